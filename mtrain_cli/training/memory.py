"""Estimate a worker's GPU memory in closed form, by part, at each moment that can be the peak.

Symbols: T tokens of a worker and micro-batch (including padding), C hidden, A = heads * head_dim,
K = kv_heads * head_dim, I intermediate, V vocabulary, L layers, W workers, e bytes of the compute
dtype, P_l weights of a layer, P_r weights outside the layers (embedding, norm, LM head). The order
of events follows FSDP2 (torch/distributed/fsdp/_fully_shard), `Decoder`, the exchanges and the
fused LM head and loss. Norms are CUDA's fused kernels. With train.compile, a layer's backward pass
takes less memory than estimated.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache, cached_property

from mtrain_cli.attention.block_lists import list_widths
from mtrain_cli.attention.packed_columns import COLUMN_TILE
from mtrain_cli.config.schema import Config, ModelConfig
from mtrain_cli.model.tiling import layers_with_products, tile_rows
from mtrain_cli.parallel.activation_offload import block_sizes, layers_on_host
from mtrain_cli.parallel.exchange_selection import ExchangeChoice
from mtrain_cli.parallel.layout import Layout, early_queries
from mtrain_cli.parallel.lowering import SHARDS, lower
from mtrain_cli.parallel.program import KEYS, Compute, Program, ShardSizes, low, pool_bytes
from mtrain_cli.parallel.schedule import ScheduleOptions, make_schedule
from mtrain_cli.sparsity.pattern import Pattern
from mtrain_cli.sparsity.pattern_registry import make_pattern
from mtrain_cli.training.flops import attention_kept
from mtrain_cli.training.state_memory import StateMemory

MIB, GIB = 2**20, 2**30
# Rough, outside the allocator: drivers and NCCL versions differ by some hundred MiB.
CONTEXT_BYTES = 600 * MIB  # CUDA context, kernels, cuBLAS
COMMUNICATOR_BYTES = 400 * MIB  # NCCL channels and buffers, per communicator
# From kernels/triton/sparse/key_gradient.py, which cannot be imported without Triton.
_MOST_PARTS, _PROGRAMS_WANTED = 16, 1024
_MOST_OF_16_BITS = 32767


@dataclass(frozen=True, kw_only=True)
class MemoryMoment:
    """Bytes that a worker's allocator holds at one moment of a step, by part.

    parameters: float32 shards, 4 (P_l L + P_r) / W, with each dimension 0 rounded up to a multiple
        of W; e instead of 4 with optim.offload.
    optimizer: both AdamW states in float32, 8 (P_l L + P_r) / W; 0 with optim.offload.
    gradients: 4 P_l / W per layer (and 4 P_r / W) reduced so far. With several micro-batches,
        4 (P_l L + P_r) / W throughout, or 4 (P_l L + P_r) with train.shard=optimizer. 0 with
        optim.offload_gradients and a single micro-batch.
    working_weights: unsharded weights e (P_r + P_l), the next layer's gathered weights e P_l (all
        layers' unless train.shard=full), gradients e (P_l + V C), and the current reduce-scatter's
        input r P_l, with r bytes of train.reduce_dtype (see `state_memory`).
    activations: what layers keep for backward, on the device. Per token and layer:
        no checkpointing: e (4 C + 2 A + 2 K + 4 I) + 4 heads; tiled: e (2 C + 2 A + 2 K) + 4 heads;
        selective: e (C + A) + 4 heads, in a ring plus the 2 e K received from another worker;
        sequence_selective: e C + (e A + 4 heads) train.checkpoint_keep; full: e C.
        The 4 heads are lse. All layers that are not offloaded count, at least two. Layers with
        train.keep_mlp keep e (C + 2 I) more.
    layer: the recomputed tensors and activation gradients of the layer in backward, at the MLP's
        gate or in attention: whichever is larger together with `exchange` (`layer_in_backward`).
        The gate takes e (6 I + 2 C) per token of a tile, or e (4 I + C) if gate and up were kept;
        with one tile, less the MLP's weight gradients, which come later.
    index: dynamic indices of the layers between forward and backward. A bitmap takes
        heads * (T / block) * (S / block) bytes per layer and sequence of S tokens (all rows if
        queries circulate), and one bit per query and chunk if each query chooses. Slashes and
        columns take heads * (S / block + 4 columns) until all layers are counted; tensors that
        kernels derive from them take about as much (`IndexShape.derived`). A ring that gathers
        columns once holds 2 e heads * columns * head_dim per layer with activations on the device.
        Counting a bitmap's pairs takes 2 bytes per pair of blocks and micro-batch of the step.
    exchange: KV and its gradients in transit, and the kernel's own buffers. With N = cp T keys,
        all_gather holds 2 e N K of KV, 2 e N K of gradients, and 8 N K while it packs them; with
        topology.chunks, only one part of the heads, plus the next part's KV. A single worker holds
        all heads' gradients and one part's kernel buffers. A ring holds a few shards of KV and of
        float32 gradients, most of which stay allocated (`exchange_in_backward`, `kernel_backward`).
    loss: float32 logits of one chunk and, in another dtype, their gradient; the float32 gradient
        4 V C of the LM head; 3 e C T for the final hidden states before and after their norm, and
        their gradient.
    inputs: tokens, positions, labels (int64), cosine and sine (float32).
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

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part, in the order of the fields."""
        return {
            field.name: getattr(self, field.name) for field in fields(self) if field.name != "name"
        }

    @cached_property
    def allocated(self) -> int:
        """Total bytes, as torch.cuda.max_memory_allocated reports if this moment is the peak."""
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory of one worker, in bytes.

    moments: candidates for the peak.
    reserve: CUDA context and NCCL, outside the allocator; 0 on a CPU.
    host: host memory for offloaded activations and an offloaded optimizer.
    saving: host memory for the copy that a checkpoint holds until it is written.
    """

    moments: tuple[MemoryMoment, ...]
    reserve: int
    host: int = 0
    saving: int = 0

    @property
    def host_peak(self) -> int:
        """Peak host memory, in addition to the device's, while a checkpoint is written."""
        return self.host + self.saving

    @property
    def peak(self) -> MemoryMoment:
        """The moment with the most allocated memory."""
        return max(self.moments, key=lambda moment: moment.allocated)

    @property
    def allocated(self) -> int:
        """Bytes at the peak; compare with `peak_memory_gib` of metrics.jsonl."""
        return self.peak.allocated

    @property
    def total(self) -> int:
        """Bytes that the GPU needs before fragmentation: allocated + reserve."""
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
) -> MemoryEstimate:
    """Estimate the memory of one worker in a steady step, from the second step on.

    The worker is context rank 0, which holds the largest shards.

    Args:
        layout: layout of a context group; `layout.workers` = cp.
        kernel: a kernel's name, not `auto`.
        dtype_bytes: bytes of the compute dtype.
    """
    step = _StepMemory(config, workers, layout, exchange, kernel, dtype_bytes)
    communicators = 0 if workers == 1 else 1 + (exchange.communicators if layout.workers > 1 else 0)
    reserve = CONTEXT_BYTES + communicators * COMMUNICATOR_BYTES if cuda else 0
    states = step.states
    return MemoryEstimate(
        moments=tuple(step.moments()),
        reserve=reserve,
        host=step.host() + states.host,
        saving=states.saving,
    )


