"""`mtrain profile kernels`: time attention kernels, dense and with fixed indices.

The times are a calibration of the simulator. In a ring over W workers, a call has W * W times less
work than one over the whole sequence, so its fixed time dominates: `profile_worker_calls` times the
steps of real schedules without messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch

from mtrain_cli.attention.index import VerticalSlash
from mtrain_cli.attention.kernel import IndexRequest, Kernel, KernelRequest, Saved
from mtrain_cli.attention.kernel_registry import choose, survey
from mtrain_cli.attention.mask import IntArray, SequenceMask
from mtrain_cli.attention.mask_tables import MaskTables
from mtrain_cli.attention.packed_columns import SharedColumns
from mtrain_cli.attention.partials import accumulation_dtype, row_delta
from mtrain_cli.attention.tiles import Tiles
from mtrain_cli.config.exchanges import exchange_name
from mtrain_cli.parallel.layout import Layout, make_layout
from mtrain_cli.parallel.lowering import Traits, lower
from mtrain_cli.parallel.plan import positions_of
from mtrain_cli.parallel.program import Compute, Whole
from mtrain_cli.parallel.schedule import Schedule, ScheduleOptions, make_schedule
from mtrain_cli.profiling.timing import median_ms
from mtrain_cli.simulation.calibration import ALONE_COLUMNS, DENSE, DIAGONALS, LISTS, SPARSE
from mtrain_cli.simulation.work_counts import (
    BACKWARD,
    FLOP_PER_PAIR,
    FORWARD,
    StepWork,
    WorkCounter,
)
from mtrain_cli.sparsity.fixed import fixed_index

LAYOUTS = ("striped", "zigzag")
RING, GATHER = (exchange_name(gathers=gathers, hierarchical=False) for gathers in (False, True))


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """One shape. density: share of causal block pairs on slashes; None for dense attention."""

    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    block: int
    density: float | None = None
    columns: int = 0

    @property
    def dense(self) -> KernelCase:
        return replace(self, density=None, columns=0)

    def index(self) -> VerticalSlash:
        """Draw the index. Every call draws the same index."""
        return fixed_index(
            seed=0, batch=1, heads=self.heads, seq=self.seq, block=self.block, slashes=None,
            columns=self.columns, density=self.density,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CallTime:
    """Median times of one kernel on one case.

    pairs: query-key pairs to compute, summed over the heads.
    backward_ms: None for a backward that the kernel lacks.
    forward_ratio, backward_ratio: time of another implementation in the same run over this time.
    """

    derived: ClassVar = ("forward_tflops", "backward_tflops")
    kernel: str
    case: KernelCase
    pairs: int
    forward_ms: float
    backward_ms: float | None
    forward_ratio: float | None = None
    backward_ratio: float | None = None

    @property
    def forward_tflops(self) -> float:
        return FLOP_PER_PAIR[FORWARD] * self.case.head_dim * self.pairs / self.forward_ms / 1e9

    @property
    def backward_tflops(self) -> float | None:
        flop = FLOP_PER_PAIR[BACKWARD] * self.case.head_dim * self.pairs
        return self.backward_ms and flop / self.backward_ms / 1e9

    def compared(self, base: CallTime) -> Self:
        """Return these times with their ratios to ``base``."""
        ratio = base.backward_ms and self.backward_ms and base.backward_ms / self.backward_ms
        forward = base.forward_ms / self.forward_ms
        return replace(self, forward_ratio=forward, backward_ratio=ratio)


@dataclass(frozen=True, kw_only=True)
class KernelTime(CallTime):
    """Median times of one kernel with one index. The ratios are to dense attention.

    blocks, column_pairs: block pairs on slashes, and pairs of single columns, over all heads.
    form: name in `simulation.calibration`; None to derive it from the density.
    what: name of a worker's call; `whole` for one on the whole sequence.
    mask_pairs: query-key pairs that the mask allows; None if not counted.
    skips: whether the kernel skips the pairs that the index leaves out.
    """

    blocks: int = 0
    column_pairs: int = 0
    form: str | None = None
    workers: int = 1
    what: str = "whole"
    mask_pairs: int | None = None
    skips: bool = True


@dataclass(frozen=True)
class KernelBench:
    """The kernels to time. names: empty for all kernels except `reference`."""

    names: Sequence[str]
    dtype: torch.dtype
    device: str
    repeats: int

    def kernels(self, case: KernelCase) -> Iterator[Kernel]:
        """Yield all kernels that support a sparse case; for a dense one, that of `auto`."""
        able = [name for name, reason in self.survey(case) if reason is None]
        for name in ["auto"] if case.density is None else able:
            yield choose(name, self.request(case))[0]

    def survey(self, case: KernelCase) -> list[tuple[str, str | None]]:
        """Return (name, reason) of every kernel: why it cannot run the case, or None if it can."""
        return [
            (name, reason)
            for name, reason in survey(self.request(case))
            if (name in self.names if self.names else name != "reference")
        ]

    def request(self, case: KernelCase, intervals: int = 1) -> KernelRequest:
        """Return what a case needs. intervals: most intervals of keys that a query sees."""
        capability = torch.cuda.get_device_capability() if self.device == "cuda" else None
        index = None if case.density is None else IndexRequest(case.block, bitmap=False)
        dtype = str(self.dtype).removeprefix("torch.")
        return KernelRequest(
            self.device, capability, dtype, case.head_dim, case.heads,
            case.kv_heads, index=index, intervals=intervals,
        )  # fmt: skip

    def unsupported(self, cases: Sequence[KernelCase]) -> list[tuple[str, str, bool]]:
        """Return (name, reason, runs no case) for every kernel that cannot run some case."""
        surveyed = dict.fromkeys(answer for case in cases for answer in self.survey(case))
        served = {name for name, reason in surveyed if reason is None}
        return [(name, reason, name not in served) for name, reason in surveyed if reason]

    def tiles(
        self, mask: SequenceMask, queries: IntArray, keys: IntArray, case: KernelCase
    ) -> Tiles:
        tables = MaskTables.make([mask], case.block)
        return Tiles.between([mask], queries, keys, tables).to(self.device)

    def inputs(self, case: KernelCase, queries: int, keys: int) -> list[torch.Tensor]:
        """Draw q, k, v and dout. Every call draws the same tensors."""
        generator = torch.Generator(device=self.device).manual_seed(0)
        shapes = ((queries, case.heads), *[(keys, case.kv_heads)] * 2, (queries, case.heads))
        return [
            torch.randn(
                1, n, h, case.head_dim, generator=generator, device=self.device, dtype=self.dtype
            )
            for n, h in shapes
        ]

    def time_passes(
        self, kernel: Kernel, case: KernelCase, tiles: Tiles, *, with_delta: bool = False
    ) -> dict[str, Any]:
        """Return forward_ms and backward_ms of a kernel on random inputs.

        with_delta: compute delta before the timed calls, as a ring does, unless the kernel needs
            the output: such a kernel computes delta itself.
        """
        q, k, v, dout = self.inputs(case, tiles.num_queries, tiles.num_keys)
        scale = case.head_dim**-0.5
        out, lse = kernel.forward(q, k, v, tiles, scale)
        delta = row_delta(out, dout) if with_delta and not kernel.needs_out else None
        return self.time_calls(
            lambda: kernel.forward(q, k, v, tiles.without_index_cache(), scale),
            lambda: kernel.backward(dout, Saved(q, k, v, out, lse, delta), tiles, scale),
        )

    def time_calls(
        self, forward: Callable[[], Any], backward: Callable[[], Any] | None
    ) -> dict[str, Any]:
        """Return forward_ms and backward_ms, the latter None without a backward."""
        calls = {"forward_ms": forward, "backward_ms": backward}
        return {n: call and median_ms(call, self.device, self.repeats) for n, call in calls.items()}


def profile_kernels(bench: KernelBench, cases: Sequence[KernelCase]) -> Iterator[KernelTime]:
    """Yield the time of every kernel on every case that it supports, after dense attention's."""
    dense: dict[KernelCase, KernelTime] = {}
    for case in cases:
        base = case.dense
        if base not in dense:
            (kernel,) = bench.kernels(base)
            dense[base] = _measure(bench, kernel, base)
            yield dense[base]
        if case.density is not None:
            for kernel in bench.kernels(case):
                yield _measure(bench, kernel, case).compared(dense[base])


