"""The vertical-slash pattern of MTraining: slashes and columns with budgets found online.

A sequence may be sharded over several workers. Workers add up integers
(`pattern.to_mass_units`), so any number of workers finds the same index.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from mtrain_cli.attention.device_copy import to_device
from mtrain_cli.attention.index import VerticalSlash
from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.attention.partials import Pair, Triple, accumulation_dtype, has_triton
from mtrain_cli.config.pattern_settings import VerticalSlashSettings
from mtrain_cli.sparsity.pattern import (
    MASS_UNITS,
    MOST_UNITS,
    MaskedPositions,
    Selection,
    base_rank_keys,
    rank_keys,
    to_mass_units,
)

_UNIT = torch.tensor(1 / MASS_UNITS, dtype=torch.float64, device="cpu")
_SCORE_BYTES = 1 << 30  # maximum bytes of scores, or of tables, at a time
# Keys per tile of the fused probe; a tile lies within a block.
_SMALLEST_TILE, _LARGEST_TILE = 16, 128
# Rows per tile of the fused probe. Chunks of rows are multiples, so sums do not depend on chunks.
_ROWS = 64
# A sequence, some of its probed blocks, and their mass [blocks, heads, local columns].
Table = tuple[int, range, Tensor]


@dataclass(frozen=True)
class Probe:
    """The probed queries of one sequence, whose attention to all keys is computed, on the device.

    A probed block is a query block that contains a probed query; with ``by_row``, each probed query
    is one.

    rows: int64 [rows], positions of the probed queries, ascending.
    row_blocks: int64 [rows], index of each query's block among the probed blocks.
    local: int64 [local rows], indices into ``rows`` of the queries that this worker holds.
    diagonals: int64 [probed blocks, local blocks], block diagonal of a probed block and a local key
        block; 0 if the keys are in the future and so have no mass.
    """

    rows: Tensor
    first: Tensor
    row_blocks: Tensor
    local: Tensor
    slots: Tensor
    diagonals: Tensor

    @staticmethod
    def make(
        positions: Tensor, masked: MaskedPositions, sequence: int, *, by_row: bool = False
    ) -> Probe:
        device = masked.device
        numbers, row_blocks = positions // masked.tables.block, torch.arange(len(positions))
        if not by_row:
            numbers, row_blocks = torch.unique(numbers, return_inverse=True)
        slots = np.searchsorted(masked.host_positions, positions.numpy())
        nearest = masked.host_positions[np.minimum(slots, len(masked.host_positions) - 1)]
        local = np.flatnonzero(nearest == positions.numpy())
        diagonals = (numbers[:, None] - torch.from_numpy(masked.numbers)).clamp(min=0)
        rows = to_device(positions, device)
        return Probe(
            rows=rows,
            first=masked.tables.first[sequence].index_select(0, rows),
            row_blocks=to_device(row_blocks, device),
            local=to_device(local, device),
            slots=to_device(slots[local], device),
            diagonals=to_device(diagonals, device),
        )

    @cached_property
    def for_kernels(self) -> Triple:
        return self.first, self.rows.int(), self.row_blocks.int()


class ProbedAttention:
    """The attention from the probed queries of a batch to this worker's keys.

    The constructor computes each probed query's log-sum-exp over the keys of all workers. One
    collective gathers the probed queries, and two merge the log-sum-exps of all tiles, or of each
    chunk of queries if the log-sum-exps of all queries exceed the memory budget.

    fused: whether Triton kernels compute it, which never store scores.
    tile: number of keys per tile, a divisor of the block size.
    """

    def __init__(
        self, q: Tensor, k: Tensor, probes: Sequence[Probe], masked: MaskedPositions
    ) -> None:
        self.k, self.probes, self.masked = k, probes, masked
        self.block, self.width = masked.tables.block, len(masked.host_positions)
        self.fused = fused_probe_usable(q, self.block)
        self.tile = tile_keys(self.block) if self.fused else self.block
        blocks = masked.geometry.key_blocks
        self._of_keys = blocks, self.block, self.tile, q.shape[-1] ** -0.5
        self._hidden = (
            []
            if self.fused
            else [~masked.visible(b, p.rows, k.shape[1]) for b, p in enumerate(probes)]
        )
        self.queries = self._gather_queries(q)
        # Bytes of one number for every head.
        self._head_bytes = accumulation_dtype(q.dtype).itemsize * q.shape[2]
        self._lse = self._merged_lse()

    @property
    def is_small(self) -> bool:
        """Whether all tables together fit the memory budget."""
        blocks = sum(len(probe.diagonals) for probe in self.probes)
        return blocks * self._head_bytes * self.width <= _SCORE_BYTES

    def tables(self) -> Iterator[Table]:
        """Yield tables of the mass that each probed block gives each local column.

        A table covers as many probed blocks of one sequence as the memory budget allows. Over the
        probed blocks of a sequence and the columns of all workers, the mass of a head sums to 1.
        """
        at_once = max(1, _SCORE_BYTES // (self._head_bytes * self.width))
        for b, probe in enumerate(self.probes):
            for begin in range(0, len(probe.diagonals), at_once):
                blocks = range(begin, min(begin + at_once, len(probe.diagonals)))
                yield b, blocks, self._columns(b, self._lse[b], blocks)

    def _gather_queries(self, q: Tensor) -> Sequence[Tensor]:
        """Return the probed queries of each sequence, [rows, heads, head_dim], from all workers."""
        counts = [len(probe.rows) for probe in self.probes]
        everyone = q.new_zeros(sum(counts), *q.shape[2:])
        queries = everyone.split(counts)
        for target, own, probe in zip(queries, q, self.probes, strict=True):
            target.index_copy_(0, probe.local, own.index_select(0, probe.slots))
        # One worker has each query and the others add zeros, so the sum is exact in any precision.
        self.masked.group.sum(everyone)
        return queries

    def _merged_lse(self) -> list[Tensor]:
        """Return each sequence's log-sum-exps over the keys of all workers, [heads, rows]."""
        bytes_a_row = self._head_bytes * (self.width // self.tile) * len(self.probes)
        rows = max(_ROWS, _SCORE_BYTES // bytes_a_row // _ROWS * _ROWS)
        chunks: list[list[Tensor]] = [[] for _ in self.probes]
        for start in range(0, max(len(p.rows) for p in self.probes), rows):
            pending = [b for b, p in enumerate(self.probes) if start < len(p.rows)]
            partial = [self._tile_lse(b, slice(start, start + rows)) for b in pending]
            merged = _merge_lse(partial, self.masked).split([t.shape[-1] for t in partial], -1)
            for b, lse in zip(pending, merged, strict=True):
                chunks[b].append(lse)
            del partial
        return [_concatenate(parts).contiguous() for parts in chunks]

    def _tile_lse(self, b: int, rows: slice) -> Tensor:
        """Return log-sum-exps over each tile of local keys, [tiles, heads, rows]."""
        queries, probe = self.queries[b][rows], self.probes[b]
        if self.fused:
            from mtrain_cli.kernels.triton import probe as kernel

            first, at, _ = (t[rows] for t in probe.for_kernels)
            return kernel.tile_lse(queries, self.k[b], first, at, *self._of_keys)
        missing = -self.k.shape[1] % self.block
        parts = []
        for _, scores in _scores(queries, self.k[b], self._hidden[b][rows]):
            if missing:
                scores = torch.nn.functional.pad(scores, (0, missing), value=float("-inf"))
            parts.append(scores.unflatten(-1, (-1, self.block)).logsumexp(-1).permute(2, 0, 1))
        return torch.cat(parts, 1)

    def _columns(self, b: int, lse: Tensor, blocks: range) -> Tensor:
        """Return the mass that probed blocks give each local column, [blocks, heads, columns]."""
        q, k, probe = self.queries[b], self.k[b], self.probes[b]
        if self.fused:
            from mtrain_cli.kernels.triton import probe as kernel

            first, at, row_blocks = probe.for_kernels
            return kernel.probed_columns(
                q, k, first, at, *self._of_keys, lse, row_blocks, blocks, self.width
            )
        total, hidden, row_blocks = len(q), self._hidden[b], probe.row_blocks
        if len(blocks) < len(probe.diagonals):
            chosen = (row_blocks >= blocks.start) & (row_blocks < blocks.stop)
            q, hidden, lse = q[chosen], hidden[chosen], lse[:, chosen]
            row_blocks = row_blocks[chosen]
        columns = torch.zeros(len(blocks), q.shape[1], self.width, dtype=lse.dtype, device=q.device)
        numbers = torch.arange(blocks.start, blocks.stop, device=q.device)[:, None]
        weights = (row_blocks == numbers).to(lse.dtype) / total
        for heads, scores in _scores(q, k, hidden):
            p = scores.sub_(lse[heads, :, None]).exp_()
            columns[:, heads, : len(k)] = (weights @ p).transpose(0, 1)
        return columns


def fused_probe_usable(q: Tensor, block: int) -> bool:
    if not q.is_cuda or q.dtype == torch.float64 or q.shape[-1] not in (16, 32, 64, 128):
        return False
    return tile_keys(block) >= _SMALLEST_TILE and has_triton()


def tile_keys(block: int) -> int:
    """Return the keys per tile of the fused probe: a power of two that divides the block."""
    return math.gcd(block, _LARGEST_TILE)


def _merge_lse(partial: list[Tensor], masked: MaskedPositions) -> Tensor:
    """Merge the log-sum-exps of tiles over all workers, [heads, rows of all sequences]."""
    # A row that sees no key gets +inf. Each tile lies within a block, and tiles are added as
    # integers, so the result does not depend on which worker holds a block.
    dtype = partial[0].dtype
    sizes = [t.shape[-1] for t in partial]
    highest = masked.group.max(_concatenate([t.amax(0) for t in partial]))
    highest = highest.clamp_(min=torch.finfo(dtype).min)
    totals = []
    for tiles, largest in zip(partial, highest.split(sizes, -1), strict=True):
        units = tiles.sub_(largest).exp_().mul_(MASS_UNITS).round_()
        at_once = max(1, _SCORE_BYTES // (8 * units[:, 0].numel()))
        totals.append(_concatenate([heads.long().sum(0) for heads in units.split(at_once, 1)], 0))
    total = masked.group.sum(_concatenate(totals))
    # Scaling by a power of two is exact. log(0) is -inf.
    lse = (total * _UNIT).log_().add_(highest)
    return lse.nan_to_num_(nan=float("inf"), posinf=float("inf"), neginf=float("inf")).to(dtype)


def _concatenate(parts: list[Tensor], dim: int = -1) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _scores(q: Tensor, k: Tensor, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield (slice of the query heads, scores [heads, rows, keys]) within the memory budget."""
    heads, dim = q.shape[1:]
    keys, kv_heads = k.shape[:2]
    dtype, per_kv = accumulation_dtype(q.dtype), heads // kv_heads
    grouped = q.to(dtype).unflatten(1, (kv_heads, -1))
    at_once = max(1, _SCORE_BYTES // (4 * len(q) * keys * per_kv))
    for g in range(0, kv_heads, at_once):
        # [kv heads, group * rows, dim]
        queries = grouped[:, g : g + at_once].permute(1, 2, 0, 3).flatten(1, 2)
        products = queries @ k[:, g : g + at_once].permute(1, 2, 0).to(dtype)
        scores = products.mul_(dim**-0.5).view(-1, len(q), keys)
        first = g * per_kv
        scores.masked_fill_(hidden | ~(scores < float("inf")), float("-inf"))
        yield slice(first, first + len(scores)), scores


_COLUMN_STEP = 128  # the width of unbounded columns is a multiple of this


@dataclass(frozen=True)
class VerticalSlashPattern(VerticalSlashSettings):
    """Choose the columns and slashes that hold a share of probed attention.

    This is MTraining's section B.1 and algorithm 1: a column is a single key, a slash a block
    diagonal with the mass of its blocks. The line that crosses the share is kept. With ``joint``,
    slashes and columns together hold the share p_v: columns count only mass outside the slashes.
    With ``p_of=rest``, no line counts mass in the columns and slashes that are always kept.
    Diagonal 0 is always kept, and diagonal 1 if min_slashes is above 1: without it, the first
    queries of a block would not see the recent past.

    With ``slash_unit=token``, this is the rule of the released code (`vertical_slash_utils.py`):
    shares are of single diagonals of tokens and leave out the line that crosses them, and each
    chosen diagonal keeps the one or two block diagonals that it touches. There, block diagonal 0 is
    kept by unused entries of the list.
    """

    @property
    def by_token(self) -> bool:
        return self.slash_unit == "token"

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
        joint = ", joint with the diagonals," if self.joint else ""
        bounds = ((self.max_columns, "columns"), (self.max_slashes, "diagonals"))
        caps = " and ".join(f"{at_most} {kind}" for at_most, kind in bounds if at_most)
        diagonals = "the blocks of token diagonals" if self.by_token else "block diagonals"
        return (
            f"columns that{joint} hold {100 * self.p_v:g}% and {diagonals} that hold "
            f"{100 * self.p_s:g}% of the attention of {probe}"
            + (" outside the lines that are always kept" if self.p_of == "rest" else "")
            + (f", at most {caps} per head" if caps else "")
            + (", one index per KV head" if self.per_group else "")
        )

    def estimate(self, q: Tensor, k: Tensor, masked: MaskedPositions, layer: int) -> VerticalSlash:
        """Estimate the index, with five collectives over the batch."""
        group = q.shape[2] // k.shape[2] if self.per_group else 1
        attention = ProbedAttention(q, k, self.probes(masked), masked)
        # A joint budget reads the tables twice: for the diagonals, and for the columns outside the
        # chosen diagonals. Tables too large to keep are computed twice.
        cached = list(attention.tables()) if self.joint and attention.is_small else None
        shape = len(masked.masks), q.shape[2] // group
        diagonals, vertical = self._totals(cached or attention.tables(), masked, shape, None)
        diagonals = masked.group.sum(diagonals)
        slashes = self._slashes(diagonals.clamp(max=MOST_UNITS), masked)
        if self.joint:
            _, vertical = self._totals(cached or attention.tables(), masked, shape, slashes)
        whole = diagonals.sum(-1, keepdim=True) if self.p_of == "rest" else MASS_UNITS
        columns = self._column_choice(vertical, masked, whole)
        if group > 1:
            slashes, columns = (t.repeat_interleave(group, 1) for t in (slashes, columns))
        most = self.slash_bound(masked.geometry.blocks)
        return VerticalSlash(
            self.block, masked.geometry.blocks, slashes, columns, most, has_own_blocks=True
        )

    def _totals(
        self,
        tables: Iterable[Table],
        masked: MaskedPositions,
        shape: tuple[int, int],
        chosen: Tensor | None,
    ) -> Pair:
        """Return this worker's probed mass per diagonal and per local column."""
        probes, device = self.probes(masked), masked.device
        lines = masked.geometry.blocks * (self.block if self.by_token else 1)
        diagonals = torch.zeros(*shape, lines, dtype=torch.int64, device=device)
        columns: dict[int, Tensor] = {}
        for b, blocks, table in tables:
            for mass, number in zip(table, blocks, strict=True):
                met, units = probes[b].diagonals[number], _units(mass, len(mass) // shape[1])
                by_block = units.unflatten(-1, (-1, self.block))
                if self.p_of == "rest":
                    is_sink = (masked.positions < self.sink_tokens).unflatten(0, (-1, self.block))
                    by_block.masked_fill_(is_sink | (met < self._forced)[:, None], 0)
                if chosen is None and self.by_token:
                    distances = (probes[b].rows[number] - masked.positions).clamp(min=0)
                    diagonals[b].index_add_(-1, distances, units)
                elif chosen is None:
                    diagonals[b].index_add_(-1, met, by_block.sum(-1))
                else:
                    by_block.masked_fill_(chosen[b][:, met][..., None], 0)
                columns[b] = columns[b].add_(units) if b in columns else units
        assert len(columns) == len(probes), "every sequence ends with a probed block"
        vertical = list(columns.values())
        return diagonals, torch.stack(vertical) if len(vertical) > 1 else vertical[0][None]

    @property
    def _forced(self) -> int:
        """Number of the nearest block diagonals that are always kept."""
        return min(2, max(1, self.min_slashes))

    @property
    def _span(self) -> int:
        """Number of last tokens of a window from which `probed_rows` takes the probed queries."""
        return self.last_q if self.by_token else -(-self.last_q // self.block) * self.block

    def probed_rows(self, length: int) -> Tensor:
        """Return the positions of the probed queries, int64, ascending, distinct.

        They are evenly spaced over the last `_span` tokens of each window, which samples every
        offset within a block equally: the first queries of a block meet a diagonal of tokens in one
        block diagonal, the later queries in the next. With diagonals of tokens, they are the last.
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
        key = (type(self).__name__, self.last_q, self.windows, self.by_token)
        if key not in masked.cache:
            masked.cache[key] = [
                Probe.make(self.probed_rows(mask.length), masked, sequence, by_row=self.by_token)
                for sequence, mask in enumerate(masked.masks)
            ]
        return masked.cache[key]

    def _slashes(self, units: Tensor, masked: MaskedPositions) -> Tensor:
        """Return the chosen block diagonals, bool [batch, heads, blocks].

        units: probed mass per diagonal over all workers, int64 [batch, heads, diagonals].
        """
        lines, blocks, forced = units.shape[-1], masked.geometry.blocks, self._forced
        key = (type(self).__name__, "diagonals", forced, lines)
        if key not in masked.cache:
            numbers = torch.arange(lines, device=units.device)
            is_forced = (numbers < forced) & (not self.by_token)
            masked.cache[key] = base_rank_keys(is_forced, numbers, lines)
        order, total = rank_keys(units, masked.cache[key]), units.sum(-1, keepdim=True)
        chosen_lines = Selection.of(
            order,
            total,
            self.p_s,
            0 if self.by_token else max(1, self.min_slashes),
            self.max_slashes or lines,
            lines,
            crossing=not self.by_token,
        )
        if not self.by_token:
            return chosen_lines.flags()
        numbers = chosen_lines.numbers().long()
        chosen = units.new_zeros(*units.shape[:-1], blocks + 1, dtype=torch.bool)
        for touched in (numbers // self.block, -(-numbers // self.block)):
            chosen.scatter_(-1, touched, True)
        chosen[..., :forced] = True
        return chosen[..., :blocks].contiguous()

    def _column_choice(
        self, vertical: Tensor, masked: MaskedPositions, whole: Tensor | float
    ) -> Tensor:
        """Return the positions of the chosen columns, int32 [batch, heads, width], ascending.

        whole: the mass of which slashes and columns must hold p_v with ``joint``.
        """
        tokens = masked.geometry.blocks * self.block
        at_most = self.max_columns or tokens
        key = (type(self).__name__, "columns", self.sink_tokens)
        if key not in masked.cache:
            is_sink = masked.positions < self.sink_tokens
            masked.cache[key] = base_rank_keys(is_sink, masked.positions, tokens)
        column_mass = vertical.sum(-1, keepdim=True)
        order = rank_keys(vertical.clamp_(max=MOST_UNITS), masked.cache[key])
        if masked.group.size > 1:
            if at_most < order.shape[-1]:
                # The largest rank keys of all workers are among the largest of each worker.
                order = torch.topk(order, at_most, dim=-1, sorted=False).values
            gathered = masked.group.gather(torch.cat([order, column_mass], -1))
            column_mass = gathered[..., -1:].sum(0)
            order = gathered[..., :-1].permute(1, 2, 0, 3).flatten(2)
        share: float | Tensor = self.p_v
        if self.joint:
            # Slashes hold whole - column_mass, so columns add p_v * whole - (whole - column_mass).
            wanted = column_mass - (1 - self.p_v) * whole
            share = (wanted / column_mass.clamp(min=1)).clamp(min=0.0)
        columns = Selection.of(
            order,
            column_mass,
            share,
            max(self.sink_tokens, self.min_columns),
            at_most,
            tokens,
            crossing=not self.by_token,
        ).numbers()
        if masked.padded:
            # Never choose padding, even if the settings ask for more columns than there are tokens.
            columns.masked_fill_(columns >= masked.tables.lengths[:, None, None], tokens)
        columns = columns.sort(-1).values
        if not self.max_columns:
            # Without a bound the width is the number of tokens. Wait for the device to learn how
            # many columns are in use, and cut the width: all later work grows with it.
            steps = max(1, -(-int((columns < tokens).sum(-1).max()) // _COLUMN_STEP))
            columns = columns[..., : min(tokens, steps * _COLUMN_STEP)].contiguous()
        return columns


def make_pattern(settings: VerticalSlashSettings, seed: int) -> VerticalSlashPattern:
    return VerticalSlashPattern(**vars(settings))


def _units(mass: Tensor, group: int) -> Tensor:
    """Return the mean mass of each group of ``group`` heads, int64 [heads / group, columns]."""
    units = to_mass_units(mass)
    return units if group == 1 else units.unflatten(0, (-1, group)).sum(1) // group
