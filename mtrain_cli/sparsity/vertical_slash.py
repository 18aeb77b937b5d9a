"""The vertical-slash pattern of MTraining: slashes and columns with budgets found online.

A sequence may be spread over several workers. Keys never move: all workers receive the probed
queries, and each worker scores them against its own keys. Workers add integers
(`pattern.to_mass_units`), so all workers get the same index that one worker would get.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from mtrain_cli.attention.device_copy import to_device
from mtrain_cli.attention.index import VerticalSlash
from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.attention.partials import accumulation_dtype
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

_SCORE_BYTES = 1 << 30  # maximum bytes of scores at a time
_COLUMN_STEP = 128  # the width of unbounded columns is a multiple of this
# Keys per tile of the fused probe; a tile lies within a block.
_SMALLEST_TILE, _LARGEST_TILE = 16, 128
# Rows per tile of the fused probe. Chunks of rows are multiples, so sums do not depend on chunks.
_ROWS = 64
# A sequence, some of its probed blocks, and their mass [blocks, heads, local columns].
Table = tuple[int, range, torch.Tensor]


@dataclass(frozen=True)
class Probe:
    """The probed queries of one sequence, and where they meet this worker's shard, on the device.

    rows: int64 [rows], ascending positions of the queries.
    first: int32 [rows], first position that each query sees.
    row_blocks: int64 [rows], index of each query's block among the probed blocks.
    held: int64, indices of the rows that this worker holds.
    slots: int64 like held, local slots of the held rows.
    diagonals: int64 [probed blocks, local blocks], diagonal on which a local key block meets a
        probed block; 0 for future keys, which have no mass.
    """

    rows: torch.Tensor
    first: torch.Tensor
    row_blocks: torch.Tensor
    held: torch.Tensor
    slots: torch.Tensor
    diagonals: torch.Tensor

    @cached_property
    def for_kernels(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return first, rows and row_blocks as int32."""
        return self.first, self.rows.int(), self.row_blocks.int()


