"""Estimate a worker's GPU memory in closed form, by part, at each moment that can be the peak.

The order of events is that of FSDP2, `Decoder`, the programs of the exchanges, and the fused LM
head and loss. Norms use CUDA's fused kernels. With train.compile, a layer's backward pass takes
less memory than estimated.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from functools import cached_property

from mtrain_cli.config.schema import Config
from mtrain_cli.grouping import grouped
from mtrain_cli.parallel.activation_offload import layers_on_host
from mtrain_cli.parallel.exchange_selection import ExchangeChoice
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.training.attention_memory import AttentionMemory
from mtrain_cli.training.flops import layer_kinds
from mtrain_cli.training.layer_memory import BackwardBytes, LayerMemory
from mtrain_cli.training.pipeline_plan import ModelPart, model_parts
from mtrain_cli.training.state_memory import StateMemory

MIB, GIB = 2**20, 2**30
# Rough bytes outside the allocator. Driver and NCCL versions differ by some hundred MiB.
CONTEXT_BYTES = 600 * MIB  # CUDA context, kernels, cuBLAS
COMMUNICATOR_BYTES = 400 * MIB  # channels and buffers of one NCCL communicator


@dataclass(frozen=True, kw_only=True)
class MemoryMoment:
    """Bytes that a worker's allocator holds at one moment of a step, by part.

    parameters, optimizer: this worker's shards of weights and of both AdamW states (`StateMemory`).
    gradients: reduced float32 gradients.
    working_weights: unsharded weights of the current and the next layer and of those outside the
        layers, gradients of the current layer and of the LM head, and a reduce-scatter's input.
    activations: tensors that layers keep on the device for backward (`LayerMemory.kept`).
    layer: recomputed tensors and activation gradients of the layer in backward
        (`LayerMemory.in_backward`).
    index: dynamic indices of the layers between forward and backward, what kernels derive from them
        (`IndexShape`), and what the pattern learns.
    exchange: KV and its gradients in transit, and the kernel's buffers (`AttentionMemory`).
    loss: logits of one chunk and their gradient, the LM head's float32 gradient, and the final
        hidden states before and after their norm with a gradient.
    inputs: tokens, positions, labels, rotary angles, and what kernels derive from the masks.
    messages: hidden states and gradients that a pipeline sends and receives.
    """

    name: str
    parameters: int = 0
    optimizer: int = 0
    gradients: int = 0
    working_weights: int = 0
    activations: int = 0
    layer: int = 0
    index: int = 0
    exchange: int = 0
    loss: int = 0
    inputs: int = 0
    messages: int = 0

    @property
    def parts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _PARTS}

    @cached_property
    def allocated(self) -> int:
        """Sum of all parts. The sum at the peak estimates torch.cuda.max_memory_allocated."""
        return sum(getattr(self, name) for name in _PARTS)


_PARTS = tuple(field.name for field in fields(MemoryMoment) if field.name != "name")


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory of one worker, in bytes.

    reserve: device memory outside the allocator, for the CUDA context and NCCL. 0 on a CPU.
    host: host memory for offloaded activations and for an offloaded optimizer.
    saving: host memory for the copy of weights and states while a checkpoint is written.
    """

    moments: tuple[MemoryMoment, ...]
    reserve: int
    host: int = 0
    saving: int = 0

    @property
    def host_peak(self) -> int:
        """Host memory while a checkpoint is written. On a CPU, a worker also needs `total`."""
        return self.host + self.saving

    @property
    def peak(self) -> MemoryMoment:
        return max(self.moments, key=lambda moment: moment.allocated)

    @property
    def allocated(self) -> int:
        return self.peak.allocated

    @property
    def total(self) -> int:
        """Bytes that the GPU needs at the peak, without fragmentation: allocated + reserve."""
        return self.allocated + self.reserve