class _StepMemory:
    """Tensor sizes of one training step, and the memory at its moments."""

    def __init__(
        self,
        config: Config,
        workers: int,
        layout: Layout,
        exchange: ExchangeChoice,
        kernel: str,
        e: int,
    ) -> None:
        model = config.model
        self.model, self.train, self.layout = model, config.train, layout
        self.exchange, self.kernel, self.e = exchange, kernel, e
        self.workers = workers
        self.tokens = layout.tokens_per_worker * config.train.micro_batch
        self.width = model.num_heads * model.head_dim
        self.kv_width = model.num_kv_heads * model.head_dim
        self.hidden = e * self.tokens * model.hidden_size
        self.head = model.vocab_size * model.hidden_size
        self.heads = 4 * self.tokens * model.num_heads
        self.recomputes = config.train.activation_checkpoint != "none"
        self.on_host = layers_on_host(config.train.offload_activations, model.num_layers)
        self.rows = tile_rows(
            self.tokens, model.hidden_size, model.intermediate_size, e, config.train.tile_mib * MIB
        )
        # Layers from this one on keep the products of their MLP.
        keeping = layers_with_products(config.train.keep_mlp, model.num_layers)
        if not self.recomputes and self.rows == self.tokens:
            keeping = 0  # autograd keeps these and more
        self.first_with_products = model.num_layers - keeping
        # Queries of a worker, and how many of them recompute attention.
        self.queries = layout.tokens_per_worker * exchange.heads
        self.early = (
            early_queries(self.queries, attention_kept(config.train), config.sparsity.block)
            if self.recomputes
            else 0
        )
        pattern = make_pattern(config.sparsity, config.seed)
        self.index = None if pattern is None else IndexShape.make(config, pattern, layout, exchange)
        self.micro_batches = config.train.global_batch // (
            config.train.micro_batch * (workers // layout.workers)
        )
        self.states = StateMemory(config, workers, self.micro_batches, e)
        # Layers whose weights are whole at once: the current one, and the next if it is gathered.
        self.ahead = 2 if workers > 1 else 1

    def moments(self) -> list[MemoryMoment]:
        layers, states = self.model.num_layers, self.states
        kept = self.kept(layers)
        scatter = states.scatter(states.layer_shard)
        # Memory changes evenly over the layers, except that activations stop shrinking at the
        # offloaded layers. The second layer is a candidate, too: backward has gathered the first
        # layer's weights ahead, and has more gradients than in higher layers.
        places = {
            layers,
            max(1, layers - 1),
            min(2, layers),
            *([self.on_host + 1] if self.on_host else []),
        }
        backward = (
            self.moment(
                f"backward of layer {index}",
                gradients=states.gradients(layers - index),
                # Whole weights, and gradients of the LM head and the current layer.
                working_weights=self.e * (states.root_weights + self.head + states.layer_weights)
                + states.weights(index, self.ahead)
                + (scatter if index < layers else 0),
                activations=self.kept(index),
                indices=index,
                at=index,
            )
            for index in sorted(places, reverse=True)
        )
        return [
            self.at_loss(kept),
            max(backward, key=lambda m: m.allocated),
            self.at_the_end(),
            self.at_the_optimizer(),
        ]

    def moment(
        self,
        name: str,
        *,
        gradients: int = 0,
        working_weights: int,
        activations: int,
        indices: int = 0,
        at: int = 0,
        loss: int = 0,
    ) -> MemoryMoment:
        """Build a moment. indices: layers with an index. at: layer in backward from 1, or 0."""
        layer, exchange, freed = (
            self.layer_in_backward(products=at > self.first_with_products)
            if at
            else (0, self.pool(), 0)
        )
        return MemoryMoment(
            name=name,
            parameters=self.states.parameters,
            optimizer=self.states.optimizer,
            gradients=gradients,
            working_weights=working_weights,
            activations=activations - freed,
            layer=layer,
            index=self.kept_index(indices),
            exchange=exchange,
            loss=loss,
            inputs=self.tokens * (3 * 8 + 4 * self.model.head_dim),
        )

    def at_loss(self, kept: int) -> MemoryMoment:
        """Return the memory in use while the loss is computed.

        All activations, plus a chunk of logits or the LM head's gradient.
        """
        rows = max(
            1, min(self.tokens, (self.train.loss_chunk_mib * MIB) // (4 * self.model.vocab_size))
        )
        # In float32 the gradient of the logits overwrites them.
        second = 0 if self.e == 4 else self.e
        chunk, converted = (4 + second) * rows * self.model.vocab_size, second * self.head
        return self.moment(
            "loss",
            gradients=self.states.gradients(0),
            working_weights=self.e * self.states.root_weights
            + self.states.weights(self.model.num_layers, self.ahead - 1),
            activations=kept,
            indices=self.model.num_layers,
            # The last layer's output (kept by the final norm), the normed output, its gradient.
            loss=3 * self.hidden + 4 * self.head + max(chunk, converted),
        )

    def at_the_end(self) -> MemoryMoment:
        """Return the larger last moment: the first layer, or reducing embedding and LM head."""
        layers, states = self.model.num_layers, self.states
        first_layer = self.moment(
            "backward of layer 1",
            gradients=states.gradients(layers - 1),
            working_weights=self.e * (states.root_weights + self.head + states.layer_weights)
            + states.weights(1, 1)
            + states.scatter(states.layer_shard),
            activations=self.kept(1),
            indices=1,
            at=1,
        )
        # Embedding and LM head each have a gradient (summed if tied), then copied to float32.
        scatter = states.scatter(states.root_shard)
        whole = self.e * states.root_weights
        gradients = whole + 2 * self.e * self.head, whole + scatter, scatter + 4 * states.root_shard
        root = self.moment(
            "reduction of the embedding",
            gradients=states.gradients(layers),
            working_weights=max(gradients) + states.weights(0, 0),
            activations=0,
        )
        return max(first_layer, root, key=lambda moment: moment.allocated)

    def at_the_optimizer(self) -> MemoryMoment:
        return self.moment(
            "optimizer step",
            gradients=self.states.at_the_optimizer,
            working_weights=0,
            activations=0,
        )

    def kept(self, layers: int) -> int:
        """Bytes on the device that the first `layers` layers keep for backward."""
        products = self.hidden + 2 * self.e * self.tokens * self.model.intermediate_size
        return self.kept_by_layer() * self.on_device(layers) + products * max(
            0, layers - self.first_with_products
        )

    def on_device(self, layers: int) -> int:
        """Count which of the first `layers` layers have activations on the device."""
        return max(layers - self.on_host, min(layers, 2))

    def host(self) -> int:
        """Bytes of host memory for offloaded activations, in the blocks of `ActivationOffload`.

        Columns that a ring gathers once are offloaded, too.
        """
        late = self.queries - self.early
        out, lse = (
            size * late // self.queries for size in (self.e * self.tokens * self.width, self.heads)
        )
        others = [] if self.early else [self.received_kv(), self.gathered_columns()]
        tensors = [self.hidden, out, lse, *others]
        return self.on_host * sum(sum(block_sizes(size)) for size in tensors)

    def kept_by_layer(self) -> int:
        """Bytes that one layer keeps from forward to backward."""
        tokens, e = self.tokens, self.e
        out = e * tokens * self.width + self.heads
        if self.recomputes:
            return (
                self.hidden
                + out * (self.queries - self.early) // self.queries
                + (0 if self.early else self.received_kv())
            )
        attention = out + e * tokens * (self.width + 2 * self.kv_width) + self.norms()
        if self.rows < tokens:
            return 2 * self.hidden + attention
        return 4 * self.hidden + attention + 4 * e * tokens * self.model.intermediate_size

    def received_kv(self) -> int:
        """Bytes of the KV shard that a worker receives last in a ring and keeps."""
        return self.keys if self.exchange.circulates_among(self.layout.workers) else 0

    def kept_index(self, layers: int) -> int:
        """Bytes of the indices of `layers` layers, and of the tensors that count pairs."""
        if self.index is None:
            return 0
        gathered = 0 if self.early else self.gathered_columns()
        # Slashes and columns stay until all layers are counted (`DynamicIndex.count`).
        there = layers if self.index.bitmap else self.model.num_layers
        kept = there * self.index.kept + layers * self.index.derived(self.kernel)
        return kept + self.on_device(layers) * gathered + self.micro_batches * self.index.counted

    def gathered_columns(self) -> int:
        """Bytes of one layer's columns if a ring gathers them once."""
        return (
            2 * self.e * self.index.columns * self.model.head_dim
            if self.index is not None and self.index.gathered
            else 0
        )

    def norms(self) -> int:
        """Bytes of q and k before their norms (Qwen3), kept only without checkpointing."""
        return self.e * self.tokens * (self.width + self.kv_width) if self.model.qk_norm else 0

    def layer_in_backward(self, *, products: bool) -> tuple[int, int, int]:
        """Return (layer, exchange, freed) in bytes at the MLP's gate or in attention.

        The larger of the two counts. freed: kept activations that are freed by then.

        A recomputed layer first recomputes its normed input, q, k, v, and the output and lse that
        it did not keep. A recomputed or tiled MLP then holds the gradients of its output, of x and
        of attention's output. Each tile holds x + attention, its norm, gate, up, silu(gate), their
        product, and the gradients of product and gate; several tiles also hold float32 gradients of
        the weights. Without checkpointing and tiles, all these tensors were kept, and backward adds
        the gradients of product, silu and up.

        products: x + attention, gate and up were kept.
        """
        e, tokens, model = self.e, self.tokens, self.model
        wide, out = e * tokens * model.intermediate_size, e * tokens * self.width
        tiled = self.rows < tokens
        mlp, attention, freed = self.hidden + 2 * wide, self.hidden + out, 0
        if self.recomputes or tiled:
            # A narrow MLP peaks at its norm: x + attention, the norm's gradient, and both and
            # their product in float32.
            norm = (12 if e < 4 else 4) * model.hidden_size
            wide_tensors, narrow_tensors = (4, 1) if products else (6, 2)
            mlp = 2 * self.hidden + out
            gate = self.rows * (
                max(wide_tensors * e * model.intermediate_size, norm)
                + narrow_tensors * e * model.hidden_size
            )
            if tiled:
                weights = model.hidden_size * (3 * model.intermediate_size + self.width)
                mlp += gate + max(0, 4 * weights - e * self.states.layer_weights)
            else:
                # In one tile, the weights have no gradient at the gate yet; after it, two tensors
                # of the MLP's width remain.
                behind = self.rows * max(
                    2 * e * model.intermediate_size + 3 * e * model.hidden_size, norm
                )
                mlp += max(gate - e * self.states.layer_weights, behind)
            if products:
                freed = self.hidden + 2 * wide  # with the MLP
        if self.recomputes:
            recomputed = (
                self.hidden
                + out
                + self.norms()
                + (out + self.heads + self.gathered_columns() if self.early else 0)
            )
            # In a ring, backward uses only the shard that was received.
            received = self.received_kv() and not self.early
            recomputed += 0 if received else 2 * e * tokens * self.kv_width
            mlp, attention = mlp + recomputed, attention + recomputed
        elif not tiled:
            # Of the layer's kept tensors, those of the MLP are freed before attention.
            freed = 4 * wide + 2 * self.hidden
        exchange = self.exchange_in_backward()
        buffers = self.pool()
        return (
            (mlp, buffers, 0)
            if mlp + buffers >= attention + exchange - freed
            else (attention, exchange, freed)
        )

    def pool(self) -> int:
        """Bytes of the exchange's pool, which stay allocated from layer to layer."""
        return _pool(self.exchange.name, self.options, self.sizes)

    @cached_property
    def options(self) -> ScheduleOptions:
        return self.exchange.options(self.layout.workers)

    @cached_property
    def keys(self) -> int:
        """Bytes of the KV shard of the ranks that share heads."""
        return int(low(KEYS).of(self.sizes, self.exchange.heads))

    def exchange_in_backward(self) -> int:
        """Peak bytes of attention's backward in addition to its saved inputs.

        Counts the gradients of q, k and v, other workers' KV, and the kernel's buffers.
        """
        e, exchange, model = self.e, self.exchange, self.model
        ranks, n = self.layout.workers // exchange.heads, exchange.chunks
        tokens, queries = self.tokens * exchange.heads, self.tokens * self.width
        circulates = exchange.circulates_among(self.layout.workers)
        seen = tokens if circulates else tokens * ranks
        # FlashAttention-4 computes the two rectangles of a zigzag worker in turn and sums their
        # dk and dv in float32.
        zigzag = ranks > 1 and self.layout.name == "zigzag"
        made, buffers = kernel_backward(
            self.kernel, model, self.tokens, seen, e, zigzag and self.index is None, self.index
        )
        copied = 0  # by PyTorch's kernel: out, dout and lse of a part, or a placeholder for out
        if self.kernel == "sdpa":
            copied = (2 * e * queries + self.heads) // n if n > 1 else 0
            copied += e * queries if exchange.queries_travel and circulates else 0
        sizes = replace(self.sizes, made_bytes=made)
        # dk and dv are brought into rank order before they are cut into shards. Striped and
        # contiguous layouts do so in the same copy, unless ranks share heads.
        kv = model.head_dim * 2 * tokens * ranks * max(1, model.num_kv_heads // exchange.heads)
        ordered = 3 * made * kv // (4 * n) if zigzag else 0
        if exchange.heads > 1:
            ordered = made * kv // (2 * n)
        return self.pool() + _peak_of_backward(
            exchange.name, self.options, sizes, buffers // n + copied, ordered
        )

    @cached_property
    def sizes(self) -> ShardSizes:
        model = self.model
        return ShardSizes(self.tokens, model.num_heads, model.num_kv_heads, model.head_dim, self.e)


@cache
def programs_of(exchange: str, options: ScheduleOptions) -> tuple[Program, Program]:
    """Return what a worker runs in forward and in backward."""
    schedule = make_schedule(exchange, options)
    return lower(schedule, 0), lower(schedule, 0, backward=True)


# A search for settings that fit asks for the same few programs and sizes thousands of times.
@cache
def _pool(exchange: str, options: ScheduleOptions, sizes: ShardSizes) -> int:
    """Bytes of the pool. `kernel_backward` counts gathered columns."""
    return pool_bytes(programs_of(exchange, options), sizes)


@cache
def _peak_of_backward(
    exchange: str, options: ScheduleOptions, sizes: ShardSizes, kernel: int, ordered: int
) -> int:
    """Peak bytes of backward. kernel, ordered: scratch of a call, and of ordering shards."""
    scratch = {Compute.__name__: kernel, SHARDS: ordered}
    return programs_of(exchange, options)[1].peak_bytes(sizes, scratch)


@dataclass(frozen=True, kw_only=True)
class IndexShape:
    """Sizes of one layer's dynamic index, as one worker holds it for its micro-batch.

    sequences, heads: sequences of the micro-batch, and all query heads.
    block, blocks: tokens per block, and blocks per whole sequence.
    bitmap: the index lists blocks instead of slashes.
    kept: bytes of the index.
    counted: bytes per micro-batch for counting a bitmap's pairs.
    columns: packed columns over heads and sequences, padded to tiles. If the configuration sets no
        bound, every token may be a column.
    ways: ranks that share heads (Ulysses); each call holds the tokens of all these ranks.
    rings: KV or queries circulate.
    gathered: columns are gathered once and kept from forward to backward.
    diagonals: maximum slashes per head; 0 = no bound.
    """

    sequences: int
    heads: int
    block: int
    blocks: int
    bitmap: bool
    kept: int
    counted: int
    columns: int
    ways: int
    rings: bool
    gathered: bool
    diagonals: int = 0

    @staticmethod
    def make(
        config: Config, pattern: Pattern, layout: Layout, exchange: ExchangeChoice
    ) -> IndexShape:
        """Compute the sizes for the largest index that the pattern may choose."""
        sparsity, sequences = config.sparsity, config.train.micro_batch
        heads = config.model.num_heads
        request = pattern.request()
        blocks = -(-layout.padded_seq // request.block)
        own = -(-blocks // layout.workers)
        rings = exchange.circulates_among(layout.workers)
        if request.bitmap:
            held = blocks if exchange.heads > 1 or (rings and exchange.queries_travel) else own
            bytes_each = 2 if request.block**2 < 1 << 15 else 4
            kept = sequences * heads * held * blocks
            counted, width = bytes_each * sequences * own * blocks, 0
            if request.chunk:
                chunk_words = -(-blocks * request.block // (32 * request.chunk))
                kept += 4 * sequences * heads * held * request.block * chunk_words
                counted += 8 * sequences * blocks * request.block
        else:
            most = sparsity.column_bound
            width = min(layout.padded_seq if most is None else most, blocks * request.block)
            kept, counted = sequences * heads * (blocks + 4 * width), 0
        width = -(-width // COLUMN_TILE) * COLUMN_TILE
        return IndexShape(
            sequences=sequences,
            heads=heads,
            block=request.block,
            blocks=blocks,
            bitmap=request.bitmap,
            kept=kept,
            counted=counted,
            columns=sequences * (heads // exchange.heads) * width,
            ways=exchange.heads,
            rings=rings,
            gathered=rings and exchange.shared_columns and width > 0,
            diagonals=0 if request.bitmap else sparsity.slash_bound(blocks),
        )

    def derived(self, kernel: str) -> int:
        """Bytes that a kernel derives from slashes and columns and keeps until backward.

        See `Tiles.index_cache`: key slots of the columns, their counts below each block, and the
        list of slashes. If columns are gathered once, also their slots among the rank's own keys.
        """
        if self.bitmap or kernel not in ("flash4", "triton") or (self.rings and not self.gathered):
            return 0
        rows = self.sequences * self.heads // self.ways
        columns = 4 * (
            self.columns * (2 if self.gathered else 1)
            + (rows * (self.blocks + 1) if self.columns else 0)
        )
        return columns + (
            4 * rows * (2 * self.blocks + 1) if kernel == "triton" and not self.rings else 0
        )

    def pairs_of_blocks(self, queries: int, keys: int) -> int:
        """Count pairs of blocks in a call, over heads and sequences.

        queries, keys: tokens of the call times sequences.
        """
        rows, others = (-(-tokens // (self.block * self.sequences)) for tokens in (queries, keys))
        return self.sequences * self.heads * rows * others

    def listed(self, queries: int, keys: int) -> int:
        """Count entries in a call's lists of blocks per key block, with packed documents.

        See `attention.block_lists`.
        """
        rows, others = (
            -(-tokens // (self.block * self.sequences)) for tokens in (keys, queries * self.ways)
        )
        return (
            self.sequences
            * (self.heads // self.ways)
            * rows
            * sum(list_widths(others, self.diagonals, plain=False))
        )

    def columns_in_backward(self, queries: int, head_dim: int, e: int) -> int:
        """Bytes of a call's packed columns in backward.

        Includes one bit per query block and column that its slashes cover, key slots and positions
        (8 bytes per column), and float32 gradients in the parts that `backward_columns` makes.
        """
        if not self.columns:
            return 0
        tiles = self.columns // COLUMN_TILE
        parts = max(1, min(_MOST_PARTS, _PROGRAMS_WANTED // tiles))
        covered = -(-queries * self.ways // (self.block * self.sequences)) * self.columns // 8
        return (
            self.columns * (2 * e * head_dim + 8 + 8 * (parts + (parts > 1)) * head_dim) + covered
        )


def kernel_backward(
    kernel: str,
    model: ModelConfig,
    queries: int,
    keys: int,
    e: int,
    pieces: bool,
    index: IndexShape | None = None,
) -> tuple[int, int]:
    """Return (bytes per element of the dk and dv a kernel returns, bytes of its backward buffers).

    flash4: float32 accumulators of dq and, with grouped heads, of dk and dv; lse and delta. With an
    index also its lists of blocks, then the columns, which use another dq. sdpa (FlashAttention-2):
    float32 accumulator of dq, dk and dv for every query head, and dq, dk, dv of the current
    rectangle. triton: lse and delta, and the columns or the lists of a bitmap, 2 bytes per pair of
    blocks and direction (4 beyond 32767 blocks). reference: three float64 score matrices and more.

    Args:
        queries, keys: tokens of one call times micro-batch.
        pieces: flash4 is called for more than one rectangle.
        index: sizes of the dynamic index; None for dense attention.
    """
    heads, width = model.num_heads, model.num_heads * model.head_dim
    kv_width = model.num_kv_heads * model.head_dim
    grouped = model.num_heads != model.num_kv_heads
    columns = 0 if index is None else index.columns_in_backward(queries, model.head_dim, e)
    if kernel == "flash4":
        buffers = (
            4 * queries * width + 8 * queries * heads + (8 * keys * kv_width if grouped else 0)
        )
        if pieces:
            return 4, buffers + e * (queries * width + 2 * keys * kv_width)
        listed = 0 if index is None else index.listed(queries, keys)
        return e, max(
            buffers + 4 * listed,
            columns + 4 * queries * heads + (e * queries * width if columns else 0),
        )
    if kernel == "sdpa":
        expanded = 2 * e * keys * width if grouped else 0
        return 4, (
            4 + e
        ) * queries * width + 8 * queries * heads + expanded + 2 * e * keys * kv_width
    if kernel == "triton":
        bytes_each = 4 if index is not None and index.blocks <= _MOST_OF_16_BITS else 8
        pairs = 0 if index is None or not index.bitmap else index.pairs_of_blocks(queries, keys)
        lists = bytes_each * pairs
        return 4, 8 * queries * heads + lists + columns
    return e, 3 * 8 * queries * keys * heads
