"""Arguments of Python callers: checks of their types, and messages that name them.

The functions under `mtrain_cli.api` do what commands do, whose messages name options of the command
line. `ARGUMENTS` names arguments instead.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterable, Mapping, Set
from numbers import Integral, Real
from pathlib import Path

from mtrain_cli.config.problem import ConfigError, Names

ARGUMENTS = Names(options=False, lacks=("prompt_file",))


def whole_number(name: str, value: object) -> int:
    """Return a whole number.

    Raises:
        ConfigError: the value is none.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _wrong(name, value, "a whole number")
    return int(value)


def number(name: str, value: object) -> float:
    """Return a number.

    Raises:
        ConfigError: the value is none.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _wrong(name, value, "a number")
    return float(value)


def truth(name: str, value: object) -> bool:
    """Return True or False.

    Raises:
        ConfigError: the value is neither.
    """
    if not isinstance(value, bool):
        raise _wrong(name, value, "True or False")
    return value


def text(name: str, value: object) -> str:
    """Return a text.

    Raises:
        ConfigError: the value is none.
    """
    if not isinstance(value, str):
        raise _wrong(name, value, "a text")
    return value


def path(name: str, value: object) -> Path:
    """Return a path.

    Raises:
        ConfigError: the value is none.
    """
    if not isinstance(value, str | os.PathLike):
        raise _wrong(name, value, "a path")
    return Path(os.fsdecode(value))


def token_ids(name: str, value: object) -> list[int]:
    """Return token ids.

    Raises:
        ConfigError: the value is no sequence of whole numbers.
    """
    ids = []
    for at, one in enumerate(map(_plain, _items(name, value, "a text or token ids")), 1):
        if isinstance(one, bool) or not isinstance(one, Integral):
            raise ConfigError(f"{name}: token {at} is {reprlib.repr(one)}; ids are whole numbers")
        ids.append(int(one))
    return ids


def prompts(name: str, value: object) -> list[str | list[int]]:
    """Return a list of prompts, each a text or token ids. A single prompt becomes a list of one.

    Raises:
        ConfigError: the value is no prompt and no sequence of them.
    """
    value = _plain(value)
    if isinstance(value, str):
        return [value]
    items = [_plain(one) for one in _items(name, value, "a text, token ids, or a list of these")]
    if items and isinstance(items[0], Real):
        return [token_ids(name, items)]
    return [
        one if isinstance(one, str) else token_ids(f"{name}: prompt {at}", one)
        for at, one in enumerate(items, 1)
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
