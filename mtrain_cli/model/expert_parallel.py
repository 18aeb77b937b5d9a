"""Experts of a layer on several workers: rows of tokens travel to the experts and back.

The tokens are computed in chunks. While a worker computes one chunk, the rows of other chunks are
on their way.

Shape suffixes: T own tokens, C hidden size, E experts, K chosen experts of a token, L own experts,
I width of an expert, W = 2 I, S own pairs of a token and an expert in a chunk, ordered by expert, R
received pairs of a chunk, in the order in which they arrive or ordered by expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

from mtrain_cli.model import expert_kernels
from mtrain_cli.model.expert_tiles import WeightGradients, inner_gradients, outputs
from mtrain_cli.model.experts import Experts, expert_layers
from mtrain_cli.model.grouped_products import grouped_rows, grouped_rows_back
from mtrain_cli.model.routing import Decision, part_of
from mtrain_cli.parallel.expert_group import ExpertGroup, RowMessage
from mtrain_cli.parallel.parameter_shards import own_part
from mtrain_cli.parallel.tensor_group import staggered


@dataclass(frozen=True)
class ExpertSharing:
    """How workers share the experts of a layer."""

    group: ExpertGroup

    def agreed(self, bounds: list[int], device: torch.device) -> list[int]:
        """Return bounds of as many chunks on all workers of the group, which call this together.

        Workers of an evaluation may have different numbers of tokens: those of a training step have
        as many.
        """
        count = self.group.most(len(bounds) - 1, device)
        return [bounds[-1] * n // count for n in range(count + 1)]

    def plan(self, decision: Decision, bounds: list[int]) -> tuple[Chunk, ...]:
        """Plan how the rows of a decision travel. All workers of the group call this together.

        Args:
            bounds: first token of each chunk, and the number of tokens.
        """
        with self.group.observer.waiting():
            return plan_chunks(decision, self.group, bounds)

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


class Chunk(NamedTuple):
    """The pairs of some tokens, and how their rows travel.

    begin, end: first token, and the token after the last.
    order_S: pairs that travel, numbered (token - begin) * K + k, ordered by expert.
    place: place of each pair in that order, or the number of pairs that travel if it does not.
    send, receive: number of rows for and from each worker.
    order_R: rows in the order in which they arrive, by expert.
    place_R: place of each arriving row in that order.
    ends_L: int32, number of rows of this and all earlier own experts.
    """

    begin: int
    end: int
    order_S: Tensor
    place: Tensor
    send: list[int]
    receive: list[int]
    order_R: Tensor
    place_R: Tensor
    ends_L: Tensor


def plan_chunks(decision: Decision, group: ExpertGroup, bounds: list[int]) -> tuple[Chunk, ...]:
    """Plan how the rows of a decision travel. All workers of the group call this together."""
    parts = [part_of(decision, begin, end) for begin, end in pairwise(bounds)]
    ends_XE = torch.stack([part.ends_E.long() for part in parts])
    counts_XE = ends_XE.diff(prepend=ends_XE.new_zeros(len(parts), 1), dim=1)
    counts_PXE = group.gather_counts(counts_XE)
    experts = counts_XE.shape[1] // group.size
    from_XPL = counts_PXE[:, :, group.rank * experts : (group.rank + 1) * experts].transpose(0, 1)
    send_XP = counts_XE.unflatten(1, (group.size, -1)).sum(-1)
    sizes = torch.stack([send_XP, from_XPL.sum(-1)]).tolist()  # waits for the device
    return tuple(
        _chunk(bounds[n], part, sizes[0][n], sizes[1][n], from_XPL[n])
        for n, part in enumerate(parts)
    )


def _chunk(
    begin: int, part: Decision, send: list[int], receive: list[int], from_PL: Tensor
) -> Chunk:
    end, travel, arrive = begin + len(part.chosen_TK), sum(send), sum(receive)
    device = from_PL.device
    number_PL = torch.arange(from_PL.shape[1], device=device).expand_as(from_PL)
    expert_R = number_PL.flatten().repeat_interleave(from_PL.flatten(), output_size=arrive)
    order_R = expert_R.argsort(stable=True)
    place_R = torch.empty_like(order_R)
    place_R[order_R] = torch.arange(arrive, device=device)
    ends_L = from_PL.sum(0).cumsum(0).to(torch.int32)
    place = part.place_S.clamp(max=travel)
    return Chunk(begin, end, part.order_S[:travel], place, send, receive, order_R, place_R, ends_L)


@dataclass(frozen=True)
class _Journey:
    """Rows of a chunk that travel to the workers of their experts, and back.

    top_k: number of experts of a token.
    compile: compile the operations on rows.
    """

    chunk: Chunk
    group: ExpertGroup
    top_k: int
    compile: bool

    @property
    def own(self) -> slice:
        """The tokens of the chunk."""
        return slice(self.chunk.begin, self.chunk.end)

    def start_rows(self, rows_TC: Tensor) -> RowMessage:
        """Start to send the row of each pair's token. rows_TC: rows of all own tokens."""
        own, order_S = rows_TC[self.own], self.chunk.order_S
        if self.compile:
            rows = expert_kernels.taken(own, order_S, self.top_k)
        else:
            rows = own.index_select(0, order_S // self.top_k)
        return self.group.start(rows, self.chunk.send, self.chunk.receive)

    def start_scores(self, scores_TK: Tensor) -> RowMessage:
        """Start to send the score of each pair."""
        scores = scores_TK[self.own].flatten()[self.chunk.order_S]
        return self.group.start(scores, self.chunk.send, self.chunk.receive)

    def arrived(self, message: RowMessage) -> Tensor:
        """Wait for rows from all workers. Return them ordered by expert."""
        return self._ordered(message.wait(), self.chunk.order_R)

    def start_back(self, rows_R: Tensor) -> RowMessage:
        """Start to send rows, ordered by expert, back to the workers of their tokens."""
        rows_R = self._ordered(rows_R, self.chunk.place_R)
        return self.group.start(rows_R, self.chunk.receive, self.chunk.send)

    def _ordered(self, rows_R: Tensor, order_R: Tensor) -> Tensor:
        if self.compile and rows_R.ndim > 1:
            return expert_kernels.taken(rows_R, order_R, 1)
        return rows_R[order_R]

    def sums(self, message: RowMessage, high: torch.dtype) -> Tensor:
        """Wait for the rows that return. Return the sum of each token's rows.

        Args:
            high: dtype in which to add up the rows.
        """
        rows_SC = message.wait()
        if self.compile:
            return expert_kernels.summed(rows_SC, self.chunk.place, None, self.top_k)
        padded = functional.pad(rows_SC, (0, 0, 0, 1))  # the row of pairs that did not travel
        rows_TKC = padded[self.chunk.place].unflatten(0, (-1, self.top_k))
        return rows_TKC.sum(1, dtype=high).to(rows_SC.dtype)


class _SharedExperts(torch.autograd.Function):
    """Without recomputation, forward keeps the received rows, the scores, and gate and up.

    With recomputation, the backward pass fetches rows and scores again, chunk by chunk. The second
    forward pass of the checkpoint then has nothing to do.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TC: Tensor, scores_TK: Tensor, gate_up_LWC: Tensor, down_LCI: Tensor,
        chunks: tuple[Chunk, ...], group: ExpertGroup,
        recompute: bool, compile: bool, inputs_only: bool,
    ) -> Tensor:  # fmt: skip
        kept: list[Tensor] = []
        out_TC = x_TC.new_empty(()).expand_as(x_TC) if inputs_only else torch.empty_like(x_TC)

        def compute(chunk: Chunk) -> Iterator[None]:
            journey = _Journey(chunk, group, scores_TK.shape[1], compile)
            rows, scores = journey.start_rows(x_TC), journey.start_scores(scores_TK)
            yield
            x_RC, scores_R1 = journey.arrived(rows), journey.arrived(scores)[:, None]
            gate_up_RW = grouped_rows(x_RC, gate_up_LWC, chunk.ends_L)
            if not recompute:
                kept.extend((x_RC, scores_R1, gate_up_RW))
            del x_RC, rows
            out_RC = outputs(gate_up_RW, scores_R1, down_LCI, chunk.ends_L, compile=compile)
            del gate_up_RW
            back = journey.start_back(out_RC)
            del out_RC
            yield
            out_TC[journey.own] = journey.sums(back, scores_TK.dtype)

        if not inputs_only:
            staggered(map(compute, chunks))
        ctx.chunks, ctx.group, ctx.compile = chunks, group, compile
        ctx.save_for_backward(x_TC, scores_TK, gate_up_LWC, down_LCI, *kept)
        return out_TC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TC: Tensor) -> tuple[Tensor | None, ...]:
        x_TC, scores_TK, gate_up_LWC, down_LCI, *kept = ctx.saved_tensors
        grad_TC = grad_TC.contiguous()
        dx_TC, dscores_TK = torch.empty_like(grad_TC), torch.zeros_like(scores_TK)
        sums = WeightGradients(len(ctx.chunks))

        def compute(number: int, chunk: Chunk) -> Iterator[None]:
            journey = _Journey(chunk, ctx.group, scores_TK.shape[1], ctx.compile)
            messages = [] if kept else [journey.start_rows(x_TC), journey.start_scores(scores_TK)]
            of_grad = journey.start_rows(grad_TC)
            yield
            if kept:
                x_RC, scores_R1, gate_up_RW = kept[3 * number : 3 * number + 3]
            else:
                x_RC = journey.arrived(messages[0])
                scores_R1 = journey.arrived(messages[1])[:, None]
                gate_up_RW = grouped_rows(x_RC, gate_up_LWC, chunk.ends_L)
            rows = [journey.arrived(of_grad)]
            del messages, of_grad
            # The gradient of the down projection follows later, while rows travel.
            later: list[tuple[Tensor, Tensor]] = []
            dgate_up_RW, dscores_R = inner_gradients(
                rows, gate_up_RW, scores_R1, down_LCI, chunk.ends_L,
                lambda grad_RC, inner_RI: later.append((grad_RC, inner_RI)), compile=ctx.compile,
            )  # fmt: skip
            del gate_up_RW
            dx = journey.start_back(grouped_rows_back(dgate_up_RW, gate_up_LWC, chunk.ends_L))
            dscores = journey.start_back(dscores_R)
            # While the gradients travel, add up those of the weights.
            sums.add("down", *later.pop(), chunk.ends_L)
            sums.add("gate_up", dgate_up_RW, x_RC, chunk.ends_L)
            del dgate_up_RW, x_RC
            yield
            dx_TC[journey.own] = journey.sums(dx, scores_TK.dtype)
            dscores_TK[journey.own].view(-1)[chunk.order_S] = dscores.wait()

        staggered(compute(n, chunk) for n, chunk in enumerate(ctx.chunks))
        of_weights = sums.take("gate_up", gate_up_LWC), sums.take("down", down_LCI)
        return dx_TC, dscores_TK, *of_weights, None, None, None, None, None


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
