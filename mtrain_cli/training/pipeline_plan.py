"""Which layers each stage of a pipeline holds and keeps at once, and what its schedule costs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, islice

from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.config.keys import show
from mtrain_cli.config.schema import Config, ModelConfig
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.pipeline_schedule import (
    RECEIVE,
    SEND,
    SENDS_IN_FLIGHT,
    Pipeline,
    Played,
    TimedPipeline,
    in_flight,
)
from mtrain_cli.training.flops import (
    ASSUMED_DENSITY,
    Shape,
    layer_kinds,
    layer_matmul,
    own_tiles,
    root_shapes,
)

# FLOP of a backward pass divided by those of the forward pass, without and with recomputation.
_BACKWARD, _RECOMPUTED = 2, 3
_DIVISIONS = 60  # halvings of the slowest stage's cost, until float64 resolves no difference
_ROUNDING = 1e-12  # relative error of sums of costs


def stage_layers(config: Config) -> tuple[int, ...]:
    """Return the number of layers of each virtual stage.

    ``topology.stage_layers=auto`` makes the slowest one as fast as possible, and the others as
    equal as possible.
    """
    topology = config.topology
    if not isinstance(topology.stage_layers, str):
        return topology.stage_layers
    stages = topology.pipeline_parallel * topology.virtual_stages
    return cut(layer_costs(config), head_cost(config), stages)


def layer_costs(config: Config) -> list[float]:
    """Return the forward FLOP per token of each layer: matrix products, q k^T and p v.

    Of a layer's experts, those of one token count; of the pairs of a sparse layer, `sparse_share`.
    """
    model, mask, seq = config.model, MaskRule.of(config), config.seq
    per_pair = 4 * model.num_heads * model.head_dim / seq
    dense, share = config.sparsity.dense_of(model.num_layers), sparse_share(config)
    pairs = {
        full: rule.undivided(seq, seq).pairs
        for full, rule in ((False, mask), (True, MaskRule(mask.document_mask)))
    }
    matmul = {kind: 2 * layer_matmul(model, experts=kind) for kind in layer_kinds(model)}
    return [
        matmul[model.has_experts(layer)]
        + per_pair * pairs[config.mask.is_full(layer)] * (1.0 if layer in dense else share)
        for layer in range(model.num_layers)
    ]


def sparse_share(config: Config) -> float:
    """Return the share of the allowed pairs that counts for a layer with an index.

    If the share depends on the data, a model with dense layers counts `ASSUMED_DENSITY`. A model
    whose layers are all sparse counts all pairs: only the LM head is weighed against them.
    """
    known = config.sparsity.known_density(config.seq)
    if known is not None:
        return known
    return ASSUMED_DENSITY if config.sparsity.dense_layers else 1.0


def head_cost(config: Config) -> float:
    """Return the forward FLOP per token of the LM head."""
    return 2.0 * config.model.vocab_size * config.model.hidden_size


def cut(costs: Sequence[float], head: float, stages: int) -> tuple[int, ...]:
    """Return the number of consecutive layers of each stage, at least one each.

    No other cut has a cheaper slowest stage. Within that limit, each stage takes the number of
    layers nearest to an equal share of what is left. head: cost of the last stage beside layers.
    """
    assert 1 <= stages <= len(costs)
    sums = [0.0, *accumulate(costs)]
    total = sums[-1] + head
    low, high = max(max(costs), costs[-1] + head), total
    if _fewest(sums, head, low)[0] <= stages:
        high = low
    for _ in range(_DIVISIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if _fewest(sums, head, middle)[0] <= stages else (middle, high)
    high *= 1 + _ROUNDING
    fewest, counts, begin = _fewest(sums, head, high), list[int](), 0
    for left in range(stages, 1, -1):
        share = sums[begin] + (total - sums[begin]) / left
        longest = bisect_right(sums, sums[begin] + high)
        ends = range(begin + 1, min(longest, len(costs) - left + 2))
        end = min(
            (end for end in ends if fewest[end] < left), key=lambda end: abs(sums[end] - share)
        )
        counts.append(end - begin)
        begin = end
    return (*counts, len(costs) - begin)


def _fewest(sums: Sequence[float], head: float, most: float) -> list[int]:
    """Return, for each layer, how few stages hold it and all later ones at a cost of ``most``."""
    layers = len(sums) - 1
    fewest = [layers + 1] * (layers + 1)  # without a layer, the head has no stage
    for begin in reversed(range(layers)):
        if sums[-1] + head - sums[begin] <= most:
            fewest[begin] = 1
        else:
            # The last stage needs a layer, too.
            end = min(bisect_right(sums, sums[begin] + most) - 1, layers - 1)
            fewest[begin] = 1 + fewest[max(begin + 1, end)]
    return fewest


@dataclass(frozen=True)
class ModelPart:
    """The layers and other weights of one worker, when it keeps the most activations.

    layers: layers of each of its virtual stages. Without a pipeline, all layers are one.
    first, last: whether the worker holds the embedding, or the final norm and the LM head.
    in_flight: number of micro-batches that each virtual stage keeps.
    messages: number of messages of the pipeline that the worker keeps. Each has the hidden states
        of a micro-batch, or their gradient.
    channels: number of communicators for these messages, and for a tied embedding.
    """

    layers: tuple[range, ...]
    first: bool
    last: bool
    in_flight: tuple[int, ...]
    messages: int = 0
    channels: int = 0

    @staticmethod
    def whole(model: ModelConfig) -> ModelPart:
        """Return the whole model, with one micro-batch at a time."""
        return ModelPart((range(model.num_layers),), True, True, (1,))

    @property
    def number_of_layers(self) -> int:
        return sum(map(len, self.layers))

    @property
    def every_layer(self) -> list[int]:
        return [layer for layers in self.layers for layer in layers]

    @cached_property
    def current(self) -> range:
        """The layers whose backward pass begins: the last virtual stage that keeps activations."""
        return next(
            layers
            for layers, kept in zip(reversed(self.layers), reversed(self.in_flight), strict=True)
            if kept
        )

    @cached_property
    def others(self) -> tuple[range, ...]:
        """Layers that keep activations of other micro-batches, or of earlier virtual stages."""
        return tuple(
            layers
            for layers, kept in zip(self.layers, self.in_flight, strict=True)
            for _ in range(kept - (layers == self.current))
        )

    @property
    def virtual_stages(self) -> tuple[ModelPart, ...]:
        ends = len(self.layers) - 1
        return tuple(
            replace(
                self,
                layers=(layers,),
                first=self.first and n == 0,
                last=self.last and n == ends,
                in_flight=(max(1, self.in_flight[n]),),
            )
            for n, layers in enumerate(self.layers)
        )

    @property
    def other_losses(self) -> int:
        """Number of micro-batches, except the current one, whose loss awaits its backward pass."""
        return max(0, self.in_flight[-1] - 1) if self.last else 0

    def root_shapes(self, model: ModelConfig) -> dict[str, Shape]:
        head = "embedding" if model.tie_word_embeddings else "lm head"
        own = {"embedding"} if self.first else set()
        own |= {"norm", head} if self.last else set()
        return {name: shape for name, shape in root_shapes(model).items() if name in own}


def model_parts(config: Config, micro_batches: int) -> tuple[ModelPart, ...]:
    """Return the part of the model on each stage of the pipeline, or the whole model."""
    if config.topology.pipeline_parallel == 1:
        return (ModelPart.whole(config.model),)
    tied = config.model.tie_word_embeddings
    return _stages(Pipeline.of(config.topology, micro_batches), stage_layers(config), tied)


@lru_cache(maxsize=64)  # a search for memory settings estimates the same stages many times
def _stages(pipeline: Pipeline, counts: tuple[int, ...], tied: bool) -> tuple[ModelPart, ...]:
    ends = [sum(counts[: n + 1]) for n in range(len(counts))]
    layers = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
    parts = []
    for stage in range(pipeline.stages):
        own, actions = pipeline.own(stage), pipeline.actions(stage)
        kept = in_flight(actions, lambda number: counts[number])
        # One message of each channel arrives ahead of its use. Sends stay for a while.
        arriving, leaving = (
            {pipeline.channel(action) for action in actions if action.kind == kind}
            for kind in (RECEIVE, SEND)
        )
        messages = len(arriving) + min(SENDS_IN_FLIGHT, pipeline.micro_batches) * len(leaving)
        parts.append(
            ModelPart(
                tuple(layers[number] for number in own),
                own[0] == 0,
                own[-1] == pipeline.last,
                tuple(kept[number] for number in own),
                messages,
                len(arriving | leaving) + (tied and stage in (0, pipeline.stages - 1)),
            )
        )
    return tuple(parts)


@dataclass(frozen=True)
class PipelinePlan:
    """The pipeline of a run, and what it costs.

    pipeline: the schedule of a training step.
    layers: number of layers of each virtual stage.
    hidden: bytes of the hidden states of a micro-batch on one worker: of one message.
    """

    config: Config
    pipeline: Pipeline
    layers: tuple[int, ...]
    hidden: int

    @staticmethod
    def of(config: Config, micro_batches: int, layout: Layout, dtype_bytes: int) -> PipelinePlan:
        own, _ = own_tiles(config, layout, dtype_bytes)
        return PipelinePlan(
            config,
            Pipeline.of(config.topology, micro_batches),
            stage_layers(config),
            own * config.model.hidden_size * dtype_bytes,
        )

    @cached_property
    def costs(self) -> list[float]:
        """Forward FLOP per token of each virtual stage."""
        costs = iter(layer_costs(self.config))
        stages = [sum(islice(costs, count)) for count in self.layers]
        stages[-1] += head_cost(self.config)
        return stages

    @cached_property
    def played(self) -> Played:
        """The schedule with these costs and free messages. The unit of time is a FLOP per token."""
        recomputes = self.config.train.activation_checkpoint != "none"
        times = _RECOMPUTED if recomputes else _BACKWARD
        backward = tuple(times * cost for cost in self.costs)
        return TimedPipeline(self.pipeline, tuple(self.costs), backward).played

    @property
    def received(self) -> int:
        """Bytes of hidden states and of their gradients that reach a worker of a middle stage."""
        pipeline = self.pipeline
        return 2 * self.hidden * pipeline.micro_batches * pipeline.virtual_stages

    def describe(self) -> str:
        """Return stages and schedule, and the share of time in which stages idle."""
        pipeline, layers = self.pipeline, self.layers
        each = layers[0] if len(set(layers)) == 1 else show(layers)
        virtual = f" x {pipeline.virtual_stages} virtual stages" * (pipeline.virtual_stages > 1)
        count = pipeline.micro_batches
        step = f"{pipeline.schedule}, {count} micro-batch{'es' * (count != 1)} per step"
        idle = f"stages idle {self.played.bubble:.0%} of the time"
        return f"{pipeline.stages} stages{virtual} of {each} layers; {step}: {idle}"
