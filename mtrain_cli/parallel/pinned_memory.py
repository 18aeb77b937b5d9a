"""Pinned host memory for copies to and from a GPU.

torch pins page by page on one thread, 1.6 to 2.7 GiB/s on the host of an H200, and rounds each
allocation up to a power of two. This module maps large regions, writes to them from several threads
and registers them with CUDA: eight threads pin 20 GiB/s (profiles/notes.md).
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import prod

import numpy as np
import torch
from torch import Tensor

ARENA = 256 << 20  # bytes to pin at once, for small requests
_ALONE = 32 << 20  # requests from this size on get a mapping of their own
_HUGE = 2 << 20
# Requests from this size on do not share an arena with smaller ones, which would leave gaps.
_LARGE = 16 << 20
_ALIGN = 256  # as torch's allocators align: more than any dtype or copy engine needs
_MOST_THREADS = 16
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK of Linux 4.14; mmap has no name for it
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


class PinnedMemory:
    """Allocate pinned host tensors for copies to and from one GPU. For a CPU, pin nothing.

    Small tensors share a region of `ARENA` bytes; a large tensor has its own region. A region is
    freed when no tensor uses it. This object keeps the unused rest of at most two regions.

    registers: whether CUDA registers memory for this object. If CUDA refuses, torch pins it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.mapped = 0
        self.registers = True
        # The unused rest of the current arenas: for large (True) and for small requests (False).
        self._rest: dict[bool, Tensor] = {}

    def empty(self, size: int) -> Tensor:
        if self.device.type != "cuda" or size == 0:
            return torch.empty(size, dtype=torch.uint8)
        if size >= _ALONE:
            return self._mapping(-(-size // _HUGE) * _HUGE)[:size]
        rest = self._rest.get(size >= _LARGE)
        if rest is None or len(rest) < size:
            rest = self._mapping(ARENA)
        taken, self._rest[size >= _LARGE] = rest[:size], rest[-(-size // _ALIGN) * _ALIGN :]
        return taken

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.empty(prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def _mapping(self, size: int) -> Tensor:
        self.mapped += size
        if self.registers:
            with suppress(OSError):  # the system has no memory left to map
                mapping = _Mapping(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                if mapping.register(self.device):
                    return torch.frombuffer(mapping, dtype=torch.uint8)
            self.registers = False
            logging.getLogger(__name__).warning(
                "CUDA cannot register host memory here, so torch pins it. Pinning by torch takes "
                "longer and needs up to twice the memory"
            )
        return pinned_by_torch(size)


class _Mapping(mmap.mmap):
    """Anonymous memory that stays registered with CUDA until its last tensor is gone."""

    _address = 0

    def register(self, device: torch.device) -> bool:
        """Write to every page, then pin the memory. Return whether CUDA pinned it."""
        for advice in (_WIPE_ON_FORK, mmap.MADV_HUGEPAGE):
            with suppress(OSError):  # this Linux kernel does not support the advice
                # A forked child would get a copy of every pinned page; with this it gets zeros.
                self.madvise(advice)
        pages = np.frombuffer(self, dtype=np.uint8)
        touch(pages, touching_threads())
        address = pages.ctypes.data
        if not register(address, len(self), device):
            return False
        self._address, self._device, self._process = address, device, os.getpid()
        return True

    def __del__(self) -> None:
        if self._address and self._process == os.getpid() and not sys.is_finalizing():
            unregister(self._address, self._device)


def touching_threads() -> int:
    """Return the number of threads for `touch`: the number of cores per GPU, up to a limit."""
    return max(
        1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // max(1, torch.cuda.device_count()))
    )


def touch(memory: np.ndarray, threads: int) -> None:
    """Write 0 to every page of new memory with several threads, so that the system provides it."""

    def write(part: np.ndarray) -> None:
        part[:: mmap.PAGESIZE] = 0

    share = -(-len(memory) // max(1, threads) // _HUGE) * _HUGE
    try:
        with ThreadPoolExecutor(max(1, threads)) as pool:
            list(pool.map(write, [memory[at : at + share] for at in range(0, len(memory), share)]))
    except RuntimeError:  # the process may not start more threads
        write(memory)


def register(address: int, size: int, device: torch.device) -> bool:
    """Pin existing memory. Return False if CUDA refuses."""
    if int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE)) == 0:
        return True
    # CUDA keeps the error for the next caller, which would be torch's next launch: clear it here.
    with suppress(RuntimeError):
        torch.zeros(1, device=device)
    return False


def unregister(address: int, device: torch.device) -> None:
    """Unpin memory that `register` pinned. First wait until the device has finished its copies."""
    with suppress(RuntimeError):
        torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(address)


def pinned_by_torch(size: int) -> Tensor:
    """Return a pinned uint8 tensor. torch rounds its memory up to a power of two."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
