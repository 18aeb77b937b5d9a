"""Experts of a layer on several workers: rows of tokens travel to the experts and back.

Tokens are computed in tiles, as many as memory needs, and a worker's experts in parts: while it
computes one part, the rows of other parts are on their way. Unlike tiles, parts read each weight
once and need no sums of gradients. Rows of a worker's own experts are in no message.

Only the numbers of rows are known on the host; the orders of the rows stay on the device. On a GPU,
each step of a journey launches one kernel (`kernels.triton.expert_rows`): a part is computed so
fast that the GPU would wait for the host.

Shape suffixes: T own tokens, C hidden size, E experts, K chosen experts of a token, P workers of
the group, L own experts, J parts, I width of an expert, W = 2 I. S own pairs of a token and an
expert in a tile. R pairs of a part that this worker computes, ordered by expert. Of these, A arrive
from others and B belong to own tokens. D are the elements of a row of a message: C, or more with a
score at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from mtrain_cli.attention.decode import has_triton
from mtrain_cli.model.expert_products import (
    WeightGradients,
    grouped_rows,
    grouped_rows_back,
    inner_gradients,
    outputs,
)
from mtrain_cli.model.experts import Experts, expert_layers
from mtrain_cli.model.routing import Decision, part_of
from mtrain_cli.model.tiling import expert_parts, scored_row
from mtrain_cli.parallel.layer_groups import ExpertGroup, Message, own_part, staggered


def fused(tensor: Tensor) -> bool:
    """Return whether kernels of Triton compute a worker's rows."""
    return tensor.is_cuda and has_triton()


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
    """Start to exchange numbers of rows. Return a function that waits for them and plans tiles.

    All workers of the group call this together. What is queued before the function's call, the
    device computes meanwhile.

    Args:
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


def make_journey(tile: Tile, group: ExpertGroup, scores_TK: Tensor) -> Journey:
    """Return the journey of a tile's rows. scores_TK: scores of all own tokens."""
    return (FusedJourney if fused(scores_TK) else Journey)(tile, group, scores_TK)