def estimate_memory(
    config: Config,
    *,
    workers: int,
    layout: Layout,
    exchange: ExchangeChoice,
    kernel: str,
    dtype_bytes: int,
    cuda: bool,
    attention: AttentionMemory | None = None,
) -> MemoryEstimate:
    """Estimate the memory of context rank 0, which has the largest shards, after the first step.

    Args:
        workers: number of workers of the run.
        layout: layout of a context group.
        attention: memory of a layer's attention; None to count it, with ``kernel`` for all layers.
    """
    if attention is None:
        attention = AttentionMemory(config.of_worker, layout, exchange, kernel, dtype_bytes)
    communicators = 0 if workers == 1 else 1 + (exchange.communicators if layout.workers > 1 else 0)
    if config.topology.tensor_parallel > 1:
        communicators += 2  # of the tensor group, and of the workers that shard a layer's part
    degree, stage = config.topology.expert_parallel, workers // config.topology.pipeline_parallel
    if config.model.moe.experts and isinstance(degree, int) and degree > 1:
        # Of the expert group, and of the workers that shard its experts.
        communicators += 1 + (stage > degree)
    estimates = []
    for part in model_parts(config, _micro_batches(config, workers, layout)):
        step = _StepMemory(config, workers, layout, attention, dtype_bytes, part)
        number = communicators + part.channels
        estimates.append(
            MemoryEstimate(
                moments=tuple(step.moments()),
                reserve=CONTEXT_BYTES + number * COMMUNICATOR_BYTES if cuda else 0,
                host=step.host() + step.states.host,
                saving=step.states.saving,
            )
        )
    return max(estimates, key=lambda estimate: estimate.total + estimate.host_peak * (not cuda))


def _micro_batches(config: Config, workers: int, layout: Layout) -> int:
    topology, train = config.topology, config.train
    sharing = layout.workers * topology.tensor_parallel * topology.pipeline_parallel
    return train.global_batch // (train.micro_batch * (workers // sharing))


