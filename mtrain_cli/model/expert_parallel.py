"""Experts of a layer on several workers: rows of tokens travel to the experts and back.

The tokens are computed in tiles, as many as memory needs. A worker computes the experts that it
holds in parts. While it computes one part, the rows of other parts are on their way. Parts of
experts, unlike tiles of tokens, read each weight once and need no sums of gradients.

Rows of tokens whose expert the worker itself holds are in no message.

Shape suffixes: T own tokens, C hidden size, E experts, K chosen experts of a token, P workers of
the group, L own experts, J parts, I width of an expert, W = 2 I. S own pairs of a token and an
expert in a tile. R pairs of a part that this worker computes, ordered by expert. Of these, A arrive
from others and B belong to own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from mtrain_cli.attention.partials import accumulation_dtype
from mtrain_cli.model import expert_kernels
from mtrain_cli.model.expert_tiles import inner_gradients, outputs
from mtrain_cli.model.experts import Experts, expert_layers
from mtrain_cli.model.grouped_products import grouped_rows, grouped_rows_back, grouped_sums
from mtrain_cli.model.routing import Decision, part_of
from mtrain_cli.model.tiling import ONE_ADDITION, expert_parts
from mtrain_cli.parallel.expert_group import ExpertGroup, RowMessage
from mtrain_cli.parallel.parameter_shards import own_part
from mtrain_cli.parallel.tensor_group import staggered


@dataclass(frozen=True)
class ExpertSharing:
    """How workers share the experts of a layer."""

    group: ExpertGroup

    def agreed(self, bounds: list[int], device: torch.device) -> tuple[list[int], int]:
        """Return bounds of as many tiles on all workers, and the largest number of tokens.

        All workers of the group call this together. Workers of an evaluation may have different
        numbers of tokens: those of a training step have as many.
        """
        count, tokens = self.group.most([len(bounds) - 1, bounds[-1]], device)
        return [bounds[-1] * n // count for n in range(count + 1)], tokens

    def start_plan(
        self, decision: Decision, bounds: list[int], tokens: int
    ) -> Callable[[], tuple[Tile, ...]]:
        """Start to plan how the rows of a decision travel. Return a function that ends it.

        All workers of the group call this together. The function waits for the device. What is
        queued before its call, the device computes meanwhile.

        Args:
            bounds: first token of each tile, and the number of tokens.
            tokens: the largest number of tokens of a worker.
        """
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
        compile: bool = False,
    ) -> Tensor:
        """Return what `compute_experts` returns, with experts on all workers of the group."""
        weights = own_part(experts.gate_up), own_part(experts.down)
        # Workers with popular experts take longer, so the time of all is not compared.
        with self.group.observer.waiting():
            return _SharedExperts.apply(
                x_TC, scores_TK, *weights, decision.chunks, self.group,
                recompute, compile, inputs_only,
            )  # fmt: skip


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
    counts_PL: number of rows from each worker for each own expert. This worker is the last.
    top_k: number of experts of a token.
    scores: scores of the rows of each part, for a backward pass that fetches rows again.
    """

    begin: int
    end: int
    order_S: Tensor
    counts_PL: Tensor
    parts: tuple[Part, ...]
    top_k: int
    scores: dict[int, Tensor] = field(default_factory=dict)

    @cached_property
    def place_S(self) -> Tensor:
        """Place of each pair in `order_S`, or the number of its elements if it is not there."""
        order_S = self.order_S
        place_S = order_S.new_full(((self.end - self.begin) * self.top_k,), len(order_S))
        place_S[order_S] = torch.arange(len(order_S), device=order_S.device)
        return place_S

    @cached_property
    def _orders(self) -> tuple[Tensor, Tensor, Tensor]:
        """`order_R`, `place_R` and `ends_JL`."""
        counts_JPL = self.counts_PL.unflatten(1, (len(self.parts), -1)).transpose(0, 1)
        # Both orders have one part after the other.
        sizes = [part.rows.stop - part.rows.start for part in self.parts]
        numbers = torch.arange(max(sizes), device=counts_JPL.device)
        number_R = torch.cat([numbers[:size] for size in sizes])
        behind_JPL = counts_JPL.flatten(1).cumsum(1).view_as(counts_JPL)
        begin_JLP = (behind_JPL - counts_JPL).transpose(1, 2).flatten(1)
        counts_JLP = counts_JPL.transpose(1, 2).flatten(1)
        shift_JLP = begin_JLP - (counts_JLP.cumsum(1) - counts_JLP)
        rows = sum(sizes)
        # Number of a row in its part, by worker. Then the place in the order of all parts.
        order_R = number_R + shift_JLP.flatten().repeat_interleave(
            counts_JLP.flatten(), output_size=rows
        )
        place_R = torch.empty_like(order_R)
        for part in self.parts:
            place_R[part.rows][order_R[part.rows]] = number_R[part.rows]
        ends_JL = counts_JPL.sum(1).cumsum(1).to(torch.int32)
        return order_R, place_R, ends_JL

    def order_R(self, part: Part) -> Tensor:
        """Return the rows of a part, ordered by expert. First are those that arrive, by worker."""
        return self._orders[0][part.rows]

    def place_R(self, part: Part) -> Tensor:
        """Return the place of each row of a part in `order_R`."""
        return self._orders[1][part.rows]

    def ends_L(self, part: Part) -> Tensor:
        """Return the number of rows of each expert of a part, and all earlier ones, as int32."""
        return self._orders[2][part.number]


