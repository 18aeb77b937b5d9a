"""FlashAttention-4 (CuTe DSL) on Hopper and later.

Dense attention: native causal calls if the mask is a few rectangles, block lists otherwise. Under a
dynamic index, FlashAttention-4 computes the blocks. The Triton kernels then compute the single
columns, continuing the same softmax, so no merge is needed.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import nullcontext
from functools import cache
from types import ModuleType
from typing import Any

import torch

from mtrain_cli import install_command
from mtrain_cli.attention.block_lists import index_lists
from mtrain_cli.attention.kernel import KernelRequest
from mtrain_cli.attention.kernel_cache import persistent_kernel_cache
from mtrain_cli.attention.packed_columns import add_column_gradients, pack_columns
from mtrain_cli.attention.tiles import Tiles
from mtrain_cli.attention.triton_kernel import TritonColumns, ensure_delta, make_tile_plan

# With more rectangles per sequence, one call with block lists beats a call per rectangle.
_MAX_RECTANGLES = 4
_BLOCK = 128
_LIST_NAMES = ("partial", "partial_count", "full", "full_count")


class Flash4Kernel(TritonColumns):
    """The fastest kernel on Hopper.

    674 / 607 TFLOP/s forward / backward for dense causal attention at 128K on an H200
    (profiles/notes.md).
    """

    name = "flash4"
    needs_out = False

    def unsupported_reason(self, request: KernelRequest) -> str | None:
        if request.device != "cuda":
            return "needs a CUDA GPU"
        if request.capability is None or request.capability[0] < 9:
            return "needs compute capability 9.0 (Hopper) or later"
        if request.dtype != "bfloat16":
            return f"computes bfloat16, not {request.dtype}"
        if request.head_dim not in (64, 128):
            return f"head_dim {request.head_dim} is not 64 or 128"
        if request.deterministic:
            return "its block-sparse backward is not bitwise repeatable"
        if request.index is not None and request.index.block != _BLOCK:
            return (
                f"computes blocks of {_BLOCK}, not sparsity.block={request.index.block}, "
                "which train.kernel=triton computes"
            )
        if request.index is not None and request.index.chunk:
            return "computes whole blocks, not sparsity.gate=query"
        if request.index is not None and importlib.util.find_spec("triton") is None:
            return f"needs triton for the columns of an index ({install_command('cuda')})"
        if (
            importlib.util.find_spec("flash_attn") is None
            or importlib.util.find_spec("flash_attn.cute") is None
        ):
            return f"flash-attn-4 is not installed ({install_command('hopper')})"
        load_error = _load_error()
        if load_error is None:
            return None
        return f"flash-attn-4 is installed, but does not load: {load_error}"

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: Tiles, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dense = _load_dense()

        if tiles.index is not None:
            return _sparse_forward(q, k, v, tiles, scale)
        if not _is_few_rectangles(tiles):
            return dense.spans_forward(
                q, k, v, (tiles.low, tiles.high), _mask_block_lists(tiles, ""), scale
            )
        if _is_one_rectangle(tiles):
            s = tiles.slices[0][0]
            return dense.forward(
                q, k[:, s.k_start : s.k_stop], v[:, s.k_start : s.k_stop], s.causal, scale
            )
        out = torch.zeros_like(q)
        lse = torch.full(
            (q.shape[0], q.shape[2], q.shape[1]),
            float("-inf"),
            dtype=torch.float32,
            device=q.device,
        )
        for s in tiles.slices[0]:
            rows, keys = slice(s.q_start, s.q_stop), slice(s.k_start, s.k_stop)
            part, part_lse = dense.forward(q[:, rows], k[:, keys], v[:, keys], s.causal, scale)
            out[:, rows] = part
            lse[:, :, rows] = part_lse
        return out, lse

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor,
        delta: torch.Tensor | None,
        tiles: Tiles,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dense = _load_dense()

        if tiles.index is not None:
            return _sparse_backward(dout, q, k, v, out, lse, delta, tiles, scale)
        if not _is_few_rectangles(tiles):
            return dense.spans_backward(
                dout,
                q,
                k,
                v,
                out,
                lse,
                delta,
                (tiles.low, tiles.high),
                _mask_block_lists(tiles, "_t"),
                scale,
            )
        if (
            _is_one_rectangle(tiles)
            and tiles.slices[0][0].k_stop - tiles.slices[0][0].k_start == k.shape[1]
        ):
            return dense.backward(dout, q, k, v, out, lse, delta, tiles.slices[0][0].causal, scale)
        dq = torch.zeros_like(q)
        dk, dv = (torch.zeros(k.shape, dtype=torch.float32, device=k.device) for _ in range(2))
        for s in tiles.slices[0]:
            rows, keys = slice(s.q_start, s.q_stop), slice(s.k_start, s.k_stop)
            own_out = None if out is None else out[:, rows]
            own_delta = None if delta is None else delta[:, :, rows]
            part_q, part_k, part_v = dense.backward(
                dout[:, rows],
                q[:, rows],
                k[:, keys],
                v[:, keys],
                own_out,
                lse[:, :, rows],
                own_delta,
                s.causal,
                scale,
            )
            dq[:, rows] = part_q
            dk[:, keys] += part_k
            dv[:, keys] += part_v
        return dq, dk, dv


def _load_dense() -> ModuleType:
    """Import FlashAttention-4's calls; the first import sets up its kernel cache."""
    with (
        nullcontext()
        if "mtrain_cli.kernels.flash4.dense" in sys.modules
        else persistent_kernel_cache()
    ):
        from mtrain_cli.kernels.flash4 import dense
    return dense


