"""Compiles the .cu files beside this one with CuPy's NVRTC at first use and launches their kernels on torch's current stream."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import torch


@cache
def _module(name: str, device: int) -> Any:
    """One compilation per file and device; CuPy keeps the result on disk for later processes."""
    with cupy.cuda.Device(device):
        return cupy.RawModule(
            code=Path(__file__).with_name(f"{name}.cu").read_text(),
            options=("--std=c++17",),
            backend="nvrtc",
        )


def check() -> None:
    """Compiles the smallest file for the current device; raises what CuPy raises where that fails."""
    _module("merge", torch.cuda.current_device()).compile()


def launch(
    file: str, kernel: str, grid: tuple[int, int], threads: int, *arguments: torch.Tensor | int
) -> None:
    """Queues one kernel. Tensors are passed by address; integers as 32 bits unless they are `np.int64`."""
    tensor = next(a for a in arguments if isinstance(a, torch.Tensor))
    device = tensor.device.index
    values = tuple(
        np.uintp(a.data_ptr())
        if isinstance(a, torch.Tensor)
        else a
        if isinstance(a, np.int64)
        else np.int32(a)
        for a in arguments
    )
    stream = cupy.cuda.Stream.from_external(torch.cuda.current_stream(device))
    with cupy.cuda.Device(device), stream:
        _module(file, device).get_function(kernel)((*grid, 1), (threads, 1, 1), values)
