"""The vertical-slash pattern of MTraining: slashes and columns with budgets found online.

A sequence may be sharded over several workers. Workers add up integers
(`pattern.to_mass_units`), so any number of workers finds the same index.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from mtrain_cli.attention.index import VerticalSlash
from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.config.pattern_settings import VerticalSlashSettings
from mtrain_cli.sparsity.pattern import (
    MASS_UNITS,
    MOST_UNITS,
    MaskedPositions,
    base_rank_keys,
    rank_keys,
    select_ranked,
    to_mass_units,
)
from mtrain_cli.sparsity.probe import Probe, Table, probed_attention

_COLUMN_STEP = 128  # the width of unbounded columns is a multiple of this


@dataclass(frozen=True)
class VerticalSlashPattern(VerticalSlashSettings):
    """Choose the columns and slashes that hold a share of probed attention.

    This is MTraining's section B.1 and algorithm 1. A column is a single key. A slash is a block
    diagonal, and its mass is the sum over its blocks.

    - `probed_rows` chooses the ``last_q`` probed queries of each window. Each of these queries sees
      only its own packed document.
    - The column or slash that crosses the share is kept.
    - With ``joint``, slashes and columns together hold the share p_v: the columns count only mass
      outside the chosen slashes.
    - Diagonal 0 is always kept. Diagonal 1 is kept if min_slashes is above 1: without diagonal 1,
      the first queries of a block would not see the recent past.
    """

    @property
    def per_group(self) -> bool:
        """Whether the query heads that share a KV head share one index."""
        return self.index_per == "kv_group"

    def request(self) -> IndexRequest:
        return IndexRequest(self.block, bitmap=False)

    def describe(self) -> str:
        probe = f"the last {self._span} tokens"
        if self.windows > 1:
            probe += f" of each of {self.windows} windows"
        if self.last_q < self._span:
            probe = f"{self.last_q} queries spread over {probe}"
        bounds = ((self.max_columns, "columns"), (self.max_slashes, "diagonals"))
        caps = [f"{at_most} {kind}" for at_most, kind in bounds if at_most]
        joint = ", joint with the diagonals," if self.joint else ""
        parts = [
            f"columns that{joint} hold {100 * self.p_v:g}% and block diagonals that hold "
            f"{100 * self.p_s:g}% of the attention of {probe}"
        ]
        if caps:
            parts.append(f"at most {' and '.join(caps)} per head")
        if self.per_group:
            parts.append("one index per KV head")
        return ", ".join(parts)

    def covers(self, seq: int) -> str | None:
        blocks, columns = -(-seq // self.block), max(self.min_columns, self.sink_tokens)
        if self.min_slashes >= blocks:
            return f"at least {self.min_slashes} block diagonals of {self.block} tokens cover"
        if columns >= seq:
            return f"at least {columns} columns cover"
        return f"one block of {self.block} tokens covers" if blocks == 1 else None

    def estimate(
        self, q: torch.Tensor, k: torch.Tensor, masked: MaskedPositions, layer: int
    ) -> VerticalSlash:
        """Estimate the index, with five collectives over the batch.

        Three collectives belong to `ProbedAttention`. The other two sum the mass of the diagonals
        and gather the candidate columns.
        """
        group = q.shape[2] // k.shape[2] if self.per_group else 1
        attention = probed_attention(q, k, self.probes(masked), masked)
        # A joint budget reads the tables twice: for the diagonals, and for the columns outside the
        # chosen diagonals. Tables too large to keep are computed twice.
        cached = list(attention.tables()) if self.joint and attention.is_small else None
        shape = len(masked.masks), q.shape[2] // group
        diagonals, vertical = self._totals(cached or attention.tables(), masked, shape, None)
        slashes = self._slashes(diagonals, masked)
        if self.joint:
            _, vertical = self._totals(cached or attention.tables(), masked, shape, slashes)
        columns = self._column_choice(vertical, masked)
        if group > 1:
            slashes, columns = (t.repeat_interleave(group, 1) for t in (slashes, columns))
        return VerticalSlash(self.block, masked.geometry.blocks, slashes, columns, self.max_slashes)

    def mass(self, q: torch.Tensor, k: torch.Tensor, masked: MaskedPositions) -> list[torch.Tensor]:
        """Return the mass that the probed queries give to local keys, one tensor per sequence.

        Returns:
            [probed blocks, heads, local blocks * block]; see `ProbedAttention.tables`.
        """
        masses: list[list[torch.Tensor]] = [[] for _ in masked.masks]
        for sequence, _, table in probed_attention(q, k, self.probes(masked), masked).tables():
            masses[sequence].append(table)
        return [torch.cat(tables) for tables in masses]

    def _totals(
        self,
        tables: Iterable[Table],
        masked: MaskedPositions,
        shape: tuple[int, int],
        chosen: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this worker's probed mass per diagonal and per local column."""
        probes, device = self.probes(masked), masked.device
        diagonals = torch.zeros(*shape, masked.geometry.blocks, dtype=torch.int64, device=device)
        columns: dict[int, torch.Tensor] = {}
        for b, blocks, table in tables:
            for mass, number in zip(table, blocks, strict=True):
                met, units = probes[b].diagonals[number], _units(mass, len(mass) // shape[1])
                by_block = units.unflatten(-1, (-1, self.block))
                if chosen is None:
                    diagonals[b].index_add_(-1, met, by_block.sum(-1))
                else:
                    by_block.masked_fill_(chosen[b][:, met][..., None], 0)
                columns[b] = columns[b].add_(units) if b in columns else units
        assert len(columns) == len(probes), "every sequence ends with a probed block"
        vertical = list(columns.values())
        return diagonals, torch.stack(vertical) if len(vertical) > 1 else vertical[0][None]

    @property
    def _span(self) -> int:
        """Number of last tokens of a window from which `probed_rows` takes the probed queries."""
        return -(-self.last_q // self.block) * self.block

    def probed_rows(self, length: int) -> torch.Tensor:
        """Return the positions of the probed queries, int64, ascending, distinct.

        The probed queries of a window are evenly spaced over its last `_span` tokens, or over the
        whole window if it is shorter. Even spacing samples every offset within a block equally. The
        offset matters because a diagonal of tokens crosses two block diagonals: the first queries
        of a block meet it in one block diagonal, the later queries in the other.
        """
        rows, before = [], 0
        for window in range(self.windows):
            end = length * (window + 1) // self.windows
            start = max(before, end - self._span)
            count = min(self.last_q, end - start)
            rows.append(start + (2 * torch.arange(count) + 1) * (end - start) // max(1, 2 * count))
            before = end
        return torch.cat(rows)

    def probes(self, masked: MaskedPositions) -> list[Probe]:
        key = (type(self).__name__, self.last_q, self.windows)
        if key not in masked.cache:
            masked.cache[key] = [
                Probe.make(self.probed_rows(mask.length), masked, sequence)
                for sequence, mask in enumerate(masked.masks)
            ]
        return masked.cache[key]

    def _slashes(self, diagonals: torch.Tensor, masked: MaskedPositions) -> torch.Tensor:
        blocks = masked.geometry.blocks
        units = masked.group.sum(diagonals).clamp_(max=MOST_UNITS)
        at_least = max(1, self.min_slashes)
        forced = min(2, at_least)
        key = (type(self).__name__, "diagonals", forced)
        if key not in masked.cache:
            numbers = torch.arange(blocks, device=diagonals.device)
            masked.cache[key] = base_rank_keys(numbers < forced, numbers, blocks)
        order, total = rank_keys(units, masked.cache[key]), units.sum(-1, keepdim=True)
        candidates, keep = select_ranked(
            order, total, self.p_s, at_least, self.max_slashes or blocks, blocks
        )
        return torch.zeros_like(diagonals, dtype=torch.bool).scatter_(-1, candidates, keep)

    def _column_choice(self, vertical: torch.Tensor, masked: MaskedPositions) -> torch.Tensor:
        """Return the positions of the chosen columns, int32 [batch, heads, width], ascending."""
        tokens = masked.geometry.blocks * self.block
        at_most = self.max_columns or tokens
        key = (type(self).__name__, "columns", self.sink_tokens)
        if key not in masked.cache:
            is_sink = masked.positions < self.sink_tokens
            masked.cache[key] = (
                base_rank_keys(is_sink, masked.positions, tokens),
                torch.full((), tokens, dtype=torch.int32, device=vertical.device),
            )
        without_mass, unused = masked.cache[key]
        column_mass = vertical.sum(-1, keepdim=True)
        order = rank_keys(vertical.clamp_(max=MOST_UNITS), without_mass)
        if masked.group.size > 1:
            if at_most < order.shape[-1]:
                # The largest rank keys of all workers are among the largest of each worker.
                order = torch.topk(order, at_most, dim=-1, sorted=False).values
            gathered = masked.group.gather(torch.cat([order, column_mass], -1))
            column_mass = gathered[..., -1:].sum(0)
            order = gathered[..., :-1].permute(1, 2, 0, 3).flatten(2)
        share: float | torch.Tensor = self.p_v
        if self.joint:
            # Slashes hold 1 - column_mass, so columns must add p_v - (1 - column_mass).
            wanted = column_mass - (1 - self.p_v) * MASS_UNITS
            share = (wanted / column_mass.clamp(min=1)).clamp(min=0.0)
        candidates, keep = select_ranked(
            order, column_mass, share, max(self.sink_tokens, self.min_columns), at_most, tokens
        )
        if masked.padded:
            # Never choose padding, even if the settings ask for more columns than there are tokens.
            keep &= candidates < masked.tables.lengths[:, None, None]
        columns = torch.where(keep, candidates.int(), unused).sort(-1).values
        if not self.max_columns:
            # Without a bound the width is the number of tokens. Wait for the device to learn how
            # many columns are in use, and cut the width: all later work grows with it.
            steps = max(1, -(-int(keep.sum(-1).max()) // _COLUMN_STEP))
            columns = columns[..., : min(tokens, steps * _COLUMN_STEP)].contiguous()
        return columns


def make_pattern(settings: VerticalSlashSettings, seed: int) -> VerticalSlashPattern:
    return VerticalSlashPattern(**vars(settings))


def _units(mass: torch.Tensor, group: int) -> torch.Tensor:
    """Return the mean mass of each group of ``group`` heads, int64 [heads / group, columns]."""
    units = to_mass_units(mass)
    return units if group == 1 else units.unflatten(0, (-1, group)).sum(1) // group
