"""Arguments of Python callers: checks of their types, and messages that name them.

Each check returns the value, or raises ConfigError for one of another type.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Set
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

from mtrain_cli.config.problem import ConfigError, Names

T = TypeVar("T")
ARGUMENTS = Names(options=False, lacks=("prompt_file",))


def _check(
    kind: type | tuple[type, ...], convert: Callable[[Any], T], expected: str
) -> Callable[[str, object], T]:
    def check(name: str, value: object) -> T:
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise _wrong(name, value, expected)
        return convert(value)

    return check


whole_number = _check(Integral, int, "a whole number")
number = _check(Real, float, "a number")
truth = _check(bool, bool, "True or False")
text = _check(str, str, "a text")
path = _check((str, os.PathLike), lambda value: Path(os.fsdecode(value)), "a path")


def token_ids(name: str, value: object) -> list[int]:
    ids = []
    for at, item in enumerate(map(_plain, _items(name, value, "a text or token ids")), 1):
        if isinstance(item, bool) or not isinstance(item, Integral):
            raise ConfigError(f"{name}: token {at} is {reprlib.repr(item)}; ids are whole numbers")
        ids.append(int(item))
    return ids


def prompts(name: str, value: object) -> list[str | list[int]]:
    """Return a list of prompts, each a text or token ids. A single prompt becomes a list of one."""
    value = _plain(value)
    if isinstance(value, str):
        return [value]
    items = [_plain(one) for one in _items(name, value, "a text, token ids, or a list of these")]
    if items and isinstance(items[0], Real):
        return [token_ids(name, items)]
    return [
        item if isinstance(item, str) else token_ids(f"{name}: prompt {at}", item)
        for at, item in enumerate(items, 1)
    ]


def _items(name: str, value: object, expected: str) -> list[object]:
    value = _plain(value)
    # Bytes would pass as ids, and a set has no order.
    wrong = isinstance(value, str | bytes | bytearray | Mapping | Set)
    if wrong or not isinstance(value, Iterable):
        raise _wrong(name, value, expected)
    return list(value)


def _plain(value: object) -> object:
    """Return a tensor or an array as a list or a number."""
    to_list = getattr(value, "tolist", None)
    return value if to_list is None else to_list()


def _wrong(name: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"{name}={reprlib.repr(value)}: must be {expected}")
