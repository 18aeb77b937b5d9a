"""Parameters and floating-point operations of a decoder from its shape alone, and what a GPU could do at most.

One multiply-add counts as two FLOP. Element-wise work (norms, rotary embedding, softmax, SwiGLU gate) is left out of both
conventions, as is usual.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from mtrain_cli.config.schema import Config, ModelConfig, TrainConfig
from mtrain_cli.model.tiling import layers_with_products, tile_rows
from mtrain_cli.parallel.layout import Layout, early_queries

Shape = tuple[int, ...]


def layer_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Shape of every parameter of one decoder layer; matrices are [out, in], dimension 0 is the one that FSDP shards."""
    heads, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    shapes: dict[str, Shape] = {
        "attention norm": (model.hidden_size,),
        "q": (heads, model.hidden_size),
        "k": (kv, model.hidden_size),
        "v": (kv, model.hidden_size),
        "o": (model.hidden_size, heads),
        "mlp norm": (model.hidden_size,),
        "gate": (model.intermediate_size, model.hidden_size),
        "up": (model.intermediate_size, model.hidden_size),
        "down": (model.hidden_size, model.intermediate_size),
    }
    if model.qkv_bias:
        shapes |= {"q bias": (heads,), "k bias": (kv,), "v bias": (kv,)}
    if model.qk_norm:
        shapes |= {"q norm": (model.head_dim,), "k norm": (model.head_dim,)}
    return shapes


def root_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Shape of every parameter outside the layers; a tied LM head is the embedding and appears once."""
    shapes: dict[str, Shape] = {
        "embedding": (model.vocab_size, model.hidden_size),
        "norm": (model.hidden_size,),
    }
    if not model.tie_word_embeddings:
        shapes["lm head"] = (model.vocab_size, model.hidden_size)
    return shapes


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """How many numbers a decoder holds.

    total: every parameter, a tied embedding once.
    embedding: rows of the embedding table times its width.
    matmul: parameters that a token is multiplied with: all matrices of the layers and the LM head (tied or not), without the embedding
        look-up, norms and biases.
    layer: every parameter of one decoder layer.
    layer_matmul: matrices of one decoder layer.
    """

    total: int
    embedding: int
    matmul: int
    layer: int
    layer_matmul: int


def parameters(model: ModelConfig) -> ParameterCount:
    """Count the parameters of a decoder of this shape, without building it."""
    layer = [prod(shape) for shape in layer_shapes(model).values()]
    matrices = [prod(shape) for shape in layer_shapes(model).values() if len(shape) == 2]
    head = model.vocab_size * model.hidden_size
    return ParameterCount(
        total=sum(layer) * model.num_layers
        + sum(prod(shape) for shape in root_shapes(model).values()),
        embedding=head,
        matmul=sum(matrices) * model.num_layers + head,
        layer=sum(layer),
        layer_matmul=sum(matrices),
    )


def causal_pairs(seq: int) -> int:
    """Query-key pairs of a causal mask over ``seq`` tokens, the diagonal included."""
    return seq * (seq + 1) // 2


def attention_kept(train: TrainConfig) -> float:
    """The share of a worker's queries whose attention output stays for a second forward pass; without one (none), nothing need stay."""
    return {
        "none": 0.0,
        "selective": 1.0,
        "sequence_selective": float(train.checkpoint_keep),
        "full": 0.0,
    }[train.activation_checkpoint]


def recomputes_attention(train: TrainConfig) -> bool:
    """Whether attention runs again in the backward pass, for some or all queries, and with it what workers send each other."""
    return train.activation_checkpoint != "none" and attention_kept(train) < 1


def recomputed_pair_share(train: TrainConfig, layout: Layout) -> float:
    """The share of a causal sequence's query-key pairs whose attention is computed a second time: those of every worker's early tokens.

    The first half of a sequence has a quarter of its pairs. Of packed documents it has up to half, which is not known beforehand.
    """
    if train.activation_checkpoint in ("none", "selective"):
        return 0.0
    early = early_queries(
        layout.tokens_per_worker, attention_kept(train), layout.unit if layout.unit > 1 else None
    )
    if early == layout.tokens_per_worker:
        return 1.0
    return _pairs_of_first(early, layout) / causal_pairs(layout.padded_seq)


@lru_cache(maxsize=64)
def _pairs_of_first(early: int, layout: Layout) -> int:
    """Causal pairs of the first so many tokens of every worker; asked for again for every setting that is priced."""
    return sum(int((layout.positions(rank)[:early] + 1).sum()) for rank in range(layout.workers))


@dataclass(frozen=True, kw_only=True)
class FlopsPerToken:
    """FLOP of one token's forward and backward pass, averaged over its sequence.

    model: what the mathematics asks for, by which MFU goes (PaLM's convention, Chowdhery et al. 2022, appendix B, but attention counts
        the pairs that the mask allows: causal and inside documents). 6 per matmul parameter (2 forward, 4 backward) plus, per layer, head
        and pair, 12 * head_dim: two products (q k^T and p v) forward, four backward. No recomputation and no pads, so that it never
        exceeds ``executed``.
    executed: what the kernels are asked to compute, by which HFU goes. Pads count as tokens in the matrices; attention counts the pairs
        that mask and sparsity allow, 4 * head_dim FLOP each forward and 10 backward (a flash backward forms q k^T again: five products);
        activation checkpointing adds the products that run a second time (in eager mode; a compiler may drop some of them). Tiles that
        straddle the mask's edge are not rounded up.
    """

    model: float
    executed: float


