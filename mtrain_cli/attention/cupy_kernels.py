"""Check whether mtrain's CUDA kernels (`kernels/cuda`) can run: CuPy is installed and compiles."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch


@cache
def cupy_unsupported_reason() -> str | None:
    """Return why the CUDA kernels cannot run on the current GPU, or None if they can."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    try:
        from mtrain_cli.kernels.cuda.nvrtc import check
    except Exception as error:  # a broken installation can raise anything
        return f"CuPy cannot be imported: {_first_line(error)}"
    try:
        check()
    except Exception as error:
        return f"CuPy cannot compile here: {_first_line(error)}"
    return None


def cuda_kernels_usable(tensor: torch.Tensor) -> bool:
    """Return whether the CUDA kernels can process the tensor: it is on a GPU and CuPy works."""
    return tensor.is_cuda and cupy_unsupported_reason() is None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:120]
