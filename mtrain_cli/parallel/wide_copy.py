"""Copies that reorder tokens or heads, with elements as wide as a GPU can load at once.

PyTorch copies non-contiguous tensors element by element: 128 MiB of bfloat16 keys took 0.2 ms on an
H200. This is 1.4 TB/s, and a plain copy reaches 4.2 TB/s. The bytes of one head stay in order, so
they can be copied in elements of 16 bytes.
"""

from __future__ import annotations

import torch

_WIDE_DTYPES = (torch.complex128, torch.int64)


def as_wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the same memory whose last dimension has fewer, wider elements.

    Return the tensor itself if no such view exists, or if the tensor needs gradients.
    """
    if (
        not tensor.ndim
        or not tensor.numel()
        or tensor.stride(-1) != 1
        or (tensor.requires_grad and torch.is_grad_enabled())
    ):
        return tensor
    for wide in _WIDE_DTYPES:
        ratio = wide.itemsize // tensor.element_size()
        if ratio > 1 and not any(
            n % ratio for n in (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
        ):
            return tensor.view(wide)
    return tensor


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy, or the tensor itself if it is contiguous."""
    return tensor if tensor.is_contiguous() else as_wide(tensor).contiguous().view(tensor.dtype)


def copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.dtype == target.dtype:
        wide_source, wide_target = as_wide(source), as_wide(target)
        if wide_source.dtype == wide_target.dtype:
            source, target = wide_source, wide_target
    target.copy_(source)
