"""Keep activations in host memory between the forward and the backward pass of their layer.

Copies run on their own stream. A layer's tensors move to the host while the next layer runs
forward, and return while that layer runs backward: at most two offloaded layers have tensors on the
device. Streams wait for each other; the host never waits. No pinned block is allocated after the
largest tensors have occurred. On a CPU the copies are plain copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from mtrain_cli.attention.partials import Pair
from mtrain_cli.parallel.pinned_memory import PinnedMemory

# Bytes of a full host block. Its copy takes 0.3 ms over PCIe 5, much longer than a launch.
FULL_BLOCK = 16 << 20


def block_sizes(size: int) -> list[int]:
    """Return the size in bytes of each host block that holds a tensor of ``size`` bytes."""
    rest = size % FULL_BLOCK
    return [FULL_BLOCK] * (size // FULL_BLOCK) + ([1 << (rest - 1).bit_length()] if rest else [])


class OffloadedTensor:
    """One tensor that a layer keeps from its forward to its backward pass.

    copied: event at the end of the tensor's last transfer, on a GPU.
    """

    # Not a dataclass, and neither is `ActivationOffload`: FSDP searches dataclass arguments of a
    # module for tensors, and these two refer to each other.
    def __init__(self, store: ActivationOffload, layer: int, device: Tensor) -> None:
        self.store = store
        self.layer = layer
        self.shape, self.dtype = device.shape, device.dtype
        self.device: Tensor | None = device
        self.host: list[Tensor] | None = None
        self.copied: torch.cuda.Event | None = None

    def get(self) -> Tensor:
        return self.store.get(self)


Kept = Tensor | OffloadedTensor


def layers_on_host(offloaded: bool | int, layers: int) -> int:
    """Return how many layers, counted from the first, `train.offload_activations` offloads."""
    return min(layers if offloaded is True else int(offloaded), layers - 1)


class ActivationOffload:
    """Host memory for the tensors that a decoder's layers keep for backward.

    leaving: number of offloaded layers, counted from the first.
    """

    def __init__(self, layers: int, device: torch.device, offloaded: bool | int = True) -> None:
        self.leaving = layers_on_host(offloaded, layers)
        self.device = device
        self.allocated = 0
        self.moved = 0
        self._at = -1  # the layer whose tensors are leaving
        self._waiting: dict[int, list[OffloadedTensor]] = {}
        self._memory = PinnedMemory(device)
        self._free: dict[int, list[Tensor]] = {}  # by size
        self._stream: torch.cuda.Stream | None = None

    @property
    def waiting(self) -> int:
        return sum(len(row) for row in self._waiting.values())

    def put(self, layer: int, tensor: Tensor) -> OffloadedTensor:
        """Keep a layer's tensor, which must not change any more. Start to copy it to the host."""
        if layer != self._at:
            self._begin(layer)
        kept = OffloadedTensor(self, layer, tensor.detach())
        self._waiting[layer].append(kept)
        if layer >= self.leaving:
            return kept
        kept.device = tensor.detach().contiguous()
        kept.host = [self._block(size) for size in block_sizes(tensor.nbytes)]
        with self._copy_stream():
            for part, block in _split_over_blocks(kept.device, kept.host):
                block.copy_(part, non_blocking=True)
            kept.copied = self._event()
        self.moved += tensor.nbytes
        if self.device.type != "cuda":
            kept.device = None
        return kept

    def _begin(self, layer: int) -> None:
        """Start a layer. Free layer ``layer - 2``'s tensors on the device after their copies."""
        self._at = layer
        if layer == 0:
            # Drop what is left of a forward pass that had no backward pass.
            for kept in [kept for row in self._waiting.values() for kept in row]:
                self._wait(kept)
                self._release_blocks(kept)
            self._waiting.clear()
        if layer - 2 < self.leaving:
            for kept in self._waiting.get(layer - 2, []):
                self._wait(kept)
                kept.device = None
        self._waiting[layer] = []

    def get(self, kept: OffloadedTensor) -> Tensor:
        self._at = -1
        self._fetch(kept.layer)
        self._fetch(kept.layer - 1)
        assert kept.device is not None, "a kept tensor is taken only once"
        tensor = kept.device
        self._wait(kept)
        self._release_blocks(kept)
        row = self._waiting[kept.layer]
        row.remove(kept)
        if not row:
            del self._waiting[kept.layer]
        return tensor

    def _fetch(self, layer: int) -> None:
        for kept in self._waiting.get(layer, []):
            if kept.device is not None:
                continue
            assert kept.host is not None
            # Allocate on the current stream, in whose order the tensor is later freed.
            kept.device = torch.empty(kept.shape, dtype=kept.dtype, device=self.device)
            with self._copy_stream():
                for part, block in _split_over_blocks(kept.device, kept.host):
                    part.copy_(block, non_blocking=True)
                kept.copied = self._event()
            self.moved += kept.device.nbytes

    def _release_blocks(self, kept: OffloadedTensor) -> None:
        # Safe at once: later copies are queued behind the copies of this tensor.
        for block in kept.host or ():
            self._free.setdefault(block.nbytes, []).append(block)
        kept.device = kept.host = None

    def _block(self, size: int) -> Tensor:
        """Return the smallest free block of at least ``size`` bytes, or allocate a block."""
        large_enough = size
        while large_enough <= FULL_BLOCK:
            if free := self._free.get(large_enough):
                return free.pop()
            large_enough *= 2
        self.allocated += size
        return self._memory.empty(size)

    def _copy_stream(self) -> AbstractContextManager[object]:
        """Return a context whose copies run after the work queued on the current stream so far."""
        if self.device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._stream)

    def _event(self) -> torch.cuda.Event | None:
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    @staticmethod
    def _wait(kept: OffloadedTensor) -> None:
        if kept.copied is not None:
            torch.cuda.current_stream().wait_event(kept.copied)


def _split_over_blocks(tensor: Tensor, blocks: list[Tensor]) -> Iterator[Pair]:
    """Yield pairs of views, uint8: a part of a contiguous tensor, and its space in a block."""
    flat, at = tensor.view(-1).view(torch.uint8), 0
    for block in blocks:
        part = flat[at : at + block.nbytes]
        yield part, block[: part.nbytes]
        at += part.nbytes
