"""Masks that a caller gives: arrays of slices, files, and ranges as MagiAttention takes them."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from mtrain_cli.attention.mask import IntArray, slices_per_query
from mtrain_cli.config.problem import ConfigError
from mtrain_cli.data.token_documents import KINDS

# One array [slices, 5], a file, or ranges, for one sequence or for each of several.
Slices = Any
RANGES = ("q_ranges", "k_ranges", "attn_type_map")
_FORMS = (
    "give an int array [slices, 5], a .npy or .npz file, or a dict of q_ranges, k_ranges and "
    "attn_type_map, or a list with one of these per sequence"
)
# MagiAttention's names of the kinds, whose numbers are those of `SliceKind`.
_KINDS = {**KINDS, "inv_causal": KINDS["inverse"], "bi_causal": KINDS["bicausal"]}
_MOST_NAMED = 2**24  # queries in all slices of a sequence, counted once per slice, or 64 a token


def read_slices(name: str, given: Slices, seq: int) -> list[IntArray]:
    """Return the slices of each sequence, int64 [slices, 5]. name: of the argument, for messages.

    Raises ConfigError for what is no such mask, and for a file that cannot be read.
    """
    if isinstance(given, str | os.PathLike):
        tables = _of_file(name, Path(given))
    elif isinstance(given, Mapping):
        tables = [_of_ranges(name, given)]
    elif isinstance(given, Tensor | np.ndarray) and given.ndim == 2:
        tables = [_table(name, given)]
    elif isinstance(given, Sequence | Tensor | np.ndarray) and len(given):
        tables = [_of_sequence(name, one) for one in given]
    else:
        raise ConfigError(f"{name}: {_FORMS}")
    for table in tables:
        if slices_per_query(table, seq) * seq > max(64 * seq, _MOST_NAMED):
            raise ConfigError(
                f"{name}: name each query in {slices_per_query(table, seq):.0f} slices on average; "
                "allowed: 64, and more in short sequences. Merge slices that overlap"
            )
    return tables


def _of_sequence(name: str, given: Any) -> IntArray:
    if isinstance(given, Mapping):
        return _of_ranges(name, given)
    if not isinstance(given, str | os.PathLike):
        return _table(name, given)
    tables = _of_file(name, Path(given))
    if len(tables) > 1:
        raise ConfigError(f"{name}={given}: holds {len(tables)} sequences; give one per item")
    return tables[0]


def _of_file(name: str, path: Path) -> list[IntArray]:
    """Return the array of a .npy file, or all of an .npz file, in its order."""
    label = f"{name}={path}"
    try:
        with path.open("rb") as opened:
            content = np.load(opened, allow_pickle=False)
            arrays = {"": content} if isinstance(content, np.ndarray) else dict(content)
    except (OSError, EOFError, ValueError, SyntaxError, KeyError, zipfile.BadZipFile) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        reason = "no array of numbers" if "pickle" in reason else reason
        raise ConfigError(
            f"{label}: cannot be read ({reason}); give a .npy file of an int array [slices, 5], or "
            "an .npz file with one per sequence"
        ) from None
    return [_table(f"{label}: {key}" if key else label, one) for key, one in arrays.items()]


def _of_ranges(name: str, given: Mapping[str, Any]) -> IntArray:
    if set(given) != set(RANGES):
        raise ConfigError(f"{name}: has the keys {', '.join(given)}; give {', '.join(RANGES)}")
    q_ranges, k_ranges = (_ranges(f"{name}: {key}", given[key]) for key in RANGES[:2])
    types = given["attn_type_map"]
    types = types.tolist() if isinstance(types, Tensor | np.ndarray) else list(types)
    kinds = [_kind(name, one) for one in types]
    if not len(q_ranges) == len(k_ranges) == len(kinds):
        raise ConfigError(
            f"{name}: has {len(q_ranges)} q_ranges, {len(k_ranges)} k_ranges and {len(kinds)} "
            "types; give equally many"
        )
    return np.column_stack([q_ranges, k_ranges, np.array(kinds, np.int64)])


def _kind(name: str, given: Any) -> int:
    """Return the number of a type: a number, a name, or an enumeration's member with a name."""
    kind = getattr(given, "value", given)
    kind = _KINDS.get(kind) if isinstance(kind, str) else kind
    if not isinstance(kind, int) or isinstance(kind, bool) or kind not in KINDS.values():
        names = "full, causal, inv_causal, bi_causal"
        raise ConfigError(f"{name}: attn_type_map has {given!r}; allowed: {names}, or 0 to 3")
    return kind


def _ranges(label: str, given: Any) -> IntArray:
    # An `AttnRanges` of MagiAttention returns its ranges as pairs.
    given = given.to_naive_ranges() if hasattr(given, "to_naive_ranges") else given
    return _table(label, given, columns=2)


def _table(label: str, given: Any, columns: int = 5) -> IntArray:
    shape = "[slices, 5]" if columns == 5 else "[ranges, 2]"
    try:
        table = np.asarray(given.cpu() if isinstance(given, Tensor) else given)
    except ValueError:  # rows of different lengths
        raise ConfigError(f"{label}: has rows of different lengths; give {shape}") from None
    if table.size == 0:
        return np.zeros((0, columns), np.int64)
    if table.dtype.kind not in "iu":
        raise ConfigError(f"{label}: must be whole numbers, not {table.dtype}")
    if table.ndim != 2 or table.shape[1] != columns:
        raise ConfigError(f"{label}: has the shape {list(table.shape)}; give {shape}")
    return table.astype(np.int64)
