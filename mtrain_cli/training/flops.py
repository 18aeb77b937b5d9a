"""Parameters and FLOP of a decoder, computed from its shape, and the peak FLOP/s of GPUs.

One multiply-add counts as two FLOP. By convention, element-wise operations (norms, rotary
embedding, softmax, SwiGLU gate) do not count.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.config.schema import Config, ModelConfig, TrainConfig
from mtrain_cli.config.sizes import count
from mtrain_cli.model.tiling import shared_tile_rows
from mtrain_cli.parallel.layout import Joined, Layout, early_queries
from mtrain_cli.parallel.program import Recompute
from mtrain_cli.parallel.recording import BACKWARD, FORWARD, RECOMPUTE
from mtrain_cli.step.program import EXPERTS_IN, EXPERTS_OUT, Program, Repeat, layers, work

Shape = tuple[int, ...]
# Share of causal pairs that a pattern is assumed to compute if the share depends on the data.
ASSUMED_DENSITY = 0.1
# Products that run in fp8, by train.fp8, and how many times as fast as in bfloat16: milliseconds
# for 32,768 rows of the MLP of Qwen2.5-3B on an H200 (profiles/fp8_speed.py). In backward, half of
# the products are for gradients of weights, which stay in bfloat16.
_FP8_PARTS: dict[str, tuple[str, ...]] = {
    "none": (),
    "mlp": ("gate", "up", "down"),
    "all": ("q", "k", "v", "o", "gate", "up", "down"),
}
_FASTER = {
    FORWARD: (4.12 + 1.83) / (2.01 + 1.00),
    RECOMPUTE: 4.12 / 2.01,
    BACKWARD: (1.94 + 4.03) / (1.18 + 2.15),
}
_IN_FP8 = {FORWARD: 1.0, RECOMPUTE: 1.0, BACKWARD: 0.5}


def layer_shapes(model: ModelConfig, *, experts: bool | None = None) -> dict[str, Shape]:
    """Return the parameter shapes of a layer, by default of the last one.

    FSDP shards dimension 0. Matrices are [out, in], and those of experts [experts, out, in].
    """
    model.require_own()
    heads, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    shapes: dict[str, Shape] = {
        "attention norm": (model.hidden_size,),
        "q": (heads, model.hidden_size),
        "k": (kv, model.hidden_size),
        "v": (kv, model.hidden_size),
        "o": (model.hidden_size, heads),
        "mlp norm": (model.hidden_size,),
    }
    hidden, moe = model.hidden_size, model.moe
    if experts if experts is not None else moe.experts > 0:
        shapes |= _mlp_shapes(hidden, moe.shared_size, "shared ") if moe.shared_size else {}
        shapes["router"] = (moe.experts, hidden)
        shapes[EXPERTS_IN] = (moe.experts, 2 * moe.expert_size, hidden)
        shapes[EXPERTS_OUT] = (moe.experts, hidden, moe.expert_size)
    else:
        shapes |= _mlp_shapes(hidden, model.intermediate_size)
    if model.qkv_bias:
        shapes |= {"q bias": (heads,), "k bias": (kv,), "v bias": (kv,)}
    if model.qk_norm:
        shapes |= {"q norm": (model.head_dim,), "k norm": (model.head_dim,)}
    return shapes


def _mlp_shapes(hidden: int, width: int, prefix: str = "") -> dict[str, Shape]:
    return {
        f"{prefix}gate": (width, hidden),
        f"{prefix}up": (width, hidden),
        f"{prefix}down": (hidden, width),
    }


def layer_kinds(model: ModelConfig, layers: Sequence[int] | None = None) -> dict[bool, int]:
    """Count layers, by default all, without experts (key False) and with (True). Omit zeros."""
    every = range(model.num_layers) if layers is None else layers
    dense = len(every)
    if model.moe.experts:  # the last layers have experts
        dense = bisect_left(every, True, key=model.has_experts)
    return {kind: n for kind, n in ((False, dense), (True, len(every) - dense)) if n}


def layer_matmul(model: ModelConfig, *, experts: bool) -> int:
    """Count the elements of a layer's matrices that multiply each token."""
    return sum(_matrices(model, experts).values())


