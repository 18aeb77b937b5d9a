"""Copy small tables from the host to the device without a wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray

Nested = TypeVar("Nested")
_ALIGNMENT = 256  # bytes; kernels load up to 16 at once, and PyTorch aligns its own tensors more


def to_device(values: NDArray[Any] | torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return a copy on the device; on a CPU the result shares memory with ``values``.

    A copy from pageable memory would make the host wait for the GPU. Pinned memory stays allocated
    until PyTorch's copy has finished.
    """
    tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(values)
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def map_tensors(value: Nested, change: Callable[[torch.Tensor], torch.Tensor]) -> Nested:
    """Return a copy of nested dataclasses, dicts and tuples with every tensor changed.

    A tensor that several parts share stays shared. Dicts are copied, so that caches are not shared.
    """
    return _mapped(value, change, {})


def _mapped(part: Any, change: Callable[[torch.Tensor], torch.Tensor], done: dict[int, Any]) -> Any:
    """Do `map_tensors`; ``done`` holds the mapped parts by id.

    A recursive nested function would keep the tensors alive until a garbage collection.
    """
    if id(part) in done:
        return done[id(part)]
    new = part
    if isinstance(part, torch.Tensor):
        new = change(part)
    elif isinstance(part, dict):
        new = {key: _mapped(item, change, done) for key, item in part.items()}
    elif isinstance(part, tuple):
        items = tuple(_mapped(item, change, done) for item in part)
        new = items if any(a is not b for a, b in zip(items, part, strict=True)) else part
    elif is_dataclass(part) and not isinstance(part, type):
        old = {f.name: getattr(part, f.name) for f in fields(part)}
        changed = {name: _mapped(item, change, done) for name, item in old.items()}
        if any(changed[name] is not old[name] for name in old):
            new = replace(part, **changed)
    done[id(part)] = new
    return new


def packed(value: Nested, *, pin: bool) -> tuple[Nested, torch.Tensor]:
    """Copy all tensors into one buffer on the host, so that one copy moves them (`unpacked`).

    Returns a copy of ``value`` whose tensors lie in the buffer, and the buffer, uint8. pin: use
    pinned memory.
    """
    size = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal size
        size += tensor.nbytes + -tensor.nbytes % _ALIGNMENT
        return tensor

    map_tensors(value, count)
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
    size = 0

    def place(tensor: torch.Tensor) -> torch.Tensor:
        start = size
        count(tensor)
        view = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return view.copy_(tensor)

    return map_tensors(value, place), buffer


def unpacked(value: Nested, buffer: torch.Tensor, device: torch.device | str) -> Nested:
    """Return what `packed` made, with its tensors on the device. Copy the buffer once."""
    moved = buffer.to(device, non_blocking=True)

    def place(tensor: torch.Tensor) -> torch.Tensor:
        start = tensor.storage_offset() * tensor.element_size()
        return moved[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    return map_tensors(value, place)
