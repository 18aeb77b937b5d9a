"""Read JSON and YAML that people or earlier runs wrote. Errors are worded without Python terms."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_MOST_INTEGER = 2**63  # what other programs can hold in an integer
_MOST_FLOAT = 1e18
_MAY_DIVERGE = ("loss", "grad_norm")  # these may be infinite or NaN


class UnreadableError(ValueError):
    """A file is not valid JSON or YAML. The text gives the reason without the file's name."""


def read_json(path: Path) -> Any:
    """Parse a JSON file.

    Raises:
        UnreadableError: the file is not valid JSON.
        OSError: the file cannot be read.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnreadableError(reason(error)) from None


def read_yaml(path: Path) -> Any:
    """Parse a YAML file. Raises the same errors as `read_json`."""
    import yaml

    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise UnreadableError(reason(error)) from None


def reason(error: BaseException) -> str:
    """Return in one line why something cannot be read."""
    if isinstance(error, UnicodeDecodeError):
        return f"it is not text: byte {error.start + 1} is not UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"line {error.lineno}, column {error.colno}: {error.msg[:1].lower()}{error.msg[1:]}"
    if isinstance(error, UnreadableError):
        return str(error)
    if isinstance(error, OSError):
        return (error.strerror or str(error).splitlines()[0]) if str(error) else "it cannot be read"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, OverflowError):
        return "a number is too large"
    if isinstance(error, KeyError):
        return f"{error.args[0]} is missing" if error.args else "a key is missing"
    if isinstance(error, TypeError | AttributeError | IndexError):
        return "a value has the wrong type"
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        problem = getattr(error, "problem", None) or "not YAML"
        return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
    text = (str(error).strip() or "it is damaged").splitlines()[0]
    if "digits) for integer string" in text:
        return "a number has too many digits"
    return (
        text
        if not text.startswith(("could not convert", "invalid literal", "cannot convert"))
        else "a value is not a number"
    )


def checked(kind: type[T], values: Mapping[str, Any], *, nulls: bool = False) -> T:
    """Build the dataclass ``kind`` from a JSON object.

    Lists become tuples where the field is one. Unknown keys are dropped; missing ones take their
    defaults.

    Args:
        nulls: allow null for every value, and for missing keys without a default.

    Raises:
        UnreadableError: a key is missing, or its value has the wrong type or is not finite.
    """
    if not isinstance(values, Mapping):
        raise UnreadableError("it is not a JSON object")
    hints = typing.get_type_hints(kind)
    given: dict[str, Any] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if nulls and values.get(field.name) is None:
            given[field.name] = None
        elif field.name in values:
            given[field.name] = _fitting(hints[field.name], values[field.name], field.name)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise UnreadableError(f"{field.name} is missing")
    return kind(**given)


def _fitting(hint: Any, value: Any, name: str) -> Any:
    """Convert ``value`` to the type ``hint``. name: the field, for the message."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        for one in inner:
            try:
                return _fitting(one, value, name)
            except UnreadableError:
                continue
    elif hint is Any:
        return value
    elif hint is type(None):
        if value is None:
            return None
    elif hint is bool or hint is str:
        if isinstance(value, hint):
            return value
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MOST_INTEGER:
            return value
    elif hint is float:
        if is_number(value) or (isinstance(value, float) and name in _MAY_DIVERGE):
            return float(value)
    elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return checked(hint, value)
    elif origin is list and isinstance(value, list):
        return [_fitting(inner[0], item, name) for item in value]
    elif origin is tuple and isinstance(value, list | tuple):
        kinds = [inner[0]] * len(value) if len(inner) == 2 and inner[1] is Ellipsis else inner
        if len(kinds) == len(value):
            return tuple(_fitting(one, item, name) for one, item in zip(kinds, value, strict=True))
    elif origin in (dict, Mapping) or hint is dict:
        if isinstance(value, Mapping):
            return dict(value)
    elif origin is None and not isinstance(hint, type):
        return value
    raise UnreadableError(f"{name}={_shown(value)} has the wrong type")


def is_number(value: Any) -> bool:
    """Return whether ``value`` is a finite number small enough to compute with."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return (
        abs(value) < _MOST_INTEGER
        if isinstance(value, int)
        else math.isfinite(value) and abs(value) < _MOST_FLOAT
    )


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (ValueError, TypeError, RecursionError):
        text = "..."
    return text if len(text) <= 40 else f"{text[:40]}..."
