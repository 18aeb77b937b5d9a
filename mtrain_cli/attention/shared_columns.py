"""The single columns of an index when the keys are spread over workers.

Every worker writes the columns that it holds into their places of one packed tensor, and the sum
over workers completes it. Only chosen columns are communicated, once for all steps, and one kernel
call computes them. The steps of an exchange compute block diagonals only. Gradients return the same
way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtrain_cli.attention.index import VerticalSlash
from mtrain_cli.attention.packed_columns import add_rows, key_slots, pack_rows, whole_columns
from mtrain_cli.attention.partials import accumulation_dtype
from mtrain_cli.attention.tiles import Tiles


@dataclass(frozen=True)
class SharedColumns:
    """The columns of one layer's index, and where this worker holds them.

    tiles: this worker's queries against the whole sequence, under the index.
    slots: int32 [batch, heads, width], key slot of each column on this worker; -1 if another worker
        holds it.
    """

    tiles: Tiles
    slots: torch.Tensor

    @staticmethod
    def make(whole: Tiles, own: Tiles) -> SharedColumns | None:
        """Return the columns of a layer, or None if its index has none.

        Args:
            whole: this worker's queries against the whole sequence, under the index.
            own: any tiles against this worker's keys, under the index.
        """
        index, geometry = whole.index, own.geometry
        assert geometry is not None
        if not isinstance(index, VerticalSlash) or not index.columns.shape[-1]:
            return None
        # Cache with `own`, whose keys are this worker's, not with `whole`.
        if "slots" not in own.index_cache:
            own.index_cache["slots"] = key_slots(whole_columns(index), geometry)
        return SharedColumns(whole, own.index_cache["slots"])

    def pack(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Gather this worker's columns, [2, batch, heads, width, head_dim].

        Places of other workers' columns hold 0. k, v: [batch, keys, kv_heads, head_dim] of this
        worker.
        """
        return torch.stack(pack_rows(k, v, self.slots))

    def add_gradients(self, dk: torch.Tensor, dv: torch.Tensor, gradients: torch.Tensor) -> None:
        """Add the gradients of this worker's columns to dk and dv.

        gradients: [2, batch, heads, width, head_dim], summed over workers.
        """
        absent = self.slots < 0
        order = torch.argsort(absent.to(torch.int8), dim=-1, stable=True)
        slots = self.slots.gather(-1, order)
        rows = order[None, ..., None].expand_as(gradients)
        own = gradients.gather(3, rows)
        add_rows(dk, dv, own[:1], own[1:], slots)

    def seen(self) -> torch.Tensor:
        """Return the pairs that columns alone contribute, bool [batch, heads, queries, width].

        The mask allows them and no diagonal covers them.
        """
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
    """Return out and lse over the columns alone, by the definition, in the accumulation dtype.

    Materialises the scores. q: [batch, queries, heads, head_dim]; packed: [2, batch, heads, width,
    head_dim].
    """
    high = accumulation_dtype(q.dtype)
    scores = q.to(high).transpose(1, 2) @ packed[0].to(high).transpose(-1, -2) * scale
    scores.masked_fill_(~columns.seen(), float("-inf"))
    lse = scores.logsumexp(-1)
    p = torch.exp(scores - lse.masked_fill(torch.isneginf(lse), 0.0)[..., None])
    return (p @ packed[1].to(high)).transpose(1, 2), lse


def columns_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    packed: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    columns: SharedColumns,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dq and the gradient of packed, in the accumulation dtype.

    lse, delta: whole rows' values.
    """
    high = accumulation_dtype(q.dtype)
    heads_first = q.to(high).transpose(1, 2)
    do = dout.to(high).transpose(1, 2)
    scores = (heads_first @ packed[0].to(high).transpose(-1, -2) * scale).masked_fill_(
        ~columns.seen(), float("-inf")
    )
    p = torch.exp(scores - lse.to(high).masked_fill(torch.isneginf(lse), 0.0)[..., None])
    ds = p * (do @ packed[1].to(high).transpose(-1, -2) - delta.to(high)[..., None]) * scale
    dq = (ds @ packed[0].to(high)).transpose(1, 2)
    return dq, torch.stack([ds.transpose(-1, -2) @ heads_first, p.transpose(-1, -2) @ do])