def start_plan(
    decision: Decision, group: ExpertGroup, bounds: list[int], tokens: int
) -> Callable[[], tuple[Tile, ...]]:
    """Start to exchange numbers of rows. Return a function that waits for them and plans tiles."""
    whole = len(bounds) == 2
    tiles = [decision] if whole else [part_of(decision, *each) for each in pairwise(bounds)]
    ends_XE = torch.stack([tile.ends_E.long() for tile in tiles])
    counts_XE = ends_XE.diff(prepend=ends_XE.new_zeros(len(tiles), 1), dim=1)
    counts_PXE = group.gather_counts(counts_XE)
    # The copy goes to pinned memory, so the host does not wait for it here.
    on_host = counts_PXE.to("cpu", non_blocking=True)
    copied = None
    if counts_PXE.is_cuda:
        copied = torch.cuda.Event()
        copied.record()

    def end() -> tuple[Tile, ...]:
        if copied is not None:
            copied.synchronize()
        counts = on_host.numpy()
        parts = expert_parts(tokens, counts.shape[2] // group.size, len(tiles))
        return tuple(
            _tile(tile, begin, group, counts[:, n], counts_PXE[:, n], parts)
            for n, (tile, begin) in enumerate(zip(tiles, bounds, strict=False))
        )

    return end


def _tile(
    decision: Decision,
    begin: int,
    group: ExpertGroup,
    counts_PE: np.ndarray,
    on_device_PE: Tensor,
    parts: int,
) -> Tile:
    rank, size = group.rank, group.size
    others = [worker for worker in range(size) if worker != rank]
    own = counts_PE.shape[1] // size
    mine = slice(rank * own, (rank + 1) * own)
    send_PJ = counts_PE[rank].reshape(size, parts, -1).sum(-1)
    receive_PJ = counts_PE[:, mine].reshape(size, parts, -1).sum(-1)
    ends_PJ = send_PJ.cumsum().reshape(size, parts)
    pieces, found, places, computed = [], [], 0, 0
    for n in range(parts):
        pieces += [
            decision.order_S[ends_PJ[p, n] - send_PJ[p, n] : ends_PJ[p, n]] for p in (*others, rank)
        ]
        leaving, staying = int(send_PJ[others, n].sum()), int(send_PJ[rank, n])
        send, receive = send_PJ[:, n].tolist(), receive_PJ[:, n].tolist()
        rows = sum(receive)
        send[rank] = receive[rank] = 0
        each = own // parts
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
    from_PL = on_device_PE[:, mine]
    counts_PL = torch.cat([from_PL[:rank], from_PL[rank + 1 :], from_PL[rank : rank + 1]])
    end, top_k = begin + len(decision.chosen_TK), decision.chosen_TK.shape[1]
    return Tile(begin, end, torch.cat(pieces), counts_PL, tuple(found), top_k)


class _Journey:
    """The rows of a tile that travel to the workers of their experts, and back, in one pass.

    All parts of a tile return to the same tensors.
    """

    def __init__(self, tile: Tile, group: ExpertGroup, compile: bool) -> None:
        """Prepare a pass. compile: compile the operations on rows."""
        self._tile, self._group, self._compile = tile, group, compile
        self.own = slice(tile.begin, tile.end)
        self._returned: dict[str, Tensor] = {}

    def start_rows(self, rows_TC: Tensor, part: Part) -> RowMessage:
        """Start to send the row of the token of each pair that leaves.

        Args:
            rows_TC: rows of all own tokens.
        """
        own, order_A, top_k = rows_TC[self.own], self._tile.order_S[part.leave], self._tile.top_k
        if self._compile:
            rows = expert_kernels.taken(own, order_A, top_k)
        else:
            rows = own.index_select(0, order_A // top_k)
        return self._group.start(rows, part.send, part.receive)

    def start_scores(self, scores_TK: Tensor, part: Part) -> RowMessage:
        """Start to send the score of each pair that leaves."""
        scores = scores_TK[self.own].flatten()[self._tile.order_S[part.leave]]
        return self._group.start(scores, part.send, part.receive)

    def arrived(self, message: RowMessage, rows_TC: Tensor, part: Part) -> Tensor:
        """Wait for rows from others. Return them and those that stay, ordered by expert."""
        tile, own, order_R = self._tile, rows_TC[self.own], self._tile.order_R(part)
        arrived_AC, order_B = message.wait(), tile.order_S[part.stay]
        if self._compile:
            return expert_kernels.merged(arrived_AC, own, order_B, order_R, tile.top_k)
        rows_RC = arrived_AC.new_empty(len(order_R), arrived_AC.shape[1])
        place_A, place_B = tile.place_R(part).split([part.arriving, len(order_B)])
        rows_RC[place_A] = arrived_AC
        rows_RC[place_B] = own.index_select(0, order_B // tile.top_k)
        return rows_RC

    def arrived_scores(self, message: RowMessage, scores_TK: Tensor, part: Part) -> Tensor:
        """Wait for scores from others. Return them and those that stay, ordered by expert."""
        own_B = scores_TK[self.own].flatten()[self._tile.order_S[part.stay]]
        return torch.cat([message.wait(), own_B])[self._tile.order_R(part)][:, None]

    def start_back(self, name: str, rows_R: Tensor, part: Part) -> RowMessage:
        """Start to send the rows of others' tokens back, and keep those of own tokens.

        Args:
            name: the rows of all parts with this name return to one tensor.
            rows_R: rows or numbers of a part, ordered by expert.
        """
        if name not in self._returned:
            places = len(self._tile.order_S)
            self._returned[name] = rows_R.new_empty(places, *rows_R.shape[1:])
        returned_S = self._returned[name]
        place_A, place_B = self._tile.place_R(part).split(
            [part.arriving, part.stay.stop - part.stay.start]
        )
        if self._compile and rows_R.ndim > 1:
            leaving = expert_kernels.taken(rows_R, place_A, 1)
        else:
            leaving = rows_R[place_A]
        message = self._group.start(leaving, part.receive, part.send, into=returned_S[part.leave])
        torch.index_select(rows_R, 0, place_B, out=returned_S[part.stay])
        return message

    def returned(self, name: str) -> Tensor:
        """Remove and return what returned, in the order of `Tile.order_S`."""
        return self._returned.pop(name)

    def sums(self, name: str, high: torch.dtype) -> Tensor:
        """Return the sum of each token's rows, if those of all parts have returned.

        Args:
            high: dtype in which to add up the rows.
        """
        rows_SC, tile = self._returned.pop(name), self._tile
        if self._compile:
            return expert_kernels.summed(rows_SC, tile.place_S, None, tile.top_k)
        total_TC = rows_SC.new_zeros(tile.end - tile.begin, rows_SC.shape[1], dtype=high)
        for place_T in tile.place_S.view(-1, tile.top_k).unbind(1) if len(rows_SC) else ():
            rows_TC = rows_SC[place_T.clamp(max=len(rows_SC) - 1)]
            total_TC += rows_TC.masked_fill_((place_T == len(rows_SC))[:, None], 0)
        return total_TC.to(rows_SC.dtype)


class _WeightSums:
    """Gradients of the worker's experts, by parts, summed over tiles as in `WeightGradients`."""

    def __init__(self, tiles: tuple[Tile, ...]) -> None:
        self._tiles, self._parts = len(tiles), len(tiles[0].parts)
        self._sums: dict[str, Tensor] = {}
        self._begun: set[tuple[str, int]] = set()

    def add(self, name: str, part: Part, left_RB: Tensor, right_RA: Tensor, ends_L: Tensor) -> None:
        """Add ``left.T @ right`` of each expert's rows to the gradient ``name``."""
        sums_LBA = grouped_sums(left_RB, right_RA, ends_L)
        begun = (name, part.number) in self._begun
        self._begun.add((name, part.number))
        if begun:
            self._sums[name][part.experts] += sums_LBA
            return
        high = accumulation_dtype(sums_LBA.dtype)
        dtype = high if self._tiles > ONE_ADDITION else sums_LBA.dtype
        if self._parts == 1:
            self._sums[name] = sums_LBA.to(dtype)
            return
        if name not in self._sums:
            shape = len(sums_LBA) * self._parts, *sums_LBA.shape[1:]
            self._sums[name] = sums_LBA.new_empty(shape, dtype=dtype)
        self._sums[name][part.experts] = sums_LBA

    def take(self, name: str, weight: Tensor) -> Tensor:
        """Remove the gradient ``name`` and return it in the dtype of its weight."""
        return self._sums.pop(name).to(weight.dtype)


class _SharedExperts(torch.autograd.Function):
    """Without recomputation, forward keeps the received rows, the scores, and gate and up.

    With recomputation, the backward pass fetches rows again, part by part. The second forward pass
    of the checkpoint then has nothing to do.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TC: Tensor, scores_TK: Tensor, gate_up_LWC: Tensor, down_LCI: Tensor,
        tiles: tuple[Tile, ...], group: ExpertGroup,
        recompute: bool, compile: bool, inputs_only: bool,
    ) -> Tensor:  # fmt: skip
        kept: list[Tensor] = []
        out_TC = x_TC.new_empty(()).expand_as(x_TC) if inputs_only else torch.empty_like(x_TC)

        def compute(tile: Tile, journey: _Journey, part: Part) -> Iterator[None]:
            rows, scores = journey.start_rows(x_TC, part), journey.start_scores(scores_TK, part)
            yield
            x_RC = journey.arrived(rows, x_TC, part)
            scores_R1 = journey.arrived_scores(scores, scores_TK, part)
            ends_L = tile.ends_L(part)
            gate_up_RW = grouped_rows(x_RC, gate_up_LWC[part.experts], ends_L)
            if recompute:
                tile.scores[part.number] = scores_R1
            else:
                kept.extend((x_RC, scores_R1, gate_up_RW))
            del x_RC, rows
            down = down_LCI[part.experts]
            out_RC = outputs(gate_up_RW, scores_R1, down, ends_L, compile=compile)
            del gate_up_RW
            back = journey.start_back("out", out_RC, part)
            del out_RC
            yield
            back.wait()
            if part is tile.parts[-1]:
                out_TC[journey.own] = journey.sums("out", scores_TK.dtype)

        if not inputs_only:
            staggered(compute(*each) for each in _journeys(tiles, group, compile))
        ctx.tiles, ctx.group, ctx.compile = tiles, group, compile
        ctx.save_for_backward(x_TC, scores_TK, gate_up_LWC, down_LCI, *kept)
        return out_TC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TC: Tensor) -> tuple[Tensor | None, ...]:
        x_TC, scores_TK, gate_up_LWC, down_LCI, *kept = ctx.saved_tensors
        grad_TC = grad_TC.contiguous()
        dx_TC, dscores_TK = torch.empty_like(grad_TC), torch.zeros_like(scores_TK)
        sums = _WeightSums(ctx.tiles)
        inputs = iter(kept)

        def compute(tile: Tile, journey: _Journey, part: Part) -> Iterator[None]:
            messages = [] if kept else [journey.start_rows(x_TC, part)]
            messages.append(journey.start_rows(grad_TC, part))
            yield
            gate_up, down = gate_up_LWC[part.experts], down_LCI[part.experts]
            ends_L = tile.ends_L(part)
            if kept:
                x_RC, scores_R1, gate_up_RW = next(inputs), next(inputs), next(inputs)
            else:
                x_RC = journey.arrived(messages.pop(0), x_TC, part)
                scores_R1 = tile.scores.pop(part.number)
                gate_up_RW = grouped_rows(x_RC, gate_up, ends_L)
            rows = [journey.arrived(messages.pop(), grad_TC, part)]
            # The gradient of the down projection follows later, while rows travel.
            later: list[tuple[Tensor, Tensor]] = []
            dgate_up_RW, dscores_R = inner_gradients(
                rows, gate_up_RW, scores_R1, down, ends_L,
                lambda grad_RC, inner_RI: later.append((grad_RC, inner_RI)), compile=ctx.compile,
            )  # fmt: skip
            del gate_up_RW
            dx_RC = grouped_rows_back(dgate_up_RW, gate_up, ends_L)
            dx = journey.start_back("dx", dx_RC, part)
            del dx_RC
            dscores = journey.start_back("dscores", dscores_R, part)
            # While the gradients travel, add up those of the weights.
            sums.add("down", part, *later.pop(), ends_L)
            sums.add("gate_up", part, dgate_up_RW, x_RC, ends_L)
            del dgate_up_RW, x_RC
            yield
            dx.wait()
            dscores.wait()
            if part is tile.parts[-1]:
                dx_TC[journey.own] = journey.sums("dx", scores_TK.dtype)
                dscores_TK[journey.own].view(-1)[tile.order_S] = journey.returned("dscores")

        staggered(compute(*each) for each in _journeys(ctx.tiles, ctx.group, ctx.compile))
        of_weights = sums.take("gate_up", gate_up_LWC), sums.take("down", down_LCI)
        return dx_TC, dscores_TK, *of_weights, None, None, None, None, None


def _journeys(
    tiles: tuple[Tile, ...], group: ExpertGroup, compile: bool
) -> Iterator[tuple[Tile, _Journey, Part]]:
    for tile in tiles:
        journey = _Journey(tile, group, compile)
        for part in tile.parts:
            yield tile, journey, part


def deal_experts(decoder: nn.Module, mesh: DeviceMesh) -> None:
    """Give each worker of an expert group its part of the experts of all layers, in place.

    The parameters keep their names and whole shapes.

    Args:
        decoder: a decoder on the meta device.
        mesh: the expert group, one-dimensional.
    """
    for mlp in expert_layers(decoder.layers):  # type: ignore[arg-type]
        for name, parameter in list(mlp.experts.named_parameters()):
            part = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            mlp.experts.register_parameter(name, nn.Parameter(part))
