"""Activations that wait in host memory between the forward and the backward pass of their layer.

Copies run on a stream of their own. A layer's tensors leave while the next layer computes, and come back while the layer behind it is in
backward: beside those of layers that are told to stay, at most two layers of them are on the device. Only streams wait for each other,
never the host. Host buffers are pinned blocks, which one tensor after another uses; where sizes depend on data, new ones are made only
until the largest have been seen. On a CPU the same is done with plain copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch

from mtrain_cli.parallel.pinned_memory import PinnedMemory

# Bytes of a full block of host memory: 0.3 ms over PCIe 5, beside which one more launch is little.
FULL_BLOCK = 16 << 20


def block_sizes(size: int) -> list[int]:
    """Bytes of the host blocks for a tensor of so many bytes: full ones, and for the rest one of the next power of two, so that few sizes
    serve tensors of all sizes.
    """
    rest = size % FULL_BLOCK
    return [FULL_BLOCK] * (size // FULL_BLOCK) + ([1 << (rest - 1).bit_length()] if rest else [])


class OffloadedTensor:
    """One tensor between its forward and its backward pass. device, host: where it is, both while it is copied; on the host in blocks, one
    part after the other. copied: end of the last copy, None on a CPU.
    """

    # Like `ActivationOffload` no dataclass: FSDP looks for tensors inside the dataclasses among a module's arguments, and these two form
    # a ring.
    def __init__(self, store: ActivationOffload, layer: int, device: torch.Tensor) -> None:
        self.store = store
        self.layer = layer
        self.shape, self.dtype = device.shape, device.dtype
        self.device: torch.Tensor | None = device
        self.host: list[torch.Tensor] | None = None
        self.copied: torch.cuda.Event | None = None

    def get(self) -> torch.Tensor:
        """The tensor on the device, for work on the current stream. Once: the host blocks then serve others."""
        return self.store.get(self)


Kept = torch.Tensor | OffloadedTensor


def layers_on_host(offloaded: bool | int, layers: int) -> int:
    """Layers of a decoder whose activations leave the device, the first ones. offloaded: ``train.offload_activations``. The last layer's
    stay in any case, since its backward pass comes at once.
    """
    return min(layers if offloaded is True else int(offloaded), layers - 1)


class ActivationOffload:
    """Host memory for what the layers of one decoder keep, from one step to the next.

    leaving: layers whose tensors leave; those of the others stay on the device. allocated: bytes of all host blocks. moved: bytes copied
    so far, out and back.
    """

    def __init__(self, layers: int, device: torch.device, offloaded: bool | int = True) -> None:
        """layers: of the decoder. offloaded: of how many of them, as `layers_on_host` has it."""
        self.leaving = layers_on_host(offloaded, layers)
        self.device = device
        self.allocated = 0
        self.moved = 0
        self._at = -1  # layer whose tensors are leaving
        self._waiting: dict[int, list[OffloadedTensor]] = {}
        self._memory = PinnedMemory(device)
        self._free: dict[int, list[torch.Tensor]] = {}  # blocks by their size
        self._stream: torch.cuda.Stream | None = None

    @property
    def waiting(self) -> int:
        """Tensors between their forward and their backward pass."""
        return sum(len(row) for row in self._waiting.values())

    def put(self, layer: int, tensor: torch.Tensor) -> OffloadedTensor:
        """Begins to copy a tensor out, behind what has been queued so far. Nobody may change it afterwards."""
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
        """The first tensor of a layer: what the layer before the last one left behind on the device is free, once it has been copied."""
        self._at = layer
        if layer == 0:
            # Of a forward pass that had no backward pass.
            for kept in [kept for row in self._waiting.values() for kept in row]:
                self._wait(kept)
                self._release_blocks(kept)
            self._waiting.clear()
        if layer - 2 < self.leaving:
            for kept in self._waiting.get(layer - 2, []):
                self._wait(kept)
                kept.device = None
        self._waiting[layer] = []

    def get(self, kept: OffloadedTensor) -> torch.Tensor:
        """See `OffloadedTensor.get`."""
        self._at = -1
        self._fetch(kept.layer)
        self._fetch(kept.layer - 1)
        assert kept.device is not None, "what is kept is taken once"
        tensor = kept.device
        self._wait(kept)
        self._release_blocks(kept)
        row = self._waiting[kept.layer]
        row.remove(kept)
        if not row:
            del self._waiting[kept.layer]
        return tensor

    def _fetch(self, layer: int) -> None:
        """Begins to copy back what of a layer is not on the device."""
        for kept in self._waiting.get(layer, []):
            if kept.device is not None:
                continue
            assert kept.host is not None
            # Of the current stream's memory, which frees it in the order of its own work.
            kept.device = torch.empty(kept.shape, dtype=kept.dtype, device=self.device)
            with self._copy_stream():
                for part, block in _split_over_blocks(kept.device, kept.host):
                    part.copy_(block, non_blocking=True)
                kept.copied = self._event()
            self.moved += kept.device.nbytes

    def _release_blocks(self, kept: OffloadedTensor) -> None:
        """Its host blocks are used by later copies, which are queued behind those of this one."""
        for block in kept.host or ():
            self._free.setdefault(block.nbytes, []).append(block)
        kept.device = kept.host = None

    def _block(self, size: int) -> torch.Tensor:
        """The smallest free one that is large enough, so that a later tensor that is no larger than an earlier one finds room in what is
        there.
        """
        large_enough = size
        while large_enough <= FULL_BLOCK:
            if free := self._free.get(large_enough):
                return free.pop()
            large_enough *= 2
        self.allocated += size
        return self._memory.empty(size)

    def _copy_stream(self) -> AbstractContextManager[object]:
        """The stream of the copies, behind what the current one has been given so far."""
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


def _split_over_blocks(
    tensor: torch.Tensor, blocks: list[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The bytes of a contiguous tensor, part by part, each with as much of the block that holds it."""
    flat, at = tensor.view(-1).view(torch.uint8), 0
    for block in blocks:
        part = flat[at : at + block.nbytes]
        yield part, block[: part.nbytes]
        at += part.nbytes
