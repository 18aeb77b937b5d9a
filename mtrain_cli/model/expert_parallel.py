"""Experts of a layer on several workers: rows of tokens travel to the experts and back.

A token is sent once to each other worker that has some of its experts, with the scores and places
of its pairs there. That worker adds up what its experts return for the token, and sends one row
back. The order of a sum is fixed: on each worker, the token's experts in the order of its choice;
then the workers in the order of their ranks, the own one among them. Both sums are computed in the
dtype of the scores, and each is rounded once to that of the rows. The order depends neither on the
time at which rows arrive nor on the worker that has the token.

Tokens are computed in chunks, as many as memory needs: while a worker computes one chunk, the rows
of others are on their way. Rows of own tokens for own experts are not sent.

Only the numbers of rows are known on the host; places stay on the device. On a GPU, kernels of
`kernels.triton.expert_rows` move the rows. `expert_rows` computes the same with PyTorch.

Shape suffixes: T local tokens, C hidden size, E experts, K chosen experts of a token, P workers of
the group, L local experts, I width of an expert, W = 2 I. X chunks. Of a chunk, A rows arrive from
others, N = T + A are all rows with which this worker computes, own tokens first, and R their pairs
of a token and an own expert, ordered by expert, then by worker, then by token. S rows leave, and
return. D are the elements of a row of a message: C, or more with numbers at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

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
from mtrain_cli.model.expert_rows import ABSENT, numbers_of
from mtrain_cli.model.routing import Decision, part_of
from mtrain_cli.model.tiling import scored_row
from mtrain_cli.parallel.layer_groups import ExpertGroup, Message, staggered


def rows_module(tensor: Tensor) -> Any:
    """Return the module whose functions move a worker's rows."""
    if not (tensor.is_cuda and has_triton()):
        return expert_rows
    from mtrain_cli.kernels.triton import expert_rows as kernels

    return kernels


@dataclass(frozen=True, eq=False)
class Tile:
    """Own tokens from ``begin`` to ``end``, and how their rows travel.

    send, receive: number of rows for and from each worker; 0 for this worker itself.
    rows: number of pairs R that this worker computes.
    each: number of experts of a worker.
    slot_TP: int32, place of a token's sum from each worker, behind those of the own one, by worker,
        then by token; `expert_rows.ABSENT` if it has none of the token's experts.
    chosen_TK, place_TK: the expert of each pair, and int32 its place among the pairs of the
        expert's worker; `expert_rows.ABSENT` for a pair that no expert computes.
    ends_L: int32, the end of each own expert's rows.
    arrived: places of the pairs of all rows ``[N, K]``, and their scores ``[R, 1]``, for a backward
        pass.
    """

    begin: int
    end: int
    send: list[int]
    receive: list[int]
    rows: int
    each: int
    slot_TP: Tensor
    chosen_TK: Tensor
    place_TK: Tensor
    ends_L: Tensor
    arrived: dict[str, Tensor] = field(default_factory=dict)


def start_plan(
    decision: Decision, group: ExpertGroup, bounds: list[int]
) -> Callable[[], tuple[Tile, ...]]:
    """Start to exchange numbers of rows. Return a function that waits for them and plans tiles.

    All workers of the group call this together. The device computes meanwhile what is queued.

    bounds: first token of each tile, and the number of tokens.
    """
    whole = len(bounds) == 2
    tiles = [decision] if whole else [part_of(decision, *each) for each in pairwise(bounds)]
    ends_XE = torch.stack([tile.ends_E for tile in tiles]).long()
    experts = ends_XE.shape[1]
    slots = [_slots(tile, group.rank, group.size) for tile in tiles]
    sent_XP = torch.stack([sent_P for _, sent_P in slots])
    counts_XE = ends_XE.diff(dim=1, prepend=ends_XE.new_zeros(len(tiles), 1))
    # Numbers of pairs for each expert, then of rows for each worker.
    counts = group.gather_counts(torch.cat([counts_XE, sent_XP], 1))
    # The copy goes to pinned memory, so the host does not wait for it here.
    on_host = counts.to("cpu", non_blocking=True)
    copied = None
    if counts.is_cuda:
        copied = torch.cuda.Event()
        copied.record()
    each = experts // group.size
    own = slice(group.rank * each, (group.rank + 1) * each)
    totals_XE = counts[:, :, :experts].sum(0)
    begin_XE = totals_XE.unflatten(1, (group.size, each)).cumsum(2).flatten(1) - totals_XE
    begin_XE += counts[: group.rank, :, :experts].sum(0)
    shift_XE = begin_XE - (ends_XE - counts_XE)
    ends_XL = totals_XE[:, own].cumsum(1).to(torch.int32)
    places = [_places(tile, shift_E) for tile, shift_E in zip(tiles, shift_XE, strict=True)]

    def end() -> tuple[Tile, ...]:
        with group.observer.waiting():
            if copied is not None:
                copied.synchronize()
            return tuple(map(plan, range(len(tiles))))

    def plan(n: int) -> Tile:
        rows_PP = on_host[:, n, experts:]
        send, receive = rows_PP[group.rank].tolist(), rows_PP[:, group.rank].tolist()
        return Tile(
            bounds[n], bounds[n + 1], send, receive, int(on_host[:, n, :experts][:, own].sum()),
            each, slots[n][0], tiles[n].chosen_TK, places[n], ends_XL[n],
        )  # fmt: skip

    return end


