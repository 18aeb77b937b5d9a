"""GPU memory of one worker, in closed form: what each part of a training step holds, at the moments when a step can be at its largest.

Symbols: T tokens of a worker and micro-batch (pads included), C hidden, A = heads * head_dim, K = kv_heads * head_dim, I intermediate,
V vocabulary, L layers, W workers, e bytes of the compute dtype, P_l weights of a layer, P_r weights outside the layers (embedding, norm,
LM head). The order of events is FSDP2's (torch/distributed/fsdp/_fully_shard) and that of `Decoder`, `AllGather`, `Ring` and
`fused_linear_cross_entropy`; norms are counted as CUDA's fused ones. Under train.compile the layer in backward takes less.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from mtrain_cli.attention.block_lists import list_widths
from mtrain_cli.attention.packed_columns import COLUMN_TILE
from mtrain_cli.config.schema import Config, ModelConfig, SparsityConfig
from mtrain_cli.model.tiling import layers_with_products, tile_rows
from mtrain_cli.parallel.activation_offload import block_sizes, layers_on_host
from mtrain_cli.parallel.exchange_selection import ExchangeChoice
from mtrain_cli.parallel.layout import Layout, early_queries
from mtrain_cli.sparsity.pattern import Pattern
from mtrain_cli.sparsity.pattern_registry import make_pattern
from mtrain_cli.training.flops import attention_kept
from mtrain_cli.training.state_memory import StateMemory

MIB, GIB = 2**20, 2**30
# Outside the allocator's count, and rough: seen to differ by some hundred MiB between drivers and NCCL versions.
CONTEXT_BYTES = 600 * MIB  # CUDA context, kernels, cuBLAS
COMMUNICATOR_BYTES = 400 * MIB  # NCCL channels and buffers, for each communicator
# Of the gradient of columns, as in kernels/triton/sparse/key_gradient.py, which needs Triton to be read.
_MOST_PARTS, _PROGRAMS_WANTED = 16, 1024
_MOST_OF_16_BITS = 32767


@dataclass(frozen=True, kw_only=True)
class MemoryMoment:
    """What a worker's allocator holds at one moment of a step, bytes by part.

    parameters: 4 * (P_l L + P_r) / W, the float32 shards; each dimension 0 is rounded up to a multiple of W. e in place of 4 with offload.
    optimizer: 8 * (P_l L + P_r) / W, both AdamW states in float32; on the host with offload.
    gradients: 4 * P / W for the layers (and root) that were reduced so far; all of them while gradients accumulate over micro-batches, and
        4 P then with train.shard=optimizer. None with optim.offload_gradients where they do not accumulate.
    working_weights: unsharded weights e (P_r + P_l), the next layer's gathered ones e P_l (all layers' unless train.shard=full), gradients
        e (P_l + V C), and the input r P_l of the reduce-scatter that is under way, in train.reduce_dtype (see `state_memory`).
    activations: what the layers keep for backward; for each token of a layer, with activation checkpointing
        none: e (4 C + 2 A + 2 K + 4 I) + 4 heads, and in tiles e (2 C + 2 A + 2 K) + 4 heads; selective: e (C + A) + 4 heads, in a ring
        also the 2 e K that came from another worker; sequence_selective: e C + (e A + 4 heads) train.checkpoint_keep; full: e C. lse is
        the 4 heads. Of all layers, or of those that are not offloaded, and of at least two. Of the layers of train.keep_mlp also
        e (C + 2 I).
    layer: the layer in backward, what it recomputes and the gradients of its activations: at the gate of the MLP e (6 I + 2 C) for each
        token of a tile (e (4 I + C) where gate and up were kept), of one tile less the gradients of its weights, which come behind, or
        attention, whichever is more together with `exchange` (see `layer_in_backward`).
    index: the dynamic indices of the layers between their forward and backward pass: bitmaps take heads * (T / block) * (S / block) bytes
        a layer and sequence of S tokens (all of their rows where queries circulate), choices of queries a bit for each chunk,
        diagonals and columns heads * (S / block + 4 columns),
        which stay until those of all layers are counted, and what kernels keep of them about as much (`IndexShape.derived`); columns that a
        ring gathers once, 2 e heads * columns * head_dim of each layer whose activations are on the device; and the pairs of each pair of
        blocks, which bitmaps are counted by, 2 bytes for every micro-batch of the step.
    exchange: keys, values and their gradients on the way to and from other workers, and the kernel's own buffers; with N = cp T keys,
        all_gather holds 2 e N K of keys and values, as much of gradients, and 8 N K while these are packed, or of one part of the heads
        that, and the keys and values of the next; one worker the gradients of all, and what the kernel has for a part; a ring holds a few
        shards of keys and of float32 gradients, most of them from step to step (see `exchange_in_backward`, `kernel_backward`).
    loss: float32 logits of one chunk and, in another dtype, their gradient, float32 gradient 4 V C of
        the LM head, and 3 e C T: final hidden states before and after their norm, and their gradient.
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
        """Bytes by part, in the order above."""
        return {
            field.name: getattr(self, field.name) for field in fields(self) if field.name != "name"
        }

    @property
    def allocated(self) -> int:
        """Sum of the parts: what torch.cuda.max_memory_allocated would report if this moment were the peak."""
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """moments: the candidates for the peak. reserve: CUDA context and NCCL, outside the allocator; 0 on a CPU. host: bytes of host memory
    beside all that, in which offloaded activations wait, and the weights and states of an offloaded optimizer; saving: those that a
    checkpoint takes on top of it until it is written.
    """

    moments: tuple[MemoryMoment, ...]
    reserve: int
    host: int = 0
    saving: int = 0

    @property
    def host_peak(self) -> int:
        """Most bytes of host memory beside the device's: with a checkpoint under way."""
        return self.host + self.saving

    @property
    def peak(self) -> MemoryMoment:
        """The moment with the most memory."""
        return max(self.moments, key=lambda moment: moment.allocated)

    @property
    def allocated(self) -> int:
        """Bytes at the peak, as torch.cuda.max_memory_allocated counts; compare with ``peak_memory_gib`` of metrics.jsonl."""
        return self.peak.allocated

    @property
    def total(self) -> int:
        """allocated + reserve: what the GPU must have, before fragmentation."""
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
    """Memory of one worker (context rank 0, which holds the largest shards) in a steady step, that is from the second on.

    layout: of a context group, ``layout.workers`` = cp. kernel: a name, not ``auto``. dtype_bytes: of the compute dtype.
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
    """The sizes of one training step, and its moments."""

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
        self.model, self.train, self.layout, self.exchange, self.kernel, self.e = (
            model,
            config.train,
            layout,
            exchange,
            kernel,
            e,
        )
        self.workers = workers
        self.tokens = layout.tokens_per_worker * config.train.micro_batch
        self.width, self.kv_width = (
            model.num_heads * model.head_dim,
            model.num_kv_heads * model.head_dim,
        )
        self.hidden = e * self.tokens * model.hidden_size
        self.head = model.vocab_size * model.hidden_size
        self.heads = 4 * self.tokens * model.num_heads
        self.recomputes = config.train.activation_checkpoint != "none"
        self.on_host = layers_on_host(config.train.offload_activations, model.num_layers)
        self.rows = tile_rows(
            self.tokens, model.hidden_size, model.intermediate_size, e, config.train.tile_mib * MIB
        )
        # The layers from here on keep what their MLP's products gave.
        keeping = layers_with_products(config.train.keep_mlp, model.num_layers)
        if not self.recomputes and self.rows == self.tokens:
            keeping = 0  # autograd keeps these and more
        self.first_with_products = model.num_layers - keeping
        # Of how many queries, among which, attention is computed again.
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
        self.ahead = (
            2 if workers > 1 else 1
        )  # layers that are whole at once: the one at work, and the next one if it is gathered

    def moments(self) -> list[MemoryMoment]:
        layers, states = self.model.num_layers, self.states
        kept = self.kept(layers)
        scatter = states.scatter(states.layer_shard)
        # All that grows or shrinks does so evenly, but for what is kept, of which no less is there from the offloaded layers on.
        # At the second layer, too, the weights of another one are gathered ahead, and more gradients are there than at later ones.
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
                # Whole weights, and the gradients of the LM head and of the layer at work.
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
        """indices: of how many layers the index is there. at: the layer in backward, counted from 1; 0: none is."""
        layer, exchange, freed = (
            self.layer_in_backward(products=at > self.first_with_products)
            if at
            else (0, self.ring_buffers(), 0)
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
        """Every layer's activations, the last gathered buffer, and the loss: a chunk, or the LM head's gradient in both dtypes."""
        rows = max(
            1, min(self.tokens, (self.train.loss_chunk_mib * MIB) // (4 * self.model.vocab_size))
        )
        second = (
            0 if self.e == 4 else self.e
        )  # in float32 the gradient of the logits takes their place
        chunk, converted = (4 + second) * rows * self.model.vocab_size, second * self.head
        return self.moment(
            "loss",
            gradients=self.states.gradients(0),
            working_weights=self.e * self.states.root_weights
            + self.states.weights(self.model.num_layers, self.ahead - 1),
            activations=kept,
            indices=self.model.num_layers,
            # Last layer's output (kept by the final norm), the normalised hidden states and their gradient.
            loss=3 * self.hidden + 4 * self.head + max(chunk, converted),
        )

    def at_the_end(self) -> MemoryMoment:
        """First layer in backward, or the reduction of the embedding and LM head: all other gradients are there, activations are gone."""
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
        # Embedding and LM head each have a gradient (a tied weight's are added up); then they move to the float32 input of reduce-scatter.
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
        """Bytes on the device of what the first so many layers keep for backward: those that are not offloaded, and at least two; and the
        results of the MLP's products.
        """
        products = self.hidden + 2 * self.e * self.tokens * self.model.intermediate_size
        return self.kept_by_layer() * self.on_device(layers) + products * max(
            0, layers - self.first_with_products
        )

    def on_device(self, layers: int) -> int:
        """Of how many of the first so many layers what is kept is on the device."""
        return max(layers - self.on_host, min(layers, 2))

    def host(self) -> int:
        """Bytes of host memory for what is offloaded, in the blocks of `ActivationOffload`; columns that a ring gathers once leave with
        the rest."""
        late = self.queries - self.early
        out, lse = (
            size * late // self.queries for size in (self.e * self.tokens * self.width, self.heads)
        )
        others = [] if self.early else [self.travelled(), self.gathered_columns()]
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
                + (0 if self.early else self.travelled())
            )
        attention = out + e * tokens * (self.width + 2 * self.kv_width) + self.norms()
        if self.rows < tokens:
            return 2 * self.hidden + attention
        return 4 * self.hidden + attention + 4 * e * tokens * self.model.intermediate_size

    def travelled(self) -> int:
        """Keys and values of the shard that a ring ends with, which another worker made."""
        exchange = self.exchange
        if exchange.name not in ("ring", "hierarchical_ring") or self.layout.workers == exchange.heads:
            return 0
        return (
            2
            * self.e
            * self.tokens
            * exchange.heads
            * max(self.model.num_kv_heads // exchange.heads, 1)
            * self.model.head_dim
        )

    def kept_index(self, layers: int) -> int:
        """Bytes of the indices of so many layers, and of what they are counted by."""
        if self.index is None:
            return 0
        gathered = 0 if self.early else self.gathered_columns()
        # Lines stay until those of all layers are counted, after backward (`DynamicIndex.count`).
        there = layers if self.index.bitmap else self.model.num_layers
        kept = there * self.index.kept + layers * self.index.derived(self.kernel)
        return kept + self.on_device(layers) * gathered + self.micro_batches * self.index.counted

    def gathered_columns(self) -> int:
        """Bytes of the columns of one layer that a ring gathers once."""
        return (
            2 * self.e * self.index.columns * self.model.head_dim
            if self.index is not None and self.index.gathered
            else 0
        )

    def norms(self) -> int:
        """q and k before their norms (Qwen3), which only `none` keeps and the others make again."""
        return self.e * self.tokens * (self.width + self.kv_width) if self.model.qk_norm else 0

    def layer_in_backward(self, *, products: bool) -> tuple[int, int, int]:
        """(layer, exchange, gone) at the larger of two points: the MLP's gate, where six tensors of its width exist, or attention. gone: of
        what was kept, what has been freed there.

        A recomputed layer has first made the normalised input, q, k, v, and what of output and lse was not kept. Its MLP, and any in
        tiles, then holds the gradients of its output, of x and of attention's output; for a tile x + attention, its norm, gate, up,
        silu(gate), their product, and the gradients of product and gate; and over several tiles float32 gradients of the weights. `none`
        in one tile has kept all of that, and makes the gradients of product, silu and up. products: x + attention, gate and up were kept.
        """
        e, tokens, model = self.e, self.tokens, self.model
        wide, out = e * tokens * model.intermediate_size, e * tokens * self.width
        tiled = self.rows < tokens
        mlp, attention, freed = self.hidden + 2 * wide, self.hidden + out, 0
        if self.recomputes or tiled:
            # Or, where the MLP is narrow, at its norm: x + attention, gradient of the norm, both and their product in float32.
            norm = (12 if e < 4 else 4) * model.hidden_size
            tensors = (4, 1) if products else (6, 2)
            mlp = 2 * self.hidden + out
            gate = self.rows * (
                max(tensors[0] * e * model.intermediate_size, norm) + tensors[1] * e * model.hidden_size
            )
            if tiled:
                weights = model.hidden_size * (3 * model.intermediate_size + self.width)
                mlp += gate + max(0, 4 * weights - e * self.states.layer_weights)
            else:
                # In one tile no weight has a gradient at the gate, and behind it two tensors of the MLP's width are left.
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
            # Of a ring nothing but the shard that travelled is used in backward.
            recomputed += 0 if self.travelled() and not self.early else 2 * e * tokens * self.kv_width
            mlp, attention = mlp + recomputed, attention + recomputed
        elif not tiled:
            # Of the stored tensors of the layer at hand, MLP's have been freed when attention is reached.
            freed = 4 * wide + 2 * self.hidden
        exchange = self.exchange_in_backward()
        buffers = self.ring_buffers()
        return (
            (mlp, buffers, 0)
            if mlp + buffers >= attention + exchange - freed
            else (attention, exchange, freed)
        )

    def ring_buffers(self) -> int:
        """Messages of a ring, which stay allocated from layer to layer: shards on the way, and gradients at hand, arriving and leaving."""
        exchange, cp = self.exchange, self.layout.workers
        if exchange.name not in ("ring", "hierarchical_ring") or cp == exchange.heads:
            return 0
        e, tokens = self.e, self.tokens * exchange.heads
        shard = 2 * tokens * max(self.model.num_kv_heads // exchange.heads, 1) * self.model.head_dim
        across = 1 if exchange.name == "hierarchical_ring" else 0
        if exchange.circulates == "queries":
            queries = self.tokens * self.width
            return (
                (1 + across) * self.message_of_queries()
                + (3 + across) * 4 * queries
                + (e + 4) * shard
            )
        return (exchange.prefetch + across) * e * shard + (3 + across) * 4 * shard

    def message_of_queries(self) -> int:
        """q, dout, lse and delta (`circulation.QueryMessage`)."""
        return 2 * self.e * self.tokens * self.width + 2 * self.heads

    def exchange_in_backward(self) -> int:
        """Most bytes of attention's backward beyond its stored inputs: gradients of q, k, v, KV of others, and the kernel's buffers."""
        e, cp, exchange = self.e, self.layout.workers, self.exchange
        queries, shard = self.tokens * self.width, 2 * self.tokens * self.kv_width
        if exchange.heads > 1:
            # The tokens of all ranks that share heads, for a part of them; traded tensors stand beside what is sent.
            kv_width = max(self.model.num_kv_heads // exchange.heads, 1) * self.model.head_dim
            shard = 2 * self.tokens * exchange.heads * kv_width
            trading = 2 * e * (queries + shard)
            return trading + self._keys_in_backward(
                queries, cp // exchange.heads, self.tokens * exchange.heads, kv_width
            )
        return self._keys_in_backward(queries, cp, self.tokens, self.kv_width)

    def _keys_in_backward(self, queries: int, ranks: int, tokens: int, kv_width: int) -> int:
        """queries: numbers of a rank's queries. ranks: between which keys move. tokens: of a rank."""
        e, exchange = self.e, self.exchange
        rings = exchange.name in ("ring", "hierarchical_ring")
        seen = tokens if rings else tokens * ranks
        # FlashAttention-4 takes the two rectangles of a zigzag worker one after the other and adds their dk and dv in float32.
        pieces = ranks > 1 and self.layout.name == "zigzag" and self.index is None
        grad, buffers = kernel_backward(
            self.kernel, self.model, self.tokens, seen, e, pieces, self.index
        )
        keys = 2 * seen * kv_width
        if rings and ranks > 1:
            # dq so far and dq of this step; delta; the message at hand. Of keys that is the shard that forward kept.
            sums = (4 + e) * queries + self.heads
            message = self.message_of_queries() if exchange.circulates == "queries" else 0
            if exchange.circulates == "queries" and self.kernel == "sdpa":
                message += e * queries  # its stand-in for out
            return sums + message + self.ring_buffers() + grad * keys + buffers
        n = exchange.chunks
        copied = (2 * e * queries + self.heads) // n if n > 1 and self.kernel == "sdpa" else 0
        if ranks == 1 and n > 1:
            # Of a part its keys and values, and all that is made, beside the gradients of all.
            return e * (queries + keys) + (e * queries + (e + grad) * keys + buffers) // n + copied
        if ranks == 1:
            return e * queries + grad * keys + max(buffers, e * keys)
        # A part of the heads at a time. In its kernel: its keys and values, those of the next one on their way, and the float32 message of
        # dk and dv of the part before, with what returned of all; PyTorch's kernels copy out, dout and lse of the part. Then keys, values
        # and that message are gone, and dk and dv become the next one, of zigzag put in the order of ranks before, and between nodes put in
        # the order of nodes behind. At the end what returned is rounded, and dq is joined.
        inner = min(ranks, max(1, exchange.per_node // exchange.heads))
        nodes = exchange.name == "hierarchical_all_gather" and 1 < inner < ranks
        counterparts = keys // inner if nodes else 0
        ordered = 3 * grad * keys // (4 * n) if pieces or self.layout.name == "zigzag" else 0
        most = (
            e * queries + max((4 + e) * keys // ranks, e * queries + e * keys // ranks)
            if n > 1
            else 0
        )
        for part in range(n):
            # With what this rank sends for it.
            coming = e * (keys + keys // ranks + counterparts) // n if part < n - 1 else 0
            before = 4 * (keys + counterparts) // n if part else 0
            returned = 4 * keys * part // (n * ranks)
            computing = copied + (e * keys + buffers) // n + before
            arriving = 4 * keys // n if nodes else 4 * keys // (n * ranks)
            packing = 4 * keys // n + max(ordered, arriving)
            most = max(
                most,
                e * queries * (part + 1) // n
                + grad * keys // n
                + coming
                + returned
                + max(computing, packing),
            )
        return most


@dataclass(frozen=True, kw_only=True)
class IndexShape:
    """Sizes of the dynamic index of one layer, as one worker holds it for its micro-batch.

    sequences, heads, block, blocks: of the index, all query heads and the blocks of a whole sequence. bitmap: listed blocks instead of
    diagonals. kept: bytes. counted: bytes that a micro-batch holds to count bitmaps by. columns: numbers of packed columns, over heads and
    sequences, filled up to tiles; without a bound in the configuration every token may be one. ways: the heads of a call are divided among
    so many ranks, each with the tokens of all of them. rings: keys circulate. gathered: columns are gathered once and kept from forward to
    backward. diagonals: that a head has at most, 0 = any number.
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
        """Of what the pattern may choose at most."""
        sparsity, heads, sequences = (
            config.sparsity,
            config.model.num_heads,
            config.train.micro_batch,
        )
        request = pattern.request()
        blocks = -(-layout.padded_seq // request.block)
        own = -(-blocks // layout.workers)
        rings = exchange.name in ("ring", "hierarchical_ring") and layout.workers > exchange.heads
        if request.bitmap:
            held = (
                blocks
                if exchange.heads > 1 or (rings and exchange.circulates == "queries")
                else own
            )
            bytes_each = 2 if request.block**2 < 1 << 15 else 4
            kept, counted, width = (
                sequences * heads * held * blocks,
                bytes_each * sequences * own * blocks,
                0,
            )
            if request.chunk:
                chunk_words = -(-blocks * request.block // (32 * request.chunk))
                kept += 4 * sequences * heads * held * request.block * chunk_words
                counted += 8 * sequences * blocks * request.block
        else:
            most = (
                sparsity.columns
                if sparsity.pattern == "fixed"
                else sparsity.max_columns or layout.padded_seq
            )
            width = min(most or 0, blocks * request.block)
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
            diagonals=0 if request.bitmap else _most_diagonals(sparsity, blocks),
        )

    def derived(self, kernel: str) -> int:
        """Bytes of what a kernel makes of diagonals and columns and keeps until backward (`Tiles.of_index`): key slots of columns, how many
        are below each block, and the list of diagonals. Where columns are gathered once, slots among a rank's own keys, too.
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
        """Of a call, over heads and sequences. queries, keys: tokens of the call, times sequences."""
        rows, others = (-(-tokens // (self.block * self.sequences)) for tokens in (queries, keys))
        return self.sequences * self.heads * rows * others

    def listed(self, queries: int, keys: int) -> int:
        """Numbers in the lists of blocks of a call, one for each block of keys (`attention.block_lists`), of packed documents."""
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
        """Bytes of the packed columns of a call, of what a query block has of them on its diagonals (a bit each), of their key slots and
        places (8 bytes each), and of their float32 gradients, in the parts that `backward_columns` makes.
        """
        if not self.columns:
            return 0
        tiles = self.columns // COLUMN_TILE
        parts = max(1, min(_MOST_PARTS, _PROGRAMS_WANTED // tiles))
        covered = -(-queries * self.ways // (self.block * self.sequences)) * self.columns // 8
        return (
            self.columns * (2 * e * head_dim + 8 + 8 * (parts + (parts > 1)) * head_dim) + covered
        )


def _most_diagonals(sparsity: SparsityConfig, blocks: int) -> int:
    """Of a head; 0 where the configuration sets no bound."""
    if sparsity.pattern != "fixed":
        return sparsity.max_slashes or 0
    # Those drawn are longer than the mean diagonal, since they crowd near the first one.
    return sparsity.slashes or min(blocks, int((sparsity.density or 0.0) * blocks) + 2)


def kernel_backward(
    kernel: str,
    model: ModelConfig,
    queries: int,
    keys: int,
    e: int,
    pieces: bool,
    index: IndexShape | None = None,
) -> tuple[int, int]:
    """(bytes of one number of the dk and dv that a kernel returns, bytes of its own buffers in backward).

    queries, keys: tokens of one call, times micro-batch. pieces: flash4 is called for more than one rectangle. index: narrows the call.
    flash4: float32 accumulators of dq and, with grouped heads, of dk and dv; lse and delta; under an index also its lists of blocks,
    and after them the columns, which are added to another dq. sdpa (FlashAttention-2): float32 accumulator of dq, dk and dv for every query
    head, and dq, dk, dv of the rectangle at hand. triton: lse and delta; the lists of a bitmap, 2 bytes for each pair of blocks and
    direction (4 beyond 32767 blocks), or the columns. reference: three float64 matrices of scores, and more.
    """
    heads, width, kv_width = (
        model.num_heads,
        model.num_heads * model.head_dim,
        model.num_kv_heads * model.head_dim,
    )
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
        lists = (
            bytes_each * index.pairs_of_blocks(queries, keys) if index is not None and index.bitmap else 0
        )
        return 4, 8 * queries * heads + lists + columns
    return e, 3 * 8 * queries * keys * heads