class _StepMemory:
    """The memory of one worker at the moments of a training step."""

    def __init__(
        self,
        config: Config,
        workers: int,
        layout: Layout,
        attention: AttentionMemory,
        e: int,
        part: ModelPart | None = None,
    ) -> None:
        model, train = config.model, config.train
        self.model, self.train, self.e = model, train, e
        self.part = part or ModelPart.whole(model)
        self.micro_batches = _micro_batches(config, workers, layout)
        self.states = StateMemory(config, workers, self.micro_batches, e, self.part)
        self.attention = attention
        self.dense = config.sparsity.dense_of(model.num_layers) if attention.dense else frozenset()
        sparse = set(self.part.every_layer) - config.sparsity.dense_of(model.num_layers)
        sizes = model.num_heads, model.num_kv_heads, model.head_dim
        self.learned = len(sparse) * config.sparsity.learned_bytes(*sizes)
        # By (whether layers have experts, whether they have no index in a sparse run).
        self.by_kind = {
            (experts, of_kind is attention.dense): LayerMemory(
                config, layout, of_kind, weights, e, experts=experts
            )
            for experts, weights in self.states.whole.items()
            for of_kind in (attention, attention.dense)
            if of_kind is not None
        }
        self.layer = next(iter(self.by_kind.values()))  # for sizes that all layers share
        held = {layer in self.dense for layer in self.part.every_layer}
        self.attentions = [
            of_kind
            for is_dense, of_kind in ((False, attention), (True, attention.dense))
            if of_kind is not None and is_dense in held
        ]
        self.pool = max(of_kind.pool for of_kind in self.attentions)
        self.layers_on_host = layers_on_host(train.offload_activations, model.num_layers)
        # Layers with unsharded weights under train.shard=full: the current one and, if several
        # workers gather it ahead, the next one.
        self.whole_layers = 2 if self.states.workers > 1 else 1

    def moments(self) -> list[MemoryMoment]:
        """Return the moments of a step that can be the peak, in order of time."""
        layers = len(self.part.current)
        # Memory changes evenly from layer to layer, except where layers of another kind begin. (It
        # falls less below the last offloaded layer, which makes no peak.) The second layer is a
        # candidate, too: it has more gradients than higher layers, and the first layer's weights
        # are gathered ahead.
        places = {layers, max(1, layers - 1), min(2, layers)}
        if mlps := layer_kinds(self.model, self.part.current).get(False, 0):
            # The last two layers without experts: the layer above the lower one reduces its MLP.
            # And the first two with experts: the higher one gathers those of the lower one ahead.
            places |= {max(1, min(mlps + further, layers)) for further in range(-1, 3)}
        # The first and the last of the layers with an index, and of the dense ones among them.
        kinds = grouped(range(layers), lambda n: self.part.current[n] in self.dense).values()
        places |= {n + 1 for kind in kinds for n in (kind[0], kind[-1]) if n}
        backward = (
            self.backward_of(layer, self.whole_layers, scatters=layer < layers)
            for layer in sorted(places, reverse=True)
        )
        # FSDP2 ends each backward pass with all reductions done, so that none is left for the only
        # layer of a stage. A whole model of one layer counts one for its own reduction.
        alone = layers == 1 and self.part.messages > 0
        first_layer = self.backward_of(1, 1, scatters=not alone)
        reduced = [self.reduction_of_the_only_layer()] if alone else []
        return [
            *([self.at_loss()] if self.part.last else []),
            max(backward, key=lambda moment: moment.allocated),
            max(first_layer, *reduced, self.at_root(), key=lambda moment: moment.allocated),
            self.moment(
                "optimizer step", gradients=self.states.at_the_optimizer, working_weights=0
            ),
        ]

    def moment(
        self,
        name: str,
        *,
        gradients: int,
        working_weights: int,
        layers: int | None = None,
        in_backward: BackwardBytes | None = None,
        loss: int = 0,
    ) -> MemoryMoment:
        """Return the memory at one moment.

        layers: number of layers of the current micro-batch that hold activations and indices. None
            if no micro-batch is in flight.
        """
        layer, exchange, freed = in_backward or (0, self.pool, 0)
        others = () if layers is None else self.part.others
        kept = self.kept(layers or 0) + sum(map(self._kept_by, others)) - freed
        index = self.kept_index(layers or 0) + sum(self._index_of(each) for each in others)
        index += self.learned
        in_flight = 0 if layers is None else sum(self.part.in_flight)
        return MemoryMoment(
            name=name,
            parameters=self.states.parameters,
            optimizer=self.states.optimizer,
            gradients=gradients,
            working_weights=working_weights,
            activations=kept,
            layer=layer,
            index=index,
            exchange=exchange,
            loss=loss + self._other_losses * (layers is not None),
            inputs=self._inputs(in_flight) + sum(kind.mask_tables for kind in self.attentions),
            messages=self.part.messages * self.layer.hidden * (layers is not None),
        )

    def _inputs(self, in_flight: int) -> int:
        # A pipeline has all micro-batches of a step on the device, and keeps the rotary angles of
        # those in flight.
        batches = 1 if self.part.messages == 0 else self.micro_batches
        angles = 4 * self.model.head_dim * max(1, in_flight)
        experts = self.memory_of(self.part.current[-1]).experts
        routing = 0 if experts is None else experts.inputs
        return self.layer.tokens * (3 * 8 * batches + angles) + routing * max(1, in_flight)

    @property
    def _other_losses(self) -> int:
        # Each other loss keeps the input of the final norm, and the gradients of its output and of
        # the LM head; with train.loss_gradients=recompute, the output instead of the gradients.
        head = self.e * self._lm_head * (self.train.loss_gradients == "forward")
        return self.part.other_losses * (2 * self.layer.hidden + head)

    def backward_of(self, layer: int, whole_layers: int, *, scatters: bool) -> MemoryMoment:
        """Return the memory in the backward pass of a layer.

        layer: number of the layer among those of the current virtual stage, counted from 1.
        whole_layers: number of layers whose unsharded weights train.shard=full holds.
        scatters: whether the gradients of the layer above are being reduced.
        """
        states = self.states
        # Whole weights, and gradients of the LM head and of this layer.
        head = self._lm_head * self.part.last
        number = self.part.current.start + layer
        working = self.e * (states.root_weights + head + states.weights_of([number - 1]))
        working += states.weights(layer, whole_layers)
        # The layer above, or this one if the model has no other.
        working += states.layer_scatter(min(number, self.part.current[-1])) if scatters else 0
        memory = self.memory_of(number - 1)
        at_peak = memory.in_backward(products=number > self.layer.first_with_products)
        # The buffers of the other kind of layers stay in the pool.
        exchange = at_peak.exchange + self.pool - memory.attention.pool
        return self.moment(
            f"backward of layer {number}",
            gradients=states.gradients(len(self.part.current) - layer),
            working_weights=working,
            layers=layer,
            in_backward=at_peak._replace(exchange=exchange),
        )

    def reduction_of_the_only_layer(self) -> MemoryMoment:
        # With more layers, the backward pass of the layer below takes more.
        states, number = self.states, self.part.current.start
        head, weights = self._lm_head * self.part.last, states.weights_of([number])
        # Live bytes have one more copy in the compute dtype if another dtype reduces.
        copies = 1 if self.e == states.r else 2
        gathered = 0 if states.shard_kind == "full" else states.weights(1, 1)
        working = self.e * (states.root_weights + head + copies * weights) + gathered
        return self.moment(
            f"reduction of layer {number + 1}",
            gradients=states.gradients(0),
            working_weights=working + states.layer_scatter(number) + states.reduced_layer(number),
            layers=0,
            loss=self.layer.hidden,  # the gradient of the layer's input
        )

    def at_loss(self) -> MemoryMoment:
        layers, vocabulary = len(self.part.current), self.model.vocab_size
        chunk_rows = self.train.loss_chunk_mib * MIB // (4 * vocabulary)
        rows = max(1, min(self.layer.own_tokens, chunk_rows))
        # In float32, the gradient of the logits overwrites the logits.
        gradient_bytes = 0 if self.e == 4 else self.e
        chunk = (4 + gradient_bytes) * rows * vocabulary
        return self.moment(
            "loss",
            gradients=self.states.gradients(0),
            working_weights=self.e * self.states.root_weights
            + self.states.weights(layers, self.whole_layers - 1),
            layers=layers,
            # Three hidden states: the last layer's output, which the final norm keeps, the normed
            # output, and its gradient.
            loss=3 * self.layer.hidden
            + 4 * self._lm_head
            + max(chunk, gradient_bytes * self._lm_head),
        )

    def at_root(self) -> MemoryMoment:
        states = self.states
        scatter, weights = states.root_scatter, self.e * states.root_weights
        # Embedding and LM head each have a gradient. If tied, the gradients are summed. The result
        # is then copied to float32.
        gradients = self.part.first + self.part.last
        working = weights + max(gradients * self.e * self._lm_head, scatter)
        return self.moment(
            "reduction of the embedding",
            gradients=states.gradients(len(self.part.current)),
            working_weights=max(working, scatter + 4 * states.root_shard) + states.weights(0, 0),
            layers=0,
        )

    @property
    def _lm_head(self) -> int:
        return self.model.vocab_size * self.model.hidden_size

    def memory_of(self, layer: int) -> LayerMemory:
        return self.by_kind[self.model.has_experts(layer), layer in self.dense]

    def _sparse(self, layers: range) -> list[int]:
        """Return those of the layers that have an index; all if the run has no dense layers."""
        return [layer for layer in layers if layer not in self.dense]

    def kept(self, layers: int) -> int:
        own = self.part.current[:layers]
        away = layers - self.on_device(layers)
        decisions = self._sum_of("decision", own[:away])
        return self._sum_of("kept", own[away:]) + decisions + self._products_of(own)

    def _kept_by(self, layers: range) -> int:
        return self._sum_of("kept", layers) + self._products_of(layers)

    def _sum_of(self, size: str, layers: range) -> int:
        kinds = Counter((self.model.has_experts(n), n in self.dense) for n in layers)
        return sum(n * getattr(self.by_kind[kind], size) for kind, n in kinds.items())

    def _products_of(self, layers: range) -> int:
        first = max(layers.start, self.layer.first_with_products)
        return self.layer.products * max(0, layers.stop - first)

    def on_device(self, layers: int) -> int:
        return max(layers - self.layers_on_host, min(layers, 2))

    def kept_index(self, layers: int) -> int:
        """Return the memory of the indices of the current virtual stage, with pair counts."""
        index = self.attention.index
        if index is None or not any(map(self._sparse, self.part.layers)):
            return 0
        counts = self.micro_batches * index.counted
        return self._index_of(self.part.current, layers) + counts

    def _index_of(self, own: range, layers: int | None = None) -> int:
        """Return the memory of the indices of the first layers of a stage for a micro-batch."""
        index = self.attention.index
        if index is None:
            return 0
        holding = own[: len(own) if layers is None else layers]
        sparse = len(self._sparse(holding))
        # Slashes and columns stay until all layers are counted (`DynamicIndex.count`).
        indices = index.kept * (sparse if index.bitmap else len(self._sparse(own)))
        on_device = holding[len(holding) - self.on_device(len(holding)) :]
        columns = self._sum_of("gathered_columns", on_device)
        return indices + sparse * index.derived(self.attention.kernel) + columns

    def host(self) -> int:
        return self._sum_of("on_host", range(self.layers_on_host))


def size(number: int) -> str:
    """Format bytes as GiB, or as MiB below 0.1 GiB."""
    return f"{number / GIB:,.2f} GiB" if number >= GIB / 10 else f"{number / 2**20:,.1f} MiB"
