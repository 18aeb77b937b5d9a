"""The attention that a few probed queries give to all keys.

A sequence may be sharded over several workers. Keys never move: all workers receive the probed
queries, and each worker scores them against its own keys. Sums over workers add integers
(`pattern.to_mass_units`), so any number of workers gives the same result.
"""

from __future__ import annotations

import importlib.util
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from mtrain_cli.attention.device_copy import to_device
from mtrain_cli.attention.partials import accumulation_dtype
from mtrain_cli.sparsity.pattern import MASS_UNITS, MaskedPositions

_SCORE_BYTES = 1 << 30  # maximum bytes of scores, or of tables, at a time
# Keys per tile of the fused probe; a tile lies within a block.
_SMALLEST_TILE, _LARGEST_TILE = 16, 128
# Rows per tile of the fused probe. Chunks of rows are multiples, so sums do not depend on chunks.
_ROWS = 64
# A sequence, some of its probed blocks, and their mass [blocks, heads, local columns].
Table = tuple[int, range, torch.Tensor]


@dataclass(frozen=True)
class Probe:
    """The probed queries of one sequence. All tensors are on the device.

    Probed queries are the few queries whose attention to all keys is computed to estimate an index.
    A probed block is a query block that contains a probed query.

    rows: int64 [rows], positions of the probed queries, ascending.
    first: int32 [rows], first position that each probed query sees.
    row_blocks: int64 [rows], index of each query's block among the probed blocks.
    local: int64 [local rows], indices into ``rows`` of the queries that this worker holds.
    slots: int64 [local rows], slots of the queries that this worker holds.
    diagonals: int64 [probed blocks, local blocks], number of the block diagonal that contains a
        probed block and a local key block; 0 if the keys are in the future and so have no mass.
    """

    rows: torch.Tensor
    first: torch.Tensor
    row_blocks: torch.Tensor
    local: torch.Tensor
    slots: torch.Tensor
    diagonals: torch.Tensor

    @staticmethod
    def make(positions: torch.Tensor, masked: MaskedPositions, sequence: int) -> Probe:
        device = masked.device
        numbers, row_blocks = torch.unique(positions // masked.tables.block, return_inverse=True)
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
    def for_kernels(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.first, self.rows.int(), self.row_blocks.int()


class ProbedAttention(ABC):
    """The attention from the probed queries of a batch to this worker's keys.

    The constructor computes each probed query's log-sum-exp over the keys of all workers, with
    three collectives: one gathers the probed queries, two merge the log-sum-exps of all tiles. If
    the log-sum-exps of the tiles exceed the memory budget, the constructor processes the queries in
    chunks, and merges each chunk with two collectives.

    tile: number of keys per tile, a divisor of the block size.
    """

    tile: int

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, probes: Sequence[Probe], masked: MaskedPositions
    ) -> None:
        self.k, self.probes, self.masked = k, probes, masked
        self.block, self.width = masked.tables.block, len(masked.host_positions)
        self.queries = self._gather_queries(q)
        # Bytes of one number for every head.
        self._head_bytes = accumulation_dtype(q.dtype).itemsize * q.shape[2]
        self._lse = self._merged_lse()

    @property
    def nbytes(self) -> int:
        return sum(len(p.diagonals) for p in self.probes) * self._head_bytes * self.width

    @property
    def is_small(self) -> bool:
        return self.nbytes <= _SCORE_BYTES

    def tables(self) -> Iterator[Table]:
        """Yield tables of the mass that each probed block gives each local column.

        A table covers as many probed blocks of one sequence as the memory budget allows. Its dtype
        is float32, or float64 for float64 queries. Over the probed blocks of a sequence and the
        columns of all workers, the mass of a head sums to 1.
        """
        at_once = max(1, _SCORE_BYTES // (self._head_bytes * self.width))
        for b, probe in enumerate(self.probes):
            for begin in range(0, len(probe.diagonals), at_once):
                blocks = range(begin, min(begin + at_once, len(probe.diagonals)))
                yield b, blocks, self._columns(b, self._lse[b], blocks)

    def _gather_queries(self, q: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the probed queries of each sequence, [rows, heads, head_dim], from all workers."""
        counts = [len(probe.rows) for probe in self.probes]
        everyone = q.new_zeros(sum(counts), *q.shape[2:])
        queries = everyone.split(counts)
        for target, own, probe in zip(queries, q, self.probes, strict=True):
            target.index_copy_(0, probe.local, own.index_select(0, probe.slots))
        # One worker has each query and the others add zeros, so the sum is exact in any precision.
        self.masked.group.sum(everyone)
        return queries

    def _merged_lse(self) -> list[torch.Tensor]:
        """Return each sequence's log-sum-exps over the keys of all workers, [heads, rows]."""
        bytes_a_row = self._head_bytes * (self.width // self.tile) * len(self.probes)
        rows = max(_ROWS, _SCORE_BYTES // bytes_a_row // _ROWS * _ROWS)
        chunks: list[list[torch.Tensor]] = [[] for _ in self.probes]
        for start in range(0, max(len(p.rows) for p in self.probes), rows):
            pending = [b for b, p in enumerate(self.probes) if start < len(p.rows)]
            partial = [self._tile_lse(b, slice(start, start + rows)) for b in pending]
            merged = _merge_lse(partial, self.masked).split([t.shape[-1] for t in partial], -1)
            for b, lse in zip(pending, merged, strict=True):
                chunks[b].append(lse)
            del partial
        return [_concatenate(parts).contiguous() for parts in chunks]

    @abstractmethod
    def _tile_lse(self, b: int, rows: slice) -> torch.Tensor:
        """Return log-sum-exps over each tile of local keys, [tiles, heads, rows]."""

    @abstractmethod
    def _columns(self, b: int, lse: torch.Tensor, blocks: range) -> torch.Tensor:
        """Return the mass that probed blocks give each local column, [blocks, heads, columns]."""


class FusedProbe(ProbedAttention):
    """The attention of probed queries, from Triton kernels that never store scores."""

    def __init__(self, q, k, probes, masked) -> None:
        self.tile = tile_keys(masked.tables.block)
        self._of_keys = (
            masked.geometry.key_blocks, masked.tables.block, self.tile, q.shape[-1] ** -0.5
        )  # fmt: skip
        super().__init__(q, k, probes, masked)

    def _tile_lse(self, b: int, rows: slice) -> torch.Tensor:
        from mtrain_cli.kernels.triton import probe as kernel

        first, at, _ = (t[rows] for t in self.probes[b].for_kernels)
        return kernel.tile_lse(self.queries[b][rows], self.k[b], first, at, *self._of_keys)

    def _columns(self, b: int, lse: torch.Tensor, blocks: range) -> torch.Tensor:
        from mtrain_cli.kernels.triton import probe as kernel

        first, at, row_blocks = self.probes[b].for_kernels
        return kernel.probed_columns(
            self.queries[b], self.k[b], first, at, *self._of_keys, lse, row_blocks, blocks,
            self.width,
        )  # fmt: skip


class PyTorchProbe(ProbedAttention):
    """Probed attention by PyTorch, which stores the scores of some heads at a time."""

    def __init__(self, q, k, probes, masked) -> None:
        self.tile = masked.tables.block
        self._hidden = [~masked.visible(b, p.rows, k.shape[1]) for b, p in enumerate(probes)]
        super().__init__(q, k, probes, masked)

    def _tile_lse(self, b: int, rows: slice) -> torch.Tensor:
        missing = -self.k.shape[1] % self.block
        parts = []
        for _, scores in _scores(self.queries[b][rows], self.k[b], self._hidden[b][rows]):
            if missing:
                scores = torch.nn.functional.pad(scores, (0, missing), value=float("-inf"))
            parts.append(scores.unflatten(-1, (-1, self.block)).logsumexp(-1).permute(2, 0, 1))
        return torch.cat(parts, 1)

    def _columns(self, b: int, lse: torch.Tensor, blocks: range) -> torch.Tensor:
        q, k, hidden, row_blocks = (
            self.queries[b], self.k[b], self._hidden[b], self.probes[b].row_blocks
        )  # fmt: skip
        total = len(q)
        if len(blocks) < len(self.probes[b].diagonals):
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


def probed_attention(
    q: torch.Tensor, k: torch.Tensor, probes: Sequence[Probe], masked: MaskedPositions
) -> ProbedAttention:
    """Return the attention of the probed queries, by the fastest implementation that can run."""
    fused = fused_probe_usable(q, masked.tables.block)
    return (FusedProbe if fused else PyTorchProbe)(q, k, probes, masked)


def fused_probe_usable(q: torch.Tensor, block: int) -> bool:
    if not q.is_cuda or q.dtype == torch.float64 or q.shape[-1] not in (16, 32, 64, 128):
        return False
    return tile_keys(block) >= _SMALLEST_TILE and importlib.util.find_spec("triton") is not None


def tile_keys(block: int) -> int:
    """Return the number of keys per tile of `FusedProbe`: a power of two that divides the block."""
    return math.gcd(block, _LARGEST_TILE)


def _merge_lse(partial: list[torch.Tensor], masked: MaskedPositions) -> torch.Tensor:
    """Merge the log-sum-exps of tiles over all workers, [heads, rows of all sequences]."""
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
    lse = (total * torch.tensor(1 / MASS_UNITS, dtype=torch.float64)).log_().add_(highest)
    return lse.nan_to_num_(nan=float("inf"), posinf=float("inf"), neginf=float("inf")).to(dtype)


def _concatenate(parts: list[torch.Tensor], dim: int = -1) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _scores(
    q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor]]:
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
