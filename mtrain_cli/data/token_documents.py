"""Documents that come as token ids, with their own mask, rotary positions and targets.

A document's mask is a list of slices [query start, query stop, key start, key stop, kind]. Slices
count tokens from the start of the document. The kind is one of `KINDS` or its number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np

from mtrain_cli.attention.mask import (
    MOST_SLICES,
    IntArray,
    SequenceMask,
    SliceKind,
    slices_per_query,
)
from mtrain_cli.config.option import MOST_TOKENS
from mtrain_cli.config.problem import as_typed
from mtrain_cli.config.schema import ConfigError

KINDS = {name.lower(): int(kind) for name, kind in SliceKind.__members__.items()}
_SHOWN = 60  # characters of a value in a message


@dataclass(frozen=True)
class RecordKey:
    """A key of .jsonl records, or a column of a .parquet file.

    option: configuration key or command-line option that sets the name, for messages.
    """

    name: str
    option: str

    def missing_error(self, location: str, present: Iterable[str]) -> ConfigError:
        """Return the error for a record or file at ``location`` whose keys are ``present``."""
        names = ", ".join(islice(present, 12)) or "none"
        return self.value_error(location, f"has no such key. Its keys: {names}")

    def value_error(self, location: str, problem: object) -> ConfigError:
        """Return the error for a value at ``location``. problem: text that continues the place."""
        return ConfigError(f"{as_typed(self.option, self.name)}: {location} {problem}")


class Fields(Protocol):
    """Reads documents from records.

    keys: keys that a record must have. The first one has the content.
    others: names of keys that are read if a record has them.
    skips: whether a record that cannot be read is left out and counted; if false, it is an error.
    """

    others: tuple[str, ...] = ()
    skips: bool = False

    @property
    def keys(self) -> tuple[RecordKey, ...]: ...

    @property
    def identity(self) -> str:
        """Text that differs between readers that may read other documents from the same file."""

    def read(
        self, record: Mapping[str, Any], location: str
    ) -> Iterable[str] | TokenDocument | None:
        """Return pieces of text or token ids; nothing for a record without content.

        location: file and record, for messages.
        """

    def absent(self, present: Iterable[str]) -> RecordKey | None:
        """Return a key that a record or file with the keys ``present`` lacks."""
        return next((key for key in self.keys if key.name not in present), None)


@dataclass(frozen=True)
class TokenDocument:
    """The content of a document that comes as token ids.

    ids: int64[N], at least one.
    slices: int64 [slices, 5]; None if the document has no mask, which makes its attention causal.
    positions: rotary position of each token, int64[N]; None if the document has none.
    intervals: most separate intervals of keys that a query sees.
    targets: whether the loss may predict each token, bool[N]; None if it may predict every token.
    notes: peculiarities, as in `StoreMeta.notes`.
    """

    ids: np.ndarray
    slices: IntArray | None = None
    positions: np.ndarray | None = None
    intervals: int = 1
    targets: np.ndarray | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TokenFields(Fields):
    """Reads documents of token ids from records: keys of ids, slices, positions and targets.

    whole: whether a sequence holds whole documents only, such as conversations.
    """

    tokens: RecordKey
    mask: RecordKey | None = None
    positions: RecordKey | None = None
    targets: RecordKey | None = None
    whole: bool = False

    @property
    def keys(self) -> tuple[RecordKey, ...]:
        keys = self.tokens, self.mask, self.positions, self.targets
        return tuple(key for key in keys if key is not None)

    @property
    def identity(self) -> str:
        return "\0".join(["tokens", *(f"{key.option} {key.name}" for key in self.keys)])

    def read(self, record: Mapping[str, Any], location: str) -> TokenDocument | None:
        if record[self.tokens.name] is None:
            return None
        ids = _integers(record[self.tokens.name], self.tokens, location)
        slices, positions, targets, intervals = None, None, None, 1
        if self.mask is not None and (given := record[self.mask.name]) is not None:
            slices, intervals = _slices(given, ids.size, self.mask, location)
        if self.positions is not None and (given := record[self.positions.name]) is not None:
            positions = _positions(given, ids.size, self.positions, location)
        if self.targets is not None and (given := record[self.targets.name]) is not None:
            targets = _targets(given, ids.size, self.targets, location)
        return TokenDocument(ids, slices, positions, intervals, targets) if ids.size else None


def _integers(value: Any, key: RecordKey, location: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        array = np.asarray(None)
    if array.ndim == 1 and array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.max() > np.iinfo(np.int64).max:
        raise key.value_error(location, f"holds {_shown(value)}, not a list of integers")
    return array.astype(np.int64)


def _positions(value: Any, length: int, key: RecordKey, location: str) -> np.ndarray:
    positions = _integers(value, key, location)
    if positions.size != length:
        problem = f"holds {positions.size} positions for {length} tokens. Give one per token."
        raise key.value_error(location, problem)
    outside = positions[(positions < 0) | (positions >= MOST_TOKENS)]
    if outside.size:
        problem = f"holds the position {outside[0]}. Give positions from 0 to {MOST_TOKENS - 1:,}."
        raise key.value_error(location, problem)
    return positions


def _targets(value: Any, length: int, key: RecordKey, location: str) -> np.ndarray:
    flags = isinstance(value, list) and all(isinstance(flag, bool) for flag in value)
    targets = np.array(value, np.int64) if flags else _integers(value, key, location)
    if targets.size != length or not np.isin(targets, (0, 1)).all():
        problem = f"holds {_shown(value)} for {length} tokens. Give true or false for each token."
        raise key.value_error(location, problem)
    return targets.astype(bool)


def _slices(value: Any, length: int, key: RecordKey, location: str) -> tuple[IntArray, int]:
    """Return the slices of a document, and the most intervals of keys that a query sees."""
    rows = [_slice(row) for row in value] if isinstance(value, list) else []
    if not rows or None in rows:
        wrong = value[rows.index(None)] if None in rows else value
        raise key.value_error(
            location,
            f"holds {_shown(wrong)}. Give a list of slices [query start, query stop, key start, "
            f"key stop, kind] with a kind of {', '.join(KINDS)}, or 0 to 3; or null for causal "
            "attention.",
        )
    table = np.array(rows, np.int64)
    named = slices_per_query(table, length)
    if named > MOST_SLICES:
        raise key.value_error(
            location,
            f"names each query in {named:.0f} slices on average; at most {MOST_SLICES} "
            "are allowed. Merge slices that overlap.",
        )
    try:
        return table, SequenceMask.from_slices(table, length, length).intervals
    except ValueError as error:
        raise key.value_error(location, f"is wrong: {error}") from None


def _slice(row: Any) -> list[int] | None:
    """Return the five numbers of a slice; None if it is none."""
    if not isinstance(row, list | tuple | np.ndarray) or len(row) != 5:
        return None
    *numbers, kind = row
    numbers.append(KINDS.get(kind) if isinstance(kind, str) else kind)
    if not all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in numbers):
        return None
    whole = list(map(int, numbers))  # an int64 has no absolute value of -2^63
    return whole if max(map(abs, whole)) < 2**62 else None


def _shown(value: Any) -> str:
    text = repr(value.tolist() if isinstance(value, np.ndarray) else value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
