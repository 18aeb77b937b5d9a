"""Checks of what callers give the library: one line each, which names the argument."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtrain_cli.config.problem import ConfigError

Integers = Tensor | NDArray[np.integer] | Sequence[int] | Sequence[Sequence[int]]
_WHOLE = torch.int16, torch.int32, torch.int64  # which hold IGNORED


def require_tensor(
    name: str, given: Any, dims: tuple[str, ...], *, whole: bool | None = None
) -> None:
    """Raise ConfigError unless an argument is a tensor of these dimensions.

    whole: whether of signed integers; False for floating-point numbers, None for any.
    """
    kinds = {True: " of int16, int32 or int64", False: " of floating-point numbers", None: ""}
    form = f"a tensor{kinds[whole]}, [{', '.join(dims)}]"
    if not isinstance(given, Tensor):
        raise ConfigError(f"{name}: is of the type {type(given).__name__}; give {form}")
    fits = {True: given.dtype in _WHOLE, False: given.is_floating_point(), None: True}
    if not fits[whole] or (dims[-1] != "..." and given.ndim != len(dims)):
        raise ConfigError(
            f"{name}: has the shape {list(given.shape)} and is {kind_of(given)}; give {form}"
        )


def kind_of(tensor: Tensor) -> str:
    """Return the type and the device of a tensor, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def is_whole(value: object, least: int) -> bool:
    """Return whether a value is a whole number of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def require(given: str, known: bool, allowed: str) -> None:
    """Raise ConfigError for an argument, ``NAME=VALUE``, unless it is known to be right."""
    if not known:
        raise ConfigError(f"{given}: must be {allowed}")


def documents_of(name: str, value: Integers, seq: int) -> list[NDArray[np.int64]]:
    """Return the document of each token, [seq], for each sequence.

    name: the argument: documents, cu_seqlens or position_ids.

    Raises ConfigError for numbers that describe no documents.
    """
    try:
        table = np.asarray(value.cpu() if isinstance(value, Tensor) else value)
    except ValueError:
        raise ConfigError(f"{name}: its rows differ in length; give [sequences, {seq}]") from None
    if table.dtype.kind not in "iu":
        raise ConfigError(f"{name}: must be whole numbers, not {table.dtype}")
    table = table.astype(np.int64)  # differences of unsigned integers wrap
    if name == "cu_seqlens":
        if table.ndim != 1 or (np.diff(table) < 0).any() or table[[0, -1]].tolist() != [0, seq]:
            raise ConfigError(
                f"cu_seqlens={np.array2string(table, threshold=8)}: must rise from 0 to seq={seq}"
            )
        return [np.repeat(np.arange(len(table) - 1), np.diff(table))]
    table = np.atleast_2d(table)
    if table.ndim != 2 or table.shape[1] != seq:
        raise ConfigError(
            f"{name}: has the shape {list(table.shape)}; give [sequences, {seq}] for seq={seq}"
        )
    if name == "position_ids":
        begins = np.diff(table, axis=1, prepend=table[:, :1] - 1) != 1
        return list(np.cumsum(begins, axis=1))
    if (np.diff(table, axis=1) < 0).any():
        raise ConfigError("documents: decrease along a sequence; give ids that never decrease")
    return list(table)