@cache
def _load_error() -> str | None:
    """Return why the installed FlashAttention-4 does not load, or None.

    A common cause is a CUDA library that is missing or does not match PyTorch's.
    """
    try:
        _load_dense()
    except Exception as error:  # mismatched libraries raise all kinds of errors
        return (
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"[
                :200
            ]
        )
    return None


def _sparse_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: Tiles, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    from mtrain_cli.kernels.triton import sparse

    dense = _load_dense()
    blocks = dense.spans_forward(
        q, k, v, _spans(tiles), index_lists(tiles, transposed=False), scale
    )
    columns = pack_columns(k, v, tiles)
    if columns is None:
        return blocks
    return sparse.forward(
        q, k, v, columns, make_tile_plan(tiles, slashes=False), scale, slashes=False, partial=blocks
    )


def _sparse_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    lse: torch.Tensor,
    delta: torch.Tensor | None,
    tiles: Tiles,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from mtrain_cli.kernels.triton import sparse

    dense = _load_dense()
    dq, dk, dv = dense.spans_backward(
        dout, q, k, v, out, lse, delta, _spans(tiles), index_lists(tiles, transposed=True), scale
    )
    columns = pack_columns(k, v, tiles)
    if columns is None:
        return dq, dk, dv
    plan = make_tile_plan(tiles, slashes=False)
    delta = ensure_delta(out, dout, delta)
    dq = sparse.backward_queries(
        dout, q, k, v, columns, lse, delta, plan, scale, slashes=False, partial=dq
    )
    columns_dk, columns_dv = sparse.backward_columns(dout, q, columns, lse, delta, plan, scale)
    add_column_gradients(dk, dv, columns_dk, columns_dv, tiles)
    return dq, dk, dv


def _spans(tiles: Tiles) -> tuple[torch.Tensor, torch.Tensor] | None:
    assert tiles.geometry is not None
    return None if tiles.geometry.plain else (tiles.low, tiles.high)


def _is_few_rectangles(tiles: Tiles) -> bool:
    return tiles.same_for_batch and len(tiles.slices[0]) <= _MAX_RECTANGLES


def _is_one_rectangle(tiles: Tiles) -> bool:
    """Return whether one rectangle covers every query row."""
    return (
        len(tiles.slices[0]) == 1
        and tiles.slices[0][0].q_start == 0
        and tiles.slices[0][0].q_stop == tiles.low.shape[1]
    )


def _mask_block_lists(tiles: Tiles, suffix: str) -> dict[str, Any]:
    """Return the mask's block lists, per query block or, with suffix ``_t``, per key block."""
    if "flash4" not in tiles.cache:
        tiles.cache["flash4"] = block_lists(tiles.low, tiles.high, tiles.num_keys, _BLOCK)
    lists = tiles.cache["flash4"]
    return {
        part: lists[part.replace("_count", "") + suffix + "_count" * part.endswith("_count")]
        for part in _LIST_NAMES
    }


def block_lists(
    low: torch.Tensor, high: torch.Tensor, num_keys: int, block: int
) -> dict[str, torch.Tensor]:
    """List the blocks that spans touch, in FlashAttention-4's form.

    Args:
        low, high: int [batch, queries], the keys low <= j < high that each query sees.

    Returns:
        ``partial`` and ``full`` per query block, ``partial_t`` and ``full_t`` per key block:
        ascending block indices, int32 [batch, 1, blocks, width]. With ``_count`` appended: their
        number, int32 [batch, 1, blocks]. In a full block every query sees every key. Rows beyond
        the last query do not count.
    """
    batch, queries = low.shape
    pad = -queries % block
    # Rows beyond the end must not constrain full blocks. A row without keys has low == high, so no
    # block is full for it.
    rows_low = torch.nn.functional.pad(low, (0, pad), value=-1).view(batch, -1, block)
    rows_high = torch.nn.functional.pad(high, (0, pad), value=num_keys + block).view(
        batch, -1, block
    )
    sees_keys = torch.nn.functional.pad(low < high, (0, pad), value=False).view(batch, -1, block)
    beyond = num_keys + block
    lowest = rows_low.masked_fill(~sees_keys, beyond).amin(-1)
    highest = rows_high.masked_fill(~sees_keys, 0).amax(-1)
    full_low = rows_low.amax(-1)
    full_high = rows_high.amin(-1).clamp(max=num_keys)
    start = torch.arange(0, num_keys, block, device=low.device)
    # The last key block may be short: FlashAttention-4 itself masks what lies beyond the keys.
    stop = (start + block).clamp(max=num_keys)
    touched = (start < highest[..., None]) & (stop > lowest[..., None])
    full = touched & (start >= full_low[..., None]) & (stop <= full_high[..., None])
    partial = touched & ~full
    result: dict[str, torch.Tensor] = {}
    for name, blocks in (("partial", partial), ("full", full)):
        result[name + "_count"], result[name] = _set_block_indices(blocks)
        result[name + "_t_count"], result[name + "_t"] = _set_block_indices(blocks.transpose(1, 2))
    return result


def _set_block_indices(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of set blocks per row and their ascending indices.

    blocks: bool [batch, rows, columns]. Returns int32 [batch, 1, rows] and [batch, 1, rows,
        columns].
    """
    count = blocks.sum(-1, dtype=torch.int32)
    index = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True).to(
        torch.int32
    )
    if index.shape[-1] < 2:
        # A list width of 1 breaks the stride check of FlashAttention-4 4.0.0b36.
        index = torch.nn.functional.pad(index, (0, 2 - index.shape[-1]))
    return count[:, None].contiguous(), index[:, None].contiguous()