def _matrices(model: ModelConfig, experts: bool) -> dict[str, int]:
    """Return the number of elements of each matrix of a layer that multiply a token."""
    return {
        name: model.moe.top_k * prod(shape[1:]) if len(shape) == 3 else prod(shape)
        for name, shape in layer_shapes(model, experts=experts).items()
        if len(shape) > 1
    }


def copied_elements(model: ModelConfig, *, experts: bool, dealt: bool) -> int:
    """Count the elements of a layer that tensor parallelism does not cut.

    dealt: whether the experts are dealt over workers.
    """
    return sum(
        prod(shape)
        for name, shape in layer_shapes(model, experts=experts).items()
        if "norm" in name
        or name == "router"
        or name.startswith("shared ")
        or (len(shape) == 3 and not dealt)
    )


def root_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Return the parameter shapes outside the layers. A tied LM head counts as the embedding."""
    shapes: dict[str, Shape] = {
        "embedding": (model.vocab_size, model.hidden_size),
        "norm": (model.hidden_size,),
    }
    if not model.tie_word_embeddings:
        shapes["lm head"] = (model.vocab_size, model.hidden_size)
    return shapes


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Number of elements in a decoder's parameters.

    total: all parameters; a tied embedding counts once.
    active: all except the experts that a token did not choose.
    matmul: those that multiply a token: the matrices of the layers, of the experts those of the
        token, and the LM head, tied or not.
    layer: parameters of the last layer.
    """

    total: int
    active: int
    embedding: int
    matmul: int
    layer: int

    @property
    def described(self) -> str:
        text = f"{count(self.total)} parameters"
        return text if self.active == self.total else f"{text}, {count(self.active)} active"


def parameters(model: ModelConfig) -> ParameterCount:
    kinds = layer_kinds(model)
    of_layers = {
        experts: sum(map(prod, layer_shapes(model, experts=experts).values())) for experts in kinds
    }
    head = model.vocab_size * model.hidden_size
    total = sum(of_layers[experts] * number for experts, number in kinds.items())
    total += sum(map(prod, root_shapes(model).values()))
    moe = model.moe
    idle = 3 * (moe.experts - moe.top_k) * moe.expert_size * model.hidden_size
    return ParameterCount(
        total=total,
        active=total - model.expert_layers * idle,
        embedding=head,
        matmul=sum(layer_matmul(model, experts=experts) * n for experts, n in kinds.items()) + head,
        layer=of_layers[model.moe.experts > 0],
    )


def causal_pairs(seq: int) -> int:
    return seq * (seq + 1) // 2


def allowed_pairs(config: Config) -> float:
    """Return the mean over layers of the pairs allowed in a sequence of one document."""
    rules = MaskRule.of(config).by_layers(config.model.num_layers)
    pairs = sum(count * rule.undivided(config.seq, config.seq).pairs for rule, count in rules)
    return pairs / config.model.num_layers


def assumed_density(config: Config) -> float:
    """Return the share of causal pairs that attention computes, as the mean over layers.

    If it depends on the data, it is `ASSUMED_DENSITY`, or what the mask allows if that is less.
    """
    sparsity, layers = config.sparsity, config.model.num_layers
    causal = config.mask.kind == "causal"
    allowed = 1.0 if causal else allowed_pairs(config) / causal_pairs(config.seq)
    if sparsity.pattern == "dense":
        return allowed
    known = sparsity.known_density(config.seq)
    sparse = min(ASSUMED_DENSITY if known is None else known, allowed)
    return sparse + (allowed - sparse) * len(sparsity.dense_of(layers)) / layers


def attention_kept(train: TrainConfig) -> float:
    """Return the share of a worker's queries whose attention output checkpointing saves."""
    partial = {"selective": 1.0, "sequence_selective": float(train.checkpoint_keep)}
    return partial.get(train.activation_checkpoint, 0.0)


def recomputed_attention(train: TrainConfig, layout: Layout, sharing: int) -> Recompute:
    """Return which part of a layer's forward exchange the backward pass runs again."""
    if train.activation_checkpoint == "none":
        return Recompute.NOTHING
    return Recompute.of(_early_queries(train, layout, sharing), sharing)


