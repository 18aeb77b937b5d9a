"""Pinned host memory, for what travels to and from a GPU.

torch pins what `torch.empty(..., pin_memory=True)` returns page by page on one thread: 1.6 to 2.7 GiB/s beside an H200, so two minutes for
the 300 GiB that a long sequence leaves on the host. Here whole arenas are mapped, in huge pages where the system gives them, written to by
several threads at once and then registered with CUDA: 20 GiB/s (profiles/notes.md). torch also rounds each allocation up to a power of two.
"""

from __future__ import annotations

import mmap
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import prod

import numpy as np
import torch

ARENA = 256 << 20  # bytes that are pinned at once, for small requests
_ALONE = 32 << 20  # requests from here on have a mapping of their own
_HUGE = 2 << 20
_LARGE = 16 << 20  # requests from here on share arenas with one another only, since smaller ones would leave gaps between them
_ALIGN = 256
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


class PinnedMemory:
    """Host tensors for copies to and from one device; plain memory for a CPU. Nothing is given back before the tensors are gone.

    mapped: bytes pinned so far, what is left of arenas included. registers: False where CUDA refused, and torch pins instead.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.mapped = 0
        self.registers = True
        self._rest: dict[bool, torch.Tensor] = {}  # of the arenas at hand, for large and for small requests

    def empty(self, size: int) -> torch.Tensor:
        """So many bytes, uint8."""
        if self.device.type != "cuda" or size == 0:
            return torch.empty(size, dtype=torch.uint8)
        if size >= _ALONE:
            return self._mapping(-(-size // _HUGE) * _HUGE)[:size]
        rest = self._rest.get(size >= _LARGE)
        if rest is None or len(rest) < size:
            rest = self._mapping(ARENA)
        taken, self._rest[size >= _LARGE] = rest[:size], rest[-(-size // _ALIGN) * _ALIGN :]
        return taken

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.empty(prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def _mapping(self, size: int) -> torch.Tensor:
        self.mapped += size
        if self.registers:
            with suppress(OSError):  # no room for it, or a system that does not know what it is asked
                mapping = _Mapping(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                if mapping.register(self.device):
                    return torch.frombuffer(mapping, dtype=torch.uint8)
            self.registers = False
        return pinned_by_torch(size)


class _Mapping(mmap.mmap):
    """Anonymous memory, registered with CUDA until the last tensor in it is gone."""

    _address = 0

    def register(self, device: torch.device) -> bool:
        """Whether CUDA has pinned it; every page is there then."""
        self.madvise(mmap.MADV_DONTFORK)  # a child would be given a copy of every pinned page
        with suppress(OSError):  # a kernel without huge pages
            self.madvise(mmap.MADV_HUGEPAGE)
        pages = np.frombuffer(self, dtype=np.uint8)
        touch(pages, torch.get_num_threads())
        address = pages.ctypes.data
        if not register(address, len(self), device):
            return False
        self._address = address
        return True

    def __del__(self) -> None:
        if self._address and not sys.is_finalizing():
            unregister(self._address)


def touch(memory: np.ndarray, threads: int) -> None:
    """Has the system find every page of fresh memory, on several threads, each with a stretch of it: that is where pinning spends its
    time. memory: bytes, which become 0.
    """

    def write(part: np.ndarray) -> None:
        part[:: mmap.PAGESIZE] = 0

    share = -(-len(memory) // max(1, threads) // _HUGE) * _HUGE
    with ThreadPoolExecutor(max(1, threads)) as pool:
        list(pool.map(write, [memory[at : at + share] for at in range(0, len(memory), share)]))


def register(address: int, size: int, device: torch.device) -> bool:
    """Pins memory that is there already; False where CUDA refuses."""
    if int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE)) == 0:
        return True
    with suppress(RuntimeError):
        torch.zeros(1, device=device)  # CUDA keeps the error for whoever asks next, which is torch behind its next launch
    return False


def unregister(address: int) -> None:
    torch.cuda.synchronize()  # a copy may be on its way
    torch.cuda.cudart().cudaHostUnregister(address)


def pinned_by_torch(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
