"""The vertical-slash training pattern of MTraining: block diagonals and single columns, with budgets found online.

A sequence may be spread over several workers. Keys never move: the probed queries go to all workers, each worker scores them against its
own keys, and what is added across workers are integers (`pattern.in_units`), so that the index is the same on all of them, and as on one.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch

from mtrain_cli.attention.device_copy import to_device
from mtrain_cli.attention.index import VerticalSlash
from mtrain_cli.attention.kernel import IndexRequest, accumulation_dtype
from mtrain_cli.sparsity.pattern import (
    MASS_UNITS,
    MOST_UNITS,
    MaskedPositions,
    fewest_lines,
    in_units,
    rank_without_mass,
    ranking,
)

_SCORE_BYTES = 1 << 30  # scores that exist at once while an index is estimated
_COLUMN_STEP = 128  # the width of unbounded columns is a multiple of this
_SMALLEST_TILE, _LARGEST_TILE = (
    16,
    128,
)  # keys of a tile of the fused probe, which has to lie in one block


_ROWS = 64  # of a tile of the fused probe, so that it adds up in one way however many rows are taken at once
Table = tuple[
    int, range, torch.Tensor
]  # a sequence, some of its probed blocks, and their masses [blocks, heads, local columns]


@dataclass(frozen=True)
class Probe:
    """The probed queries of one sequence, in ascending order, and where they meet the shard of this worker; tensors on the device.

    rows: int64 [rows], positions. first: int32 [rows], the first position that each sees. of_row: int64 [rows], the place of the block of
        each among the probed blocks.
    held, slots: int64, the places among the rows of those that this worker holds, and their local slots.
    away: int64 [probed blocks, local blocks], the diagonal on which a local block of keys meets a probed block; 0 for keys of the future,
        which have no mass.
    """

    rows: torch.Tensor
    first: torch.Tensor
    of_row: torch.Tensor
    held: torch.Tensor
    slots: torch.Tensor
    away: torch.Tensor

    @cached_property
    def for_kernels(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """first, rows and of_row, int32."""
        return self.first, self.rows.int(), self.of_row.int()


@dataclass(frozen=True)
class VerticalSlashPattern:
    """Probes queries of one or more windows and keeps the lines that hold a share of their attention (paper section B.1, algorithm 1):
    single columns at token level, slashes pooled over block diagonals, as the kernels compute them.

    last_q: queries of a window, spread evenly over the whole blocks that can hold them (`probed_rows`). windows: how many, evenly spread;
        the last one ends the sequence. One window says little about packed documents, since its queries see only their own.
    p_v, p_s: share of the probed attention that columns and slashes are to hold, each by itself; the line that crosses it is kept.
    joint: columns are counted on the mass outside the chosen slashes only, until both together hold p_v.
    min_columns, max_columns, min_slashes, max_slashes: bounds per head; max 0 = none. Diagonal 0 and the first sink_tokens columns always
    stay,
        and diagonal 1 where min_slashes is above 1: without it the first queries of a block see nothing of the recent past.
    per_group: one index for the query heads that share a key-value head.
    """

    block: int
    last_q: int
    windows: int
    p_v: float
    p_s: float
    joint: bool
    sink_tokens: int
    min_columns: int
    max_columns: int
    min_slashes: int
    max_slashes: int
    per_group: bool
    name: ClassVar[str] = "vertical_slash"
    synthetic: ClassVar[bool] = False

    def request(self) -> IndexRequest:
        return IndexRequest(self.block, bitmap=False)

    def describe(self) -> str:
        last = f"the last {self._span} tokens" + (
            f" of each of {self.windows} windows" if self.windows > 1 else ""
        )
        probe = f"{self.last_q} queries spread over {last}" if self.last_q < self._span else last
        caps = [
            f"{most} {what}"
            for most, what in ((self.max_columns, "columns"), (self.max_slashes, "diagonals"))
            if most
        ]
        joint = ", joint with the diagonals," if self.joint else ""
        told = [
            f"columns that{joint} hold {100 * self.p_v:g}% and block diagonals that hold {100 * self.p_s:g}% of the attention of {probe}",
            *((f"at most {' and '.join(caps)} a head",) if caps else ()),
            *(("one index per key-value group",) if self.per_group else ()),
        ]
        return ", ".join(told)

    def covers(self, seq: int) -> str | None:
        blocks = -(-seq // self.block)
        if self.min_slashes >= blocks:
            return f"at least {self.min_slashes} block diagonals of {self.block} tokens cover"
        if max(self.min_columns, self.sink_tokens) >= seq:
            return f"at least {max(self.min_columns, self.sink_tokens)} columns cover"
        return f"one block of {self.block} tokens covers" if blocks == 1 else None

    def estimate(
        self, q: torch.Tensor, k: torch.Tensor, masked: MaskedPositions, layer: int
    ) -> VerticalSlash:
        """Five collectives over the batch: probed queries, largest scores and their sums per row, diagonals, candidates for columns. Where
        the sums of all rows exceed the budget, each part of the rows takes two.
        """
        group = q.shape[2] // k.shape[2] if self.per_group else 1
        tables, size = self._tables(q, k, masked)
        # The joint budget reads them twice, for diagonals and for the columns outside these; what is large is made twice.
        kept = list(tables()) if self.joint and size <= _SCORE_BYTES else None
        diagonals, vertical = self._totals(kept or tables(), masked, q.shape[2], group, None)
        slashes = self._slashes(diagonals, masked)
        if self.joint:
            _, vertical = self._totals(kept or tables(), masked, q.shape[2], group, slashes)
        columns = self._column_choice(vertical, masked)
        if group > 1:
            slashes, columns = (t.repeat_interleave(group, 1) for t in (slashes, columns))
        return VerticalSlash(self.block, masked.geometry.blocks, slashes, columns, self.max_slashes)

    def mass(self, q: torch.Tensor, k: torch.Tensor, masked: MaskedPositions) -> list[torch.Tensor]:
        """Probed attention, q [batch, tokens, heads, head_dim], k [batch, tokens, kv_heads, head_dim] of this worker.

        Returns for each sequence the attention that each local column gets from the queries of each probed block, float32 (float64 for such
        queries) [probed blocks, heads, local blocks * block], adding up to 1 per head over all workers.
        """
        found: list[list[torch.Tensor]] = [[] for _ in masked.masks]
        for sequence, _, table in self._tables(q, k, masked)[0]():
            found[sequence].append(table)
        return [torch.cat(tables) for tables in found]

    def _tables(
        self, q: torch.Tensor, k: torch.Tensor, masked: MaskedPositions
    ) -> tuple[Callable[[], Iterator[Table]], int]:
        """`mass`, some probed blocks of a sequence at a time, as often as asked for, and the bytes of all of it."""
        probes = self.probes(masked)
        everyone = q.new_zeros(sum(len(p.rows) for p in probes), *q.shape[2:])
        parts = everyone.split([len(p.rows) for p in probes])
        for part, own, probe in zip(parts, q, probes, strict=True):
            part.index_copy_(0, probe.held, own.index_select(0, probe.slots))
        # One worker holds each row, and the others add zeros: exact in any precision.
        masked.group.sum(everyone)
        each = list(zip(parts, k, probes, strict=True))
        heads, width, element = (
            q.shape[2],
            len(masked.host_positions),
            accumulation_dtype(q.dtype).itemsize,
        )
        at_once = max(1, _SCORE_BYTES // (element * heads * width))

        if fused_probe_usable(q, self.block):
            from mtrain_cli.kernels.triton import probe as kernel

            tile, scale = tile_keys(self.block), q.shape[-1] ** -0.5
            places = [p.for_kernels for p in probes]
            fixed = (masked.geometry.key_blocks, self.block, tile, scale)

            def lse_of(b: int, rows: slice) -> torch.Tensor:
                return kernel.tile_lse(
                    parts[b][rows], k[b], *(t[rows] for t in places[b][:2]), *fixed
                )

            def columns_of(b: int, lse: torch.Tensor, blocks: range) -> torch.Tensor:
                first, at, of_row = places[b]
                return kernel.probed_columns(
                    parts[b], k[b], first, at, *fixed, lse, of_row, blocks, width
                )
        else:
            tile = self.block
            hidden = [~masked.visible(b, p.rows, k.shape[1]) for b, p in enumerate(probes)]

            def lse_of(b: int, rows: slice) -> torch.Tensor:
                return _block_lse(parts[b][rows], k[b], hidden[b][rows], self.block)

            def columns_of(b: int, lse: torch.Tensor, blocks: range) -> torch.Tensor:
                of_row, total = probes[b].of_row, len(probes[b].rows)
                if len(blocks) == len(probes[b].away):
                    return _columns(parts[b], k[b], hidden[b], lse, of_row, blocks, total, width)
                some = (of_row >= blocks.start) & (of_row < blocks.stop)
                return _columns(
                    parts[b][some],
                    k[b],
                    hidden[b][some],
                    lse[:, some],
                    of_row[some],
                    blocks,
                    total,
                    width,
                )

        rows = max(
            _ROWS, _SCORE_BYTES // (element * heads * (width // tile) * len(each)) // _ROWS * _ROWS
        )
        logs: list[list[torch.Tensor]] = [[] for _ in each]
        for start in range(0, max(len(p.rows) for p in probes), rows):
            these = [b for b, p in enumerate(probes) if start < len(p.rows)]
            partial = [lse_of(b, slice(start, start + rows)) for b in these]
            merged = _merged(partial, masked).split([t.shape[-1] for t in partial], -1)
            for b, lse in zip(these, merged, strict=True):
                logs[b].append(lse)
            del partial
        lses = [_joined(of_sequence).contiguous() for of_sequence in logs]

        def tables() -> Iterator[Table]:
            for b, probe in enumerate(probes):
                for begin in range(0, len(probe.away), at_once):
                    blocks = range(begin, min(begin + at_once, len(probe.away)))
                    yield b, blocks, columns_of(b, lses[b], blocks)

        return tables, sum(len(p.away) for p in probes) * element * heads * width

    def _totals(
        self,
        tables: Iterable[Table],
        masked: MaskedPositions,
        heads: int,
        group: int,
        chosen: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Probed mass by diagonal, int64 [batch, heads, blocks], and by local column, [batch, heads, columns], in units; of this worker.

        chosen: bool [batch, heads, blocks], diagonals whose mass is left out; None: of all.
        """
        probes, shape = self.probes(masked), (len(masked.masks), heads // group)
        device = masked.geometry.first.device
        diagonals = torch.zeros(*shape, masked.geometry.blocks, dtype=torch.int64, device=device)
        columns: list[torch.Tensor | None] = [None] * len(probes)
        for b, blocks, table in tables:
            for mass, number in zip(table, blocks, strict=True):
                away, units = probes[b].away[number], _units(mass, group)
                by_block = units.unflatten(-1, (-1, self.block))
                if chosen is None:
                    diagonals[b].index_add_(-1, away, by_block.sum(-1))
                else:
                    by_block.masked_fill_(chosen[b][:, away][..., None], 0)
                before = columns[b]
                columns[b] = units if before is None else before.add_(units)
        vertical = [t for t in columns if t is not None]
        assert len(vertical) == len(probes), "every sequence ends with a probed block"
        return diagonals, torch.stack(vertical) if len(vertical) > 1 else vertical[0][None]

    @property
    def _span(self) -> int:
        """Tokens of a window: the fewest whole blocks that can hold its queries."""
        return -(-self.last_q // self.block) * self.block

    def probed_rows(self, length: int) -> torch.Tensor:
        """Positions of the probed queries, int64, ascending, each once.

        A line of tokens lies on one block diagonal for the first rows of a block and on the next one for the others. So every row of a
        block has to be represented alike: the queries of a window stand at equal distances over as many tokens as whole blocks have,
        wherever the window ends. Windows that are closer to each other than that share out the tokens between them.
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
        """One per sequence of the batch, the same for all layers."""
        key = (type(self).__name__, self.last_q, self.windows)
        if key not in masked.cache:
            masked.cache[key] = [self._probe(masked, b) for b in range(len(masked.masks))]
        return masked.cache[key]

    def _probe(self, masked: MaskedPositions, sequence: int) -> Probe:
        geometry, device = masked.geometry, masked.geometry.first.device
        positions = self.probed_rows(masked.masks[sequence].length)
        numbers, of_row = torch.unique(positions // self.block, return_inverse=True)
        slots = np.searchsorted(masked.host_positions, positions.numpy())
        held = np.flatnonzero(
            masked.host_positions[np.minimum(slots, len(masked.host_positions) - 1)]
            == positions.numpy()
        )
        rows = to_device(positions, device)
        return Probe(
            rows=rows,
            first=geometry.first[sequence].index_select(0, rows),
            of_row=to_device(of_row, device),
            held=to_device(held, device),
            slots=to_device(slots[held], device),
            away=to_device(
                (numbers[:, None] - torch.from_numpy(masked.numbers)).clamp(min=0), device
            ),
        )

    def _slashes(self, diagonals: torch.Tensor, masked: MaskedPositions) -> torch.Tensor:
        """diagonals: mass of this worker, as `_totals` -> bool like it."""
        blocks = masked.geometry.blocks
        units = masked.group.sum(diagonals).clamp_(max=MOST_UNITS)
        least = max(1, self.min_slashes)
        forced = min(2, least)
        key = (type(self).__name__, "diagonals", forced)
        if key not in masked.cache:
            numbers = torch.arange(blocks, device=diagonals.device)
            masked.cache[key] = rank_without_mass(numbers < forced, numbers, blocks)
        order, total = ranking(units, masked.cache[key]), units.sum(-1, keepdim=True)
        lines, keep = fewest_lines(
            order, total, self.p_s, least, self.max_slashes or blocks, blocks
        )
        return torch.zeros_like(diagonals, dtype=torch.bool).scatter_(-1, lines, keep)

    def _column_choice(self, vertical: torch.Tensor, masked: MaskedPositions) -> torch.Tensor:
        """vertical: mass of this worker, as `_totals`, with the joint budget that outside the slashes -> int32 [batch, heads, width],
        ascending.
        """
        tokens = masked.geometry.blocks * self.block
        most = self.max_columns or tokens
        key = (type(self).__name__, "columns", self.sink_tokens)
        if key not in masked.cache:
            without_mass = rank_without_mass(
                masked.positions < self.sink_tokens, masked.positions, tokens
            )
            masked.cache[key] = (
                without_mass,
                torch.full((), tokens, dtype=torch.int32, device=vertical.device),
            )
        without_mass, unused = masked.cache[key]
        left = vertical.sum(-1, keepdim=True)
        order = ranking(vertical.clamp_(max=MOST_UNITS), without_mass)
        if masked.group.size > 1:
            if most < order.shape[-1]:
                # The largest of all are among the largest of each worker.
                order = torch.topk(order, most, dim=-1, sorted=False).values
            everyone = masked.group.gather(torch.cat([order, left], -1))
            left = everyone[..., -1:].sum(0)
            order = everyone[..., :-1].permute(1, 2, 0, 3).flatten(2)
        share: float | torch.Tensor = self.p_v
        if self.joint:
            # Slashes hold what is not outside; columns have to bring what is missing to p_v of all.
            share = ((left - (1 - self.p_v) * MASS_UNITS) / left.clamp(min=1)).clamp(min=0.0)
        lines, keep = fewest_lines(
            order, left, share, max(self.sink_tokens, self.min_columns), most, tokens
        )
        if masked.padded:
            # Padding is never chosen, not even where more columns are asked for than there are tokens.
            keep &= lines < masked.lengths[:, None, None]
        columns = torch.where(keep, lines.int(), unused).sort(-1).values
        if not self.max_columns:
            # Without a bound the host has to know how many there are, or every later step would work on as many as there are tokens.
            widest = int(keep.sum(-1).max())
            columns = columns[
                ..., : min(tokens, max(1, -(-widest // _COLUMN_STEP)) * _COLUMN_STEP)
            ].contiguous()
        return columns


def fused_probe_usable(q: torch.Tensor, block: int) -> bool:
    """Whether the Triton kernels, which never write scores to memory, can serve the queries."""
    shapes = (
        q.shape[-1] in (16, 32, 64, 128)
        and tile_keys(block) >= _SMALLEST_TILE
        and q.dtype != torch.float64
    )
    return q.is_cuda and shapes and importlib.util.find_spec("triton") is not None


def tile_keys(block: int) -> int:
    """Keys of a tile of the fused probe: a power of two that divides the block."""
    return math.gcd(block, _LARGEST_TILE)


def _units(mass: torch.Tensor, group: int) -> torch.Tensor:
    """[heads, columns] -> int64 [heads / group, columns], the mean mass of each group of heads in units."""
    units = in_units(mass)
    return units if group == 1 else units.unflatten(0, (-1, group)).sum(1) // group


def _merged(partial: list[torch.Tensor], masked: MaskedPositions) -> torch.Tensor:
    """Log-sum-exp of rows over the keys of all workers, [heads, rows of all sequences], from that over tiles [tiles, heads, rows] of each
    sequence; the partial results are overwritten. +inf for a row that sees nothing.

    Tiles lie within blocks, so they are the same whoever holds them; their sums are added as integers, so the result is, too.
    """
    dtype = partial[0].dtype
    top = masked.group.max(_joined([t.amax(0) for t in partial])).clamp_(min=torch.finfo(dtype).min)
    totals = []
    for tiles, largest in zip(partial, top.split([t.shape[-1] for t in partial], -1), strict=True):
        units = tiles.sub_(largest).exp_().mul_(MASS_UNITS).round_()
        at_once = max(1, _SCORE_BYTES // (8 * units[:, 0].numel()))
        totals.append(_joined([heads.long().sum(0) for heads in units.split(at_once, 1)], 0))
    total = masked.group.sum(_joined(totals))
    # A power of two: exact, as a division is. log(0) is -inf.
    lse = (total * torch.tensor(1 / MASS_UNITS, dtype=torch.float64)).log_().add_(top)
    return lse.nan_to_num_(nan=float("inf"), posinf=float("inf"), neginf=float("inf")).to(dtype)


def _joined(parts: list[torch.Tensor], dim: int = -1) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _scores(
    q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Scores of probed queries q [rows, heads, head_dim] with k [keys, kv_heads, head_dim], as many heads at once as the budget allows.

    Yields the query heads and their scores [heads, rows, keys], -inf where hidden [rows, keys] or not finite.
    """
    heads, dim = q.shape[1:]
    keys, kv_heads = k.shape[:2]
    dtype, per_kv = accumulation_dtype(q.dtype), heads // kv_heads
    probe = q.to(dtype).unflatten(1, (kv_heads, -1))
    at_once = max(1, _SCORE_BYTES // (4 * len(q) * keys * per_kv))
    for g in range(0, kv_heads, at_once):
        queries = (
            probe[:, g : g + at_once].permute(1, 2, 0, 3).flatten(1, 2)
        )  # [kv heads, group * rows, dim]
        scores = (
            (queries @ k[:, g : g + at_once].permute(1, 2, 0).to(dtype))
            .mul_(dim**-0.5)
            .view(-1, len(q), keys)
        )
        first = g * per_kv
        yield (
            slice(first, first + len(scores)),
            scores.masked_fill_(hidden | ~(scores < float("inf")), float("-inf")),
        )


def _block_lse(q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor, block: int) -> torch.Tensor:
    """-> log-sum-exp of each row over each local block, [local blocks, heads, rows]."""
    short = -len(k) % block
    parts = []
    for _, scores in _scores(q, k, hidden):
        scores = (
            torch.nn.functional.pad(scores, (0, short), value=float("-inf")) if short else scores
        )
        parts.append(scores.unflatten(-1, (-1, block)).logsumexp(-1).permute(2, 0, 1))
    return torch.cat(parts, 1)


def _columns(
    q: torch.Tensor,
    k: torch.Tensor,
    hidden: torch.Tensor,
    lse: torch.Tensor,
    of_row: torch.Tensor,
    groups: range,
    total: int,
    width: int,
) -> torch.Tensor:
    """Attention of probed queries summed per group and local key, over the total number of queries, given lse [heads, rows] over all keys.

    of_row: the group of each query; groups: those wanted. -> [groups, heads, width].
    """
    columns = torch.zeros(len(groups), q.shape[1], width, dtype=lse.dtype, device=q.device)
    mean_of = (of_row == torch.arange(groups.start, groups.stop, device=q.device)[:, None]).to(
        lse.dtype
    ) / total
    for heads, scores in _scores(q, k, hidden):
        p = scores.sub_(lse[heads, :, None]).exp_()
        columns[:, heads, : len(k)] = (mean_of @ p).transpose(0, 1)
    return columns
