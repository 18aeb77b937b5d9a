"""The message tensors that an exchange could reuse."""

from __future__ import annotations

import torch

from mtrain_cli.parallel.transport import Buffers


def free_tensors(buffers: Buffers) -> list[torch.Tensor]:
    """Return the tensors that are free now."""
    return [tensor for tensors in buffers._free.values() for tensor in tensors]
