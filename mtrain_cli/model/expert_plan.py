"""Plan how the rows of a layer's tokens travel to the workers of their experts, and back.

Only the numbers of rows are known on the host. The orders of the rows stay on the device.

Shape suffixes are those of `expert_parallel.py`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mtrain_cli.model.routing import Decision, part_of
from mtrain_cli.model.tiling import expert_parts
from mtrain_cli.parallel.expert_group import ExpertGroup


def fused(tensor: Tensor) -> bool:
    """Return whether kernels of `kernels.triton.expert_rows` compute a worker's rows."""
    return tensor.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


class Part(NamedTuple):
    """The rows of a tile for some consecutive experts of each worker.

    number: number of the part in its tile.
    experts: the own experts of the part.
    leave, stay: places, in the order of `Tile.order_S`, of the pairs that other workers compute,
        and of those that this worker computes.
    send, receive: number of rows for and from each worker; 0 for this worker itself.
    rows: places of the rows that this worker computes, among those of all parts.
    """

    number: int
    experts: slice
    leave: slice
    stay: slice
    send: list[int]
    receive: list[int]
    rows: slice

    @property
    def arriving(self) -> int:
        """The number of rows that arrive from others."""
        return sum(self.receive)


@dataclass(frozen=True, eq=False)
class Tile:
    """Some own tokens, and how the rows of their pairs travel.

    begin, end: first token, and the token after the last.
    order_S: pairs that experts compute, numbered (token - begin) * K + k. Those of the first part
        come first: those that leave, by worker, then those that stay, each ordered by expert.
    place_S: place of each pair in `order_S`. A pair that is not there has a place behind the last.
    rows: orders of the rows that this worker computes.
    top_k: number of experts of a token.
    scores: scores of the rows of each part, for a backward pass that fetches rows again.
    """

    begin: int
    end: int
    order_S: Tensor
    place_S: Tensor
    rows: RowOrders
    parts: tuple[Part, ...]
    top_k: int
    scores: dict[int, Tensor] = field(default_factory=dict)

    def order_R(self, part: Part) -> Tensor:
        """Return the rows of a part, ordered by expert. First are those that arrive, by worker."""
        return self.rows.order_R[part.rows]

    def place_R(self, part: Part) -> Tensor:
        """Return the place of each row of a part in `order_R`."""
        return self.rows.place_R[part.rows]

    def ends_L(self, part: Part) -> Tensor:
        """Return the number of rows of each expert of a part, and all earlier ones, as int32."""
        return self.rows.ends_JL[part.number]


class RowOrders(NamedTuple):
    """Orders of the rows that a worker computes, one part after another.

    order_R: the rows of each part ordered by expert, numbered as they arrive: by worker, those of
        own tokens last.
    place_R: the place of each row in that order.
    ends_JL: int32, the end of each expert's rows in its part.
    """

    order_R: Tensor
    place_R: Tensor
    ends_JL: Tensor


