"""Single columns as key blocks in front of the keys, for one FlashAttention-4 call with the blocks.

The front of a KV head holds the packed columns of each of its query heads, in tiles of `BLOCK`. All
queries of a block see the same of them (`covered_columns`), since diagonal 0 covers the block's
own. In backward, the front holds each tile several times, each for a part of the queries:
FlashAttention-4 gives a key block to one program, which would still run when all others are done.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from mtrain_cli.attention.block_lists import BLOCK, Lists
from mtrain_cli.attention.index import VerticalSlash
from mtrain_cli.attention.packed_columns import add_column_gradients, local_columns, pack_columns
from mtrain_cli.attention.partials import Pair
from mtrain_cli.attention.tiles import Tiles

_PARTS, _MOST_PARTS = 2, 8
_MOST_LIST_BYTES = 256 << 20


@dataclass(frozen=True)
class Front:
    """The key blocks in front of the keys of a KV head: [group, parts, tiles]."""

    group: int
    parts: int
    tiles: int

    @staticmethod
    def of(tiles: Tiles, kv_heads: int, *, backward: bool) -> Front | None:
        """Return the front of a call, or None if its columns need a call of their own.

        They do without all keys, with documents, if a head may lack diagonal 0, or if the lists
        of query blocks would take too much memory.
        """
        index, geometry = tiles.index, tiles.geometry
        if not isinstance(index, VerticalSlash) or not index.has_own_blocks:
            return None
        assert geometry is not None
        width = -(-index.columns.shape[-1] // BLOCK)
        if not width or index.block != BLOCK or not geometry.all_keys or not geometry.tables.plain:
            return None
        group = index.heads[1] // kv_heads
        if not backward:
            return Front(group, 1, width)
        lists = index.heads[0] * index.heads[1]
        return Front.in_backward(
            group, width, lists, geometry.query_blocks.numel(), geometry.key_blocks.numel()
        )

    @staticmethod
    def in_backward(
        group: int, tiles: int, lists: int, query_blocks: int, key_blocks: int
    ) -> Front | None:
        """Return the front with the fewest copies whose lists are small enough.

        lists: number of query heads, over all sequences.
        """
        parts = _PARTS
        while parts <= _MOST_PARTS:
            front = Front(group, parts, tiles)
            entries = (front.blocks + key_blocks) * front.list_width(query_blocks)
            if 4 * lists * entries <= _MOST_LIST_BYTES:
                return front
            parts *= 2
        return None

    @property
    def blocks(self) -> int:
        return self.group * self.parts * self.tiles

    def list_width(self, query_blocks: int) -> int:
        """Return the most query blocks of one key block in the front."""
        # A list of width 1 fails the stride check of FlashAttention-4 4.0.0b36.
        return max(2, -(-query_blocks // self.parts))

    def join(self, k: Tensor, v: Tensor, tiles: Tiles) -> list[Tensor]:
        """Return keys and values behind the front, [batch, front + keys, kv_heads, head_dim]."""
        packed = pack_columns(k, v, tiles)
        assert packed is not None
        batch, keys, kv_heads, dim = k.shape
        rows = self.blocks * BLOCK
        joined = []
        for t, columns in zip((k, v), packed, strict=True):
            whole = t.new_empty(batch, rows + keys, kv_heads, dim)
            whole[:, rows:] = t
            of_heads = columns.view(batch, kv_heads, self.group, 1, -1, dim)
            self._front(whole).copy_(of_heads.permute(0, 2, 3, 4, 1, 5))
            joined.append(whole)
        return joined

    def _front(self, whole: Tensor) -> Tensor:
        """Return the rows of the front, [batch, group, parts, columns, kv_heads, head_dim]."""
        front = whole[:, : self.blocks * BLOCK]
        return front.unflatten(1, (self.group, self.parts, -1))

    def add_gradients(self, dk: Tensor, dv: Tensor, tiles: Tiles) -> Pair:
        """Return dk and dv of the keys, with those of the columns in the front added."""
        keys, fronts = [], []
        for t in (dk, dv):
            keys.append(t[:, self.blocks * BLOCK :].contiguous())
            # [parts, batch, kv_heads, group, columns, head_dim]
            parts = self._front(t).permute(2, 0, 4, 1, 3, 5)
            parts = parts.to(torch.float32, memory_format=torch.contiguous_format)
            fronts.append(parts.flatten(2, 3))
        own_dk, own_dv = keys
        add_column_gradients(own_dk, own_dv, fronts[0], fronts[1], local_columns(tiles)[1])
        return own_dk, own_dv

    def add_to(self, lists: Lists, tiles: Tiles, transposed: bool) -> Lists:
        """Add the front's blocks, which are all partial, to lists whose rows of them are empty.

        A query block lists the tiles whose first column is in an earlier block, and a tile lists
        the query blocks after its first column.
        """
        geometry = tiles.geometry
        assert geometry is not None
        own = geometry.query_blocks
        first = local_columns(tiles)[0][..., ::BLOCK] // BLOCK
        if not transposed:
            heads = torch.arange(first.shape[1], dtype=torch.int32, device=own.device)
            base = (heads % self.group * (self.parts * self.tiles))[:, None, None]
            below = (first[:, :, None] < own[:, None]).sum(-1, dtype=torch.int32)
            place = torch.arange(self.tiles + 1, dtype=torch.int32, device=own.device)
            # The block's own keys come last, so that FlashAttention-4 begins with them.
            lists["partial"] = torch.where(
                place < below[..., None], base + place, lists["partial"][..., :1]
            )
            lists["partial_count"] += below
            return lists
        start = torch.searchsorted(own, first.contiguous(), right=True, out_int32=True)
        steps = torch.arange(self.parts + 1, dtype=torch.int32, device=own.device)[:, None]
        cuts = start[:, :, None] + (own.numel() - start[:, :, None]) * steps // self.parts
        numbers = torch.arange(lists["partial"].shape[-1], dtype=torch.int32, device=own.device)
        values = cuts[:, :, :-1, :, None] + numbers, cuts.diff(dim=2)
        for name, value in zip(("partial", "partial_count"), values, strict=True):
            front = lists[name][:, :, : self.blocks]
            # [batch, kv_heads, group of the head, group of the blocks, ...]: a head has its own.
            front = front.unflatten(2, (self.group, -1)).unflatten(1, (-1, self.group))
            front.diagonal(dim1=2, dim2=3).copy_(
                value.flatten(2, 3).unflatten(1, (-1, self.group)).movedim(2, -1)
            )
        return lists

    def words(self, tiles: Tiles) -> Pair:
        """Return which query block sees which column, and the sizes that the kernel needs."""
        from mtrain_cli.kernels.triton.sparse import covered_columns

        index, geometry = tiles.index, tiles.geometry
        assert isinstance(index, VerticalSlash)
        assert geometry is not None
        seen = covered_columns(
            index.slashes.flatten(0, 1).contiguous().view(torch.uint8),
            local_columns(tiles)[0].flatten(0, 1), geometry.query_blocks, BLOCK, of_tiles=True,
        )  # fmt: skip
        return seen, _sizes(self.blocks, index.heads[1], str(seen.device))


@cache
def _sizes(front: int, heads: int, device: str) -> Tensor:
    return torch.tensor([front, heads], dtype=torch.int32, device=device)
