"""The single columns of an index when the keys are sharded over workers.

One packed tensor has an entry for each column of the index. Every worker fills the entries of the
columns among its own keys and leaves 0 in all other entries. The sum over workers completes the
tensor. Columns are therefore communicated once per layer, and one kernel call computes all of them.
The steps of the exchange compute block diagonals only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtrain_cli.attention import definition
from mtrain_cli.attention.index import VerticalSlash
from mtrain_cli.attention.packed_columns import add_rows, key_slots, pack_rows, whole_columns
from mtrain_cli.attention.partials import accumulation_dtype
from mtrain_cli.attention.tiles import Tiles


@dataclass(frozen=True)
class SharedColumns:
    """The columns of one layer's index, and their slots among this worker's keys.

    tiles: tiles of this worker's queries and all keys of the sequence, with the index.
    slots: int32 [batch, heads, width], slot of each column's key on this worker; -1 if another
        worker holds the key or if the entry is unused.
    """

    tiles: Tiles
    slots: torch.Tensor

    @staticmethod
    def make(whole: Tiles, own: Tiles) -> SharedColumns | None:
        """Return the columns of a layer, or None if the layer's index has no columns.

        Args:
            own: tiles of this worker's keys and any queries, with the index.
        """
        index, geometry = whole.index, own.geometry
        assert geometry is not None
        if not isinstance(index, VerticalSlash) or not index.columns.shape[-1]:
            return None
        # The slots depend on this worker's keys, so cache them with `own`, not with `whole`.
        if "slots" not in own.index_cache:
            own.index_cache["slots"] = key_slots(whole_columns(index), geometry)
        return SharedColumns(whole, own.index_cache["slots"])

    def pack(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return this worker's part of the packed tensor, [2, batch, heads, width, head_dim]."""
        return torch.stack(pack_rows(k, v, self.slots))

    def add_gradients(self, dk: torch.Tensor, dv: torch.Tensor, gradients: torch.Tensor) -> None:
        """Add the gradients of this worker's columns to dk and dv, in place.

        gradients: [2, batch, heads, width, head_dim], dk and dv of all columns, summed over
            workers.
        """
        # `add_rows` needs the places without a slot last.
        absent = self.slots < 0
        order = torch.argsort(absent.to(torch.int8), dim=-1, stable=True)
        slots = self.slots.gather(-1, order)
        rows = order[None, ..., None].expand_as(gradients)
        own = gradients.gather(3, rows)
        add_rows(dk, dv, own[:1], own[1:], slots)

    def seen(self) -> torch.Tensor:
        """Return which query sees which column, bool [batch, heads, queries, width]."""
        index, geometry = self.tiles.index, self.tiles.geometry
        assert isinstance(index, VerticalSlash)
        assert geometry is not None
        positions = self.tiles.positions()[0]
        columns = whole_columns(index).long()
        first = geometry.tables.first[:, positions]
        rows_at = positions[:, None]
        allowed = (columns[:, :, None] >= first[:, None, :, None]) & (
            columns[:, :, None] <= rows_at
        )
        diagonals = (rows_at // index.block - columns[:, :, None] // index.block).clamp(min=0)
        table = index.slashes[:, :, None].expand(-1, -1, len(positions), -1)
        return allowed & ~table.gather(-1, diagonals)


def columns_forward(
    q: torch.Tensor, packed: torch.Tensor, columns: SharedColumns, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse over the columns alone, in the accumulation dtype.

    packed: keys and values of all columns, [2, batch, heads, width, head_dim].
    """
    high = accumulation_dtype(q.dtype)
    k, v = packed.to(high)
    out, lse = definition.forward(q.to(high).transpose(1, 2), k, v, columns.seen(), scale)
    return out.transpose(1, 2), lse


def columns_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    packed: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    columns: SharedColumns,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dq and the gradient of packed, in the accumulation dtype."""
    high = accumulation_dtype(q.dtype)
    q, dout = (t.to(high).transpose(1, 2) for t in (q, dout))
    k, v = packed.to(high)
    dq, *gradients = definition.backward(
        dout, q, k, v, lse.to(high), delta.to(high), columns.seen(), scale
    )
    return dq.transpose(1, 2), torch.stack(gradients)
