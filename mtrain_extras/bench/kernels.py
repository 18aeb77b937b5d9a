"""`mtrain profile kernels`: time attention kernels, dense and with fixed indices.

The times are a calibration of the simulator.
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
from mtrain_cli.attention.tiles import Tiles
from mtrain_cli.simulation.work_counts import BACKWARD, FLOP_PER_PAIR, FORWARD
from mtrain_cli.sparsity.fixed import fixed_index
from mtrain_extras.bench.timing import median_ms


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
    mask_pairs: query-key pairs that the mask allows; None if not counted.
    skips: whether the kernel skips the pairs that the index leaves out.
    """

    blocks: int = 0
    column_pairs: int = 0
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

    def time_passes(self, kernel: Kernel, case: KernelCase, tiles: Tiles) -> dict[str, Any]:
        """Return forward_ms and backward_ms of a kernel on random inputs."""
        q, k, v, dout = self.inputs(case, tiles.num_queries, tiles.num_keys)
        scale = case.head_dim**-0.5
        out, lse = kernel.forward(q, k, v, tiles, scale)
        return self.time_calls(
            lambda: kernel.forward(q, k, v, tiles.without_index_cache(), scale),
            lambda: kernel.backward(dout, Saved(q, k, v, out, lse, None), tiles, scale),
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
