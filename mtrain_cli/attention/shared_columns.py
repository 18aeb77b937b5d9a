"""The single columns of an index when keys are spread over workers: gathered once for all steps, computed in one call.

Every worker puts the columns that it holds into its places of one packed tensor; the sum over workers is complete on all of them. So only
chosen columns travel, and block diagonals are all that is left for the steps of an exchange. Gradients return the same way, once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtrain_cli.attention.index import VerticalSlash
from mtrain_cli.attention.kernel import accumulation_dtype
from mtrain_cli.attention.packed_columns import add_rows, key_slots, pack_rows, whole_columns
from mtrain_cli.attention.tiles import Tiles


@dataclass(frozen=True)
class SharedColumns:
    """tiles: the queries of this worker against the whole sequence, under the index of a layer. slots: int32 [batch, heads, width], where
    this worker holds each column among its keys, -1 where it does not.
    """

    tiles: Tiles
    slots: torch.Tensor

    @staticmethod
    def make(whole: Tiles, own: Tiles) -> SharedColumns | None:
        """whole: own queries against the whole sequence. own: anything against the keys of this worker. Both under the index of a layer;
        None where it has no columns.
        """
        index, geometry = whole.index, own.geometry
        assert geometry is not None
        if not isinstance(index, VerticalSlash) or not index.columns.shape[-1]:
            return None
        # Not with `whole`: the keys of this worker are those of `own`.
        if "slots" not in own.of_index:
            own.of_index["slots"] = key_slots(whole_columns(index), geometry)
        return SharedColumns(whole, own.of_index["slots"])

    def pack(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """k, v [batch, keys, kv_heads, head_dim] of this worker -> [2, batch, heads, width, head_dim], 0 for the columns of others."""
        return torch.stack(pack_rows(k, v, self.slots))

    def add_gradients(self, dk: torch.Tensor, dv: torch.Tensor, gradients: torch.Tensor) -> None:
        """Adds what belongs to this worker's keys. gradients: [2, batch, heads, width, head_dim], complete; dk, dv like k and v."""
        missing = self.slots < 0
        order = torch.argsort(missing.to(torch.int8), dim=-1, stable=True)
        slots = self.slots.gather(-1, order)
        rows = order[None, ..., None].expand_as(gradients)
        own = gradients.gather(3, rows)
        add_rows(dk, dv, own[:1], own[1:], slots)

    def seen(self) -> torch.Tensor:
        """bool [batch, heads, queries, width]: from the definition, what mask and index leave of each column beyond the diagonals."""
        index, geometry = self.tiles.index, self.tiles.geometry
        assert isinstance(index, VerticalSlash)
        assert geometry is not None
        positions = self.tiles.positions()[0]
        columns = whole_columns(index).long()
        first = geometry.first[:, positions]
        at = positions[:, None]
        visible = (columns[:, :, None] >= first[:, None, :, None]) & (columns[:, :, None] <= at)
        away = (at // index.block - columns[:, :, None] // index.block).clamp(min=0)
        table = index.slashes[:, :, None].expand(-1, -1, len(positions), -1)
        return visible & ~table.gather(-1, away)


def columns_forward(
    q: torch.Tensor, packed: torch.Tensor, columns: SharedColumns, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the columns alone, from its definition; scores are held in memory. -> out, lse in the accumulation dtype.

    q [batch, queries, heads, head_dim]; packed [2, batch, heads, width, head_dim].
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
    """-> dq and the gradients of packed, in the accumulation dtype. lse, delta: of whole rows."""
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
