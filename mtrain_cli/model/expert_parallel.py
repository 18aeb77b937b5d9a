"""Experts of a layer on several workers: rows of tokens travel to the experts and back.

The tokens are computed in chunks. While a worker computes one chunk, the rows of other chunks are
on their way.

Shape suffixes: T own tokens, C hidden size, E experts, K chosen experts of a token, L own experts,
I width of an expert, W = 2 I, S own pairs of a token and an expert in a chunk, ordered by expert, R
received pairs of a chunk, in the order in which they arrive or ordered by expert.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

from mtrain_cli.model.experts import Experts, expert_layers
from mtrain_cli.model.grouped_products import grouped_rows, grouped_rows_back, grouped_sums
from mtrain_cli.model.routing import Decision
from mtrain_cli.parallel.expert_group import ExpertGroup
from mtrain_cli.parallel.parameter_shards import own_part
from mtrain_cli.parallel.tensor_group import staggered

_CHUNK = 2048  # fewest tokens of a chunk under `auto`
_MOST_CHUNKS = 4


@dataclass(frozen=True)
class ExpertSharing:
    """How workers share the experts of a layer.

    chunks: value of ``topology.expert_chunks``.
    """

    group: ExpertGroup
    chunks: int | str = "auto"

    def plan(self, decision: Decision) -> tuple[Chunk, ...]:
        """Plan how the rows of a decision travel. All workers of the group call this together."""
        return plan_chunks(decision, self)

    def compute(
        self,
        x_TC: Tensor,
        scores_TK: Tensor,
        experts: Experts,
        decision: Decision,
        *,
        inputs_only: bool,
    ) -> Tensor:
        """Return what `compute_experts` returns, with experts on all workers of the group."""
        weights = own_part(experts.gate_up), own_part(experts.down)
        return _SharedExperts.apply(
            x_TC, scores_TK, *weights, decision.chunks, self.group, inputs_only
        )

    def number_of_chunks(self, tokens: int) -> int:
        """Return the number of chunks of a worker's tokens, which all workers must agree on."""
        if isinstance(self.chunks, int):
            return max(1, min(self.chunks, tokens))
        return max(1, min(_MOST_CHUNKS, tokens // _CHUNK))


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


def plan_chunks(decision: Decision, sharing: ExpertSharing) -> tuple[Chunk, ...]:
    """Plan how the rows of a decision travel. All workers of the group call this together."""
    group, chosen_TK = sharing.group, decision.chosen_TK
    (tokens, top_k), experts = chosen_TK.shape, len(decision.ends_E)
    # Pairs that no expert computes have the number `experts`.
    expert_TK = torch.searchsorted(decision.ends_E.long(), decision.place_S, right=True).view(
        tokens, top_k
    )
    count = sharing.number_of_chunks(tokens)
    bounds = [tokens * n // count for n in range(count + 1)]
    numbers = torch.arange(experts, device=chosen_TK.device)
    ordered = [expert_TK[a:b].flatten().sort(stable=True) for a, b in itertools.pairwise(bounds)]
    ends_XE = torch.stack(
        [torch.searchsorted(by_expert, numbers, right=True) for by_expert, _ in ordered]
    )
    counts_XE = ends_XE.diff(prepend=ends_XE.new_zeros(count, 1), dim=1)
    counts_PXE = group.gather_counts(counts_XE)
    own = slice(group.rank * (experts // group.size), (group.rank + 1) * (experts // group.size))
    from_XPL = counts_PXE[:, :, own].transpose(0, 1)
    send_XP = counts_XE.unflatten(1, (group.size, -1)).sum(-1)
    sizes = torch.stack([send_XP, from_XPL.sum(-1)]).tolist()  # waits for the device
    return tuple(
        _chunk(bounds[n], bounds[n + 1], order, sizes[0][n], sizes[1][n], from_XPL[n])
        for n, (_, order) in enumerate(ordered)
    )


def _chunk(
    begin: int, end: int, order: Tensor, send: list[int], receive: list[int], from_PL: Tensor
) -> Chunk:
    pairs, travel, arrive = len(order), sum(send), sum(receive)
    place = torch.full((pairs,), travel, device=order.device)
    place[order[:travel]] = torch.arange(travel, device=order.device)
    number_PL = torch.arange(from_PL.shape[1], device=order.device).expand_as(from_PL)
    expert_R = number_PL.flatten().repeat_interleave(from_PL.flatten(), output_size=arrive)
    order_R = expert_R.argsort(stable=True)
    place_R = torch.empty_like(order_R)
    place_R[order_R] = torch.arange(arrive, device=order.device)
    ends_L = from_PL.sum(0).cumsum(0).to(torch.int32)
    return Chunk(begin, end, order[:travel], place, send, receive, order_R, place_R, ends_L)


class _SharedExperts(torch.autograd.Function):
    """Forward keeps the received rows, so backward does not fetch them again."""

    @staticmethod
    def forward(
        ctx: Any, x_TC: Tensor, scores_TK: Tensor, gate_up_LWC: Tensor, down_LCI: Tensor,
        chunks: tuple[Chunk, ...], group: ExpertGroup, inputs_only: bool,
    ) -> Tensor:  # fmt: skip
        kept: list[Tensor] = []
        out_TC = torch.empty_like(x_TC)

        def compute(chunk: Chunk) -> Iterator[None]:
            own = slice(chunk.begin, chunk.end)
            rows = group.start(_rows(x_TC[own], chunk, scores_TK), chunk.send, chunk.receive)
            scores = group.start(scores_TK[own].flatten()[chunk.order_S], chunk.send, chunk.receive)
            yield
            x_RC, scores_R1 = rows.wait()[chunk.order_R], scores.wait()[chunk.order_R][:, None]
            gate_up_RW = grouped_rows(x_RC, gate_up_LWC, chunk.ends_L)
            kept.extend((x_RC, scores_R1, gate_up_RW))
            if inputs_only:
                return
            gate_RI, up_RI = gate_up_RW.chunk(2, -1)
            inner_RI = functional.silu(gate_RI) * up_RI * scores_R1
            out_RC = grouped_rows(inner_RI.to(x_RC.dtype), down_LCI, chunk.ends_L)
            back = group.start(out_RC[chunk.place_R], chunk.receive, chunk.send)
            del gate_RI, up_RI, inner_RI, out_RC
            yield
            out_TC[own] = _sums(back.wait(), chunk, scores_TK)

        staggered(map(compute, chunks))
        ctx.chunks, ctx.group = chunks, group
        ctx.save_for_backward(scores_TK, gate_up_LWC, down_LCI, *kept)
        return x_TC.new_empty(()).expand_as(x_TC) if inputs_only else out_TC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TC: Tensor) -> tuple[Tensor | None, ...]:
        scores_TK, gate_up_LWC, down_LCI, *kept = ctx.saved_tensors
        chunks, group = ctx.chunks, ctx.group
        grad_TC = grad_TC.contiguous()
        dx_TC, dscores_TK = torch.empty_like(grad_TC), torch.zeros_like(scores_TK)
        dgate_up_LWC, ddown_LCI = torch.zeros_like(gate_up_LWC), torch.zeros_like(down_LCI)

        def compute(number: int, chunk: Chunk) -> Iterator[None]:
            own = slice(chunk.begin, chunk.end)
            rows = group.start(_rows(grad_TC[own], chunk, scores_TK), chunk.send, chunk.receive)
            yield
            grad_RC = rows.wait()[chunk.order_R]
            x_RC, scores_R1, gate_up_RW = kept[3 * number : 3 * number + 3]
            gate_RI, up_RI = gate_up_RW.chunk(2, -1)
            silu_RI = functional.silu(gate_RI)
            outer_RI = silu_RI * up_RI
            dinner_RI = grouped_rows_back(grad_RC, down_LCI, chunk.ends_L)
            dscores_R = (dinner_RI.to(scores_R1.dtype) * outer_RI).sum(-1)
            inner_RI = (outer_RI * scores_R1).to(x_RC.dtype)
            ddown_LCI.add_(grouped_sums(grad_RC, inner_RI, chunk.ends_L))
            douter_RI = (dinner_RI * scores_R1).to(x_RC.dtype)
            dgate_RI = torch.ops.aten.silu_backward(douter_RI * up_RI, gate_RI)
            dgate_up_RW = torch.cat([dgate_RI, douter_RI * silu_RI], -1)
            dx_RC = grouped_rows_back(dgate_up_RW, gate_up_LWC, chunk.ends_L)
            dx = group.start(dx_RC[chunk.place_R], chunk.receive, chunk.send)
            dscores = group.start(dscores_R[chunk.place_R], chunk.receive, chunk.send)
            dgate_up_LWC.add_(grouped_sums(dgate_up_RW, x_RC, chunk.ends_L))
            del grad_RC, silu_RI, outer_RI, dinner_RI, inner_RI, douter_RI, dgate_RI
            del dgate_up_RW, dx_RC, dscores_R
            yield
            dx_TC[own] = _sums(dx.wait(), chunk, scores_TK)
            dscores_TK[own].view(-1)[chunk.order_S] = dscores.wait()

        staggered(compute(n, chunk) for n, chunk in enumerate(chunks))
        return dx_TC, dscores_TK, dgate_up_LWC, ddown_LCI, None, None, None


def _rows(rows: Tensor, chunk: Chunk, scores_TK: Tensor) -> Tensor:
    """Return the row of each pair's token, ordered by expert, ``[S, C]``."""
    return rows.index_select(0, chunk.order_S // scores_TK.shape[1])


def _sums(rows_SC: Tensor, chunk: Chunk, scores_TK: Tensor) -> Tensor:
    """Return the sum of each token's rows, computed in the dtype of the scores."""
    padded = functional.pad(rows_SC, (0, 0, 0, 1))  # the row of pairs that did not travel
    rows_TKC = padded[chunk.place].unflatten(0, (chunk.end - chunk.begin, -1))
    return rows_TKC.sum(1, dtype=scores_TK.dtype).to(rows_SC.dtype)


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
