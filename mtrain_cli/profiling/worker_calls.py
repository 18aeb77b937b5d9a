"""`mtrain profile kernels --workers 8,32`: time one worker's kernel calls on one device.

In a ring over W workers, a kernel call has W * W times less work than a call over the whole
sequence, so the fixed time of a call dominates. This benchmark times the steps of real schedules,
without messages:
- ring: one shard of queries attends to one shard of keys. Slashes and columns need separate calls.
- all-gather: one shard of queries attends to all keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mtrain_cli.attention.index import VerticalSlash
from mtrain_cli.attention.kernel import Kernel
from mtrain_cli.attention.mask import IntArray, SequenceMask
from mtrain_cli.attention.packed_columns import SharedColumns
from mtrain_cli.attention.partials import accumulation_dtype, row_delta
from mtrain_cli.attention.tiles import Tiles
from mtrain_cli.config.exchanges import exchange_name
from mtrain_cli.parallel.layout import Layout, make_layout
from mtrain_cli.parallel.lowering import lower
from mtrain_cli.parallel.plan import positions_of
from mtrain_cli.parallel.program import Compute, Whole
from mtrain_cli.parallel.program_builder import Traits
from mtrain_cli.parallel.schedule import Schedule, ScheduleOptions, make_schedule
from mtrain_cli.profiling.kernel_benchmark import KernelBench, KernelCase, KernelTime
from mtrain_cli.simulation.calibration import ALONE_COLUMNS, DENSE, DIAGONALS, LISTS, SPARSE
from mtrain_cli.simulation.work_counts import FORWARD, StepWork, WorkCounter

LAYOUTS = ("striped", "zigzag")
RING, GATHER = (exchange_name(gathers=gathers, hierarchical=False) for gathers in (False, True))


@dataclass(frozen=True)
class _Worker:
    """The worker with the last rank, whose kernel calls are timed."""

    bench: KernelBench
    kernel: Kernel
    case: KernelCase
    layout: Layout
    mask: SequenceMask
    index: VerticalSlash | None

    @property
    def rank(self) -> int:
        return self.layout.workers - 1

    @property
    def queries(self) -> IntArray:
        return self.layout.positions(self.rank)

    def tiles(self, keys: IntArray) -> Tiles:
        return self.bench.tiles(self.mask, self.queries, keys, self.case)

    def schedule(self, exchange: str) -> Schedule:
        return make_schedule(exchange, ScheduleOptions(self.layout.workers, self.layout.workers))

    def work(self, schedule: Schedule, index: VerticalSlash | None) -> StepWork:
        """Count the work of this worker's forward pass."""
        case = self.case
        counter = WorkCounter.make(schedule, self.layout, [self.mask], case.heads, case.block)
        return counter.count(index, self.rank)[FORWARD]

    def time(
        self, form: str, what: str, ms: dict[str, Any], mask_pairs: int, **counts: int
    ) -> KernelTime:
        return KernelTime(
            kernel=self.kernel.name, case=self.case, form=form, workers=self.layout.workers,
            what=f"{self.layout.name}, {what}", mask_pairs=mask_pairs, skips=self.kernel.skips,
            **counts, **ms,
        )  # fmt: skip


def profile_worker_calls(
    bench: KernelBench, cases: Sequence[KernelCase], workers: Sequence[int]
) -> Iterator[KernelTime]:
    """Yield the times of one worker's calls for each case, number of workers and layout.

    Skip a case if its sequence cannot be split into whole blocks for this number of workers.
    """
    seen: set[tuple[KernelCase, int, str]] = set()
    for case, count, name in itertools.product(cases, workers, LAYOUTS):
        if case.seq % (2 * count * case.block):
            continue
        for one in (case.dense, case):
            if (one, count, name) in seen:
                continue
            seen.add((one, count, name))
            layout = make_layout(name, count, case.seq, case.block, unit=case.block)
            mask = SequenceMask.causal(case.seq, layout.padded_seq)
            for kernel in bench.kernels(one):
                index = None if one.density is None else one.index()
                yield from _calls(_Worker(bench, kernel, one, layout, mask, index))


def _calls(worker: _Worker) -> Iterator[KernelTime]:
    """Yield the times of a worker's ring and all-gather calls, and of its single columns."""
    for exchange in (RING, GATHER):
        schedule = worker.schedule(exchange)
        work, masked = (worker.work(schedule, index) for index in (worker.index, None))
        traits = Traits(columns=not schedule.gathers)
        calls = list(lower(schedule, worker.rank, traits=traits).computes)
        for step in sorted({0, len(calls) // 2}):
            if work.pairs[0, step]:
                what = f"{exchange} step {step}" if len(calls) > 1 else exchange
                yield _time_step(worker, calls[step], what, work, masked)
    if worker.index is not None and worker.case.columns:
        yield _time_columns(worker, worker.index)


def _time_step(
    worker: _Worker, call: Compute, what: str, work: StepWork, masked: StepWork
) -> KernelTime:
    """Time one kernel call of a program."""
    bench, case, index, step = worker.bench, worker.case, worker.index, call.step
    gathered = isinstance(call.keys, Whole)
    tiles = worker.tiles(positions_of(worker.layout, call.keys))
    form, columns = LISTS if worker.layout.name == "striped" else DENSE, 0
    if index is not None:
        form = SPARSE if gathered else DIAGONALS
        kept = index if call.with_columns else index.without_columns()
        tiles = tiles.with_index(kept.to(bench.device))
        if call.with_columns and work.of_columns is not None:
            columns = int(work.of_columns[0, step])
    ms = bench.time_passes(worker.kernel, case, tiles, with_delta=not gathered)
    pairs, blocks = int(work.pairs[0, step]), int(work.blocks[0, step])
    mask_pairs = int(masked.pairs[0, step])
    return worker.time(form, what, ms, mask_pairs, pairs=pairs, blocks=blocks, column_pairs=columns)


def _time_columns(worker: _Worker, index: VerticalSlash) -> KernelTime:
    bench, case, kernel, own = worker.bench, worker.case, worker.kernel, worker.queries
    moved = index.to(bench.device)
    everything = worker.tiles(np.arange(worker.layout.padded_seq)).with_index(moved)
    shared = SharedColumns.make(everything, worker.tiles(own).with_index(moved))
    assert shared is not None
    q, _, _, dout = bench.inputs(case, len(own), len(own))
    scale, width = case.head_dim**-0.5, shared.slots.shape[-1]
    packed = torch.randn(2, 1, case.heads, width, case.head_dim, device=q.device, dtype=q.dtype)
    # The call merges its result with the output of a step, so it needs an output to merge with.
    partial = (
        torch.zeros_like(q),
        torch.zeros(1, case.heads, len(own), device=q.device, dtype=accumulation_dtype(q.dtype)),
    )
    out, lse = kernel.forward_columns(q, packed, shared, scale, partial)
    delta = row_delta(out.to(q.dtype), dout)
    ms = bench.time_calls(
        lambda: kernel.forward_columns(q, packed, shared, scale, partial),
        lambda: kernel.backward_columns(dout, q, packed, lse, delta, shared, scale),
    )
    pairs = int(worker.work(worker.schedule(RING), index).column_pairs[0])
    return worker.time(ALONE_COLUMNS, "columns", ms, pairs, pairs=pairs, column_pairs=pairs)
