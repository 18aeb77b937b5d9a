"""Experts of a layer on several workers: rows of tokens travel to the experts and back.

Tokens are computed in chunks, as many as memory needs, and a worker's experts in parts: while it
computes one part, the rows of other parts are on their way. Unlike chunks, parts read each weight
once and need no sums of gradients. Rows of local tokens for local experts are not sent.

Only the numbers of rows are known on the host; the row order stays on the device. On a GPU, each
step of a transfer launches one kernel (`kernels.triton.expert_rows`): a part is computed so fast
that the GPU would wait for the host. `expert_rows` computes the same with PyTorch.

Shape suffixes: T local tokens, C hidden size, E experts, K chosen experts of a token, P workers of
the group, L local experts, J parts, I width of an expert, W = 2 I. S pairs of a local token and an
expert in a chunk. R pairs of a part that this worker computes, ordered by expert. Of these, A
arrive from others and B belong to local tokens. D are the elements of a row of a message: C, or
more with a score at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtrain_cli.attention.partials import has_triton
from mtrain_cli.model import expert_rows
from mtrain_cli.model.expert_products import (
    WeightGradients,
    grouped_rows,
    grouped_rows_back,
    inner_gradients,
)
from mtrain_cli.model.routing import Decision, part_of
from mtrain_cli.model.tiling import expert_parts, scored_row
from mtrain_cli.parallel.layer_groups import ExpertGroup, Message, staggered


def rows_module(tensor: Tensor) -> Any:
    """Return the module whose functions move a worker's rows."""
    if not (tensor.is_cuda and has_triton()):
        return expert_rows
    from mtrain_cli.kernels.triton import expert_rows as kernels

    return kernels


class Part(NamedTuple):
    """The rows of a tile for some consecutive experts of each worker.

    experts: the own experts of the part.
    leave, stay: places in `Tile.order_S` of the pairs for other workers and for this worker.
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
        return sum(self.receive)


@dataclass(frozen=True, eq=False)
class Tile:
    """Own tokens from ``begin`` to ``end``, and how the rows of their pairs travel.

    order_S: pairs that experts compute, numbered (token - begin) * K + k, part by part: those that
        leave, by worker, then those that stay, each ordered by expert.
    place_S: place of each pair in `order_S`; behind the last for a pair that is not there.
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
        return self.rows.order_R[part.rows]

    def place_R(self, part: Part) -> Tensor:
        return self.rows.place_R[part.rows]

    def ends_L(self, part: Part) -> Tensor:
        return self.rows.ends_JL[part.number]


class RowOrders(NamedTuple):
    """Orders of the rows that a worker computes, one part after another.

    order_R: the rows of each part by expert, numbered as they arrive: by worker, own tokens last.
    place_R: the place of each row in that order.
    ends_JL: int32, the end of each expert's rows in its part.
    """

    order_R: Tensor
    place_R: Tensor
    ends_JL: Tensor


def start_plan(
    decision: Decision, group: ExpertGroup, bounds: list[int], tokens: int
) -> Callable[[], tuple[Tile, ...]]:
    """Start to exchange numbers of rows. Return a function that waits for them and plans tiles.

    All workers of the group call this together. The device computes meanwhile what is queued.

    bounds: first token of each tile, and the number of tokens.
    tokens: the largest number of tokens of a worker.
    """
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
    orders = rows_module(counts_PXE)
    pairs = [
        orders.pair_order(tile.order_S, counts_E, group.rank, group.size, parts)
        for tile, counts_E in zip(tiles, counts_XE, strict=True)
    ]

    def end() -> tuple[Tile, ...]:
        with group.observer.waiting():
            if copied is not None:
                copied.synchronize()
            return tuple(map(plan, range(len(tiles))))

    def plan(n: int) -> Tile:
        steps = _parts(on_host.numpy()[:, n], group.rank, parts)
        rows = orders.row_order(counts_PXE[:, n], group.rank, parts, steps[-1].rows.stop)
        order_S, place_S = pairs[n]
        order_S, top_k = order_S[: steps[-1].stay.stop], tiles[n].chosen_TK.shape[1]
        return Tile(bounds[n], bounds[n + 1], order_S, place_S, RowOrders(*rows), steps, top_k)

    return end


