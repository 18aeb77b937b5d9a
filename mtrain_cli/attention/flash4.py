"""FlashAttention-4 (CuTe DSL) on Hopper and later.

Dense attention uses native causal calls if the mask is a few rectangles, else block lists. Under a
dynamic index, FlashAttention-4 computes the blocks. The Triton kernels then compute the single
columns, continuing the same softmax, so no merge is needed.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import nullcontext
from functools import cache
from types import ModuleType

import torch

from mtrain_cli import install_command
from mtrain_cli.attention.block_lists import index_lists, set_indices
from mtrain_cli.attention.kernel import KernelRequest
from mtrain_cli.attention.kernel_cache import persistent_kernel_cache
from mtrain_cli.attention.packed_columns import add_column_gradients, pack_columns
from mtrain_cli.attention.tiles import Tiles
from mtrain_cli.attention.triton_kernel import TritonColumns, ensure_delta, make_tile_plan

# With more rectangles per sequence, one call with block lists beats a call per rectangle.
_MAX_RECTANGLES = 4
_BLOCK = 128
Lists = dict[str, torch.Tensor]


class Flash4Kernel(TritonColumns):
    """The fastest kernel on Hopper.

    Dense causal attention at 128K on an H200 reaches 674 TFLOP/s forward and 607 TFLOP/s backward
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
            spans, lists = (tiles.low, tiles.high), _mask_block_lists(tiles)[0]
            return dense.spans_forward(q, k, v, spans, lists, scale)
        if _is_one_rectangle(tiles):
            (s,) = tiles.slices[0]
            keys = slice(s.k_start, s.k_stop)
            return dense.forward(q, k[:, keys], v[:, keys], s.causal, scale)
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
            spans, lists = (tiles.low, tiles.high), _mask_block_lists(tiles)[1]
            return dense.spans_backward(dout, q, k, v, out, lse, delta, spans, lists, scale)
        if _is_one_rectangle(tiles):
            (s,) = tiles.slices[0]
            if s.k_stop - s.k_start == k.shape[1]:
                return dense.backward(dout, q, k, v, out, lse, delta, s.causal, scale)
        dq = torch.zeros_like(q)
        dk, dv = (torch.zeros(k.shape, dtype=torch.float32, device=k.device) for _ in range(2))
        for s in tiles.slices[0]:
            rows, keys = slice(s.q_start, s.q_stop), slice(s.k_start, s.k_stop)
            own = dout[:, rows], q[:, rows], k[:, keys], v[:, keys]
            own_out = None if out is None else out[:, rows]
            own_delta = None if delta is None else delta[:, :, rows]
            part_q, part_k, part_v = dense.backward(
                *own, own_out, lse[:, :, rows], own_delta, s.causal, scale
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
    return None if tiles.geometry.tables.plain else (tiles.low, tiles.high)


def _is_few_rectangles(tiles: Tiles) -> bool:
    return tiles.same_for_batch and len(tiles.slices[0]) <= _MAX_RECTANGLES


def _is_one_rectangle(tiles: Tiles) -> bool:
    """Return whether one rectangle covers every query row."""
    return (
        len(tiles.slices[0]) == 1
        and tiles.slices[0][0].q_start == 0
        and tiles.slices[0][0].q_stop == tiles.low.shape[1]
    )


def _mask_block_lists(tiles: Tiles) -> tuple[Lists, Lists]:
    if "flash4" not in tiles.cache:
        tiles.cache["flash4"] = block_lists(tiles.low, tiles.high, tiles.num_keys, _BLOCK)
    return tiles.cache["flash4"]


def block_lists(
    low: torch.Tensor, high: torch.Tensor, num_keys: int, block: int
) -> tuple[Lists, Lists]:
    """List the blocks that spans touch, in FlashAttention-4's form.

    Args:
        low, high: int [batch, queries], the keys low <= j < high that each query sees.

    Returns:
        The lists per query block and those per key block. ``partial`` and ``full``: ascending block
        indices, int32 [batch, 1, blocks, width]. ``partial_count`` and ``full_count``: their
        number, int32 [batch, 1, blocks]. In a full block every query sees every key. Rows beyond
        the last query do not count. Entries beyond the count are undefined.
    """
    batch, queries = low.shape

    def by_block(rows: torch.Tensor, beyond: int) -> torch.Tensor:
        return torch.nn.functional.pad(rows, (0, -queries % block), value=beyond).view(
            batch, -1, block
        )

    # Rows beyond the end must not constrain full blocks. A row without keys has low == high, so no
    # block is full for it.
    beyond = num_keys + block
    rows_low, rows_high = by_block(low, -1), by_block(high, beyond)
    sees_keys = by_block(low < high, False)
    lowest = rows_low.masked_fill(~sees_keys, beyond).amin(-1, keepdim=True)
    highest = rows_high.masked_fill(~sees_keys, 0).amax(-1, keepdim=True)
    full_low = rows_low.amax(-1, keepdim=True)
    full_high = rows_high.amin(-1, keepdim=True).clamp(max=num_keys)
    start = torch.arange(0, num_keys, block, device=low.device)
    # The last key block may be short: FlashAttention-4 itself masks what lies beyond the keys.
    stop = (start + block).clamp(max=num_keys)
    touched = (start < highest) & (stop > lowest)
    full = touched & (start >= full_low) & (stop <= full_high)
    lists: tuple[Lists, Lists] = {}, {}
    for name, blocks in (("partial", touched & ~full), ("full", full)):
        for of_side, flags in zip(lists, (blocks, blocks.transpose(1, 2)), strict=True):
            indices, counts_below = set_indices(flags)
            # A list width of 1 breaks the stride check of FlashAttention-4 4.0.0b36.
            indices = torch.nn.functional.pad(indices, (0, max(0, 2 - indices.shape[-1])))
            of_side[name] = indices[:, None]
            of_side[f"{name}_count"] = counts_below[:, None, :, -1].contiguous()
    return lists
