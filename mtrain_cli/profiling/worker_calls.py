"""`mtrain profile kernels --workers 8,32`: time one worker's kernel calls on one device.

A call over a long sequence says little about those of a ring's step, which are W * W times smaller:
there the fixed cost of a call dominates. These calls are steps of real schedules, without messages:
of a ring (one shard of queries against one of keys, with diagonals and columns in separate calls)
and of an all-gather (one shard of queries against all keys).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from mtrain_cli.attention.index import Index, VerticalSlash
from mtrain_cli.attention.kernel import IndexRequest, Kernel
from mtrain_cli.attention.kernel_registry import choose
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.partials import accumulation_dtype, row_delta
from mtrain_cli.attention.shared_columns import SharedColumns
from mtrain_cli.attention.tiles import BlockGeometry, Tiles
from mtrain_cli.parallel.layout import Layout, make_layout
from mtrain_cli.parallel.schedule import ScheduleOptions, ScheduleStep, make_schedule
from mtrain_cli.profiling.kernel_benchmark import (
    KernelCase,
    KernelTime,
    median_ms,
    request_of,
    supported_kernels,
)
from mtrain_cli.simulation.calibration import ALONE_COLUMNS, DENSE, DIAGONALS, LISTS, SPARSE
from mtrain_cli.simulation.work_counts import FORWARD, StepWork, WorkCounter
from mtrain_cli.sparsity.fixed import fixed_index

LAYOUTS = ("striped", "zigzag")
RING, GATHER = "ring", "all_gather"


@dataclass(frozen=True)
class _WorkerCall:
    """The inputs and work of one call.

    exchange, step: of the schedule
    queries, keys: positions
    work, masked: one row of work of that worker, under the index and under the mask alone
    """

    exchange: str
    step: int
    queries: np.ndarray
    keys: np.ndarray
    work: StepWork
    masked: StepWork


def profile_worker_calls(
    cases: Sequence[KernelCase],
    workers: Sequence[int],
    kernels: Sequence[str],
    dtype: torch.dtype,
    device: str,
    repeats: int,
    report: Callable[[KernelTime], None],
) -> list[KernelTime]:
    """Time the calls of one worker for each case, worker count and layout.

    Takes the cases of `profile_kernels`; skips those too short to split into whole blocks.
    """
    times: list[KernelTime] = []
    seen: set[tuple] = set()
    for case in cases:
        for count in workers:
            for name in LAYOUTS:
                if case.seq % (2 * count * case.block):
                    continue
                for dense in (True, False):
                    kind = (
                        case.seq,
                        case.heads,
                        case.kv_heads,
                        case.head_dim,
                        case.block,
                        count,
                        name,
                        None if dense else case,
                    )
                    if kind in seen or (not dense and case.density is None):
                        continue
                    seen.add(kind)
                    one = replace(case, density=None, columns=0) if dense else case
                    for kernel in _kernels(one, kernels, dtype, device):
                        for time in _of_worker(kernel, one, name, count, dtype, device, repeats):
                            times.append(time)
                            report(time)
    return times


def _kernels(
    case: KernelCase, names: Sequence[str], dtype: torch.dtype, device: str
) -> Iterator[Kernel]:
    """Yield the kernel that `auto` picks for dense attention; else those of `profile_kernels`."""
    if case.density is None:
        request = request_of(case, dtype, device, None)
        yield choose("auto", request)[0]
        return
    request = request_of(case, dtype, device, IndexRequest(case.block, bitmap=False))
    for name in supported_kernels(case, names, dtype, device):
        yield choose(name, request)[0]


def _of_worker(
    kernel: Kernel,
    case: KernelCase,
    name: str,
    workers: int,
    dtype: torch.dtype,
    device: str,
    repeats: int,
) -> Iterator[KernelTime]:
    layout = make_layout(name, workers, case.seq, case.block, unit=case.block)
    mask = SequenceMask.causal(case.seq, layout.padded_seq)
    index = None
    if case.density is not None:
        index = fixed_index(
            seed=0,
            batch=1,
            heads=case.heads,
            seq=case.seq,
            block=case.block,
            slashes=None,
            columns=case.columns,
            density=case.density,
        )
    dense_form = LISTS if name == "striped" else DENSE
    for share in _shares(layout, mask, case, index):
        tensors = _Tensors.make(case, len(share.queries), len(share.keys), dtype, device)
        tiles = _tiles(mask, share, case.block, device)
        whole = share.exchange == GATHER
        if index is None:
            yield _timed(
                kernel, case, share, tiles, tensors, device, repeats, dense_form, workers, name
            )
            continue
        under = tiles.with_index(index.to(device))
        if whole or not case.columns:
            yield _timed(
                kernel,
                case,
                share,
                under,
                tensors,
                device,
                repeats,
                SPARSE if whole else DIAGONALS,
                workers,
                name,
            )
            continue
        alone = tiles.with_index(index.without_columns().to(device))
        yield _timed(kernel, case, share, alone, tensors, device, repeats, DIAGONALS, workers, name)
    if index is not None and case.columns and workers > 1:
        yield _columns(kernel, case, layout, mask, index, workers, name, dtype, device, repeats)


def _shares(
    layout: Layout, mask: SequenceMask, case: KernelCase, index: VerticalSlash | None
) -> Iterator[_WorkerCall]:
    """Yield the last worker's calls: its own shard, another shard, and all keys."""
    workers, rank = layout.workers, layout.workers - 1
    for exchange in (RING, GATHER):
        schedule = make_schedule(exchange, ScheduleOptions(workers, workers))
        counter = WorkCounter.make(schedule, layout, [mask], case.heads, case.block)
        work, masked = (counter.count(attended, rank)[FORWARD] for attended in (index, None))
        steps = schedule.forward[rank]
        chosen = {0, len(steps) // 2} if exchange == RING else {0}
        for at in sorted(chosen):
            step: ScheduleStep = steps[at]
            if not step.keys or not work.pairs[0, at]:
                continue
            keys = (
                np.arange(layout.padded_seq)
                if exchange == GATHER
                else layout.positions(step.keys[0])
            )
            yield _WorkerCall(exchange, at, layout.positions(rank), keys, work, masked)


def _tiles(mask: SequenceMask, share: _WorkerCall, block: int, device: str) -> Tiles:
    geometry = BlockGeometry.make([mask], share.queries, share.keys, block, device)
    return Tiles.make([mask.spans(share.queries, share.keys)], device, geometry)


@dataclass(frozen=True)
class _Tensors:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    scale: float

    @staticmethod
    def make(
        case: KernelCase, queries: int, keys: int, dtype: torch.dtype, device: str
    ) -> _Tensors:
        generator = torch.Generator(device=device).manual_seed(0)
        shapes = (
            (queries, case.heads),
            (keys, case.kv_heads),
            (keys, case.kv_heads),
            (queries, case.heads),
        )
        drawn = (
            torch.randn(1, n, h, case.head_dim, generator=generator, device=device, dtype=dtype)
            for n, h in shapes
        )
        q, k, v, dout = drawn
        return _Tensors(q, k, v, dout, case.head_dim**-0.5)


def _timed(
    kernel: Kernel,
    case: KernelCase,
    share: _WorkerCall,
    tiles: Tiles,
    tensors: _Tensors,
    device: str,
    repeats: int,
    form: str,
    workers: int,
    layout: str,
) -> KernelTime:
    q, k, v, dout, scale = tensors.q, tensors.k, tensors.v, tensors.dout, tensors.scale
    out, lse = kernel.forward(q, k, v, tiles, scale)
    delta = None if kernel.needs_out or share.exchange == GATHER else row_delta(out, dout)
    forward = median_ms(
        lambda: kernel.forward(q, k, v, tiles.without_index_cache(), scale), device, repeats
    )
    backward = median_ms(
        lambda: kernel.backward(dout, q, k, v, out, lse, delta, tiles, scale), device, repeats
    )
    of_columns = (
        int(share.work.of_columns[0, share.step])
        if share.work.of_columns is not None and form == SPARSE
        else 0
    )
    pairs, blocks = (int(values[0, share.step]) for values in (share.work.pairs, share.work.blocks))
    at = share.exchange if share.exchange == GATHER else f"{share.exchange} step {share.step}"
    return _time(
        kernel,
        case,
        form,
        workers,
        f"{layout}, {at}",
        (pairs, blocks, of_columns),
        int(share.masked.pairs[0, share.step]),
        forward,
        backward,
    )


def _columns(
    kernel: Kernel,
    case: KernelCase,
    layout: Layout,
    mask: SequenceMask,
    index: Index,
    workers: int,
    name: str,
    dtype: torch.dtype,
    device: str,
    repeats: int,
) -> KernelTime:
    """Time the single columns that a ring has gathered, for the queries of the last worker."""
    rank = layout.workers - 1
    schedule = make_schedule(RING, ScheduleOptions(layout.workers, layout.workers))
    counter = WorkCounter.make(schedule, layout, [mask], case.heads, case.block)
    own, everything = layout.positions(rank), np.arange(layout.padded_seq)
    moved = index.to(device)

    def between(keys: np.ndarray) -> Tiles:
        geometry = BlockGeometry.make([mask], own, keys, case.block, device)
        return Tiles.make([mask.spans(own, keys)], device, geometry).with_index(moved)

    shared = SharedColumns.make(between(everything), between(own))
    assert shared is not None
    tensors = _Tensors.make(case, len(own), len(own), dtype, device)
    q, dout, scale = tensors.q, tensors.dout, tensors.scale
    width = shared.slots.shape[-1]
    packed = torch.randn(2, 1, case.heads, width, case.head_dim, device=device, dtype=dtype)
    high = accumulation_dtype(dtype)
    # The partial result of the other keys: the output of one step.
    partial = torch.zeros_like(q), torch.zeros(1, case.heads, len(own), device=device, dtype=high)
    out, lse = kernel.forward_columns(q, packed, shared, scale, partial)
    delta = row_delta(out.to(dtype), dout)
    forward = median_ms(
        lambda: kernel.forward_columns(q, packed, shared, scale, partial), device, repeats
    )
    backward = median_ms(
        lambda: kernel.backward_columns(dout, q, packed, lse, delta, shared, scale), device, repeats
    )
    pairs = int(counter.count(index, rank)[FORWARD].column_pairs[0])
    return _time(
        kernel,
        case,
        ALONE_COLUMNS,
        workers,
        f"{name}, columns",
        (pairs, 0, pairs),
        pairs,
        forward,
        backward,
    )


def _time(
    kernel: Kernel,
    case: KernelCase,
    form: str,
    workers: int,
    what: str,
    counts: tuple[int, int, int],
    masked: int,
    forward: float,
    backward: float,
) -> KernelTime:
    pairs, blocks, of_columns = counts
    flop = 4 * case.head_dim * pairs
    return KernelTime(
        kernel=kernel.name,
        case=case,
        pairs=pairs,
        blocks=blocks,
        column_pairs=of_columns,
        forward_ms=forward,
        backward_ms=backward,
        forward_tflops=flop / forward / 1e9,
        backward_tflops=2.5 * flop / backward / 1e9,
        forward_ratio=None,
        backward_ratio=None,
        form=form,
        workers=workers,
        what=what,
        mask_pairs=masked,
        skips=kernel.skips,
    )
