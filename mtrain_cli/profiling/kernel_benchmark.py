"""`mtrain profile kernels`: time this machine's attention kernels, dense and under fixed indices.

The result is a calibration file, from which the simulator prices an index on this device.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mtrain_cli.attention.index import MaskWork
from mtrain_cli.attention.kernel import IndexRequest, Kernel, KernelRequest
from mtrain_cli.attention.kernel_registry import choose, survey
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.tiles import BlockGeometry, Tiles
from mtrain_cli.sparsity.fixed import fixed_index

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """One shape to time.

    seq, block: tokens
    density: share of the causal blocks that the diagonals keep; None for dense attention
    columns: single columns of each head
    """

    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    block: int
    density: float | None = None
    columns: int = 0


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """Median times of one kernel on one case.

    pairs: computed query-key pairs over all heads (the useful work)
    blocks: block pairs on diagonals, over all heads
    column_pairs: pairs of single columns, over all heads
    forward_tflops, backward_tflops: 4 and 10 * head_dim FLOP per pair
    forward_ratio, backward_ratio: dense time of the same run / this time
    form: class of the call (`simulation.calibration`); None: derived from the density
    workers, what: the call is one worker's share of a run of `workers` (`profiling.worker_calls`)
    mask_pairs: pairs that the mask allows, without an index
    skips: whether the kernel skips the pairs that the index drops
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


def profile_kernels(
    cases: Sequence[KernelCase],
    kernels: Sequence[str],
    dtype: torch.dtype,
    device: str,
    repeats: int,
    report: Callable[[KernelTime], None],
) -> list[KernelTime]:
    """Time every kernel on every case that it supports.

    The fastest dense kernel of each length runs first, as the reference of the ratios. Kernels that
    do not support a case are skipped; `unsupported_kernels` names them.

    Args:
        kernels: names; empty for all that support a case.
        report: called with each time as soon as it is measured.
    """
    times: list[KernelTime] = []
    dense: dict[tuple[int, int, int, int], tuple[float, float]] = {}
    for case in cases:
        shape = (case.seq, case.heads, case.kv_heads, case.head_dim)
        if shape not in dense:
            kernel, _ = choose("auto", request_of(case, dtype, device, None))
            base = KernelCase(
                seq=case.seq,
                heads=case.heads,
                kv_heads=case.kv_heads,
                head_dim=case.head_dim,
                block=case.block,
            )
            measured = _measure(kernel, base, dtype, device, repeats, None)
            dense[shape] = (measured.forward_ms, measured.backward_ms)
            times.append(measured)
            report(measured)
        if case.density is None:
            continue
        for name, reason in _survey(case, kernels, dtype, device):
            if reason is not None:
                continue
            kernel, _ = choose(
                name, request_of(case, dtype, device, IndexRequest(case.block, bitmap=False))
            )
            measured = _measure(kernel, case, dtype, device, repeats, dense[shape])
            times.append(measured)
            report(measured)
    return times


def unsupported_kernels(
    cases: Sequence[KernelCase], kernels: Sequence[str], dtype: torch.dtype, device: str
) -> list[tuple[str, str, bool]]:
    """Return the kernels that cannot run under an index: (name, reason, runs in no case)."""
    reasons: dict[tuple[str, str], None] = {}
    served: set[str] = set()
    for case in cases:
        for name, reason in _survey(case, kernels, dtype, device):
            if reason is None:
                served.add(name)
            else:
                reasons[name, reason] = None
    return [(name, reason, name not in served) for name, reason in reasons]


def _survey(
    case: KernelCase, kernels: Sequence[str], dtype: torch.dtype, device: str
) -> list[tuple[str, str | None]]:
    """Return (name, reason why not or None) of the requested kernels.

    Without a request: all but `reference`.
    """
    reasons = survey(request_of(case, dtype, device, IndexRequest(case.block, bitmap=False)))
    return [
        (name, reason)
        for name, reason in reasons
        if (name in kernels if kernels else name != "reference")
    ]


def supported_kernels(
    case: KernelCase, kernels: Sequence[str], dtype: torch.dtype, device: str
) -> list[str]:
    """Return the names of the requested kernels that support an index of this case."""
    return [name for name, reason in _survey(case, kernels, dtype, device) if reason is None]


def request_of(
    case: KernelCase, dtype: torch.dtype, device: str, index: IndexRequest | None
) -> KernelRequest:
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    name = str(dtype).removeprefix("torch.")
    return KernelRequest(
        device, capability, name, case.head_dim, case.heads, case.kv_heads, index=index
    )


def _measure(
    kernel: Kernel,
    case: KernelCase,
    dtype: torch.dtype,
    device: str,
    repeats: int,
    dense: tuple[float, float] | None,
) -> KernelTime:
    mask, everywhere = SequenceMask.causal(case.seq, case.seq), np.arange(case.seq)
    geometry = BlockGeometry.make([mask], everywhere, everywhere, case.block, device)
    tiles = Tiles.make([mask.spans(everywhere, everywhere)], device, geometry)
    pairs, blocks, column_pairs = mask.pairs * case.heads, 0, 0
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
        counts = index.counts(MaskWork.make([mask], case.block))
        pairs, blocks, column_pairs = (
            int(t.sum()) for t in (counts.pairs, counts.blocks, counts.column_pairs)
        )
        tiles = tiles.with_index(index.to(device))
    generator = torch.Generator(device=device).manual_seed(0)
    shapes = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    q, k, v, dout = (
        torch.randn(1, case.seq, h, case.head_dim, generator=generator, device=device, dtype=dtype)
        for h in shapes
    )
    scale = case.head_dim**-0.5
    out, lse = kernel.forward(q, k, v, tiles, scale)
    forward = median_ms(
        lambda: kernel.forward(q, k, v, tiles.without_index_cache(), scale), device, repeats
    )
    backward = median_ms(
        lambda: kernel.backward(dout, q, k, v, out, lse, None, tiles, scale), device, repeats
    )
    flop = 4 * case.head_dim * pairs
    return KernelTime(
        kernel=kernel.name,
        case=case,
        pairs=pairs,
        blocks=blocks,
        column_pairs=column_pairs,
        forward_ms=forward,
        backward_ms=backward,
        forward_tflops=flop / forward / 1e9,
        backward_tflops=2.5 * flop / backward / 1e9,
        forward_ratio=dense[0] / forward if dense else None,
        backward_ratio=dense[1] / backward if dense else None,
        mask_pairs=mask.pairs * case.heads,
        skips=kernel.skips,
    )


def median_ms(call: Callable[[], Any], device: str, repeats: int) -> float:
    """Return the median ms of single calls after two warm-up calls.

    Timed with CUDA events on a GPU, with the monotonic clock on a CPU.
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


def save_calibration(
    times: Sequence[KernelTime], path: Path, command: str, dtype: torch.dtype, device: str
) -> None:
    """Write the calibration file: hardware, versions, the command and every time."""
    document = {
        "schema": SCHEMA,
        "kind": "kernels",
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads() if device == "cpu" else None,
        "versions": versions(),
        "command": command,
        "times": [asdict(t) for t in times],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def device_name(device: str) -> str:
    """Return the name of the GPU (device=cuda) or the CPU model, if the system states it."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, [*models, platform.processor(), platform.machine()]), "CPU")


def versions() -> dict[str, str | None]:
    return {name: _version(name) for name in ("torch", "triton", "flash-attn-4", "cupy-cuda13x")}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