class Journey:
    """The rows of a tile in one pass. All parts of the tile return to one tensor."""

    def __init__(self, tile: Tile, group: ExpertGroup, scores_TK: Tensor) -> None:
        self._tile, self._group = tile, group
        self._own = slice(tile.begin, tile.end)
        self._scores_TK = scores_TK[self._own]
        self._returned_SD: Tensor | None = None

    def start_rows(self, rows_TC: Tensor, part: Part, *, scored: bool = False) -> Message:
        """Start to send the row of the token of each pair that leaves. scored: with its score."""
        leaving_AD = _message(rows_TC, part.leave.stop - part.leave.start, scored)
        self._leave(rows_TC[self._own], part, leaving_AD, scored)
        return self._group.start(leaving_AD, part.send, part.receive)

    def arrived(
        self, message: Message, rows_TC: Tensor, part: Part, *, scored: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return arrived and staying rows by expert, ``[R, C]``, and ``[R, 1]`` scores or None."""
        return self._merged(message.wait(), rows_TC[self._own], part, scored)

    def start_back(self, rows_RC: Tensor, part: Part, numbers_R: Tensor | None = None) -> Message:
        """Start to send the rows of others' tokens back, and keep those of own tokens.

        numbers_R: a number of each row that travels with it.
        """
        scored = numbers_R is not None
        if self._returned_SD is None:
            self._returned_SD = _message(rows_RC, len(self._tile.order_S), scored)
        leaving_AD = _message(rows_RC, part.arriving, scored)
        self._part(rows_RC, part, leaving_AD, self._returned_SD[part.stay], numbers_R)
        into_AD = self._returned_SD[part.leave]
        return self._group.start(leaving_AD, part.receive, part.send, into=into_AD)

    def add_up(self, out_TC: Tensor, numbers_TK: Tensor | None = None) -> None:
        """Write the sum of each own token's rows to ``out_TC``, when all parts have returned.

        numbers_TK: receives the number of each pair; 0 if no expert computed it.
        """
        returned_SD, self._returned_SD = self._returned_SD, None
        assert returned_SD is not None
        numbers_TK = None if numbers_TK is None else numbers_TK[self._own]
        self._sum(returned_SD, out_TC[self._own], numbers_TK)

    def outputs(
        self, gate_up_RW: Tensor, scores_R1: Tensor, down_LCI: Tensor, ends_L: Tensor
    ) -> Tensor:
        return outputs(gate_up_RW, scores_R1, down_LCI, ends_L)

    def inner_gradients(
        self, rows: list[Tensor], gate_up_RW: Tensor, scores_R1: Tensor, down_LCI: Tensor,
        ends_L: Tensor, later: list[Tensor],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return what `expert_products.inner_gradients` returns. later: receives what it takes."""
        return inner_gradients(
            rows, gate_up_RW, scores_R1, down_LCI, ends_L, lambda *both: later.extend(both)
        )

    def _leave(self, own_TC: Tensor, part: Part, leaving_AD: Tensor, scored: bool) -> None:
        order_A, width = self._tile.order_S[part.leave], own_TC.shape[1]
        leaving_AD[:, :width] = own_TC.index_select(0, order_A // self._tile.top_k)
        if scored:
            scores = self._scores_TK.flatten()
            leaving_AD.view(scores.dtype)[:, -1] = scores[order_A]

    def _merged(
        self, arrived_AD: Tensor, own_TC: Tensor, part: Part, scored: bool
    ) -> tuple[Tensor, Tensor | None]:
        tile, width = self._tile, own_TC.shape[1]
        order_R, order_B = tile.order_R(part), tile.order_S[part.stay]
        rows_RC = own_TC.new_empty(len(order_R), width)
        place_A, place_B = tile.place_R(part).split([part.arriving, len(order_B)])
        rows_RC[place_A] = arrived_AD[:, :width]
        rows_RC[place_B] = own_TC.index_select(0, order_B // tile.top_k)
        if not scored:
            return rows_RC, None
        scores = self._scores_TK.flatten()
        arrived_A = arrived_AD.view(scores.dtype)[:, -1]
        return rows_RC, torch.cat([arrived_A, scores[order_B]])[order_R][:, None]

    def _part(
        self, rows_RC: Tensor, part: Part, leaving_AD: Tensor, staying_BD: Tensor,
        numbers_R: Tensor | None,
    ) -> None:  # fmt: skip
        width = rows_RC.shape[1]
        places = self._tile.place_R(part).split([len(leaving_AD), len(staying_BD)])
        for place, into in zip(places, (leaving_AD, staying_BD), strict=True):
            into[:, :width] = rows_RC[place]
            if numbers_R is not None:
                into.view(numbers_R.dtype)[:, -1] = numbers_R[place]

    def _sum(self, rows_SD: Tensor, out_TC: Tensor, numbers_TK: Tensor | None) -> None:
        tile, places = self._tile, len(rows_SD)
        if numbers_TK is not None:
            numbers_TK.zero_().view(-1)[tile.order_S] = rows_SD.view(numbers_TK.dtype)[:, -1]
        total_TC = torch.zeros_like(out_TC, dtype=self._scores_TK.dtype)
        for place_T in tile.place_S.view(-1, tile.top_k).unbind(1) if places else ():
            rows_TC = rows_SD[place_T.clamp(max=places - 1)][:, : out_TC.shape[1]]
            total_TC += rows_TC.masked_fill((place_T >= places)[:, None], 0)
        out_TC.copy_(total_TC)


class FusedJourney(Journey):
    """A journey whose steps are kernels of Triton."""

    def __init__(self, tile: Tile, group: ExpertGroup, scores_TK: Tensor) -> None:
        from mtrain_cli.kernels.triton import expert_rows

        super().__init__(tile, group, scores_TK)
        self._kernels = expert_rows

    def outputs(
        self, gate_up_RW: Tensor, scores_R1: Tensor, down_LCI: Tensor, ends_L: Tensor
    ) -> Tensor:
        return grouped_rows(self._kernels.gated(gate_up_RW, scores_R1), down_LCI, ends_L)

    def inner_gradients(
        self, rows: list[Tensor], gate_up_RW: Tensor, scores_R1: Tensor, down_LCI: Tensor,
        ends_L: Tensor, later: list[Tensor],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        grad_RC = rows.pop()
        dinner_RI = grouped_rows_back(grad_RC, down_LCI, ends_L)
        inner_RI, dgate_up_RW, dscores_R = self._kernels.gate_backward(
            gate_up_RW, dinner_RI, scores_R1
        )
        later += grad_RC, inner_RI
        return dgate_up_RW, dscores_R

    def _leave(self, own_TC: Tensor, part: Part, leaving_AD: Tensor, scored: bool) -> None:
        tile, scores = self._tile, self._scores_TK if scored else None
        self._kernels.leaving(own_TC, tile.order_S[part.leave], tile.top_k, leaving_AD, scores)

    def _merged(
        self, arrived_AD: Tensor, own_TC: Tensor, part: Part, scored: bool
    ) -> tuple[Tensor, Tensor | None]:
        tile, scores = self._tile, self._scores_TK if scored else None
        order_B, order_R = tile.order_S[part.stay], tile.order_R(part)
        return self._kernels.merged(arrived_AD, own_TC, order_B, order_R, tile.top_k, scores)

    def _part(
        self, rows_RC: Tensor, part: Part, leaving_AD: Tensor, staying_BD: Tensor,
        numbers_R: Tensor | None,
    ) -> None:  # fmt: skip
        place_R = self._tile.place_R(part)
        self._kernels.parted(rows_RC, place_R, leaving_AD, staying_BD, numbers_R)

    def _sum(self, rows_SD: Tensor, out_TC: Tensor, numbers_TK: Tensor | None) -> None:
        high = self._scores_TK.dtype
        self._kernels.summed(rows_SD, self._tile.place_S, out_TC, high, numbers_TK)


def _message(rows_RC: Tensor, rows: int, scored: bool) -> Tensor:
    """Return an empty message of this many rows."""
    width = rows_RC.shape[1]
    return rows_RC.new_empty(rows, scored_row(width, rows_RC.element_size()) if scored else width)


@dataclass(frozen=True)
class ExpertSharing:
    """How workers share the experts of a layer."""

    group: ExpertGroup

    def agreed(self, bounds: list[int], device: torch.device) -> tuple[list[int], int]:
        """Return bounds of as many tiles on all workers, and the largest number of tokens.

        All workers of the group call this together. Only in an evaluation may these numbers differ.
        """
        count, tokens = self.group.most([len(bounds) - 1, bounds[-1]], device)
        return [bounds[-1] * n // count for n in range(count + 1)], tokens

    def start_plan(
        self, decision: Decision, bounds: list[int], tokens: int
    ) -> Callable[[], tuple[Tile, ...]]:
        """Return what `expert_parallel.start_plan` returns."""
        plan = start_plan(decision, self.group, bounds, tokens)

        def end() -> tuple[Tile, ...]:
            with self.group.observer.waiting():
                return plan()

        return end

    def compute(
        self,
        x_TC: Tensor,
        scores_TK: Tensor,
        experts: Experts,
        decision: Decision,
        *,
        recompute: bool,
        inputs_only: bool,
        compile: bool = False,  # noqa: ARG002  # own kernels compute the rows
    ) -> Tensor:
        """Return what `compute_experts` returns, with experts on all workers of the group."""
        weights = own_part(experts.gate_up), own_part(experts.down)
        # Workers with popular experts take longer, so the time of all is not compared.
        with self.group.observer.waiting():
            return _SharedExperts.apply(
                x_TC, scores_TK, *weights, decision.chunks, self.group,
                recompute, inputs_only,
            )  # fmt: skip


class _SharedExperts(torch.autograd.Function):
    """Forward keeps the received rows, the scores, and gate and up.

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
            out_RC = journey.outputs(gate_up_RW, scores_R1, down_LCI[part.experts], ends_L)
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
            dgate_up_RW, dscores_R = journey.inner_gradients(
                rows, gate_up_RW, scores_R1, down, ends_L, later
            )
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
        journey = make_journey(tile, group, scores_TK)
        for part in tile.parts:
            yield tile, journey, part


def deal_experts(decoder: nn.Module, mesh: DeviceMesh) -> None:
    """Give each worker its part of the experts of a decoder on the meta device, in place.

    The parameters keep their names and whole shapes. mesh: the expert group, one-dimensional.
    """
    for mlp in expert_layers(decoder.layers):  # type: ignore[arg-type]
        for name, parameter in list(mlp.experts.named_parameters()):
            part = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            mlp.experts.register_parameter(name, nn.Parameter(part))
