"""Run mtrain's CUDA sources on a CPU: g++ compiles them with CUDA's keywords defined in `warps.h`.

This tests their logic without a GPU.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from mtrain_cli import resource_dir

COMPILER = shutil.which("g++")
_KERNEL = re.compile(r'extern "C" __global__ void (\w+)\(')


class Emulator:
    """Stands in for `kernels.cuda.nvrtc`.

    folder: holds the compiled libraries.
    launched: names of the kernels that ran.
    backwards: whether the last rows of a grid run first.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launched: list[str] = []
        self.backwards = False
        self._libraries: dict[str, ctypes.CDLL] = {}

    def launch(
        self,
        file: str,
        kernel: str,
        grid: tuple[int, int],
        threads: int,
        *arguments: torch.Tensor | int,
    ) -> None:
        """Launch as `kernels.cuda.nvrtc.launch` does.

        Integers without an np.int64 wrapper must fit 32 bits.

        Raises:
            RuntimeError: the kernel trapped.
        """
        values = []
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                values.append(argument.data_ptr())
            else:
                limits = np.iinfo(np.int64 if isinstance(argument, np.int64) else np.int32)
                assert limits.min <= int(argument) <= limits.max
                values.append(int(argument) % 2**64)
        library = self._library(file)
        ctypes.c_int.in_dll(library, "backwards").value = self.backwards
        if library[f"run_{kernel}"](*grid, threads, (ctypes.c_uint64 * len(values))(*values)):
            raise RuntimeError(f"{kernel}: trap")
        self.launched.append(kernel)

    def _library(self, file: str) -> ctypes.CDLL:
        if file not in self._libraries:
            source = resource_dir("kernels") / "cuda" / f"{file}.cu"
            runs = [
                f'extern "C" int run_{name}(unsigned x, unsigned y, unsigned n, const uint64_t* v) '
                f"{{ return run({name}, x, y, n, v, places_of({name})); }}"
                for name in _KERNEL.findall(source.read_text())
            ]
            whole = self.folder / f"{file}.cpp"
            headers = Path(__file__).with_name("warps.h"), source
            whole.write_text("\n".join([*(f'#include "{path}"' for path in headers), *runs]))
            library = self.folder / f"{file}.so"
            options = ["-std=c++17", "-O1", "-shared", "-fPIC", "-o"]
            command = [str(COMPILER), *options, str(library), str(whole)]
            compiled = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert compiled.returncode == 0, compiled.stderr
            self._libraries[file] = ctypes.CDLL(str(library))
        return self._libraries[file]


def use_emulator(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, *modules: types.ModuleType
) -> None:
    """Make these modules use the CUDA kernels whatever device their tensors are on."""
    launcher = types.ModuleType("mtrain_cli.kernels.cuda.nvrtc")
    launcher.launch = emulator.launch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mtrain_cli.kernels.cuda.nvrtc", launcher)
    for module in modules:
        monkeypatch.setattr(module, "cuda_kernels_usable", lambda _: True)
