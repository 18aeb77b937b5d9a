"""Compile the .cu files of this folder with CuPy's NVRTC and launch their kernels."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import torch


@cache
def _module(name: str, device: int) -> Any:
    """Compile a file for a device, once. CuPy caches the binary on disk for later processes."""
    with cupy.cuda.Device(device):
        return cupy.RawModule(
            code=Path(__file__).with_name(f"{name}.cu").read_text(),
            options=("--std=c++17",),
            backend="nvrtc",
        )


@cache
def _kernel(file: str, kernel: str, device: int) -> Any:
    """Return a kernel, which `RawModule.get_function` would make anew for each launch."""
    with cupy.cuda.Device(device):
        return _module(file, device).get_function(kernel)


@cache
def _stream(stream: torch.cuda.Stream) -> Any:
    return cupy.cuda.Stream.from_external(stream)


def check() -> None:
    """Compile the smallest file for the current device. Raise CuPy's error on failure."""
    _module("merge", torch.cuda.current_device()).compile()


def launch(
    file: str, kernel: str, grid: tuple[int, int], threads: int, *arguments: torch.Tensor | int
) -> None:
    """Queue one kernel on torch's current stream.

    arguments: arguments of the kernel. Tensors are passed by address, `np.int64` as 64 bits, other
        integers as 32 bits.
    """
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
    # CuPy's contexts of a device and of a stream would take longer than the launch.
    stream = _stream(torch.cuda.current_stream(device))
    with torch.cuda.device(device):
        _kernel(file, kernel, device)((*grid, 1), (threads, 1, 1), values, stream=stream)
