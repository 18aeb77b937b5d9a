"""Memory of one decoder layer: tensors kept for backward, and tensors of the backward pass."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from mtrain_cli.config.schema import Config
from mtrain_cli.model.tiling import layers_with_products
from mtrain_cli.parallel.activation_offload import block_sizes
from mtrain_cli.parallel.layout import Layout, early_queries
from mtrain_cli.training.attention_memory import AttentionMemory
from mtrain_cli.training.expert_memory import ExpertMemory
from mtrain_cli.training.flops import attention_kept, own_tiles

# Tensors as wide as a hidden state, for all rows of a tile, that messages of other tiles take: the
# gathered input of the MLP, and the two sums in front of it and behind it.
_IN_FLIGHT = 3


class BackwardBytes(NamedTuple):
    """Bytes at the peak of one layer's backward pass.

    layer: bytes of recomputed tensors and of activation gradients.
    exchange: bytes of KV, of its gradients, and of the kernel's buffers.
    freed: bytes of the layer's kept activations that backward frees before the peak.
    """

    layer: int
    exchange: int
    freed: int


class LayerMemory:
    """Memory of one decoder layer on one worker, for one micro-batch, in bytes.

    tokens: number of tokens with which this worker's heads compute.
    own_tokens: number of tokens of this worker's hidden states. With tensor parallelism, an equal
        part of ``tokens``.
    hidden: bytes of one hidden state, [own tokens, hidden size].
    first_with_products: number of the first layer that keeps its MLP products, counted from 0.
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
        """Prepare the sizes of a layer.

        Args:
            weights: number of elements of the layer's weights.
            e: bytes of the compute dtype.
            experts: whether the layer has experts instead of one MLP.
        """
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
        # One MLP product: gate, up, silu(gate), or silu(gate) * up.
        self.product = e * self.tokens * model.intermediate_size
        # q and k before their norms (Qwen3), kept only without checkpointing.
        self.before_norms = self.out + self.kv // 2 if model.qk_norm else 0
        self.recomputes = train.activation_checkpoint != "none"
        self.rows = min(own_rows * self.degree, self.tokens)  # of a tile, of all workers
        self.tiled = own_rows < self.own_tokens
        self.experts: ExpertMemory | None = None
        if experts:
            self.experts = ExpertMemory.of(config, self.own_tokens, e)
        # Whether `feed_forward` has its own backward pass.
        self.by_hand = self.recomputes or self.tiled or self.degree > 1
        keeping = layers_with_products(train.keep_mlp, model.num_layers)
        if not self.by_hand:
            keeping = 0  # autograd keeps the products, and more
        self.first_with_products = model.num_layers - keeping
        # Backward recomputes attention for the first `early` of a worker's queries.
        self.queries = layout.tokens_per_worker * attention.exchange.heads
        self.early = 0
        if self.recomputes:
            self.early = early_queries(self.queries, attention_kept(train), config.sparsity.block)

    @property
    def products(self) -> int:
        """Bytes that train.keep_mlp adds to a layer: input + attention, gate and up."""
        return self.hidden + 2 * self.product

    @property
    def ring_kv(self) -> int:
        """Bytes of the KV shard that a layer keeps for backward in a ring. 0 without a ring."""
        return 0 if self.early else self.attention.ring_kv

    @property
    def gathered_columns(self) -> int:
        """Bytes of the columns that the layer gathers in forward and keeps for backward."""
        return 0 if self.early else self.attention.gathered_columns

    @property
    def decision(self) -> int:
        """Bytes of the router's decision, which the layer also keeps if it is offloaded."""
        return 0 if self.experts is None else self.experts.decision

    @cached_property
    def kept(self) -> int:
        """Bytes that the layer keeps until backward, without its index and MLP products."""
        out = self.out + self.lse
        decision = self.decision
        if self.recomputes:
            late = self.queries - self.early
            return self.hidden + out * late // self.queries + self.ring_kv + decision
        attention = out + self.out + self.kv + self.before_norms
        if self.experts is not None:
            return (3 + self.degree) * self.hidden + attention + decision + self.experts.saved
        if self.by_hand:
            return (1 + self.degree) * self.hidden + attention  # the normed input is gathered
        return 4 * self.hidden + attention + 4 * self.product

    @cached_property
    def on_host(self) -> int:
        """Bytes of host memory for an offloaded layer, in whole blocks (`ActivationOffload`)."""
        late = self.queries - self.early
        kept = [size * late // self.queries for size in (self.out, self.lse)]
        tensors = [self.hidden, *kept, self.ring_kv, self.gathered_columns]
        return sum(sum(block_sizes(size)) for size in tensors)

    def in_backward(self, *, products: bool) -> BackwardBytes:
        """Return the bytes at the peak of backward. The peak is at the MLP's gate or in attention.

        A checkpointed layer begins backward by recomputing its normed input, q, k, v, and the part
        of output and lse that forward did not keep.

        Args:
            products: whether the layer kept its MLP products.
        """
        recomputed = self._recomputed() if self.recomputes else 0
        if self.experts is not None:
            return self._with_experts(self.experts, recomputed)
        gate = BackwardBytes(self._at_gate(products) + recomputed, self.attention.pool, 0)
        kept, freed = self.hidden + self.out + recomputed, self._freed_before_attention(products)
        attention = BackwardBytes(kept, self.attention.in_backward, freed)
        return max(gate, attention, key=lambda at: at.layer + at.exchange - at.freed)

    def _with_experts(self, experts: ExpertMemory, recomputed: int) -> BackwardBytes:
        """Return the peak of a layer with experts: in their backward pass, or in attention.

        Before the experts, a checkpointed layer also recomputes the input and the output of the
        norm in front of them, and what autograd saves of router and experts.

        Args:
            recomputed: result of `_recomputed`; 0 without checkpointing.
        """
        of_experts = 2 * self.hidden + experts.saved
        again = recomputed + of_experts if self.recomputes else 0
        inside = BackwardBytes(
            self.hidden + again + experts.in_backward(self.weights),
            self.attention.pool,
            experts.shared,
        )
        attention = BackwardBytes(
            self.hidden + self.out + recomputed,
            self.attention.in_backward,
            0 if self.recomputes else of_experts,
        )
        return max(inside, attention, key=lambda at: at.layer + at.exchange - at.freed)

    def _recomputed(self) -> int:
        """Return the bytes of the tensors that a layer recomputes, up to attention's output."""
        recomputed = self.degree * self.hidden + self.out + self.before_norms
        if self.early:
            recomputed += self.out + self.lse + self.attention.gathered_columns
        # If forward kept a shard of the ring, backward does not use the recomputed k and v.
        return recomputed + (0 if self.ring_kv else self.kv)

    def _at_gate(self, products: bool) -> int:
        """Return the bytes of the MLP's backward pass at its gate.

        The result excludes the tensors of `_recomputed`.

        With neither checkpointing nor tiles, forward kept all tensors of the MLP. Backward adds the
        gradients of product, silu and up.

        With checkpointing or tiles, backward holds the gradients of the MLP's output, of the
        layer's input x and of attention's output. Each tile adds x + attention, its norm, gate, up,
        silu(gate), the product silu(gate) * up, and the gradients of product and gate. Several
        tiles also hold float32 gradients of the weights. With tensor parallelism, a tile also
        gathers the gradient of the MLP's output, and x + attention has only own rows. Messages of
        neighboring tiles are in flight.
        """
        if not self.by_hand:
            return self.products
        model = self.model
        hidden, product = self.e * model.hidden_size, self.e * model.intermediate_size  # per token
        # A narrow MLP peaks at its norm: x + attention, the norm's gradient, and in float32 both
        # and their product.
        norm = (12 if self.e < 4 else 4) * model.hidden_size
        norm = norm // self.degree
        wide_tensors, narrow_tensors = (4, 1.0) if products else (6, 1 + 1 / self.degree)
        if self.degree > 1:
            narrow_tensors += 1 + _IN_FLIGHT * self.tiled
        narrow = round(narrow_tensors * hidden)
        gate = self.rows * (max(wide_tensors * product, norm) + narrow)
        gradients = 2 * self.hidden + self.out
        if self.tiled:
            width = model.num_heads * model.head_dim
            in_float32 = 4 * model.hidden_size * (3 * model.intermediate_size + width)
            return gradients + gate + max(0, in_float32 - self.weights)
        # In one tile, the weights have no gradient at the gate yet. After it, two tensors of the
        # MLP's width remain.
        after = self.rows * max(2 * product + 3 * hidden, norm)
        return gradients + max(gate - self.weights, after)

    def _freed_before_attention(self, products: bool) -> int:
        """Return the bytes of the kept MLP tensors that backward frees before attention."""
        if not self.by_hand:
            return 4 * self.product + 2 * self.hidden
        return self.products if products else 0
