"""Call FlashAttention-4 on plain tensors.

- `forward` and `backward` compute one rectangle, full or with FlashAttention-4's causal mask.
- `spans_forward` and `spans_backward` compute listed blocks, with a mask for single elements.

Shapes: q, out, dout [batch, queries, heads, head_dim]; k, v [batch, keys, kv_heads, head_dim]; lse
and delta float32 [batch, heads, queries]. lse is a natural logarithm.

All calls to FlashAttention-4 are in this file, because they use its private interface. Checked with
flash-attn-4 4.0.0b36 on sm_90.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from flash_attn.cute import utils
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
from mtrain_cli.kernels.flash4.words import (
    INSTALLED,
    in_columns_or_diagonal,
    in_key_words,
    in_query_words,
)

Pair = tuple[torch.Tensor, torch.Tensor]

# When CuTe DSL compiles FlashAttention-4, it warns about that package's own classes. Users cannot
# act on these warnings.
warnings.filterwarnings("ignore", category=UserWarning, module=r"cutlass\..*")
warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"flash_attn\..*")


# Mask functions: whether the query sees the key. FlashAttention-4 prescribes their signature.
@cute.jit
def _in_span(batch, head, query, key, seqlen, aux):  # noqa: ARG001
    low = utils.scalar_to_ssa(aux[0][batch[0], query[0]], cutlass.Int32)
    high = utils.scalar_to_ssa(aux[1][batch[0], query[0]], cutlass.Int32)
    return (key >= low) & (key < high)


@cache
def _in_some_span(intervals: int) -> Callable[..., Any]:
    """Return the mask function for a number of intervals per query.

    The number is fixed when the kernel is compiled, so that the loop is unrolled.
    """

    @cute.jit
    def in_some_span(batch, head, query, key, seqlen, aux):  # noqa: ARG001
        low = utils.scalar_to_ssa(aux[0][batch[0], 0, query[0]], cutlass.Int32)
        high = utils.scalar_to_ssa(aux[1][batch[0], 0, query[0]], cutlass.Int32)
        seen = (key >= low) & (key < high)
        for i in cutlass.range_constexpr(1, intervals):
            low = utils.scalar_to_ssa(aux[0][batch[0], i, query[0]], cutlass.Int32)
            high = utils.scalar_to_ssa(aux[1][batch[0], i, query[0]], cutlass.Int32)
            seen = seen | ((key >= low) & (key < high))
        return seen

    return in_some_span


def takes_columns(device: torch.device) -> bool:
    """Return whether columns in front of the keys are fast: a word of bits masks them."""
    return INSTALLED and torch.cuda.get_device_capability(device)[0] == 9


@cute.jit
def _in_causal_diagonal(batch, head, query, key, seqlen, aux):  # noqa: ARG001
    return (query & 127) >= (key & 127)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse of one rectangle.

    causal: whether to apply the causal mask. The last query sees all keys, and each earlier query
        sees one key fewer than the next query.
    """
    out, lse, *_ = _flash_attn_fwd(q, k, v, softmax_scale=scale, causal=causal, return_lse=True)
    return out, lse


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    lse: torch.Tensor,
    delta: torch.Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dq, dk and dv of one rectangle.

    out, lse, delta: over all keys that each query sees, also those outside the rectangle. Either
        out or delta may be None.
    """
    out, minus_delta = _out_and_dlse(q, out, delta)
    dq, dk, dv = _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=scale, causal=causal, dlse=minus_delta
    )
    return dq, dk, dv


def spans_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spans: Pair | None,
    lists: dict[str, torch.Tensor],
    scale: float,
    words: Pair | None = None,
    columns: Pair | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse over the listed blocks, in which each query sees only its spans of keys.

    Args:
        spans: (low, high), int32 [batch, intervals, queries]: query i sees the keys low[i] <= j <
            high[i] of each interval. None if the mask is causal only: every partial block then lies
            on the diagonal.
        lists: key blocks of each query block, from `attention.block_lists`.
        words: the same mask as ``spans``, as ids and words of queries (`attention.block_lists`),
            which is faster.
        columns: words and sizes of the packed columns in front of the keys
            (`attention.column_blocks`), instead of spans.
    """
    blocks = _block_sparse(lists)
    out, lse, *_ = _flash_attn_fwd(
        q,
        k,
        v,
        softmax_scale=scale,
        block_sparse_tensors=blocks,
        return_lse=True,
        **_mask_arguments(spans, words, in_query_words, columns),
    )
    return out, lse


def spans_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    lse: torch.Tensor,
    delta: torch.Tensor | None,
    spans: Pair | None,
    lists: dict[str, torch.Tensor],
    scale: float,
    words: Pair | None = None,
    columns: Pair | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dq, dk and dv of `spans_forward`.

    out, lse, delta: over all keys that each query sees, also those in other blocks. Either out or
        delta may be None.
    lists: query blocks of each key block.
    words: as in `spans_forward`, but with words of keys.
    """
    out, minus_delta = _out_and_dlse(q, out, delta)
    blocks = _block_sparse(lists)
    dq, dk, dv = _flash_attn_bwd(
        q,
        k,
        v,
        out,
        dout,
        lse,
        softmax_scale=scale,
        block_sparse_tensors=blocks,
        dlse=minus_delta,
        **_mask_arguments(spans, words, in_key_words, columns),
    )
    return dq, dk, dv


def _block_sparse(lists: dict[str, torch.Tensor]) -> BlockSparseTensorsTorch:
    return BlockSparseTensorsTorch(
        mask_block_cnt=lists["partial_count"],
        mask_block_idx=lists["partial"],
        full_block_cnt=lists["full_count"],
        full_block_idx=lists["full"],
        block_size=(128, 128),
    )


def _out_and_dlse(
    q: torch.Tensor, out: torch.Tensor | None, delta: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the arguments out and dlse, from which FlashAttention-4 computes delta.

    FlashAttention-4 computes delta = rowsum(out * dout) - dlse. If out is None, an out of zeros and
    dlse = -delta give the same delta. The zeros take the memory of one row, with strides of 0. If
    both out and delta are given, use out: a call with dlse took 2 to 6 % longer (8,192 tokens, 32
    heads, H200).
    """
    if out is not None:
        return out.to(q.dtype), None
    assert delta is not None
    return q.new_zeros(q.shape[-1]).expand(q.shape), -delta


def _mask_arguments(
    spans: Pair | None, words: Pair | None, in_words: Callable[..., Any], columns: Pair | None
) -> dict[str, Any]:
    """Return the mask function and its tensors: ``in_words`` if there are words."""
    if columns is not None:
        return {"mask_mod": in_columns_or_diagonal, "aux_tensors": list(columns)}
    if words is not None:
        return {"mask_mod": in_words, "aux_tensors": list(words)}
    if spans is None:
        return {"mask_mod": _in_causal_diagonal}
    low, high = _padded(*spans)
    if low.shape[1] == 1:
        return {"mask_mod": _in_span, "aux_tensors": [low[:, 0], high[:, 0]]}
    return {"mask_mod": _in_some_span(low.shape[1]), "aux_tensors": [low, high]}


def _padded(low: torch.Tensor, high: torch.Tensor) -> list[torch.Tensor]:
    """Pad the spans to a multiple of 128 queries. The added queries see no key.

    In the last tile, FlashAttention-4 calls the mask function also for queries beyond the end.
    """
    pad = -low.shape[2] % 128
    if pad:
        low, high = (torch.nn.functional.pad(t, (0, pad)) for t in (low, high))
    return [low.contiguous(), high.contiguous()]
