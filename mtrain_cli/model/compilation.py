"""torch.compile with a cache that no other user can write to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mtrain_cli.launch.temporary_folders import use_private_cache


def compiled(function: Callable[..., Any], dynamic: bool | None = None) -> Callable[..., Any]:
    """Return a function, compiled. dynamic: as in torch.compile."""
    use_private_cache()
    return torch.compile(function, dynamic=dynamic)
