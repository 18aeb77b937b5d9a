"""An index as lists of blocks per row, the form that FlashAttention-4 reads; made for one kernel call and dropped after it."""

from __future__ import annotations

import torch

from mtrain_cli.attention.cupy_kernels import cuda_kernels_usable
from mtrain_cli.attention.index import BlockBitmap, VerticalSlash
from mtrain_cli.attention.tiles import Tiles

_WARPS = 4


def index_lists(tiles: Tiles, transposed: bool) -> dict[str, torch.Tensor]:
    """The blocks that index and mask leave, per query block or, transposed, per key block; columns are not among them.

    Counts int32 [batch, heads, rows] and ascending local block numbers int32 [batch, heads, rows, width] under ``partial`` and ``full``,
    with ``_count``. In a full block every row of queries sees every key. Entries beyond the count hold anything.

    width is the most that a row can list, as far as the host knows (`list_widths`).
    """
    index, geometry = tiles.index, tiles.geometry
    assert index is not None
    assert geometry is not None
    batch, heads = index.heads
    queries, keys = geometry.query_blocks.numel(), geometry.key_blocks.numel()
    rows, others = (keys, queries) if transposed else (queries, keys)
    widths = list_widths(
        others, index.most if isinstance(index, VerticalSlash) else 0, geometry.plain
    )
    device = geometry.first.device
    if cuda_kernels_usable(geometry.first):
        from mtrain_cli.kernels.cuda.nvrtc import launch

        bitmap = isinstance(index, BlockBitmap)
        chosen = (index.bits if isinstance(index, BlockBitmap) else _slashes(index)).contiguous()
        # Diagonals have no rows, so that any address stands in for the rows' numbers.
        slots, held = (
            (index.slots, len(index.rows))
            if isinstance(index, BlockBitmap)
            else (geometry.query_slot, 1)
        )
        counts = [torch.empty(batch, heads, rows, dtype=torch.int32, device=device) for _ in widths]
        lists = [
            torch.empty(batch, heads, rows, width, dtype=torch.int32, device=device)
            for width in widths
        ]
        launch(
            "block_lists", "block_lists", (-(-rows // _WARPS), batch * heads), 32 * _WARPS,
            chosen, slots, geometry.query_blocks, geometry.key_blocks, geometry.first_min, geometry.first_max,
            counts[0], lists[0], counts[1], lists[1],
            heads, index.blocks, index.block, held, queries, keys, *widths, bitmap, transposed,
        )  # fmt: skip
        return {
            "partial_count": counts[0],
            "partial": lists[0],
            "full_count": counts[1],
            "full": lists[1],
        }
    q, k = geometry.query_blocks.long(), geometry.key_blocks.long()
    touched = (k <= q[:, None]) & ((k + 1) * index.block > geometry.first_min[:, q][..., None])
    whole = touched & (k < q[:, None]) & (k * index.block >= geometry.first_max[:, q][..., None])
    active = index.chosen(q, k) & touched[:, None]
    result: dict[str, torch.Tensor] = {}
    for name, blocks, width in zip(
        ("partial", "full"),
        (active & ~whole[:, None], active & whole[:, None]),
        widths,
        strict=True,
    ):
        blocks = blocks.transpose(-1, -2) if transposed else blocks
        lists_of_name, counts_below = set_indices(blocks)
        assert int(counts_below[..., -1].max()) <= width, "an index lists no more than it says"
        result[name] = torch.nn.functional.pad(lists_of_name, (0, width - others))  # or cut
        result[name + "_count"] = counts_below[..., -1].contiguous()
    return result


def list_widths(others: int, most_diagonals: int, plain: bool) -> tuple[int, int]:
    """Widths of the partial and the full list of a row, of ``others`` blocks: a diagonal gives a row one block, and a mask that is causal
    alone (plain) cuts none but that of the row itself. most_diagonals: 0 where a bitmap, or the device, knows how many there are: lists of
    all blocks then take up to 8 bytes for each pair of blocks of every head, 16 GiB at 1M tokens and 32 heads on one worker.
    """
    # A width of 1 breaks the stride check of FlashAttention-4 4.0.0b36.
    full = max(2, min(others, most_diagonals or others))
    return 2 if plain else full, full


def _slashes(index: object) -> torch.Tensor:
    assert isinstance(index, VerticalSlash)
    return index.slashes


def set_indices(on: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [..., n] -> int32 numbers of the set ones first, ascending, [..., n], and int32 [..., n + 1], how many are set below each."""
    n = on.shape[-1]
    counts_below = torch.nn.functional.pad(on.cumsum(-1, dtype=torch.int32), (1, 0))
    # Each set number goes to its rank; the others to a place beyond the end.
    to = torch.where(on, counts_below[..., :-1], n).long()
    lines = torch.zeros(*on.shape[:-1], n + 1, dtype=torch.int32, device=on.device)
    lines.scatter_(-1, to, torch.arange(n, dtype=torch.int32, device=on.device).expand(on.shape))
    return lines[..., :n].contiguous(), counts_below
