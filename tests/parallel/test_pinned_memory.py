"""Pinned host memory: many tensors in few mappings, each pinned until its last tensor is gone."""

import mmap
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mtrain_cli.parallel import pinned_memory
from mtrain_cli.parallel.pinned_memory import ARENA, PinnedMemory

MIB = 1 << 20
GPU = torch.device("cuda", 1)


@pytest.fixture
def cuda(monkeypatch):
    """A fake CUDA that records what is pinned and all requested sizes. Arenas are 64 MiB."""
    held, asked = {}, []

    def register(address, size, device):
        assert device == GPU
        held[address] = size
        asked.append(size)
        return True

    def unregister(address, device):
        assert device == GPU
        del held[address]

    monkeypatch.setattr(pinned_memory, "register", register)
    monkeypatch.setattr(pinned_memory, "unregister", unregister)
    monkeypatch.setattr(pinned_memory, "ARENA", 64 * MIB)
    return held, asked


def mapping_of(tensor: torch.Tensor) -> tuple[str, set[str]]:
    """Return the permissions and flags of the mapping that a tensor lies in."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next(
        number for number, line in enumerate(lines) if line.startswith(f"{tensor.data_ptr():x}-")
    )
    flags = next(line.split()[1:] for line in lines[at:] if line.startswith("VmFlags:"))
    return lines[at].split()[1], set(flags)


def test_tensors_do_not_share_bytes_and_small_ones_share_mappings(cuda):
    held, asked = cuda
    memory = PinnedMemory(GPU)
    sizes = [16 * MIB, 1, 3, 16 * MIB, 1000, 16 * MIB, 4096, 16 * MIB]
    tensors = [memory.empty(size) for size in sizes]
    assert asked == [64 * MIB] * 2, (
        "four large blocks fill an arena to its end, small ones have theirs"
    )
    tensors.append(memory.empty(16 * MIB))
    assert asked == [64 * MIB] * 3
    for number, tensor in enumerate(tensors):
        tensor.fill_(number + 1)
    assert [tensor.nbytes for tensor in tensors] == [*sizes, 16 * MIB]
    assert all((tensor == number + 1).all() for number, tensor in enumerate(tensors))
    assert memory.mapped == sum(held.values())
    places = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors]
    assert all(
        any(at <= first and last <= at + size for at, size in held.items())
        for first, last in places
    )


def test_tensors_are_aligned_whatever_was_allocated_before(cuda):
    memory = PinnedMemory(GPU)
    for shape, dtype in (
        ((3,), torch.float64),
        ((), torch.int64),
        ((2, 0), torch.float32),
        ((5, 7), torch.bfloat16),
    ):
        memory.empty(1)
        found = memory.tensor(shape, dtype)
        assert found.shape == shape
        assert found.dtype == dtype
        assert found.is_contiguous()
    assert cuda[1] == [64 * MIB]
    assert PinnedMemory(GPU).empty(0).nbytes == 0
    assert cuda[1] == [64 * MIB], "nothing takes no arena"


def test_memory_is_unpinned_with_its_last_tensor(cuda):
    held, _ = cuda
    memory = PinnedMemory(GPU)
    first, second = memory.empty(1000), memory.empty(1000)
    view = second[10:20]
    del memory, first, second
    assert len(held) == 1
    del view
    assert not held


@pytest.mark.parametrize("what", ["a child", "an interpreter that ends"])
def test_only_the_process_that_pinned_unpins_and_not_at_exit(cuda, monkeypatch, what):
    held, _ = cuda
    tensor = PinnedMemory(GPU).empty(100)
    if what == "a child":
        own = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: own + 1)
    else:
        monkeypatch.setattr(sys, "is_finalizing", lambda: True)
    del tensor
    assert len(held) == 1


@pytest.mark.usefixtures("cuda")
def test_memory_is_private_wiped_on_fork_and_in_huge_pages():
    permissions, flags = mapping_of(PinnedMemory(GPU).empty(100))
    assert permissions == "rw-p"
    assert {"wf", "hg"} <= flags, "MADV_WIPEONFORK and MADV_HUGEPAGE"


def test_pages_are_written_to_by_several_threads_before_they_are_registered(cuda, monkeypatch):
    told = []
    monkeypatch.setattr(pinned_memory, "touching_threads", lambda: 7)
    monkeypatch.setattr(
        pinned_memory,
        "touch",
        lambda memory, threads: told.append((memory.nbytes, threads, len(cuda[1]))),
    )
    PinnedMemory(GPU).empty(1)
    assert told == [(64 * MIB, 7, 0)]


@pytest.mark.parametrize("refused", ["registration", "memory"])
def test_torch_pins_with_a_warning_if_cuda_or_the_system_refuses(monkeypatch, caplog, refused):
    asked, by_torch, unregistered = [], [], []

    def no_memory(*args, **words):  # noqa: ARG001
        asked.append(args[1])
        raise OSError

    if refused == "memory":
        monkeypatch.setattr(pinned_memory, "_Mapping", no_memory)
    monkeypatch.setattr(pinned_memory, "register", lambda _a, size, _device: asked.append(size))
    monkeypatch.setattr(
        pinned_memory,
        "pinned_by_torch",
        lambda size: by_torch.append(size) or torch.empty(size, dtype=torch.uint8),
    )
    monkeypatch.setattr(pinned_memory, "unregister", lambda *args: unregistered.append(args))
    memory = PinnedMemory(GPU)
    tensors = [memory.empty(16 * MIB) for _ in range(ARENA // (16 * MIB) + 1)]
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
    assert by_torch == [ARENA] * 2
    assert asked == [ARENA], "once"
    assert not memory.registers
    del memory, tensors
    assert not unregistered
    (line,) = [record.getMessage() for record in caplog.records]
    assert "torch pins it" in line


def test_torch_pins_the_fallback(monkeypatch):
    asked = {}
    monkeypatch.setattr(torch, "empty", lambda *size, **words: asked.update(size=size, **words))
    pinned_memory.pinned_by_torch(5)
    assert asked == {"size": (5,), "dtype": torch.uint8, "pin_memory": True}


def test_a_cpu_uses_plain_memory(cuda):
    memory = PinnedMemory(torch.device("cpu"))
    assert memory.empty(100 * MIB).nbytes == 100 * MIB
    assert memory.mapped == 0
    assert not cuda[1]


@pytest.mark.parametrize("threads", [1, 3, 64, "none to be had"])
@pytest.mark.parametrize("size", [mmap.PAGESIZE, 10 * MIB])
def test_every_page_is_written_to(monkeypatch, threads, size):
    if isinstance(threads, str):

        def none(_):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(pinned_memory, "ThreadPoolExecutor", none)
        threads = 4
    memory = np.ones(size, dtype=np.uint8)
    pinned_memory.touch(memory, threads)
    assert not memory[:: mmap.PAGESIZE].any()
    assert memory.sum() == size - size // mmap.PAGESIZE, "and nothing else"
