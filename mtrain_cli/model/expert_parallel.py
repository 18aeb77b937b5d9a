"""Experts of a layer on several workers: rows of tokens travel to the experts and back.

Tokens are computed in tiles, as many as memory needs, and a worker's experts in parts: while it
computes one part, the rows of other parts are on their way. Unlike tiles, parts read each weight
once and need no sums of gradients. Rows of a worker's own experts are in no message.

Shape suffixes: T own tokens, C hidden size, E experts, K chosen experts of a token, P workers of
the group, L own experts, J parts, I width of an expert, W = 2 I. S own pairs of a token and an
expert in a tile. R pairs of a part that this worker computes, ordered by expert. Of these, A arrive
from others and B belong to own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from mtrain_cli.model.expert_journey import Journey, Part, Tile, make_journey, start_plan
from mtrain_cli.model.expert_products import WeightGradients, grouped_rows, grouped_rows_back
from mtrain_cli.model.experts import Experts, expert_layers
from mtrain_cli.model.routing import Decision
from mtrain_cli.parallel.expert_group import ExpertGroup
from mtrain_cli.parallel.tensor_group import own_part, staggered


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
        """Return what `expert_journey.start_plan` returns."""
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
