"""Read JSON and YAML, check types, and replace files atomically, with messages for users."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_INTEGER_LIMIT = 2**63  # other programs read integers as int64
_FLOAT_LIMIT = 1e18
# Of a YAML file: aliases can make a small file hold many values, or a value hold itself.
_MOST_VALUES, _MOST_DEPTH = 1_000_000, 100
_MOST_SHOWN = 5  # most numbers of lines in a message
_MAY_DIVERGE = ("loss", "grad_norm")  # names of fields that may be infinite or NaN
_MAY_BE_LARGE = ("score", "error")  # such as the perplexity of a whole word, of random weights


class UnreadableError(ValueError):
    """A file is not valid JSON or YAML, or has wrong values. The message does not name the file."""


def read_json(path: Path) -> Any:
    """Parse a JSON file. Raises UnreadableError if it is not valid JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnreadableError(reason(error)) from None


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """Return the JSON object in a text; None if the text is anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_yaml(path: Path) -> Any:
    """Parse a YAML file. Raises UnreadableError if it is not valid or holds too many values."""
    import yaml

    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise UnreadableError(reason(error)) from None
    # An alias may put a document into itself, or make it very large.
    seen, waiting = 0, [(document, 0)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, list | Mapping):
            inner = value if isinstance(value, list) else value.values()
            waiting += [(item, depth + 1) for item in inner]
        seen += 1
        if depth > _MOST_DEPTH or seen > _MOST_VALUES:
            raise UnreadableError("it is nested too deeply, or holds too many values")
    return document


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return strict JSON, which every program can read. NaN and infinities become null."""
    return json.dumps(finite(value), indent=indent, allow_nan=False)


def finite(value: Any) -> Any:
    """Return a JSON value with null for NaN and infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def reason(error: BaseException) -> str:
    """Return in one line why a file cannot be read. error: the exception that reading raised."""
    match error:
        case UnicodeDecodeError():
            return f"it is not text: byte {error.start + 1} is not UTF-8"
        case json.JSONDecodeError(msg=msg):
            return f"line {error.lineno}, column {error.colno}: {msg[:1].lower()}{msg[1:]}"
        case UnreadableError():
            return str(error)
        case OSError():
            text = str(error) or "it cannot be read"
            return error.strerror or text.splitlines()[0]
        case RecursionError():
            return "it is nested too deeply"
        case OverflowError():
            return "a number is too large"
        case KeyError():
            return f"{error.args[0]} is missing" if error.args else "a key is missing"
        case TypeError() | AttributeError() | IndexError():
            return "a value has the wrong type"
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        problem = getattr(error, "problem", None) or "not YAML"
        return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
    text = (str(error).strip() or "it is damaged").splitlines()[0]
    if "digits) for integer string" in text:
        return "a number has too many digits"
    is_no_number = text.startswith(("could not convert", "invalid literal", "cannot convert"))
    return "a value is not a number" if is_no_number else text


def damaged_lines(file: Path, numbers: Sequence[int]) -> str:
    """Return ``FILE: lines 2, 5 are damaged``. numbers: count from 1."""
    shown = ", ".join(map(str, numbers[:_MOST_SHOWN])) + " and more" * (len(numbers) > _MOST_SHOWN)
    what = f"lines {shown} are" if len(numbers) > 1 else f"line {shown} is"
    return f"{file}: {what} damaged"


def lines_not_shown(file: Path, numbers: Sequence[int], thing: str) -> str:
    """Return ``FILE: line 2 is damaged; this step is not shown``; "" without numbers.

    thing: what a line holds, such as "step".
    """
    lost = f"these {thing}s are" if len(numbers) > 1 else f"this {thing} is"
    return f"{damaged_lines(file, numbers)}; {lost} not shown" if numbers else ""


# Most of the time of a short row.
_type_hints: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)


def checked(kind: type[T], values: Mapping[str, Any], *, nulls: bool = False) -> T:
    """Build an object of the dataclass ``kind`` from a JSON object. Unknown keys are ignored.

    nulls: whether a missing or null value becomes None, even if its field has another type.

    Raises:
        UnreadableError: a key without a default is missing, or a value has the wrong type or is not
            finite.
    """
    if not isinstance(values, Mapping):
        raise UnreadableError("it is not a JSON object")
    hints = _type_hints(kind)
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
    """Return ``value`` as the type ``hint``, or raise UnreadableError with the field's name."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        for one in inner:
            with contextlib.suppress(UnreadableError):
                return _fitting(one, value, name)
    elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return checked(hint, value)
    elif origin is list and isinstance(value, list):
        return [_fitting(inner[0], item, name) for item in value]
    elif origin is tuple and isinstance(value, list | tuple):
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        if len(kinds) == len(value):
            return tuple(_fitting(one, item, name) for one, item in zip(kinds, value, strict=True))
    elif (origin or hint) in (dict, Mapping) and isinstance(value, Mapping):
        return dict(value)
    elif _is_plain(hint, value, name):
        return float(value) if hint is float else value
    raise UnreadableError(f"{name}={_shown(value)} has the wrong type")


def _is_plain(hint: Any, value: Any, name: str) -> bool:
    """Return whether ``value`` has the type ``hint``, which is not a container or dataclass."""
    if hint is int:
        return is_number(value) and isinstance(value, int)
    if hint is float:
        is_large = name in _MAY_BE_LARGE and isinstance(value, float) and math.isfinite(value)
        diverges = name in _MAY_DIVERGE and isinstance(value, float)
        return is_number(value) or is_large or diverges
    kind = typing.get_origin(hint) or hint
    return hint is Any or not isinstance(kind, type) or isinstance(value, kind)


def is_number(value: Any) -> bool:
    """Return whether ``value`` is an integer that fits in int64, or a float below 1e18."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < (_INTEGER_LIMIT if isinstance(value, int) else _FLOAT_LIMIT)


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (ValueError, TypeError, RecursionError):
        text = "..."
    return text if len(text) <= 40 else f"{text[:40]}..."


def digest(path: Path) -> str:
    """Return the sha256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- files that change atomically -----


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path in the same folder. The file that the block writes there replaces ``path``.

    If the block raises an error, ``path`` stays as it was. An OSError names it.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with naming(path, draft):
            yield draft
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@contextlib.contextmanager
def naming(path: Path, draft: Path | None = None) -> Iterator[None]:
    """Name a file in an OSError of its draft, or in one that names no file: that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None or (draft is not None and str(error.filename) == str(draft)):
            if error.errno is None:  # with a file name, str() prints only strerror
                error.strerror = str(error)
            error.filename = str(path)
            if error.filename2 is not None:
                del error.filename2  # str() would print None, too
        raise


def replace_text(path: Path, text: str) -> None:
    """Replace the content of a file."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")
