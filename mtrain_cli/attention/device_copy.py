"""Small tables from the host to the device, without a wait."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray


def to_device(values: NDArray[Any] | torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A copy on the device, or the same memory on a CPU. From pageable memory a copy would make the host wait for the GPU; pinned memory
    is kept by PyTorch until the copy is over.
    """
    tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(values)
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
