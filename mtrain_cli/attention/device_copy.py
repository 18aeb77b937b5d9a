"""Copy small tables from the host to the device without making the host wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

Nested = TypeVar("Nested")
# Tensors in a buffer start at multiples of this, in bytes. Kernels load up to 16 bytes at a time.
_ALIGNMENT = 256


def to_device(values: NDArray[Any] | Tensor, device: torch.device | str) -> Tensor:
    """Return ``values`` on the device. On a CPU the result shares memory with ``values``.

    The copy to a GPU goes through pinned memory, since one from pageable memory makes the host
    wait.
    """
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def map_tensors(value: Nested, change: Callable[[Tensor], Tensor]) -> Nested:
    """Return a copy of nested dataclasses, dicts and tuples with ``change`` applied to each tensor.

    Tensors stay shared among parts. Every dict is copied: the copy shares no caches.
    """
    return _mapped(value, change, {})


def _mapped(part: Any, change: Callable[[Tensor], Tensor], done: dict[int, Any]) -> Any:
    # A recursive inner function would keep the tensors alive until a garbage collection.
    if id(part) in done:
        return done[id(part)]
    new = part
    if isinstance(part, Tensor):
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


def packed(value: Nested, *, pin: bool) -> tuple[Nested, Tensor]:
    """Copy all tensors into one host buffer, which `unpacked` copies to the device at once."""
    size = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal size
        size += tensor.nbytes + -tensor.nbytes % _ALIGNMENT
        return tensor

    map_tensors(value, count)
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
    size = 0

    def place(tensor: Tensor) -> Tensor:
        start = size
        count(tensor)
        view = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return view.copy_(tensor)

    return map_tensors(value, place), buffer


def unpacked(value: Nested, buffer: Tensor, device: torch.device | str) -> Nested:
    """Copy the buffer of `packed` to the device. Return ``value`` with tensors on the device."""
    moved = buffer.to(device, non_blocking=True)

    def place(tensor: Tensor) -> Tensor:
        start = tensor.storage_offset() * tensor.element_size()
        return moved[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    return map_tensors(value, place)