def _early_queries(train: TrainConfig, layout: Layout, sharing: int) -> int:
    """Return how many of a worker's queries backward recomputes, starting with the first."""
    unit = layout.unit if layout.unit > 1 else None
    return early_queries(layout.tokens_per_worker * sharing, attention_kept(train), unit)


def recomputed_pair_share(
    train: TrainConfig,
    layout: Layout,
    sharing: int,
    rules: Sequence[tuple[MaskRule, int]] = ((MaskRule(document_mask=False), 1),),
) -> float:
    """Return the share of query-key pairs that backward recomputes: those of first tokens.

    sharing: number of ranks that share heads, which hold one shard together.
    rules: the masks, each with the number of layers that have it.
    """
    if train.activation_checkpoint in ("none", "selective"):
        return 0.0
    early = _early_queries(train, layout, sharing)
    again = sum(count * _pairs_of_first(early, layout, sharing, rule) for rule, count in rules)
    every = sum(count * rule.undivided(layout.seq, layout.seq).pairs for rule, count in rules)
    return again / every


@lru_cache(maxsize=64)
def _pairs_of_first(early: int, layout: Layout, sharing: int, rule: MaskRule) -> int:
    """Count the pairs of the first `early` tokens of every shard, summed over shards."""
    joined = Joined.of(layout, sharing)
    first = np.concatenate([joined.positions(rank)[:early] for rank in range(joined.workers)])
    mask = rule.undivided(layout.seq, layout.seq)
    first = first[first < layout.seq]
    return int((mask.high[:, first] - mask.low[:, first]).sum())


@dataclass(frozen=True, kw_only=True)
class FlopsPerToken:
    """FLOP of one token's forward and backward pass, averaged over its sequence.

    model: the basis of MFU (Chowdhery et al. 2022, appendix B): 6 per matmul parameter, and
        12 * head_dim per layer, head and pair that the mask allows.
    executed: the basis of HFU: 6 per matmul parameter and padded token; 14 * head_dim per layer,
        head and pair that mask and sparsity allow, since a flash backward recomputes q k^T; and the
        matrix products that backward recomputes. Partial tiles are not rounded up.
    spared: those of ``executed`` that take no time (`spared_by_fp8`).
    """

    model: float
    executed: float
    spared: float = 0.0


def spared_by_fp8(program: Program, parts: Mapping[str, Any], fp8: str) -> dict[str, Any]:
    """Return how much of the `work` of a program takes no time because fp8 is faster."""
    products = work(program, {part: parts[part] for part in _FP8_PARTS[fp8] if part in parts})
    return {
        direction: _IN_FP8[direction] * (1 - 1 / _FASTER[direction]) * amount
        for direction, amount in products.items()
    }


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
    fp8: str = "none",
) -> FlopsPerToken:
    """Return the training FLOP per token of sequences of `seq` tokens.

    recomputed: whether activations are checkpointed.
    pairs: mean number of allowed query-key pairs per sequence and head; default: all causal pairs.
    padded_seq: tokens that pass through the matrices, including padding.
    pairs_again: share of the pairs that backward recomputes (`recomputed_pair_share`).
    tiled: whether the MLP runs in tiles, which are recomputed even without checkpointing.
    recomputed_logits: whether backward recomputes the LM head.
    """
    number = parameters(model)
    allowed = causal_pairs(seq) if pairs is None else pairs
    attention = model.num_layers * model.num_heads * model.head_dim * allowed
    kinds = layers(model, checkpointed=recomputed, tiled=tiled, keep_mlp=keep_mlp)
    matrices = _matrices(model, False) | _matrices(model, True)
    program = [Repeat(n, [*layer.forward(), *layer.backward()]) for n, layer in kinds]
    again = work(program, matrices)[RECOMPUTE]
    again += number.embedding if recomputed_logits else 0
    products = (6 * number.matmul + 2 * again) * (padded_seq or seq)
    return FlopsPerToken(
        model=6 * number.matmul + 12 * attention / seq,
        executed=(products + (14 + 4 * pairs_again) * attention) / seq,
        spared=2 * sum(spared_by_fp8(program, matrices, fp8).values()) * (padded_seq or seq) / seq,
    )


