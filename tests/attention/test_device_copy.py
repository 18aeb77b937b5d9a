"""Nested tables move to a device together, in one copy."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field

import torch

from mtrain_cli.attention.device_copy import map_tensors, packed, unpacked


@dataclass(frozen=True)
class Table:
    values: torch.Tensor
    name: str
    parts: tuple = ()
    cache: dict = field(default_factory=dict)


def nested() -> tuple:
    shared = Table(torch.arange(5), "shared")
    first = Table(torch.rand(3, 2), "first", (shared, 7))
    return first, Table(torch.tensor([True, False]), "second", (shared,)), None


def test_shared_parts_stay_shared_and_caches_do_not():
    first, second, nothing = value = nested()
    moved = map_tensors(value, lambda tensor: tensor + 0)
    assert moved[0].parts[0] is moved[1].parts[0] is not first.parts[0]
    assert moved[0].parts[1] == 7
    assert moved[2] is nothing is None
    assert moved[1].cache == {}
    assert moved[1].cache is not second.cache


def test_what_has_no_tensor_is_not_copied():
    value = ((1, "two"), frozenset())
    assert map_tensors(value, torch.clone) is value


def test_packed_tables_of_all_dtypes_and_sizes_come_back():
    value = (*nested(), torch.empty(2, 0, dtype=torch.int64), torch.rand(1000).double())
    host, buffer = packed(value, pin=False)
    moved = unpacked(host, buffer, "cpu")
    for old, staged, new in zip(value, host, moved, strict=True):
        for tensors in zip(*(leaves(part) for part in (old, staged, new)), strict=True):
            assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
            assert all(tensor.dtype == tensors[0].dtype for tensor in tensors)
            assert tensors[1].untyped_storage().data_ptr() == buffer.data_ptr()


def test_moved_tensors_do_not_wait_for_a_garbage_collection():
    gc.disable()
    try:
        moved = map_tensors(nested(), torch.clone)
        seen = weakref.ref(moved[0].values)
        del moved
        assert seen() is None
    finally:
        gc.enable()


def leaves(part) -> list[torch.Tensor]:
    if isinstance(part, torch.Tensor):
        return [part]
    if isinstance(part, Table):
        return [part.values, *(leaf for each in part.parts for leaf in leaves(each))]
    return []