@dataclass(frozen=True)
class VerticalSlashPattern(VerticalSlashSettings):
    """The columns and slashes that hold a share of probed attention (MTraining, section B.1,
    algorithm 1).

    Columns are single keys; slashes are pooled over block diagonals, as the kernels compute them.
    `probed_rows` chooses the ``last_q`` queries of each window. Queries see only their own
    document, so one window probes only one packed document. The column or slash that crosses its
    share is kept. With ``joint``, slashes and columns together hold p_v: columns count only mass
    outside the chosen slashes. Diagonal 0 is always kept, and diagonal 1 if min_slashes is above 1:
    without diagonal 1 the first queries of a block would not see the recent past.
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

        They exchange the probed queries, each row's largest log-sum-exp and its sum over tiles, the
        diagonals' mass, and the candidate columns. If the sums of all rows exceed the memory
        budget, each chunk of rows has its own two collectives.
        """
        group = q.shape[2] // k.shape[2] if self.per_group else 1
        tables, size = self._tables(q, k, masked)
        # A joint budget reads the tables twice: for the diagonals, and for the columns outside the
        # chosen diagonals. Tables too large to keep are computed twice.
        cached = list(tables()) if self.joint and size <= _SCORE_BYTES else None
        diagonals, vertical = self._totals(cached or tables(), masked, q.shape[2], group, None)
        slashes = self._slashes(diagonals, masked)
        if self.joint:
            _, vertical = self._totals(cached or tables(), masked, q.shape[2], group, slashes)
        columns = self._column_choice(vertical, masked)
        if group > 1:
            slashes, columns = (t.repeat_interleave(group, 1) for t in (slashes, columns))
        return VerticalSlash(self.block, masked.geometry.blocks, slashes, columns, self.max_slashes)

    def mass(self, q: torch.Tensor, k: torch.Tensor, masked: MaskedPositions) -> list[torch.Tensor]:
        """Return the attention of the probed queries, one tensor per sequence.

        Args:
            q, k: this worker's [batch, tokens, heads, head_dim] and [batch, tokens, kv_heads,
                head_dim].

        Returns:
            [probed blocks, heads, local blocks * block], float32 (float64 for float64 queries):
            the share that each probed block gives each local column. Over all workers, a head sums
            to 1.
        """
        masses: list[list[torch.Tensor]] = [[] for _ in masked.masks]
        for sequence, _, table in self._tables(q, k, masked)[0]():
            masses[sequence].append(table)
        return [torch.cat(tables) for tables in masses]

    def _tables(
        self, q: torch.Tensor, k: torch.Tensor, masked: MaskedPositions
    ) -> tuple[Callable[[], Iterator[Table]], int]:
        """Return a function that yields `mass` in parts on every call, and its total bytes."""
        probes = self.probes(masked)
        all_queries = q.new_zeros(sum(len(p.rows) for p in probes), *q.shape[2:])
        parts = all_queries.split([len(p.rows) for p in probes])
        for part, own, probe in zip(parts, q, probes, strict=True):
            part.index_copy_(0, probe.held, own.index_select(0, probe.slots))
        # One worker holds each row and the others add zeros, so the sum is exact in any precision.
        masked.group.sum(all_queries)
        sequences = list(zip(parts, k, probes, strict=True))
        heads, width = q.shape[2], len(masked.host_positions)
        element = accumulation_dtype(q.dtype).itemsize
        at_once = max(1, _SCORE_BYTES // (element * heads * width))

        if fused_probe_usable(q, self.block):
            from mtrain_cli.kernels.triton import probe as kernel

            tile, scale = tile_keys(self.block), q.shape[-1] ** -0.5
            probe_tables = [p.for_kernels for p in probes]
            fixed = (masked.geometry.key_blocks, self.block, tile, scale)

            def lse_of(b: int, rows: slice) -> torch.Tensor:
                return kernel.tile_lse(
                    parts[b][rows], k[b], *(t[rows] for t in probe_tables[b][:2]), *fixed
                )

            def columns_of(b: int, lse: torch.Tensor, blocks: range) -> torch.Tensor:
                first, at, row_blocks = probe_tables[b]
                return kernel.probed_columns(
                    parts[b], k[b], first, at, *fixed, lse, row_blocks, blocks, width
                )
        else:
            tile = self.block
            hidden = [~masked.visible(b, p.rows, k.shape[1]) for b, p in enumerate(probes)]

            def lse_of(b: int, rows: slice) -> torch.Tensor:
                return _block_lse(parts[b][rows], k[b], hidden[b][rows], self.block)

            def columns_of(b: int, lse: torch.Tensor, blocks: range) -> torch.Tensor:
                queries, unseen, row_blocks = parts[b], hidden[b], probes[b].row_blocks
                if len(blocks) < len(probes[b].diagonals):
                    chosen = (row_blocks >= blocks.start) & (row_blocks < blocks.stop)
                    queries, unseen, lse = queries[chosen], unseen[chosen], lse[:, chosen]
                    row_blocks = row_blocks[chosen]
                total = len(probes[b].rows)
                return _columns(queries, k[b], unseen, lse, row_blocks, blocks, total, width)

        bytes_a_row = element * heads * (width // tile) * len(sequences)
        rows = max(_ROWS, _SCORE_BYTES // bytes_a_row // _ROWS * _ROWS)
        lse_parts: list[list[torch.Tensor]] = [[] for _ in sequences]
        for start in range(0, max(len(p.rows) for p in probes), rows):
            pending = [b for b, p in enumerate(probes) if start < len(p.rows)]
            partial = [lse_of(b, slice(start, start + rows)) for b in pending]
            merged_lse = _merge_lse(partial, masked).split([t.shape[-1] for t in partial], -1)
            for b, lse in zip(pending, merged_lse, strict=True):
                lse_parts[b].append(lse)
            del partial
        lses = [_concatenate(parts_of_sequence).contiguous() for parts_of_sequence in lse_parts]

        def tables() -> Iterator[Table]:
            for b, probe in enumerate(probes):
                for begin in range(0, len(probe.diagonals), at_once):
                    blocks = range(begin, min(begin + at_once, len(probe.diagonals)))
                    yield b, blocks, columns_of(b, lses[b], blocks)

        return tables, sum(len(p.diagonals) for p in probes) * element * heads * width

    def _totals(
        self,
        tables: Iterable[Table],
        masked: MaskedPositions,
        heads: int,
        group: int,
        chosen: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this worker's probed mass per diagonal and per local column, in units.

        Shapes int64 [batch, heads, blocks] and [batch, heads, columns].

        chosen: bool [batch, heads, blocks], diagonals to leave out of the column mass; None to
            count all.
        """
        probes, shape = self.probes(masked), (len(masked.masks), heads // group)
        device = masked.device
        diagonals = torch.zeros(*shape, masked.geometry.blocks, dtype=torch.int64, device=device)
        columns: list[torch.Tensor | None] = [None] * len(probes)
        for b, blocks, table in tables:
            for mass, number in zip(table, blocks, strict=True):
                met, units = probes[b].diagonals[number], _units(mass, group)
                by_block = units.unflatten(-1, (-1, self.block))
                if chosen is None:
                    diagonals[b].index_add_(-1, met, by_block.sum(-1))
                else:
                    by_block.masked_fill_(chosen[b][:, met][..., None], 0)
                before = columns[b]
                columns[b] = units if before is None else before.add_(units)
        vertical = [t for t in columns if t is not None]
        assert len(vertical) == len(probes), "every sequence ends with a probed block"
        return diagonals, torch.stack(vertical) if len(vertical) > 1 else vertical[0][None]

    @property
    def _span(self) -> int:
        """Tokens per window: the fewest whole blocks that can hold its queries."""
        return -(-self.last_q // self.block) * self.block

    def probed_rows(self, length: int) -> torch.Tensor:
        """Return the positions of the probed queries, int64, ascending, distinct.

        A token diagonal crosses two block diagonals: the first rows of a block lie on one, the
        other rows on the next. To sample all row offsets equally, a window's queries are evenly
        spaced over `_span` tokens, or over the distance to the previous window if that is shorter.
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
        """Return one probe per sequence of the batch, the same for all layers."""
        key = (type(self).__name__, self.last_q, self.windows)
        if key not in masked.cache:
            masked.cache[key] = [self._make_probe(masked, b) for b in range(len(masked.masks))]
        return masked.cache[key]

    def _make_probe(self, masked: MaskedPositions, sequence: int) -> Probe:
        geometry, device = masked.geometry, masked.device
        positions = self.probed_rows(masked.masks[sequence].length)
        numbers, row_blocks = torch.unique(positions // self.block, return_inverse=True)
        slots = np.searchsorted(masked.host_positions, positions.numpy())
        nearest = masked.host_positions[np.minimum(slots, len(masked.host_positions) - 1)]
        held = np.flatnonzero(nearest == positions.numpy())
        rows = to_device(positions, device)
        return Probe(
            rows=rows,
            first=geometry.tables.first[sequence].index_select(0, rows),
            row_blocks=to_device(row_blocks, device),
            held=to_device(held, device),
            slots=to_device(slots[held], device),
            diagonals=to_device(
                (numbers[:, None] - torch.from_numpy(masked.numbers)).clamp(min=0), device
            ),
        )

    def _slashes(self, diagonals: torch.Tensor, masked: MaskedPositions) -> torch.Tensor:
        """Choose slashes, bool like diagonals. diagonals: this worker's mass from `_totals`."""
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
        """Choose columns, int32 [batch, heads, width], ascending.

        vertical: this worker's column mass from `_totals`; with a joint budget, the mass outside
            the slashes.
        """
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
                # The largest keys overall are among the largest of each worker.
                order = torch.topk(order, at_most, dim=-1, sorted=False).values
            gathered = masked.group.gather(torch.cat([order, column_mass], -1))
            column_mass = gathered[..., -1:].sum(0)
            order = gathered[..., :-1].permute(1, 2, 0, 3).flatten(2)
        share: float | torch.Tensor = self.p_v
        if self.joint:
            # Slashes hold 1 - column_mass, so columns must add p_v - (1 - column_mass).
            share = ((column_mass - (1 - self.p_v) * MASS_UNITS) / column_mass.clamp(min=1)).clamp(
                min=0.0
            )
        candidates, keep = select_ranked(
            order, column_mass, share, max(self.sink_tokens, self.min_columns), at_most, tokens
        )
        if masked.padded:
            # Never choose padding, even if more columns are wanted than there are tokens.
            keep &= candidates < masked.tables.lengths[:, None, None]
        columns = torch.where(keep, candidates.int(), unused).sort(-1).values
        if not self.max_columns:
            # Without a bound, wait for the device and cut the width to the columns in use.
            # Otherwise every later step would process as many columns as tokens.
            steps = max(1, -(-int(keep.sum(-1).max()) // _COLUMN_STEP))
            columns = columns[..., : min(tokens, steps * _COLUMN_STEP)].contiguous()
        return columns


def make_pattern(settings: VerticalSlashSettings, seed: int) -> VerticalSlashPattern:
    return VerticalSlashPattern(**vars(settings))


def fused_probe_usable(q: torch.Tensor, block: int) -> bool:
    """Return whether the Triton kernels, which never store scores, can process the queries."""
    if not q.is_cuda or q.dtype == torch.float64 or q.shape[-1] not in (16, 32, 64, 128):
        return False
    return tile_keys(block) >= _SMALLEST_TILE and importlib.util.find_spec("triton") is not None


def tile_keys(block: int) -> int:
    """Return the keys per tile of the fused probe: a power of two that divides the block."""
    return math.gcd(block, _LARGEST_TILE)


def _units(mass: torch.Tensor, group: int) -> torch.Tensor:
    """Return the mean mass of each group of heads in units, int64 [heads / group, columns].

    mass: [heads, columns].
    """
    units = to_mass_units(mass)
    return units if group == 1 else units.unflatten(0, (-1, group)).sum(1) // group


def _merge_lse(partial: list[torch.Tensor], masked: MaskedPositions) -> torch.Tensor:
    """Merge log-sum-exps of tiles over all workers, [heads, rows of all sequences].

    A row without keys gets +inf. The result does not depend on which worker holds a block: each
    tile lies within a block, and sums over tiles are integers.

    partial: [tiles, heads, rows] per sequence; overwritten.
    """
    dtype = partial[0].dtype
    highest = masked.group.max(_concatenate([t.amax(0) for t in partial])).clamp_(
        min=torch.finfo(dtype).min
    )
    totals = []
    for tiles, largest in zip(
        partial, highest.split([t.shape[-1] for t in partial], -1), strict=True
    ):
        units = tiles.sub_(largest).exp_().mul_(MASS_UNITS).round_()
        at_once = max(1, _SCORE_BYTES // (8 * units[:, 0].numel()))
        totals.append(_concatenate([heads.long().sum(0) for heads in units.split(at_once, 1)], 0))
    total = masked.group.sum(_concatenate(totals))
    # Scaling by a power of two is exact. log(0) is -inf.
    lse = (total * torch.tensor(1 / MASS_UNITS, dtype=torch.float64)).log_().add_(highest)
    return lse.nan_to_num_(nan=float("inf"), posinf=float("inf"), neginf=float("inf")).to(dtype)


def _concatenate(parts: list[torch.Tensor], dim: int = -1) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _scores(
    q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield slices of query heads and their scores, [heads, rows, keys], within the memory budget.

    Hidden scores become -inf, like scores of +inf or NaN.

    q: [rows, heads, head_dim]; k: [keys, kv_heads, head_dim]; hidden: bool [rows, keys].
    """
    heads, dim = q.shape[1:]
    keys, kv_heads = k.shape[:2]
    dtype, per_kv = accumulation_dtype(q.dtype), heads // kv_heads
    probe = q.to(dtype).unflatten(1, (kv_heads, -1))
    at_once = max(1, _SCORE_BYTES // (4 * len(q) * keys * per_kv))
    for g in range(0, kv_heads, at_once):
        # [kv heads, group * rows, dim]
        queries = probe[:, g : g + at_once].permute(1, 2, 0, 3).flatten(1, 2)
        products = queries @ k[:, g : g + at_once].permute(1, 2, 0).to(dtype)
        scores = products.mul_(dim**-0.5).view(-1, len(q), keys)
        first = g * per_kv
        scores.masked_fill_(hidden | ~(scores < float("inf")), float("-inf"))
        yield slice(first, first + len(scores)), scores


def _block_lse(q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor, block: int) -> torch.Tensor:
    """Return the log-sum-exp of each row over each local block, [local blocks, heads, rows]."""
    missing = -len(k) % block
    parts = []
    for _, scores in _scores(q, k, hidden):
        if missing:
            scores = torch.nn.functional.pad(scores, (0, missing), value=float("-inf"))
        parts.append(scores.unflatten(-1, (-1, block)).logsumexp(-1).permute(2, 0, 1))
    return torch.cat(parts, 1)


def _columns(
    q: torch.Tensor,
    k: torch.Tensor,
    hidden: torch.Tensor,
    lse: torch.Tensor,
    row_blocks: torch.Tensor,
    groups: range,
    total: int,
    width: int,
) -> torch.Tensor:
    """Return the attention from each group of queries to each local key, [groups, heads, width].

    lse: [heads, rows], over all keys.
    row_blocks: [rows], group of each query.
    groups: groups to compute.
    total: number of all probed queries, which divides the sums.
    """
    columns = torch.zeros(len(groups), q.shape[1], width, dtype=lse.dtype, device=q.device)
    numbers = torch.arange(groups.start, groups.stop, device=q.device)[:, None]
    weights = (row_blocks == numbers).to(lse.dtype) / total
    for heads, scores in _scores(q, k, hidden):
        p = scores.sub_(lse[heads, :, None]).exp_()
        columns[:, heads, : len(k)] = (weights @ p).transpose(0, 1)
    return columns
