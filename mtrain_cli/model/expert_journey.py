"""Rows of a tile that travel to the workers of their experts, and back, in one pass.

On a GPU, each step of a journey launches one kernel (`kernels.triton.expert_rows`): the computation
of a part takes so little time that the GPU would wait for the host.

Shape suffixes are those of `expert_parallel.py`. D are the elements of a row of a message, C or
more: a score can be at the end of the row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtrain_cli.model.expert_plan import Part, Tile, fused
from mtrain_cli.model.expert_tiles import inner_gradients, outputs
from mtrain_cli.model.grouped_products import grouped_rows, grouped_rows_back
from mtrain_cli.model.tiling import scored_row
from mtrain_cli.parallel.expert_group import ExpertGroup, RowMessage


def make_journey(tile: Tile, group: ExpertGroup, scores_TK: Tensor) -> Journey:
    """Return the journey of a tile's rows.

    Args:
        scores_TK: scores of all own tokens.
    """
    return (FusedJourney if fused(scores_TK) else Journey)(tile, group, scores_TK)


class Journey:
    """The rows of a tile in one pass. All parts of the tile return to one tensor."""

    def __init__(self, tile: Tile, group: ExpertGroup, scores_TK: Tensor) -> None:
        self._tile, self._group = tile, group
        self._own = slice(tile.begin, tile.end)
        self._scores_TK = scores_TK[self._own]
        self._returned_SD: Tensor | None = None

    def start_rows(self, rows_TC: Tensor, part: Part, *, scored: bool = False) -> RowMessage:
        """Start to send the row of the token of each pair that leaves.

        Args:
            rows_TC: rows of all own tokens.
            scored: send the score of the pair with its row.
        """
        leaving_AD = _message(rows_TC, part.leave.stop - part.leave.start, scored)
        self._leave(rows_TC[self._own], part, leaving_AD, scored)
        return self._group.start(leaving_AD, part.send, part.receive)

    def arrived(
        self, message: RowMessage, rows_TC: Tensor, part: Part, *, scored: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Wait for rows from others. Return them and those that stay, ordered by expert.

        Returns: rows ``[R, C]``, and their scores ``[R, 1]`` if these travelled.
        """
        return self._merged(message.wait(), rows_TC[self._own], part, scored)

    def start_back(
        self, rows_RC: Tensor, part: Part, numbers_R: Tensor | None = None
    ) -> RowMessage:
        """Start to send the rows of others' tokens back, and keep those of own tokens.

        Args:
            rows_RC: rows of a part, ordered by expert.
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
        """Write the sum of each own token's rows, if those of all parts have returned.

        Args:
            out_TC: receives the sums.
            numbers_TK: receives the number of each pair; 0 if no expert computed it.
        """
        returned_SD, self._returned_SD = self._returned_SD, None
        assert returned_SD is not None
        numbers_TK = None if numbers_TK is None else numbers_TK[self._own]
        self._sum(returned_SD, out_TC[self._own], numbers_TK)

    def outputs(
        self, gate_up_RW: Tensor, scores_R1: Tensor, down_LCI: Tensor, ends_L: Tensor
    ) -> Tensor:
        """Return the experts' outputs times the scores, ``[R, C]``."""
        return outputs(gate_up_RW, scores_R1, down_LCI, ends_L)

    def inner_gradients(
        self,
        rows: list[Tensor],
        gate_up_RW: Tensor,
        scores_R1: Tensor,
        down_LCI: Tensor,
        ends_L: Tensor,
        later: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of gate and up and of the scores, as `expert_tiles` does.

        Args:
            later: receives the gradient of the outputs and the input of the down projection, from
                which the gradient of the down projection follows.
        """
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
        self,
        rows_RC: Tensor,
        part: Part,
        leaving_AD: Tensor,
        staying_BD: Tensor,
        numbers_R: Tensor | None,
    ) -> None:
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
        self,
        rows: list[Tensor],
        gate_up_RW: Tensor,
        scores_R1: Tensor,
        down_LCI: Tensor,
        ends_L: Tensor,
        later: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
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
        self,
        rows_RC: Tensor,
        part: Part,
        leaving_AD: Tensor,
        staying_BD: Tensor,
        numbers_R: Tensor | None,
    ) -> None:
        place_R = self._tile.place_R(part)
        self._kernels.parted(rows_RC, place_R, leaving_AD, staying_BD, numbers_R)

    def _sum(self, rows_SD: Tensor, out_TC: Tensor, numbers_TK: Tensor | None) -> None:
        high = self._scores_TK.dtype
        self._kernels.summed(rows_SD, self._tile.place_S, out_TC, high, numbers_TK)


def _message(rows_RC: Tensor, rows: int, scored: bool) -> Tensor:
    """Return an empty message of this many rows."""
    width = rows_RC.shape[1]
    return rows_RC.new_empty(rows, scored_row(width, rows_RC.element_size()) if scored else width)
