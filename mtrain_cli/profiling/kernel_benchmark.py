"""`mtrain profile kernels`: time this machine's attention kernels, dense and with fixed indices.

The result is a calibration file. From this file, the simulator predicts the time of kernel calls on
this device.
"""

from __future__ import annotations

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
from mtrain_cli.attention.partials import row_delta
from mtrain_cli.attention.tiles import Tiles
from mtrain_cli.profiling.timing import dtype_name, median_ms
from mtrain_cli.simulation.work_counts import BACKWARD, FLOP_PER_PAIR, FORWARD
from mtrain_cli.sparsity.fixed import fixed_index


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
class CallTime:
    """Median times of one kernel on one case.

    pairs: number of query-key pairs to compute, summed over the heads.
    forward_ms, backward_ms: median time of a call; None for a backward that the kernel lacks.
    forward_tflops, backward_tflops: throughput in TFLOP/s, from ``pairs`` and
        `work_counts.FLOP_PER_PAIR`.
    forward_ratio, backward_ratio: time of another implementation in the same run, divided by this
        time; None without such a time.
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
        if self.backward_ms is None:
            return None
        return FLOP_PER_PAIR[BACKWARD] * self.case.head_dim * self.pairs / self.backward_ms / 1e9

    def compared(self, base: CallTime | None) -> Self:
        """Return these times with the ratios of ``base``; without ratios if it is None."""
        if base is None:
            return self
        backward = None
        if base.backward_ms and self.backward_ms:
            backward = base.backward_ms / self.backward_ms
        forward = base.forward_ms / self.forward_ms
        return replace(self, forward_ratio=forward, backward_ratio=backward)


@dataclass(frozen=True, kw_only=True)
class KernelTime(CallTime):
    """Median times of one kernel with one index. The ratios are to dense attention.

    blocks: number of block pairs on slashes, summed over the heads.
    column_pairs: number of query-key pairs of single columns, summed over the heads.
    form: form of the call, one of the names in `simulation.calibration`; None to derive the form
        from the density.
    what: name of the call that was timed for one worker (`profiling.worker_calls`); `whole` for a
        call on the whole sequence.
    mask_pairs: number of query-key pairs that the mask allows; None if not counted.
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
            self.device, capability, dtype_name(self.dtype), case.head_dim, case.heads,
            case.kv_heads, index=index, intervals=intervals,
        )  # fmt: skip

    def unsupported(self, cases: Sequence[KernelCase]) -> list[tuple[str, str, bool]]:
        """Return (name, reason, never) for every kernel that cannot run at least one case.

        never: True if the kernel cannot run any case.
        """
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

        with_delta: whether to compute delta before the timed calls, as a ring does. A kernel that
            needs the output always computes delta in the timed call.
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
        return {
            name: call and median_ms(call, self.device, self.repeats)
            for name, call in calls.items()
        }


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
    return KernelTime(
        kernel=kernel.name,
        case=case,
        **counts,
        **bench.time_passes(kernel, case, tiles),
        mask_pairs=mask_pairs,
        skips=kernel.skips,
    )
