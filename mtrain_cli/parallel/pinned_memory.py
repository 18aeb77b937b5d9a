"""Pinned host memory, for what travels to and from a GPU.

torch pins what `torch.empty(..., pin_memory=True)` returns page by page on one thread: 1.6 to 2.7 GiB/s beside an H200, so two minutes for
the 300 GiB that a long sequence leaves on the host. Here whole arenas are mapped, in huge pages where the system gives them, written to by
several threads at once and then registered with CUDA: 20 GiB/s with eight threads (profiles/notes.md). torch also rounds each allocation
up to a power of two.
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

ARENA = 256 << 20  # bytes that are pinned at once, for small requests
_ALONE = 32 << 20  # requests from here on have a mapping of their own
_HUGE = 2 << 20
_LARGE = (
    16 << 20
)  # requests from here on share arenas with one another only, since smaller ones would leave gaps between them
_ALIGN = 256  # as torch's own allocators align: more than any element or any copy engine asks for
_MOST_THREADS = 16
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK of Linux 4.14, which mmap does not name
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


class PinnedMemory:
    """Host tensors for copies to and from one device; plain memory for a CPU.

    A mapping is let go when the last tensor in it is gone, and when this object is, which holds the rest of up to two arenas.

    mapped: bytes pinned by this object so far, these rests included. registers: False once CUDA has refused, and torch pins instead.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.mapped = 0
        self.registers = True
        self._rest: dict[
            bool, torch.Tensor
        ] = {}  # of the arenas at hand, for large and for small requests

    def empty(self, size: int) -> torch.Tensor:
        """uint8 tensor of ``size`` bytes, whatever they are.

        Raises:
            RuntimeError: neither CUDA nor torch can pin so much.
        """
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
        """Contiguous tensor, as `empty`."""
        return self.empty(prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def _mapping(self, size: int) -> torch.Tensor:
        self.mapped += size
        if self.registers:
            with suppress(OSError):  # no room for it
                mapping = _Mapping(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                if mapping.register(self.device):
                    return torch.frombuffer(mapping, dtype=torch.uint8)
            self.registers = False
            logging.getLogger(__name__).warning(
                "CUDA does not register host memory here: torch pins it, which takes longer and up to twice the memory"
            )
        return pinned_by_torch(size)


class _Mapping(mmap.mmap):
    """Anonymous memory, registered with CUDA until the last tensor in it is gone."""

    _address = 0

    def register(self, device: torch.device) -> bool:
        """Whether CUDA has pinned it; every page is there then."""
        for advice in (_WIPE_ON_FORK, mmap.MADV_HUGEPAGE):
            with suppress(OSError):  # a kernel that has neither
                # A child of this process would be given a copy of every pinned page; it finds zeros there instead.
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
    """Threads for one GPU's memory: the processor cores of this process, of which each GPU that it sees has its share."""
    return max(
        1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // max(1, torch.cuda.device_count()))
    )


def touch(memory: np.ndarray, threads: int) -> None:
    """Makes the system provide every page of fresh memory, on several threads, each with a stretch of it: that is where pinning spends its
    time. memory: bytes; the first one of each page becomes 0.
    """

    def write(part: np.ndarray) -> None:
        part[:: mmap.PAGESIZE] = 0

    share = -(-len(memory) // max(1, threads) // _HUGE) * _HUGE
    try:
        with ThreadPoolExecutor(max(1, threads)) as pool:
            list(pool.map(write, [memory[at : at + share] for at in range(0, len(memory), share)]))
    except RuntimeError:  # no more threads for this process
        write(memory)


def register(address: int, size: int, device: torch.device) -> bool:
    """Pins memory that is there already; False where CUDA refuses."""
    if int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE)) == 0:
        return True
    with suppress(RuntimeError):
        torch.zeros(
            1, device=device
        )  # CUDA keeps the error for whoever asks next, which is torch behind its next launch
    return False


def unregister(address: int, device: torch.device) -> None:
    """Lets go of memory that `register` has pinned, once no copy of the device can be on its way; of a device that is lost, too."""
    with suppress(RuntimeError):
        torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(address)


def pinned_by_torch(size: int) -> torch.Tensor:
    """uint8 tensor; torch rounds its memory up to a power of two."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