def _parts(counts_PE: np.ndarray, rank: int, parts: int) -> tuple[Part, ...]:
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
        gone, end = places + leaving, places + leaving + staying
        own_rows = slice(computed, computed + rows)
        experts_of_part = slice(n * each, (n + 1) * each)
        found.append(
            Part(n, experts_of_part, slice(places, gone), slice(gone, end), send, receive, own_rows)
        )
        places, computed = end, computed + rows
    return tuple(found)


class Journey:
    """The rows of a tile in one pass. All parts of the tile return to one tensor."""

    def __init__(self, tile: Tile, group: ExpertGroup, scores_TK: Tensor) -> None:
        """Prepare a journey. scores_TK: scores of all own tokens."""
        self._tile, self._group, self.rows = tile, group, rows_module(scores_TK)
        self._own = slice(tile.begin, tile.end)
        self._scores_TK = scores_TK[self._own]
        self._returned_SD: Tensor | None = None

    def start_rows(self, rows_TC: Tensor, part: Part, *, scored: bool = False) -> Message:
        """Start to send the row of the token of each pair that leaves. scored: with its score."""
        tile, scores = self._tile, self._scores_TK if scored else None
        leaving_AD = _message(rows_TC, part.leave.stop - part.leave.start, scored)
        self.rows.leaving(
            rows_TC[self._own], tile.order_S[part.leave], tile.top_k, leaving_AD, scores
        )
        return self._group.start(leaving_AD, part.send, part.receive)

    def arrived(
        self, message: Message, rows_TC: Tensor, part: Part, *, scored: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return arrived and staying rows by expert, ``[R, C]``, and ``[R, 1]`` scores or None."""
        tile, scores = self._tile, self._scores_TK if scored else None
        orders = tile.order_S[part.stay], tile.order_R(part)
        return self.rows.merged(message.wait(), rows_TC[self._own], *orders, tile.top_k, scores)

    def start_back(self, rows_RC: Tensor, part: Part, numbers_R: Tensor | None = None) -> Message:
        """Start to send the rows of others' tokens back, with numbers; keep those of own tokens."""
        scored = numbers_R is not None
        if self._returned_SD is None:
            self._returned_SD = _message(rows_RC, len(self._tile.order_S), scored)
        leaving_AD = _message(rows_RC, part.arriving, scored)
        staying_BD, into_AD = self._returned_SD[part.stay], self._returned_SD[part.leave]
        self.rows.parted(rows_RC, self._tile.place_R(part), leaving_AD, staying_BD, numbers_R)
        return self._group.start(leaving_AD, part.receive, part.send, into=into_AD)

    def add_up(self, out_TC: Tensor, numbers_TK: Tensor | None = None) -> None:
        """Write the sum of each own token's rows to ``out_TC``, when all parts have returned.

        numbers_TK: receives the number of each pair; 0 if no expert computed it.
        """
        returned_SD, self._returned_SD = self._returned_SD, None
        assert returned_SD is not None
        numbers_TK = None if numbers_TK is None else numbers_TK[self._own]
        place_S, high = self._tile.place_S, self._scores_TK.dtype
        self.rows.summed(returned_SD, place_S, out_TC[self._own], high, numbers_TK)


def _message(rows_RC: Tensor, rows: int, scored: bool) -> Tensor:
    """Return an empty message of this many rows."""
    width = rows_RC.shape[1]
    return rows_RC.new_empty(rows, scored_row(width, rows_RC.element_size()) if scored else width)


def agreed(bounds: list[int], group: ExpertGroup, device: torch.device) -> tuple[list[int], int]:
    """Return bounds of as many tiles on all workers, and the largest number of tokens.

    All workers of the group call this together. Only in an evaluation may these numbers differ.
    """
    count, tokens = group.most([len(bounds) - 1, bounds[-1]], device)
    return [bounds[-1] * n // count for n in range(count + 1)], tokens


class SharedExperts(torch.autograd.Function):
    """The experts of a layer on all workers of a group, for own tokens (`ChunkedExperts`).

    Forward keeps the received rows, the scores, and gate and up.

    With recomputation, backward fetches rows again instead, part by part, and the second forward
    pass of the checkpoint has nothing to do.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TC: Tensor, scores_TK: Tensor, gate_up_LWC: Tensor, down_LCI: Tensor,
        tiles: tuple[Tile, ...], group: ExpertGroup, recompute: bool, inputs_only: bool,
    ) -> Tensor:  # fmt: skip
        x_TC, scores_TK = x_TC.contiguous(), scores_TK.contiguous()
        kept: list[Tensor] = []
        out_TC = x_TC.new_empty(()).expand_as(x_TC) if inputs_only else torch.empty_like(x_TC)

        def compute(tile: Tile, journey: Journey, part: Part) -> Iterator[None]:
            rows = journey.start_rows(x_TC, part, scored=True)
            yield
            x_RC, scores_R1 = journey.arrived(rows, x_TC, part, scored=True)
            assert scores_R1 is not None
            ends_L = tile.ends_L(part)
            gate_up_RW = grouped_rows(x_RC, gate_up_LWC[part.experts], ends_L)
            if recompute:
                tile.scores[part.number] = scores_R1
            else:
                kept.extend((x_RC, scores_R1, gate_up_RW))
            del x_RC, rows
            gated = journey.rows.gated
            out_RC = grouped_rows(gated(gate_up_RW, scores_R1), down_LCI[part.experts], ends_L)
            del gate_up_RW
            back = journey.start_back(out_RC, part)
            del out_RC
            yield
            back.wait()
            if part is tile.parts[-1]:
                journey.add_up(out_TC)

        if not inputs_only:
            staggered(compute(*each) for each in _journeys(tiles, group, scores_TK))
        ctx.tiles, ctx.group = tiles, group
        ctx.save_for_backward(x_TC, scores_TK, gate_up_LWC, down_LCI, *kept)
        return out_TC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TC: Tensor) -> tuple[Tensor | None, ...]:
        x_TC, scores_TK, gate_up_LWC, down_LCI, *kept = ctx.saved_tensors
        grad_TC = grad_TC.contiguous()
        dx_TC, dscores_TK = torch.empty_like(grad_TC), torch.empty_like(scores_TK)
        sums = WeightGradients(len(ctx.tiles), len(ctx.tiles[0].parts))
        inputs = iter(kept)

        def compute(tile: Tile, journey: Journey, part: Part) -> Iterator[None]:
            messages = [] if kept else [journey.start_rows(x_TC, part)]
            messages.append(journey.start_rows(grad_TC, part))
            yield
            gate_up, down = gate_up_LWC[part.experts], down_LCI[part.experts]
            ends_L = tile.ends_L(part)
            if kept:
                x_RC, scores_R1, gate_up_RW = next(inputs), next(inputs), next(inputs)
            else:
                x_RC = journey.arrived(messages.pop(0), x_TC, part)[0]
                scores_R1 = tile.scores.pop(part.number)
                gate_up_RW = grouped_rows(x_RC, gate_up, ends_L)
            rows = [journey.arrived(messages.pop(), grad_TC, part)[0]]
            later: list[Tensor] = []
            dgate_up_RW, dscores_R = inner_gradients(
                rows, gate_up_RW, scores_R1, down, ends_L, lambda *both: later.extend(both),
                fused=journey.rows.gate_backward,
            )  # fmt: skip
            del gate_up_RW
            dx_RC = grouped_rows_back(dgate_up_RW, gate_up, ends_L)
            dx = journey.start_back(dx_RC, part, dscores_R)
            del dx_RC
            # While the gradients travel, add up those of the weights.
            sums.add("down", later.pop(0), later.pop(), ends_L, part.number)
            sums.add("gate_up", dgate_up_RW, x_RC, ends_L, part.number)
            del dgate_up_RW, x_RC
            yield
            dx.wait()
            if part is tile.parts[-1]:
                journey.add_up(dx_TC, dscores_TK)

        staggered(compute(*each) for each in _journeys(ctx.tiles, ctx.group, scores_TK))
        of_weights = sums.take("gate_up", gate_up_LWC), sums.take("down", down_LCI)
        return dx_TC, dscores_TK, *of_weights, None, None, None, None


def _journeys(
    tiles: tuple[Tile, ...], group: ExpertGroup, scores_TK: Tensor
) -> Iterator[tuple[Tile, Journey, Part]]:
    for tile in tiles:
        journey = Journey(tile, group, scores_TK)
        for part in tile.parts:
            yield tile, journey, part
