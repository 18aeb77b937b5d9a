"""Copy small tables from the host to the device without a wait."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray


def to_device(values: NDArray[Any] | torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Return a copy on the device; on a CPU the result shares memory with ``values``.

    A copy from pageable memory would make the host wait for the GPU. Pinned memory stays allocated
    until PyTorch's copy has finished.
    """
    tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(values)
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
