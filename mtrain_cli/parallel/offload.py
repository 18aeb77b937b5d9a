"""Activations that wait in host memory between the forward and the backward pass of their layer.

Copies run on a stream of their own. A layer's tensors leave while the next layer computes, and come back while the layer behind it is in
backward: beside those of layers that are told to stay, at most two layers of them are on the device. Only streams wait for each other,
never the host. Host buffers are pinned, made in the first step, and used again in every later one. On a CPU the same is done with plain
copies.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


class Waiting:
    """One tensor between its forward and its backward pass. device, host: where it is, both while it is copied. copied: end of the last
    copy, None on a CPU.
    """

    # Like `Offload` no dataclass: FSDP looks for tensors inside the dataclasses among a module's arguments, and these two form a ring.
    def __init__(self, store: Offload, layer: int, device: torch.Tensor) -> None:
        self.store = store
        self.layer = layer
        self.device: torch.Tensor | None = device
        self.host: torch.Tensor | None = None
        self.copied: torch.cuda.Event | None = None

    def get(self) -> torch.Tensor:
        """The tensor on the device, for work on the current stream. Once: the host buffer then serves others."""
        return self.store.get(self)


Kept = torch.Tensor | Waiting


def layers_on_host(offloaded: bool | int, layers: int) -> int:
    """Layers of a decoder whose activations leave the device, the first ones. offloaded: ``train.offload_activations``. The last layer's
    stay in any case, since its backward pass comes at once.
    """
    return min(layers if offloaded is True else int(offloaded), layers - 1)


class Offload:
    """Host memory for what the layers of one decoder keep, from one step to the next.

    leaving: layers whose tensors leave; those of the others stay on the device. allocated: bytes of all host buffers. moved: bytes copied
    so far, out and back.
    """

    def __init__(self, layers: int, device: torch.device, offloaded: bool | int = True) -> None:
        """layers: of the decoder. offloaded: of how many of them, as `layers_on_host` has it."""
        self.leaving = layers_on_host(offloaded, layers)
        self.device = device
        self.allocated = 0
        self.moved = 0
        self._at = -1  # layer whose tensors are leaving
        self._waiting: dict[int, list[Waiting]] = {}
        self._free: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}
        self._stream: torch.cuda.Stream | None = None

    @property
    def waiting(self) -> int:
        """Tensors between their forward and their backward pass."""
        return sum(len(row) for row in self._waiting.values())

    def put(self, layer: int, tensor: torch.Tensor) -> Waiting:
        """Begins to copy a tensor out, behind what has been queued so far. Nobody may change it afterwards."""
        if layer != self._at:
            self._begin(layer)
        kept = Waiting(self, layer, tensor.detach())
        self._waiting[layer].append(kept)
        if layer >= self.leaving:
            return kept
        assert kept.device is not None
        kept.host = self._buffer(kept.device)
        with self._aside():
            kept.host.copy_(kept.device, non_blocking=True)
            kept.copied = self._event()
        self.moved += kept.host.nbytes
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
                self._release(kept)
            self._waiting.clear()
        if layer - 2 < self.leaving:
            for kept in self._waiting.get(layer - 2, []):
                self._wait(kept)
                kept.device = None
        self._waiting[layer] = []

    def get(self, kept: Waiting) -> torch.Tensor:
        """See `Waiting.get`."""
        self._at = -1
        self._fetch(kept.layer)
        self._fetch(kept.layer - 1)
        assert kept.device is not None, "what is kept is taken once"
        tensor = kept.device
        self._wait(kept)
        self._release(kept)
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
            kept.device = torch.empty(kept.host.shape, dtype=kept.host.dtype, device=self.device)
            with self._aside():
                kept.device.copy_(kept.host, non_blocking=True)
                kept.copied = self._event()
            self.moved += kept.host.nbytes

    def _release(self, kept: Waiting) -> None:
        """Its host buffer is used by later copies, which are queued behind those of this one."""
        if kept.host is not None:
            self._free.setdefault((kept.host.shape, kept.host.dtype), []).append(kept.host)
        kept.device = kept.host = None

    def _buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        free = self._free.get((tensor.shape, tensor.dtype))
        if free:
            return free.pop()
        self.allocated += tensor.nbytes
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.device.type == "cuda")

    def _aside(self) -> AbstractContextManager[object]:
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
    def _wait(kept: Waiting) -> None:
        if kept.copied is not None:
            torch.cuda.current_stream().wait_event(kept.copied)