def _measure(bench: KernelBench, kernel: Kernel, case: KernelCase) -> KernelTime:
    mask, everywhere = SequenceMask.causal(case.seq, case.seq), np.arange(case.seq)
    tiles = bench.tiles(mask, everywhere, everywhere, case)
    mask_pairs = mask.pairs * case.heads
    counts: dict[str, Any] = {"pairs": mask_pairs}
    if case.density is not None:
        index = case.index()
        work = index.counts(MaskTables.make([mask], case.block))
        counts = {
            name: int(getattr(work, name).sum()) for name in ("pairs", "blocks", "column_pairs")
        }
        tiles = tiles.with_index(index.to(bench.device))
    ms = bench.time_passes(kernel, case, tiles)
    counts |= {"skips": kernel.skips, "mask_pairs": mask_pairs}
    return KernelTime(kernel=kernel.name, case=case, **counts, **ms)


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
    """Yield the times of one worker's calls: a ring's, whose slashes and columns need separate
    calls, and an all-gather's. Skip lengths that do not divide into whole blocks.
    """
    shapes = dict.fromkeys(
        (shape, count, name)
        for case, count, name in itertools.product(cases, workers, LAYOUTS)
        for shape in (case.dense, case)
        if case.seq % (2 * count * case.block) == 0
    )
    for shape, count, name in shapes:
        layout = make_layout(name, count, shape.seq, shape.block, unit=shape.block)
        mask = SequenceMask.causal(shape.seq, layout.padded_seq)
        for kernel in bench.kernels(shape):
            index = None if shape.density is None else shape.index()
            yield from _calls(_Worker(bench, kernel, shape, layout, mask, index))


def _calls(worker: _Worker) -> Iterator[KernelTime]:
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
