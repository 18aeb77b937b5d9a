"""Pinned host memory: tensors of their own in few mappings, which CUDA knows as long as one of them is there."""

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from mtrain_cli.parallel import pinned
from mtrain_cli.parallel.pinned import ARENA, PinnedMemory

MIB = 1 << 20


@pytest.fixture
def cuda(monkeypatch):
    """What CUDA was asked to pin and to let go, address -> bytes; arenas of 64 MiB."""
    held, all_of_them = {}, []

    def register(address, size, device):
        assert device.type == "cuda"
        held[address] = size
        all_of_them.append(size)
        return True

    monkeypatch.setattr(pinned, "register", register)
    monkeypatch.setattr(pinned, "unregister", held.pop)
    monkeypatch.setattr(pinned, "ARENA", 64 * MIB)
    return held, all_of_them


def test_tensors_do_not_share_bytes_and_small_ones_share_mappings(cuda):
    held, asked = cuda
    memory = PinnedMemory(torch.device("cuda"))
    sizes = [16 * MIB, 1, 3, 16 * MIB, 1000, 16 * MIB, 4096, 16 * MIB, 16 * MIB]
    tensors = [memory.empty(size) for size in sizes]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number + 1)
    assert [tensor.nbytes for tensor in tensors] == sizes
    assert all((tensor == number + 1).all() for number, tensor in enumerate(tensors))
    assert asked == [64 * MIB] * 3, "four large blocks fill an arena to its end, the fifth begins the next, small ones have theirs"
    assert memory.mapped == sum(held.values())
    places = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors]
    assert all(any(at <= first and last <= at + size for at, size in held.items()) for first, last in places)


def test_a_large_request_takes_what_it_needs(cuda):
    _, asked = cuda
    memory = PinnedMemory(torch.device("cuda"))
    gradient = memory.tensor((3000, 4096), torch.float32)
    assert gradient.shape == (3000, 4096)
    assert gradient.dtype == torch.float32
    assert asked == [48 * MIB], "46.9 MiB in whole huge pages; torch would take 64"


def test_memory_is_let_go_with_the_last_tensor_in_it(cuda):
    held, _ = cuda
    memory = PinnedMemory(torch.device("cuda"))
    first, second = memory.empty(1000), memory.empty(1000)
    view = second[10:20]
    del memory, first, second
    assert len(held) == 1
    del view
    assert not held


@pytest.mark.usefixtures("cuda")
def test_children_are_not_given_copies_and_pages_are_huge():
    tensor = PinnedMemory(torch.device("cuda")).empty(100)
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(f"{tensor.data_ptr():x}-"))
    flags = next(line.split()[1:] for line in lines[at:] if line.startswith("VmFlags:"))
    assert {"dc", "hg"} <= set(flags), "MADV_DONTFORK and MADV_HUGEPAGE"


def test_torch_pins_where_cuda_refuses(monkeypatch):
    refused, by_torch = [], []
    monkeypatch.setattr(pinned, "register", lambda address, size, device: refused.append(size))  # noqa: ARG005
    monkeypatch.setattr(pinned, "pinned_by_torch", lambda size: by_torch.append(size) or torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(pinned, "unregister", lambda address: pytest.fail("it was never pinned"))  # noqa: ARG005
    memory = PinnedMemory(torch.device("cuda"))
    tensors = [memory.empty(16 * MIB) for _ in range(ARENA // (16 * MIB) + 1)]
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
    assert by_torch == [ARENA] * 2
    assert refused == [ARENA], "asked once"
    assert not memory.registers


def test_a_cpu_takes_plain_memory(cuda):
    memory = PinnedMemory(torch.device("cpu"))
    assert memory.empty(100 * MIB).nbytes == 100 * MIB
    assert memory.mapped == 0
    assert not cuda[1]


@pytest.mark.parametrize("threads", [1, 3, 64])
@pytest.mark.parametrize("size", [mmap.PAGESIZE, 10 * MIB])
def test_every_page_is_written_to(threads, size):
    memory = np.ones(size, dtype=np.uint8)
    pinned.touch(memory, threads)
    assert not memory[:: mmap.PAGESIZE].any()
    assert memory.sum() == size - size // mmap.PAGESIZE, "and nothing else"
