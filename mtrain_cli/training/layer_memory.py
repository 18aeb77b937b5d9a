"""Memory of one decoder layer on one worker, for one micro-batch, in bytes.

With expert parallelism, tokens are taken to choose their experts at random (`rows_per_token`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mtrain_cli.config.schema import SIGMOID, Config, ModelConfig
from mtrain_cli.model.tiling import ONE_ADDITION, layers_with_products
from mtrain_cli.parallel.activation_offload import block_sizes
from mtrain_cli.parallel.layout import Layout, early_queries
from mtrain_cli.training.attention_memory import AttentionMemory
from mtrain_cli.training.expert_traffic import chunks_of_tokens, rows_per_token
from mtrain_cli.training.flops import attention_kept, by_hand, own_tiles

# Hidden states of a tile in messages of its neighbors: the gathered input of the MLP, and the two
# sums in front of it and behind it.
_IN_FLIGHT = 3
_INT64, _INT32 = 8, 4
_HIGH = 4  # bytes of float32, the dtype of the router


class BackwardBytes(NamedTuple):
    """Bytes at the peak of one layer's backward pass.

    layer: recomputed tensors and activation gradients.
    exchange: KV, its gradients, and the kernel's buffers.
    freed: the layer's kept activations that backward frees before the peak.
    """

    layer: int
    exchange: int
    freed: int


class LayerMemory:
    """Sizes of a layer.

    tokens: tokens with which this worker's heads compute.
    own_tokens: tokens of its hidden states; with tensor parallelism, an equal part of ``tokens``.
    hidden, out, kv, lse, product: bytes of a hidden state, of attention's output, of keys and
        values, of the log-sum-exp, and of one MLP product (gate, up, silu(gate), or their product).
    products: what train.keep_mlp adds to a layer: input + attention, gate and up.
    first_with_products: number of the first layer that keeps its MLP products, counted from 0.
    ring_kv, gathered_columns: what the layer keeps of a ring (see `AttentionMemory`).
    decision: the router's decision, which also stays if the layer is offloaded.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        attention: AttentionMemory,
        weights: int,
        e: int,
        *,
        experts: bool = False,
    ) -> None:
        """Compute the sizes. weights: elements of the layer's weights; e: bytes of an element."""
        model, train = config.of_worker.model, config.train
        self.model, self.attention, self.e = model, attention, e
        self.degree = config.topology.tensor_parallel
        self.weights = e * weights
        self.tokens = layout.tokens_per_worker * train.micro_batch
        self.own_tokens, own_rows = own_tiles(config, layout, e)
        self.hidden = e * self.own_tokens * model.hidden_size
        self.out = e * self.tokens * model.num_heads * model.head_dim
        self.kv = 2 * e * self.tokens * model.num_kv_heads * model.head_dim
        self.lse = 4 * self.tokens * model.num_heads
        self.product = e * self.tokens * model.intermediate_size
        self.fp8, self.all_fp8 = train.fp8 != "none", train.fp8 == "all"
        wide = self.product + 4 * self.tokens if self.fp8 else 2 * self.product  # e4m3, and scales
        self.products = self.hidden + wide
        # The normed input of q, k and v, of which fp8 keeps no copy in the compute dtype.
        self.normed = 0 if self.all_fp8 and self.degree == 1 else self.degree * self.hidden
        # q and k before their norms (Qwen3), kept only without checkpointing.
        self.before_norms = self.out + self.kv // 2 if model.qk_norm else 0
        self.recomputes = train.activation_checkpoint != "none"
        self.rows = min(own_rows * self.degree, self.tokens)  # of a tile, of all workers
        self.tiled = own_rows < self.own_tokens
        self.experts = ExpertMemory.of(config, self.own_tokens, e) if experts else None
        self.decision = self.experts.decision if self.experts else 0
        # Whether `feed_forward` has its own backward pass; else autograd keeps the products.
        self.by_hand = self.recomputes or by_hand(config, self.tiled)
        keeping = layers_with_products(train.keep_mlp, model.num_layers) if self.by_hand else 0
        self.first_with_products = model.num_layers - keeping
        # Backward recomputes attention for the first `early` of a worker's queries.
        self.queries = layout.tokens_per_worker * attention.exchange.heads
        kept, block = attention_kept(train), config.sparsity.block
        self.early = early_queries(self.queries, kept, block) if self.recomputes else 0
        self.ring_kv = 0 if self.early else attention.ring_kv
        self.gathered_columns = 0 if self.early else attention.gathered_columns

    @cached_property
    def kept(self) -> int:
        """What the layer keeps until backward, without its index and MLP products."""
        out = self.out + self.lse
        if self.recomputes:
            late = self.queries - self.early
            return self.hidden + out * late // self.queries + self.ring_kv + self.decision
        attention = out + self.out + self.kv + self.before_norms
        if self.experts is not None:
            more = self.decision + self.experts.saved
            return (3 + self.degree) * self.hidden + attention + more
        if self.by_hand:
            return self.hidden + self.normed + attention
        return 4 * self.hidden + attention + 4 * self.product

    @cached_property
    def on_host(self) -> int:
        """Host memory of an offloaded layer, in whole blocks (`ActivationOffload`)."""
        late = self.queries - self.early
        kept = [size * late // self.queries for size in (self.out, self.lse)]
        tensors = [self.hidden, *kept, self.ring_kv, self.gathered_columns]
        return sum(sum(block_sizes(size)) for size in tensors)

    def in_backward(self, *, products: bool) -> BackwardBytes:
        """Return the peak of backward: at the MLP's gate, in the experts, or in attention.

        products: whether the layer kept its MLP products.
        """
        recomputed = self._recomputed() if self.recomputes else 0
        pool, below = self.attention.pool, self.hidden + self.out + recomputed
        if (experts := self.experts) is None:
            first = BackwardBytes(self._at_gate(products) + recomputed, pool, 0)
            freed = self.products if products else 0
            if not self.by_hand:
                freed = 4 * self.product + 2 * self.hidden
        else:
            # Input and output of the norm, and what autograd saves of router and experts.
            saved = 2 * self.hidden + experts.saved
            again = recomputed + saved if self.recomputes else 0
            inside = self.hidden + again + experts.in_backward(self.weights)
            first = BackwardBytes(inside, pool, experts.shared)
            freed = 0 if self.recomputes else saved
        attention = BackwardBytes(below, self.attention.in_backward, freed)
        return max(first, attention, key=lambda at: at.layer + at.exchange - at.freed)

    def _recomputed(self) -> int:
        """Return the recomputed tensors: normed input, q, k, v, and the missing part of output."""
        recomputed = self.normed + self.out + self.before_norms
        if self.early:
            recomputed += self.out + self.lse + self.attention.gathered_columns
        # If forward kept a shard of the ring, backward does not use the recomputed k and v.
        return recomputed + (0 if self.ring_kv else self.kv)

    def _at_gate(self, products: bool) -> int:
        """Return the bytes of the MLP's backward pass at its gate, without `_recomputed`.

        By hand, these are the gradients of the MLP's output, of the layer's input x and of
        attention's output; in a tile x + attention, its norm, gate, up, silu(gate),
        silu(gate) * up, and the gradients of product and gate. With tensor parallelism, a tile
        gathers the gradient of the MLP's output, messages of neighboring tiles are in flight, and
        x + attention has only own rows. With fp8, the gradients overwrite the gradient of the
        product, and gate and up if those are recomputed, and have a copy in fp8, as the weights
        have, some of them transposed.
        """
        if not self.by_hand:  # autograd: the gradients of product, silu and up
            return self.products
        model = self.model
        hidden, product = self.e * model.hidden_size, self.e * model.intermediate_size  # per token
        # A narrow MLP peaks at its norm: x + attention, the norm's gradient, and in float32 both
        # and their product.
        norm = (12 if self.e < 4 else 4) * model.hidden_size // self.degree
        wide_tensors = 4 if products or self.fp8 else 6
        narrow_tensors = 1.0 if products else 1 + 1 / self.degree
        if self.degree > 1:
            narrow_tensors += 1 + _IN_FLIGHT * self.tiled
        narrow = round(narrow_tensors * hidden)
        gate = self.rows * (max(wide_tensors * product, norm) + narrow)
        gradients = 2 * self.hidden + self.out
        # Bytes of fp8 weights: down at the gate, and o, gate and up if recomputed; both in other
        # tiles and after it, and the transpose of o in other tiles.
        width = model.num_heads * model.head_dim
        matrix = model.hidden_size * model.intermediate_size * self.fp8
        output = model.hidden_size * width * self.all_fp8
        again = 0 if products else 2 * matrix + output
        first, rounded = matrix + again, 3 * matrix + again
        if self.tiled:  # float32 gradients of the weights in addition
            in_float32 = 4 * model.hidden_size * (3 * model.intermediate_size + width)
            return gradients + gate + rounded + output + max(0, in_float32 - self.weights)
        # In one tile, the weights have no gradient at the gate yet. After it, two tensors of the
        # MLP's width remain, with fp8 one more.
        remaining = 2 + self.fp8
        after = self.rows * max(remaining * product + 3 * hidden, norm)
        return gradients + max(gate + first - self.weights, after + rounded)


@dataclass(frozen=True)
class ExpertMemory:
    """Memory of the experts of one layer.

    tokens, sequences: of this worker, in a micro-batch.
    e: bytes of the compute dtype. The router computes in float32.
    degree: number of workers over which the experts are dealt.
    chunks: number of chunks of tokens.
    recompute: whether the layer is checkpointed.
    """

    model: ModelConfig
    tokens: int
    sequences: int
    e: int
    degree: int = 1
    chunks: int = 1
    recompute: bool = False
    z_loss: bool = False

    @staticmethod
    def of(config: Config, tokens: int, e: int) -> ExpertMemory:
        """Return the memory of a run's experts; `topology.expert_parallel=auto` counts as 1."""
        train, given = config.train, config.topology.expert_parallel
        degree = given if isinstance(given, int) else 1
        chunks = chunks_of_tokens(config, tokens, e, degree)
        return ExpertMemory(
            config.model, tokens, train.micro_batch, e, degree, chunks,
            recompute=train.activation_checkpoint != "none", z_loss=bool(train.router_z_loss),
        )  # fmt: skip

    @property
    def _pairs(self) -> int:
        return self.tokens * self.model.moe.top_k

    @property
    def _leaving(self) -> float:
        return rows_per_token(self.model.moe, self.degree)

    @property
    def _matrix(self) -> int:
        moe = self.model.moe
        return self.e * (moe.experts // self.degree * moe.expert_size * self.model.hidden_size)

    def _sizes(self, units: int = 1) -> tuple[int, int]:
        """Return the bytes of one unit's rows, and of a tensor of an expert's width."""
        pairs = self.e * -(-self._pairs // units)
        return pairs * self.model.hidden_size, pairs * self.model.moe.expert_size

    @property
    def decision(self) -> int:
        """Bytes of the routing decision (`routing.Decision`), which is kept until backward ends."""
        moe = self.model.moe
        size = 3 * _INT64 * self._pairs + _HIGH * moe.experts * (1 + self.sequences)
        if self.degree > 1:  # places here, there and of sums, and scores (`expert_parallel.Tile`)
            places = 2 + self._leaving + self.recompute
            size += round(_INT32 * (places * self._pairs + self.degree * self.tokens))
        return size

    @property
    def saved(self) -> int:
        """What autograd saves, without the inputs of the layer's norm and of the experts."""
        moe = self.model.moe
        # Scores (with a z-loss, the logits, too), chosen scores and their normed values.
        router = (1 + self.z_loss) * moe.experts + moe.top_k * (2 if moe.normalize else 1)
        # Numbers of one token
        router += self.z_loss + (moe.score == SIGMOID) + moe.normalize + self.sequences
        # Gate and up of all pairs, and rows and scores that arrived.
        products = 0
        if not (self.recompute and (self.chunks > 1 or self.degree > 1)):
            rows, wide = self._sizes()
            arrived = rows + _HIGH * self._pairs
            products = 2 * wide + (arrived if self.degree > 1 else 0)
        return _HIGH * router * self.tokens + products + self.shared

    @property
    def shared(self) -> int:
        """What the shared MLP saves (gate, up, silu(gate), product), freed before the experts."""
        return 4 * self.e * self.tokens * self.model.moe.shared_size

    @property
    def inputs(self) -> int:
        """Which sequence each token belongs to (`routing.Routing`)."""
        return self.tokens * (2 * _INT64 + 1 + self.sequences)

    def in_backward(self, weights: int) -> int:
        """Return the peak of the experts' backward pass beyond `saved` and ``weights``.

        All moments hold the gradients of logits and scores and, with a shared MLP or by chunks, of
        the experts' input.

        weights: bytes of the gradients of all weights of the layer. Those that do not exist yet are
            subtracted.
        """
        model, moe, e, matrix = self.model, self.model.moe, self.e, self._matrix
        rows, wide = self._sizes()
        hidden = e * self.tokens * model.hidden_size
        low, in_high = e < _HIGH, _HIGH * wide // e
        held = 2 * _HIGH * self.tokens * moe.experts + (hidden if moe.shared_size else 0)
        if self.chunks > 1 or self.degree > 1:
            largest = hidden + (self._travelling() if self.degree > 1 else self._by_chunks())
        else:
            largest = max(  # at scores, down, gate, weights and input of `_Experts.backward`
                rows + 3 * wide + (2 if low else 1) * in_high,
                rows + 4 * wide + in_high * low + matrix,
                6 * wide + matrix,
                2 * wide + rows + 3 * matrix,
                2 * wide + 2 * rows + self._sums + 3 * matrix,
            )
        return held + largest + 3 * e * moe.shared_size * model.hidden_size - weights

    def _by_chunks(self) -> int:
        """Return the bytes of a chunk and of the gradients of the weights, if no row travels.

        A chunk holds rows of the experts' input and of the gradient of their output, and gate and
        up if they are recomputed. The moments: start, scores, down, gate, weights, input, end.
        """
        rows, wide = self._sizes(self.chunks)
        low, matrix, in_high = self.e < _HIGH, self._matrix, _HIGH * wide // self.e
        before = self._gradients if self.chunks > 1 else 0  # of earlier chunks
        again = 2 * wide if self.recompute else 0
        return max(
            2 * rows + again + before,
            2 * rows + again + 3 * wide + (2 if low else 1) * in_high + before,
            2 * rows + again + 4 * wide + matrix + before,
            rows + again + 6 * wide + (before or matrix),
            rows + 2 * wide + 2 * matrix + (before or matrix),
            2 * rows + 2 * wide + self._sums + self._gradients,
            self._gradients + 2 * matrix * (self.chunks > ONE_ADDITION and low),
        )

    def _travelling(self) -> int:
        """Return the bytes of a chunk and of the gradients of the weights, if rows travel.

        A chunk holds what it holds in `_by_chunks`. While it computes, inputs of the next chunk and
        sums of the previous one travel. The moments: message, start, scores, gate, input, weights
        (twice), sum of the chunk, end.
        """
        rows, wide = self._sizes(self.chunks)
        own = self.e * -(-self.tokens // self.chunks) * self.model.hidden_size
        leave = round(own * self._leaving)
        low, matrix, in_high = self.e < _HIGH, self._matrix, _HIGH * wide // self.e
        several = self.chunks > 1
        before = self._gradients if several else 0
        again = 2 * wide if self.recompute else 0
        inputs = 2 if self.recompute else 1  # else `saved` has one of them
        back = (own + leave) * (1 + several)  # also of the previous chunk
        held = before + (own + leave) * several
        largest = max(
            inputs * 2 * leave + held,
            inputs * rows + own + leave + again + held,
            inputs * rows + again + 3 * wide + (2 if low else 1) * in_high + held,
            inputs * rows + again + 7 * wide + held,
            (inputs + 1) * rows + 3 * wide + leave + back + before,
            inputs * rows + 3 * wide + leave + back + matrix + before,
            (inputs - 1) * rows + 2 * wide + leave + back + 2 * matrix + (before or matrix),
            back + self._sums + self._gradients,
            self._gradients + 2 * matrix * (self.chunks > ONE_ADDITION and low),
        )
        # Of two chunks, the second one has no inputs of a next chunk beside it.
        return largest + leave * several + 2 * inputs * leave * (self.chunks > 2)

    @property
    def _gradients(self) -> int:
        """Bytes of the gradients of all weights; float32 if more than two chunks add them up."""
        return 3 * (_HIGH if self.chunks > ONE_ADDITION else self.e) * (self._matrix // self.e)

    @property
    def _sums(self) -> int:
        # The sum of the rows of a chunk is float32 first.
        size = _HIGH + self.e * (self.e < _HIGH)
        return size * -(-self.tokens // self.chunks) * self.model.hidden_size
