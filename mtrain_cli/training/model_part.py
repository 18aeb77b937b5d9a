"""The part of the model that one worker holds, and the micro-batches that it keeps at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from mtrain_cli.config.schema import Config, ModelConfig
from mtrain_cli.parallel.pipeline_schedule import (
    RECEIVE,
    SEND,
    SENDS_IN_FLIGHT,
    Pipeline,
    in_flight,
)
from mtrain_cli.training.flops import Shape, root_shapes
from mtrain_cli.training.pipeline_plan import stage_layers


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
