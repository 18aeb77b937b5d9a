"""Attention of one query per sequence over a cache, on a GPU."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor

from mtrain_cli import install_command
from mtrain_cli.attention.partials import Pair
from mtrain_cli.config.schema import ConfigError

_FLASH_HEAD_DIM = 256  # the widest head of FlashAttention-2


def decode_on_gpu(q: Tensor, k: Tensor, v: Tensor, used: Tensor, scale: float) -> Pair:
    """Return out and lse; see `Kernel.decode`."""
    if split_kernel(q.shape[2], k.shape[2], q.shape[3], q.dtype) == "triton":
        from mtrain_cli.kernels.triton import decode

        return decode.decode(q, k, v, used, scale)
    return _flash_decode(q, k, v, used, scale)


def flash_splits(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Return whether PyTorch's FlashAttention-2 splits the keys of one query over programs."""
    return (
        heads > kv_heads
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= _FLASH_HEAD_DIM
    )


def split_kernel(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> str:
    """Return the name of the kernel of `decode_on_gpu`: the faster one that can run.

    Raises:
        ConfigError: the kernel's package is not installed.
    """
    if has_triton():
        return "triton"
    if flash_splits(heads, kv_heads, head_dim, dtype):
        return "FlashAttention-2"
    raise ConfigError(
        f"{heads} query heads, {kv_heads} key-value heads and {dtype}: new tokens need triton, "
        f"which is not installed ({install_command('cuda')})"
    )


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _flash_decode(q: Tensor, k: Tensor, v: Tensor, used: Tensor, scale: float) -> Pair:
    batch, capacity = k.shape[:2]
    starts = _starts(batch, 1, q.device), _starts(batch, capacity, q.device)
    # The batch lies in one long row, in which `starts` mark the sequences.
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q[:, 0], k.flatten(0, 1), v.flatten(0, 1), *starts, 1, capacity, 0.0, False, False,
        scale=scale, seqused_k=used,
    )  # fmt: skip
    lse = lse.view(-1, batch).t()
    # For a query that sees no key, lse is inf or -inf, depending on the number of parts.
    return out[:, None], lse.masked_fill((used == 0)[:, None], float("-inf"))[..., None]


@cache
def _starts(batch: int, tokens: int, device: torch.device) -> Tensor:
    """Return the first row of each sequence and the number of rows, int32 [batch + 1]."""
    return torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=device)


def merge_parts(parts: Tensor) -> Pair:
    """Merge the attention of the same queries over disjoint sets of keys.

    parts: float32 or float64 [parts, batch, heads, head_dim + 1]: out of each part, then its
        lse. A part without keys has out 0 and lse -inf.
    """
    if parts.is_cuda and parts.dtype == torch.float32 and has_triton():
        from mtrain_cli.kernels.triton import decode

        return decode.merge_parts(parts)
    out, part_lse = parts[..., :-1], parts[..., -1]
    lse = part_lse.logsumexp(0)
    shares = torch.exp(part_lse - lse.masked_fill(lse.isneginf(), 0.0))
    return (shares[..., None] * out).sum(0)[:, None], lse[..., None]


def pack_part(out: Tensor, lse: Tensor) -> Tensor:
    """Return out and lse of one query per sequence as a part for `merge_parts`."""
    return torch.cat([out[:, 0].to(lse.dtype), lse], dim=-1)
