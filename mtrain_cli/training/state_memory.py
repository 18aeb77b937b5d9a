"""Memory of weights, gradients and optimizer states, by sharding, reduce dtype and offload."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from mtrain_cli.config.schema import Config
from mtrain_cli.step.program import Message, traffic, weight_messages
from mtrain_cli.training.flops import Shape, layer_kinds, layer_shapes
from mtrain_cli.training.pipeline_plan import ModelPart, model_parts

BYTES = {"float32": 4, "bfloat16": 2}


def sharded_numbers(shapes: Iterable[Shape], workers: int) -> int:
    """Count the elements of one worker's shards. FSDP2 shards dimension 0 and rounds up."""
    return sum(-(-shape[0] // workers) * prod(shape[1:]) for shape in shapes)


class StateMemory:
    """Weights, gradients and optimizer states of one worker. Methods return bytes.

    layer_shard, root_shard, shard: elements of this worker's shard of its largest layer, of the
        weights outside the layers, and of all weights.
    shards, dealt, whole: elements by whether a layer has experts: of its shard, of the dealt
        experts in it, and of the weights with which this worker computes.
    e, r: bytes of the compute dtype, and of the dtype in which gradients are reduced.
    """

    def __init__(
        self,
        config: Config,
        workers: int,
        micro_batches: int,
        e: int,
        part: ModelPart | None = None,
    ) -> None:
        """workers: of the run. part: the worker's part of the model; None for the whole model."""
        model, train = config.of_worker.model, config.train
        part = part or ModelPart.whole(model)
        self.model, self.micro_batches = model, micro_batches
        self.accumulates = micro_batches > 1
        self.workers = workers = workers // config.topology.pipeline_parallel
        self.layer_workers = workers // config.topology.tensor_parallel
        self.e, self.r, self.current = e, BYTES[train.reduce_dtype], part.current
        self.numbers = part.every_layer
        self.saves = train.checkpoint_at_end or 0 < train.checkpoint_every < train.steps
        self.shard_kind, self.offload = train.shard, config.optim.offload
        self.gradients_leave = config.optim.offload_gradients
        roots = part.root_shapes(model).values()
        self.root_shard = sharded_numbers(roots, workers)
        self.root_weights = sum(map(prod, roots))
        # With expert parallelism, a worker computes with its own experts, and other workers than
        # those of the layer share their weights.
        given = config.topology.expert_parallel
        self.degree = degree = given if isinstance(given, int) else 1
        self.dealt: dict[bool, int] = {}
        self.shards: dict[bool, int] = {}
        self.whole: dict[bool, int] = {}
        for kind in layer_kinds(model, self.numbers):
            shapes = layer_shapes(model, experts=kind).values()
            experts = [shape for shape in shapes if len(shape) == 3 and degree > 1]
            others = [shape for shape in shapes if len(shape) < 3 or degree == 1]
            self.dealt[kind] = sum(map(prod, experts)) // workers
            self.shards[kind] = self.dealt[kind] + sharded_numbers(others, self.layer_workers)
            self.whole[kind] = sum(map(prod, others)) + sum(prod(s) // degree for s in experts)
        self.layer_shard = max(self.shards.values())
        self.of_layers = self._sum(self.shards, self.numbers)
        self.shard = self.of_layers + self.root_shard

    def _sum(self, sizes: dict[bool, int], layers: Sequence[int]) -> int:
        return sum(sizes[kind] * number for kind, number in layer_kinds(self.model, layers).items())

    def weights_of(self, layers: Sequence[int]) -> int:
        return self._sum(self.whole, layers)

    @property
    def parameters(self) -> int:
        """Weight shards on the device, in the compute dtype with an offloaded optimizer."""
        return (self.e if self.offload else 4) * self.shard

    @property
    def optimizer(self) -> int:
        """Both AdamW states on the device, in float32."""
        return 0 if self.offload else 8 * self.shard

    @property
    def host(self) -> int:
        """Host memory of an offloaded optimizer, without unused ends of `PinnedMemory` arenas."""
        if not self.offload:
            return 0
        # Float32 weights and AdamW states; in pinned memory two units (a layer, or the weights
        # outside the layers) of weights in the compute dtype, and gradients of two or all units.
        two_units = 2 * max(self.layer_shard, self.root_shard)
        gradients = 4 * (self.shard if self.gradients_leave else two_units)
        return 12 * self.shard + gradients + self.e * two_units

    @property
    def saving(self) -> int:
        """Host memory of the copy of weights and states while a checkpoint is written."""
        return 12 * self.shard if self.saves else 0

    def gradients(self, reduced: int) -> int:
        """Return the bytes of gradients after backward has reduced `reduced` layers."""
        # With several micro-batches, all layers hold gradients at the peak. With one, offloaded
        # gradients are freed before the next layer's peak.
        if self.accumulates and self.shard_kind == "optimizer":
            return 4 * (self.weights_of(self.numbers) + self.root_weights)
        if self.accumulates:
            return 4 * self.shard
        if self.gradients_leave:
            return 0
        return 4 * self._sum(self.shards, self.numbers[len(self.numbers) - reduced :])

    @property
    def at_the_optimizer(self) -> int:
        """Bytes of gradients on the device when the optimizer steps."""
        return 0 if self.gradients_leave else 4 * self.shard

    def weights(self, left: int, at_once: int) -> int:
        """Return the bytes of the layers' unsharded weights in the compute dtype.

        left: number of layers that have begun forward and not finished backward.
        at_once: number of layers whose weights train.shard=full holds.
        """
        if self.shard_kind == "full":
            return self.e * self.weights_of(self.current[max(0, left - at_once) : left])
        return self.e * self.weights_of(self.numbers if self.accumulates else self.numbers[:left])

    def layer_scatter(self, layer: int) -> int:
        """Return the bytes of the input of a layer's reduce-scatter. layer: its number."""
        kind = self.model.has_experts(layer)
        others = self._scatter(self.shards[kind] - self.dealt[kind], self.layer_workers)
        return others + self._scatter(self.dealt[kind], self.workers // self.degree)

    def reduced_layer(self, layer: int) -> int:
        """Return the bytes of the output of a layer's reduce-scatter. layer: its number."""
        return self._scatter(self.shards[self.model.has_experts(layer)], 1)

    @property
    def root_scatter(self) -> int:
        """Bytes of the input of the reduce-scatter of the weights outside the layers."""
        return self._scatter(self.root_shard, self.workers)

    def _scatter(self, shard: int, workers: int) -> int:
        skipped = self.accumulates and self.shard_kind == "optimizer"
        return 0 if skipped else self.r * shard * workers

    def sent(self) -> int:
        """Return the bytes of weights and gradients that reach one worker per optimizer step."""
        messages = weight_messages(self.shard_kind, self.micro_batches)
        root = {Message.GATHER: self.e, Message.REDUCE: self.r}
        per_weight = traffic(messages, root | {Message.GATHER_AGAIN: self.e})
        dealt = self._sum(self.dealt, self.numbers)
        experts = (self.workers // self.degree - 1) * per_weight * dealt
        layers = (self.layer_workers - 1) * per_weight * (self.of_layers - dealt)
        return int(
            experts + layers + (self.workers - 1) * traffic(messages, root) * self.root_shard
        )

    def over_host_link(self) -> int:
        """Return the bytes that an offloaded optimizer moves between device and host per step."""
        return (4 + self.e) * self.shard if self.offload else 0


def largest_states(config: Config, workers: int, micro_batches: int, e: int) -> StateMemory:
    """Return the states of the worker with the largest shards, which is on one of the stages."""
    parts = model_parts(config, micro_batches)
    states = (StateMemory(config, workers, micro_batches, e, part) for part in parts)
    return max(states, key=lambda states: states.shard)
