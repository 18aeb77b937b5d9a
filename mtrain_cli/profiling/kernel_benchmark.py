"""`mtrain profile kernels`: time this machine's attention kernels, dense and with fixed indices.

The result is a calibration file. From this file, the simulator predicts the time of kernel calls on
this device.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtrain_cli.attention.index import VerticalSlash
from mtrain_cli.attention.kernel import IndexRequest, Kernel, KernelRequest, Saved
from mtrain_cli.attention.kernel_registry import choose, survey
from mtrain_cli.attention.mask import IntArray, SequenceMask
from mtrain_cli.attention.mask_tables import MaskTables
from mtrain_cli.attention.partials import row_delta
from mtrain_cli.attention.tiles import Tiles
from mtrain_cli.simulation.work_counts import BACKWARD, FLOP_PER_PAIR, FORWARD
from mtrain_cli.sparsity.fixed import fixed_index

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """One shape to time.

    density: share of the causal block pairs that lie on slashes; None for dense attention.
    """

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
class KernelTime:
    """Median times of one kernel on one case. Numbers of pairs are sums over all heads.

    pairs: number of query-key pairs to compute.
    blocks: number of block pairs on slashes.
    column_pairs: number of query-key pairs of single columns.
    forward_ms, backward_ms: median time of a call in milliseconds.
    forward_tflops, backward_tflops: throughput in TFLOP/s, from ``pairs`` and
        `work_counts.FLOP_PER_PAIR`.
    forward_ratio, backward_ratio: time of dense attention in the same run, divided by this time;
        None without a dense time.
    form: form of the call, one of the names in `simulation.calibration`; None to derive the form
        from the density.
    what: name of the call that was timed for one worker (`profiling.worker_calls`); `whole` for a
        call on the whole sequence.
    mask_pairs: number of query-key pairs that the mask allows; None if not counted.
    skips: whether the kernel skips the pairs that the index leaves out.
    """

    kernel: str
    case: KernelCase
    pairs: int
    blocks: int
    column_pairs: int
    forward_ms: float
    backward_ms: float
    forward_tflops: float
    backward_tflops: float
    forward_ratio: float | None
    backward_ratio: float | None
    form: str | None = None
    workers: int = 1
    what: str = "whole"
    mask_pairs: int | None = None
    skips: bool = True

    @staticmethod
    def make(
        kernel: Kernel,
        case: KernelCase,
        ms: tuple[float, float],
        counts: tuple[int, int, int],
        *,
        dense: KernelTime | None = None,
        **more: Any,
    ) -> KernelTime:
        """Return the times of a case, and compute its throughput and ratios.

        Args:
            ms: (forward, backward) times in milliseconds.
            counts: numbers of (pairs, blocks, column_pairs).
            dense: times of dense attention in the same run; None to compute no ratios.
        """
        (forward, backward), (pairs, blocks, column_pairs) = ms, counts
        products = case.head_dim * pairs
        return KernelTime(
            kernel=kernel.name,
            case=case,
            pairs=pairs,
            blocks=blocks,
            column_pairs=column_pairs,
            forward_ms=forward,
            backward_ms=backward,
            forward_tflops=FLOP_PER_PAIR[FORWARD] * products / forward / 1e9,
            backward_tflops=FLOP_PER_PAIR[BACKWARD] * products / backward / 1e9,
            forward_ratio=dense.forward_ms / forward if dense else None,
            backward_ratio=dense.backward_ms / backward if dense else None,
            skips=kernel.skips,
            **more,
        )


@dataclass(frozen=True)
class KernelBench:
    """The kernels to time, and the settings of the measurement.

    names: names of the kernels to time; empty for all kernels except `reference`.
    repeats: number of calls whose median is the result.
    """

    names: Sequence[str]
    dtype: torch.dtype
    device: str
    repeats: int

    def kernels(self, case: KernelCase) -> Iterator[Kernel]:
        """Yield the kernels to time on a case.

        For a sparse case, yield all kernels that support the case. For dense attention, yield the
        kernel that `auto` chooses.
        """
        names = ["auto"]
        if case.density is not None:
            names = [name for name, reason in self.survey(case) if reason is None]
        for name in names:
            yield choose(name, self.request(case))[0]

    def survey(self, case: KernelCase) -> list[tuple[str, str | None]]:
        """Return (name, reason) of every kernel: why it cannot run the case, or None if it can."""
        return [
            (name, reason)
            for name, reason in survey(self.request(case))
            if (name in self.names if self.names else name != "reference")
        ]

    def request(self, case: KernelCase, intervals: int = 1) -> KernelRequest:
        """Return what a case needs from a kernel.

        intervals: most intervals of keys that a query sees.
        """
        capability = torch.cuda.get_device_capability() if self.device == "cuda" else None
        index = None if case.density is None else IndexRequest(case.block, bitmap=False)
        return KernelRequest(
            self.device, capability, _dtype_name(self.dtype), case.head_dim, case.heads,
            case.kv_heads, index=index, intervals=intervals,
        )  # fmt: skip

    def unsupported(self, cases: Sequence[KernelCase]) -> list[tuple[str, str, bool]]:
        """Return (name, reason, never) for every kernel that cannot run at least one case.

        never: True if the kernel cannot run any case.
        """
        surveyed = dict.fromkeys(found for case in cases for found in self.survey(case))
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
        self,
        kernel: Kernel,
        case: KernelCase,
        tiles: Tiles,
        inputs: Sequence[torch.Tensor],
        *,
        with_delta: bool = False,
    ) -> tuple[float, float]:
        """Return the times of the (forward, backward) pass in ms.

        with_delta: whether to compute delta before the timed calls, as a ring does. A kernel that
            needs the output always computes delta in the timed call.
        """
        q, k, v, dout = inputs
        scale = case.head_dim**-0.5
        out, lse = kernel.forward(q, k, v, tiles, scale)
        delta = row_delta(out, dout) if with_delta and not kernel.needs_out else None
        return (
            self.median_ms(lambda: kernel.forward(q, k, v, tiles.without_index_cache(), scale)),
            self.median_ms(
                lambda: kernel.backward(dout, Saved(q, k, v, out, lse, delta), tiles, scale)
            ),
        )

    def median_ms(self, call: Callable[[], Any]) -> float:
        return median_ms(call, self.device, self.repeats)


def profile_kernels(bench: KernelBench, cases: Sequence[KernelCase]) -> Iterator[KernelTime]:
    """Yield the time of every kernel on every case that the kernel supports.

    For each length, dense attention with the kernel that `auto` chooses comes first. The ratios of
    the sparse cases use this dense time.
    """
    dense: dict[KernelCase, KernelTime] = {}
    for case in cases:
        base = case.dense
        if base not in dense:
            (kernel,) = bench.kernels(base)
            dense[base] = _measure(bench, kernel, base)
            yield dense[base]
        if case.density is not None:
            for kernel in bench.kernels(case):
                yield _measure(bench, kernel, case, dense[base])


def _measure(
    bench: KernelBench, kernel: Kernel, case: KernelCase, dense: KernelTime | None = None
) -> KernelTime:
    mask, everywhere = SequenceMask.causal(case.seq, case.seq), np.arange(case.seq)
    tiles = bench.tiles(mask, everywhere, everywhere, case)
    counts = mask.pairs * case.heads, 0, 0
    if case.density is not None:
        index = case.index()
        found = index.counts(MaskTables.make([mask], case.block))
        counts = int(found.pairs.sum()), int(found.blocks.sum()), int(found.column_pairs.sum())
        tiles = tiles.with_index(index.to(bench.device))
    ms = bench.time_passes(kernel, case, tiles, bench.inputs(case, case.seq, case.seq))
    return KernelTime.make(
        kernel, case, ms, counts, dense=dense, mask_pairs=mask.pairs * case.heads
    )


def median_ms(call: Callable[[], Any], device: str, repeats: int) -> float:
    """Return the median time of a call in milliseconds, after two warm-up calls.

    device: `cuda` to measure with CUDA events. Any other device uses the monotonic clock.
    """
    for _ in range(2):
        call()
    times = []
    for _ in range(repeats):
        if device == "cuda":
            started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            started.record()
            call()
            ended.record()
            ended.synchronize()
            times.append(started.elapsed_time(ended))
        else:
            clock = time.perf_counter()
            call()
            times.append((time.perf_counter() - clock) * 1e3)
    return statistics.median(times)


def save_times(
    path: Path,
    times: Sequence[Any],
    command: str,
    dtype: torch.dtype,
    device: str,
    kind: str = "kernels",
    **settings: Any,
) -> None:
    """Write a calibration file: hardware, versions, command, settings and all times."""
    document = {
        "schema": SCHEMA,
        "kind": kind,
        "device": device_name(device),
        "dtype": _dtype_name(dtype),
        "threads": torch.get_num_threads() if device == "cpu" else None,
        "versions": versions(),
        "command": command,
        **settings,
        "times": [asdict(t) for t in times],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def device_name(device: str) -> str:
    """Return the name of the GPU for device `cuda`, else the CPU model, or "CPU" if unknown."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, [*models, platform.processor(), platform.machine()]), "CPU")


def versions() -> dict[str, str | None]:
    names = "torch", "triton", "flash-attn-4", "cupy-cuda13x"
    return {name: installed_version(name) for name in names}


def installed_version(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