def _slots(decision: Decision, rank: int, workers: int) -> tuple[Tensor, Tensor]:
    """Return `Tile.slot_TP`, and the number of rows for each worker."""
    chosen_TK, ends_E = decision.chosen_TK, decision.ends_E
    tokens = len(chosen_TK)
    padding_TK = decision.place_S.view_as(chosen_TK) >= ends_E[-1]
    worker_TK = (chosen_TK // (len(ends_E) // workers)).masked_fill(padding_TK, workers)
    worker_P = torch.arange(workers, device=chosen_TK.device)
    needs_TP = (worker_TK[:, :, None] == worker_P).any(1)
    needs_TP[:, rank] = False
    slot_TP = needs_TP.T.flatten().cumsum(0).view(workers, tokens).T + (tokens - 1)
    slot_TP = slot_TP.masked_fill(~needs_TP, ABSENT).to(torch.int32)
    slot_TP[:, rank] = torch.arange(tokens, dtype=torch.int32, device=slot_TP.device)
    return slot_TP.contiguous(), needs_TP.sum(0)


def _places(decision: Decision, shift_E: Tensor) -> Tensor:
    """Return `Tile.place_TK`.

    shift_E: place of this worker's first pair of each expert there, minus that in `order_S`.
    """
    place_TK = decision.place_S.view_as(decision.chosen_TK)
    there_TK = place_TK + shift_E[decision.chosen_TK]
    return there_TK.masked_fill(place_TK >= decision.ends_E[-1], ABSENT).to(torch.int32)


class Journey:
    """The rows of a tile in one pass."""

    def __init__(self, tile: Tile, group: ExpertGroup, scores_TK: Tensor) -> None:
        """Prepare a journey. scores_TK: scores of all own tokens."""
        self._tile, self._group, self.rows = tile, group, rows_module(scores_TK)
        self._own = slice(tile.begin, tile.end)
        self._scores_TK = scores_TK[self._own]
        self._top_k = scores_TK.shape[1]
        self._returned: Tensor | None = None

    def start_rows(self, rows_TC: Tensor, *, scored: bool = False) -> Message:
        """Start to send tokens' rows. scored: with the scores and places of their pairs."""
        tile = self._tile
        leaving_SD = _message(rows_TC, sum(tile.send), 2 * self._top_k * scored)
        pairs = (self._scores_TK, tile.chosen_TK, tile.place_TK) if scored else None
        self.rows.leaving(rows_TC[self._own], tile.slot_TP, leaving_SD, pairs, tile.each)
        return self._group.start(leaving_SD, tile.send, tile.receive)

    def arrived(
        self, message: Message, rows_TC: Tensor, *, scored: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the rows of all pairs by expert, ``[R, C]``, and ``[R, 1]`` scores or None."""
        tile, arrived_AD, scores_NK = self._tile, message.wait(), None
        if scored:
            scores, places = numbers_of(arrived_AD, self._scores_TK.dtype)
            elsewhere = tile.chosen_TK // tile.each != self._group.rank
            own_TK = tile.place_TK.masked_fill(elsewhere, ABSENT)
            tile.arrived["places"] = torch.cat([own_TK, places[:, -self._top_k :].int()])
            behind = scores[:, -2 * self._top_k : -self._top_k]
            scores_NK = torch.cat([self._scores_TK, behind])
        return self.rows.spread(
            rows_TC[self._own], arrived_AD, tile.arrived["places"], tile.rows, scores_NK
        )

    def start_back(self, rows_RC: Tensor, numbers_R: Tensor | None = None) -> Message:
        """Add up each token's rows. Start to send the sums back, with the number of each pair."""
        tile, own, width = self._tile, self._tile.end - self._tile.begin, rows_RC.shape[1]
        high, numbers = self._scores_TK.dtype, 0 if numbers_R is None else self._top_k
        self._returned = _message(rows_RC, own + sum(tile.send), numbers)
        leaving_AD = _message(rows_RC, sum(tile.receive), numbers)
        places = tile.arrived["places"]
        for place, out in ((places[:own], self._returned[:own]), (places[own:], leaving_AD)):
            self.rows.summed(rows_RC, place, out, width, high)
            if numbers_R is not None:
                numbers_of(out, high)[0][:, -numbers:] = _at(numbers_R, place)
        return self._group.start(leaving_AD, tile.receive, tile.send, into=self._returned[own:])

    def add_up(self, out_TC: Tensor, numbers_TK: Tensor | None = None) -> None:
        """Write the sum of each own token's rows to ``out_TC``, when they have returned.

        numbers_TK: receives the number of each pair; 0 if no expert computed it.
        """
        returned, self._returned = self._returned, None
        assert returned is not None
        tile, high = self._tile, self._scores_TK.dtype
        self.rows.summed(returned, tile.slot_TP, out_TC[self._own], out_TC.shape[1], high)
        if numbers_TK is not None:
            numbers = numbers_of(returned, high)[0][:, -self._top_k :]
            slot_TK = tile.slot_TP.gather(1, tile.chosen_TK // tile.each)
            choice_K = torch.arange(self._top_k, device=slot_TK.device)
            pair_TK = slot_TK.long() * self._top_k + choice_K
            numbers_TK[self._own] = _at(numbers.flatten(), pair_TK)


def _at(numbers: Tensor, place: Tensor) -> Tensor:
    """Return the numbers at places; 0 for those behind the last."""
    return torch.cat([numbers, numbers.new_zeros(1)])[place.clamp(max=len(numbers)).long()]


def _message(rows_RC: Tensor, rows: int, numbers: int) -> Tensor:
    """Return an empty message of this many rows, with numbers behind each."""
    width = rows_RC.shape[1]
    return rows_RC.new_empty(rows, scored_row(width, rows_RC.element_size(), numbers))


def agreed(bounds: list[int], group: ExpertGroup, device: torch.device) -> list[int]:
    """Return bounds of as many tiles on all workers.

    All workers of the group call this together. Only in an evaluation may the numbers differ.
    """
    (count,) = group.most([len(bounds) - 1], device)
    return [bounds[-1] * n // count for n in range(count + 1)]


class SharedExperts(torch.autograd.Function):
    """The experts of a layer on all workers of a group, for own tokens (`ChunkedExperts`).

    Forward keeps the received rows, the scores, and gate and up.

    With recomputation, backward fetches rows again instead, chunk by chunk, and the second forward
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

        def compute(tile: Tile, journey: Journey) -> Iterator[None]:
            rows = journey.start_rows(x_TC, scored=True)
            yield
            x_RC, scores_R1 = journey.arrived(rows, x_TC, scored=True)
            assert scores_R1 is not None
            gate_up_RW = grouped_rows(x_RC, gate_up_LWC, tile.ends_L)
            if recompute:
                tile.arrived["scores"] = scores_R1
            else:
                kept.extend((x_RC, scores_R1, gate_up_RW))
            del x_RC, rows
            gated = journey.rows.gated
            out_RC = grouped_rows(gated(gate_up_RW, scores_R1), down_LCI, tile.ends_L)
            del gate_up_RW
            back = journey.start_back(out_RC)
            del out_RC
            yield
            back.wait()
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
        sums = WeightGradients(len(ctx.tiles))
        inputs = iter(kept)

        def compute(tile: Tile, journey: Journey) -> Iterator[None]:
            messages = [] if kept else [journey.start_rows(x_TC)]
            messages.append(journey.start_rows(grad_TC))
            yield
            ends_L = tile.ends_L
            if kept:
                x_RC, scores_R1, gate_up_RW = next(inputs), next(inputs), next(inputs)
            else:
                x_RC = journey.arrived(messages.pop(0), x_TC)[0]
                scores_R1 = tile.arrived.pop("scores")
                gate_up_RW = grouped_rows(x_RC, gate_up_LWC, ends_L)
            rows = [journey.arrived(messages.pop(), grad_TC)[0]]
            later: list[Tensor] = []
            dgate_up_RW, dscores_R = inner_gradients(
                rows, gate_up_RW, scores_R1, down_LCI, ends_L, lambda *both: later.extend(both),
                fused=journey.rows.gate_backward,
            )  # fmt: skip
            del gate_up_RW
            dx_RC = grouped_rows_back(dgate_up_RW, gate_up_LWC, ends_L)
            dx = journey.start_back(dx_RC, dscores_R)
            del dx_RC
            # While the gradients travel, add up those of the weights.
            sums.add("down", later.pop(0), later.pop(), ends_L)
            sums.add("gate_up", dgate_up_RW, x_RC, ends_L)
            del dgate_up_RW, x_RC
            yield
            dx.wait()
            journey.add_up(dx_TC, dscores_TK)

        staggered(compute(*each) for each in _journeys(ctx.tiles, ctx.group, scores_TK))
        of_weights = sums.take("gate_up", gate_up_LWC), sums.take("down", down_LCI)
        return dx_TC, dscores_TK, *of_weights, None, None, None, None


def _journeys(
    tiles: tuple[Tile, ...], group: ExpertGroup, scores_TK: Tensor
) -> Iterator[tuple[Tile, Journey]]:
    return ((tile, Journey(tile, group, scores_TK)) for tile in tiles)