def flops_per_token(
    model: ModelConfig,
    seq: int,
    *,
    recomputed: bool = False,
    pairs: float | None = None,
    padded_seq: int | None = None,
    pairs_again: float = 0.0,
    tiled: bool = False,
    recomputed_logits: bool = False,
    keep_mlp: bool | int = False,
) -> FlopsPerToken:
    """FLOP per token of training on sequences of ``seq`` tokens, in both conventions (see `FlopsPerToken`).

    recomputed: projections and MLP are computed twice, as with every activation checkpointing but none. tiled: of a model without it, the
        MLP in tiles, which are. recomputed_logits: the LM head, too. keep_mlp: all layers, or so many, compute nothing of the MLP twice.
    pairs_again: share of the pairs whose attention is computed twice (`computed_again`).
    pairs: query-key pairs of one sequence and head that are allowed, a mean when it differs between heads or sequences; default causal.
    padded_seq: tokens that really pass through the matrices, pads included; default ``seq``.
    """
    count = parameters(model)
    allowed = causal_pairs(seq) if pairs is None else pairs
    heads = model.num_layers * model.num_heads * model.head_dim
    again = recomputed_matmul(model, recomputed=recomputed, tiled=tiled, keep_mlp=keep_mlp) + (
        count.embedding if recomputed_logits else 0
    )
    products = 14 + 4 * pairs_again
    return FlopsPerToken(
        model=6 * count.matmul + 12 * heads * allowed / seq,
        executed=((6 * count.matmul + 2 * again) * (padded_seq or seq) + products * heads * allowed)
        / seq,
    )


def training_flops(
    config: Config, layout: Layout, *, dtype_bytes: int, pairs: float | None = None
) -> FlopsPerToken:
    """`flops_per_token` of a run. pairs: of one sequence and head; default causal."""
    model, train = config.model, config.train
    tokens = layout.tokens_per_worker * train.micro_batch
    rows = tile_rows(
        tokens, model.hidden_size, model.intermediate_size, dtype_bytes, train.tile_mib << 20
    )
    return flops_per_token(
        model,
        config.seq,
        recomputed=train.activation_checkpoint != "none",
        pairs=pairs,
        padded_seq=layout.padded_seq,
        pairs_again=recomputed_pair_share(train, layout),
        tiled=rows < tokens,
        recomputed_logits=train.loss_gradients == "recompute",
        keep_mlp=train.keep_mlp,
    )


def recomputed_matmul(
    model: ModelConfig, *, recomputed: bool, tiled: bool = False, keep_mlp: bool | int = False
) -> int:
    """Matmul parameters of the layers whose forward product runs a second time in the backward pass.

    Of a recomputed layer that is every matrix but the MLP's last: all that backward needs of that product is its input. Of a layer that
    is not, but computes its MLP in tiles, it is not those of q, k and v either; of one that keeps its MLP's products it is these alone.
    """
    shapes, layers = layer_shapes(model), model.num_layers
    attention = sum(prod(shapes[name]) for name in ("q", "k", "v")) if recomputed else 0
    mlp = sum(prod(shapes[name]) for name in ("o", "gate", "up")) if recomputed or tiled else 0
    return attention * layers + mlp * (layers - layers_with_products(keep_mlp, layers))


# Dense bf16 tensor-core FLOP/s with fp32 accumulation, from NVIDIA's datasheets; where a sheet prints the sparse figure, half of it.
# The first pattern that matches the device's name counts, so that longer names stand before the names they contain.
_PEAK_FLOPS: tuple[tuple[str, float], ...] = (
    (r"GB[23]00", 2500e12),  # GB200 NVL72 sheet: 5 PFLOPS sparse a GPU; GB300 NVL72 the same
    (r"B[23]00", 2250e12),  # HGX B200 and B300 sheets: 36 PFLOPS sparse for eight GPUs
    (r"H200 NVL", 835e12),  # H200 sheet, NVL column: 1671 sparse
    (r"G?H200", 989e12),  # H200 sheet, SXM column: 1979 sparse; GH200 carries the same GPU
    (r"H100 NVL", 835e12),  # H100 NVL product brief: 1671 sparse
    (r"H100 PCIe", 756e12),  # H100 sheet, PCIe column: 1513 sparse
    (
        r"H[18]00",
        989e12,
    ),  # H100 sheet, SXM column: 1979 sparse; H800 differs in links and fp64 only
    (r"H20", 148e12),  # H20 sheet: 148 dense
    (r"A[18]00", 312e12),  # A100 sheet; A800 differs in links only
    (r"A40", 149.7e12),  # A40 sheet: 149.7 dense
    (r"A30", 165e12),  # A30 sheet: 165 dense
    (r"A10", 125e12),  # A10 sheet: 125 dense
    (r"L40S", 362e12),  # L40S sheet: 362.05 dense
    (r"L40", 181e12),  # L40 sheet: 181.05 dense
    (r"L4", 121e12),  # L4 sheet: 242 sparse
    (
        r"RTX 5090",
        209.5e12,
    ),  # RTX Blackwell whitepaper, table of the RTX 5090: 209.5 dense with fp32 accumulation
    (r"RTX 4090", 165.2e12),  # Ada whitepaper, appendix A: 165.2 dense with fp32 accumulation
    (r"RTX 3090", 71e12),  # GA102 whitepaper, appendix A: 71 dense with fp32 accumulation
)


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU by the name that CUDA gives it; None for a CPU or a GPU not in the table, and MFU is then null."""
    return next(
        (peak for pattern, peak in _PEAK_FLOPS if re.search(rf"\b{pattern}\b", device_name)), None
    )