def start_plan(
    decision: Decision, group: ExpertGroup, bounds: list[int], tokens: int
) -> Callable[[], tuple[Tile, ...]]:
    """Start to exchange numbers of rows. Return a function that waits for them and plans tiles."""
    whole = len(bounds) == 2
    tiles = [decision] if whole else [part_of(decision, *each) for each in pairwise(bounds)]
    ends_XE = torch.stack([tile.ends_E for tile in tiles]).long()
    counts_XE = ends_XE.diff(dim=1, prepend=ends_XE.new_zeros(len(tiles), 1))
    counts_PXE = group.gather_counts(counts_XE)
    # The copy goes to pinned memory, so the host does not wait for it here.
    on_host = counts_PXE.to("cpu", non_blocking=True)
    copied = None
    if counts_PXE.is_cuda:
        copied = torch.cuda.Event()
        copied.record()
    parts = expert_parts(tokens, counts_XE.shape[1] // group.size, len(tiles))
    order_pairs, order_rows = (
        (_fused_pairs, _fused_rows) if fused(counts_PXE) else (_ordered_pairs, _ordered_rows)
    )
    pairs = [
        order_pairs(tile, counts_E, group, parts)
        for tile, counts_E in zip(tiles, counts_XE, strict=True)
    ]

    def end() -> tuple[Tile, ...]:
        if copied is not None:
            copied.synchronize()
        counts, found = on_host.numpy(), []
        for n, (tile, begin) in enumerate(zip(tiles, bounds, strict=False)):
            steps = _parts(counts[:, n], group.rank, parts)
            rows = order_rows(counts_PXE[:, n], group.rank, steps)
            end, top_k = begin + len(tile.chosen_TK), tile.chosen_TK.shape[1]
            order_S = pairs[n][0][: steps[-1].stay.stop]
            found.append(Tile(begin, end, order_S, pairs[n][1], rows, steps, top_k))
        return tuple(found)

    return end


def _parts(counts_PE: np.ndarray, rank: int, parts: int) -> tuple[Part, ...]:
    """Return the parts of a tile. counts_PE: rows of each worker for each expert."""
    size, experts = counts_PE.shape
    own = experts // size
    send_JP = counts_PE[rank].reshape(size, parts, -1).sum(-1).T
    own_PE = counts_PE[:, rank * own : (rank + 1) * own]
    receive_JP = own_PE.reshape(size, parts, -1).sum(-1).T
    found, places, computed, each = [], 0, 0, own // parts
    for n, (send, receive) in enumerate(zip(send_JP.tolist(), receive_JP.tolist(), strict=True)):
        rows, staying = sum(receive), send[rank]
        send[rank] = receive[rank] = 0
        leaving = sum(send)
        found.append(
            Part(
                n,
                slice(n * each, (n + 1) * each),
                slice(places, places + leaving),
                slice(places + leaving, places + leaving + staying),
                send,
                receive,
                slice(computed, computed + rows),
            )
        )
        places, computed = places + leaving + staying, computed + rows
    return tuple(found)


def _fused_pairs(
    tile: Decision, counts_E: Tensor, group: ExpertGroup, parts: int
) -> tuple[Tensor, Tensor]:
    from mtrain_cli.kernels.triton import expert_rows

    return expert_rows.pair_order(tile.order_S, counts_E, group.rank, group.size, parts)


def _fused_rows(counts_PE: Tensor, rank: int, parts: tuple[Part, ...]) -> RowOrders:
    from mtrain_cli.kernels.triton import expert_rows

    rows = parts[-1].rows.stop
    return RowOrders(*expert_rows.row_order(counts_PE, rank, len(parts), rows))


def _ordered_pairs(
    tile: Decision, counts_E: Tensor, group: ExpertGroup, parts: int
) -> tuple[Tensor, Tensor]:
    """Return `Tile.order_S`, followed by pairs that no expert computes, and `Tile.place_S`."""
    turns = [*(worker for worker in range(group.size) if worker != group.rank), group.rank]
    ends_PJ = counts_E.cumsum(0).view(group.size, parts, -1)[:, :, -1].flatten().tolist()
    pieces = tile.order_S.tensor_split(ends_PJ)
    computed_S = torch.cat([pieces[p * parts + n] for n in range(parts) for p in turns])
    order_S, pairs = torch.cat([computed_S, pieces[-1]]), len(tile.order_S)
    place_S = order_S.new_full((pairs,), pairs)
    place_S[computed_S] = torch.arange(len(computed_S), device=order_S.device)
    return order_S, place_S


def _ordered_rows(counts_PE: Tensor, rank: int, parts: tuple[Part, ...]) -> RowOrders:
    """Return the orders of the rows of own experts. counts_PE: rows of workers for all experts."""
    own = counts_PE.shape[1] // len(counts_PE)
    from_PL = counts_PE[:, rank * own : (rank + 1) * own]
    counts_PL = torch.cat([from_PL[:rank], from_PL[rank + 1 :], from_PL[rank : rank + 1]])
    counts_JPL = counts_PL.unflatten(1, (len(parts), -1)).transpose(0, 1)
    # Both orders have one part after the other.
    sizes = [part.rows.stop - part.rows.start for part in parts]
    numbers = torch.arange(max(sizes), device=counts_PE.device)
    number_R = torch.cat([numbers[:size] for size in sizes])
    behind_JPL = counts_JPL.flatten(1).cumsum(1).view_as(counts_JPL)
    begin_JLP = (behind_JPL - counts_JPL).transpose(1, 2).flatten(1)
    counts_JLP = counts_JPL.transpose(1, 2).flatten(1)
    shift_JLP = begin_JLP - (counts_JLP.cumsum(1) - counts_JLP)
    # Number of a row in its part, by worker. Then the place in the order of all parts.
    order_R = number_R + shift_JLP.flatten().repeat_interleave(
        counts_JLP.flatten(), output_size=sum(sizes)
    )
    place_R = torch.empty_like(order_R)
    for part in parts:
        place_R[part.rows][order_R[part.rows]] = number_R[part.rows]
    ends_JL = counts_JPL.sum(1).cumsum(1).to(torch.int32)
    return RowOrders(order_R, place_R, ends_JL)