def training_flops(
    config: Config, layout: Layout, *, sharing: int, dtype_bytes: int, pairs: float | None = None
) -> FlopsPerToken:
    """Return the training FLOP per token of a run.

    sharing: number of ranks that share heads.
    pairs: mean number of allowed query-key pairs per sequence and head; default: `allowed_pairs`.
    """
    model, train = config.model, config.train
    tokens, rows = own_tiles(config, layout, dtype_bytes)
    return flops_per_token(
        model,
        config.seq,
        recomputed=train.activation_checkpoint != "none",
        pairs=allowed_pairs(config) if pairs is None else pairs,
        padded_seq=layout.padded_seq,
        pairs_again=recomputed_pair_share(
            train, layout, sharing, MaskRule.of(config).by_layers(model.num_layers)
        ),
        tiled=by_hand(config, rows < tokens),
        recomputed_logits=train.loss_gradients == "recompute",
        keep_mlp=train.keep_mlp,
        fp8=train.fp8,
    )


def by_hand(config: Config, tiled: bool) -> bool:
    """Return whether the MLP has its own backward pass, which recomputes, without a checkpoint."""
    return tiled or config.topology.tensor_parallel > 1 or config.train.fp8 != "none"


def own_tiles(config: Config, layout: Layout, dtype_bytes: int) -> tuple[int, int]:
    """Return the number of a worker's own tokens per micro-batch, and the number in a tile."""
    model, train, degree = config.model, config.train, config.topology.tensor_parallel
    own = -(-layout.tokens_per_worker * train.micro_batch // degree)
    sizes = model.hidden_size, model.intermediate_size, dtype_bytes, train.tile_mib << 20
    return own, shared_tile_rows(own, *sizes, degree, config.topology.tensor_chunks)


# Dense bf16 tensor-core FLOP/s with fp32 accumulation, from NVIDIA's datasheets. If a sheet prints
# the sparse figure, this is half of it. The first match counts, so longer names come first.
_PEAK_FLOPS: tuple[tuple[str, float], ...] = (
    (r"GB[23]00", 2500e12),  # GB200 NVL72 sheet: 5 PFLOPS sparse a GPU; GB300 NVL72 the same
    (r"B[23]00", 2250e12),  # HGX B200 and B300 sheets: 36 PFLOPS sparse for eight GPUs
    (r"H200 NVL", 835e12),  # H200 sheet, NVL column: 1671 sparse
    (r"G?H200", 989e12),  # H200 sheet, SXM column: 1979 sparse; GH200 carries the same GPU
    (r"H100 NVL", 835e12),  # H100 NVL product brief: 1671 sparse
    (r"H100 PCIe", 756e12),  # H100 sheet, PCIe column: 1513 sparse
    (r"H[18]00", 989e12),  # H100 sheet, SXM column: 1979 sparse; H800 differs in links, fp64 only
    (r"H20", 148e12),  # H20 sheet: 148 dense
    (r"A[18]00", 312e12),  # A100 sheet; A800 differs in links only
    (r"A40", 149.7e12),  # A40 sheet: 149.7 dense
    (r"A30", 165e12),  # A30 sheet: 165 dense
    (r"A10", 125e12),  # A10 sheet: 125 dense
    (r"L40S", 362e12),  # L40S sheet: 362.05 dense
    (r"L40", 181e12),  # L40 sheet: 181.05 dense
    (r"L4", 121e12),  # L4 sheet: 242 sparse
    (r"RTX 5090", 209.5e12),  # RTX Blackwell whitepaper: 209.5 dense with fp32 accumulation
    (r"RTX 4090", 165.2e12),  # Ada whitepaper, appendix A: 165.2 dense with fp32 accumulation
    (r"RTX 3090", 71e12),  # GA102 whitepaper, appendix A: 71 dense with fp32 accumulation
)


def peak_flops(device_name: str) -> float | None:
    """Return the dense bf16 FLOP/s of the GPU with this CUDA name, or None for an unknown GPU."""
    return next(
        (peak for pattern, peak in _PEAK_FLOPS if re.search(rf"\b{pattern}\b", device_name)), None
    )
