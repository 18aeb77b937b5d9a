"""What all benchmarks share: timed calls, and the file of their results."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mtrain_cli.profiling.diagnosis import installed_version

SCHEMA = 1
WARM_UP = 2  # calls before the first timed call


def measure(
    call: Callable[[], Any], device: str, repeats: int, before: Callable[[], Any] = lambda: None
) -> list[float]:
    """Return the time in ms of every call after `WARM_UP` calls.

    Each is preceded by an untimed call of ``before``.
    CUDA events measure on device `cuda`, and the monotonic clock elsewhere.
    """
    times = []
    for _ in range(WARM_UP + repeats):
        before()
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
    return times[WARM_UP:]


def median_ms(call: Callable[[], Any], device: str, repeats: int) -> float:
    """Return the median of `measure`."""
    return statistics.median(measure(call, device, repeats))


def busy_ms(call: Callable[[], Any], calls: int) -> float:
    """Return the time of a call on a GPU in a busy stream: the host is ahead, as in training.

    It is the median of three rows of ``calls`` calls without a wait.
    """
    times = []
    for _ in range(1 + 3):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20_000_000)  # cycles in which the host enqueues the calls
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return statistics.median(times[1:])


def save_times(
    path: Path,
    times: Sequence[Any],
    command: str,
    *,
    kind: str,
    device: str,
    dtype: torch.dtype,
    **settings: Any,
) -> None:
    """Write a file of `result_document`."""
    document = result_document(
        kind, device, times, command, dtype=str(dtype).removeprefix("torch."), **settings
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def result_document(
    kind: str, device: str, times: Sequence[Any], command: str | list[str], **settings: Any
) -> dict[str, Any]:
    """Return the content of a file of times, with hardware, versions, command and settings.

    times: dataclasses. Each entry also has the properties that ``derived`` of its class names.
    """
    return {
        "schema": SCHEMA,
        "kind": kind,
        "device": device_name(device),
        "threads": torch.get_num_threads() if device == "cpu" else None,
        "versions": {
            name: installed_version(name)
            for name in ("torch", "triton", "flash-attn-4", "cupy-cuda13x")
        },
        "command": command,
        **settings,
        "times": [
            asdict(t) | {name: getattr(t, name) for name in getattr(t, "derived", ())}
            for t in times
        ],
    }


def device_name(device: str) -> str:
    """Return the name of the GPU for device `cuda`, else of the CPU."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, [*models, platform.processor(), platform.machine()]), "CPU")
