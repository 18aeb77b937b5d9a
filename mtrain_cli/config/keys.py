"""Every configuration key by dotted name, and the conversion of raw values to the key's type.

The schema's dataclasses are the only source: a field added there is checked, listed and completed
without a change here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain_cli.config import sizes
from mtrain_cli.config.schema import Config
from mtrain_cli.config.suggest import did_you_mean

# Keys that count tokens, which accept sizes such as 512k. Step counts do not: most people would
# read 1k steps as 1000.
TOKEN_COUNTS = frozenset(
    {
        "seq",
        "model.rope.original_max_position",
        "topology.block_size",
        "sparsity.block",
        "sparsity.chunk",
    }
)
# Keys that hold a file or folder, unless the value is one of these words.
PATHS: Mapping[str, tuple[str, ...]] = {
    "data.path": (),
    "data.mix": (),
    "data.tokenizer": ("auto", "bytes"),
    "train.init_from": (),
    "run.dir": ("auto",),
}
# Integer keys that accept auto: `derived` replaces it by a number when a configuration is composed.
DERIVED = frozenset({"model.vocab_size"})


@dataclass(frozen=True)
class ConfigKey:
    """One leaf of the configuration.

    name: dotted, such as optim.lr.
    type: int, float, bool, str, a tuple or mapping of them, or a union with None or str.
    help: one line on what the key does.
    choices: allowed values; empty = any value of the type.
    """

    name: str
    type: Any
    help: str
    choices: tuple[str, ...]

    @property
    def types(self) -> tuple[Any, ...]:
        """The members of a union type, else the type alone."""
        return (
            typing.get_args(self.type)
            if typing.get_origin(self.type) in (types.UnionType, typing.Union)
            else (self.type,)
        )

    @property
    def optional(self) -> bool:
        """Whether null is allowed."""
        return type(None) in self.types

    @property
    def is_mapping(self) -> bool:
        """Whether the value maps names to numbers; text is then the path of a file with them."""
        return any(typing.get_origin(kind) is dict for kind in self.types)

    @property
    def is_text(self) -> bool:
        """Whether any text is allowed and taken literally."""
        return set(self.types) <= {str, type(None)}

    @property
    def expected(self) -> str:
        """The allowed values, worded to follow 'expected'."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.name in TOKEN_COUNTS:
            return sizes.EXPECTED
        if self.is_mapping:
            return "numbers by name such as {code: 0.3, book: 0.7}, a YAML file of them, or null"
        words = {
            bool: "true or false",
            int: "a whole number",
            float: "a number",
            str: "text",
            type(None): "null",
        }
        first, *rest = self.types
        if typing.get_origin(first) is tuple:
            kinds = typing.get_args(first)
            return f"a list of {len(kinds)} numbers such as [{','.join('0.5' for _ in kinds)}]"
        if str in rest or self.name in DERIVED:
            return f"{words[first]} or auto"
        return " or ".join(words[kind] for kind in (first, *rest))

    @property
    def allowed(self) -> str:
        """The allowed values, short enough for a table."""
        if self.choices:
            return ", ".join(self.choices)
        return (
            "tokens"
            if self.name in TOKEN_COUNTS
            else self.expected.removeprefix("a ").partition(" such as ")[0]
        )

    def convert(self, value: Any) -> Any:
        """Convert a value from YAML or the command line to the key's type.

        Raises:
            ValueError: what is wrong with the value, worded to follow ``key=value: ``.
        """
        for kind in self.types:
            converted = self._convert_to(kind, value)
            if converted is not _WRONG:
                return converted
        close = did_you_mean(str(value), self.choices) if self.choices else ""
        raise ValueError(f"expected {self.expected}{close}")

    def _convert_to(self, kind: Any, value: Any) -> Any:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind is type(None):
            return None if value is None else _WRONG
        if kind is bool:
            return value if isinstance(value, bool) else _WRONG
        if kind is int:
            if self.name in TOKEN_COUNTS and isinstance(value, str):
                return sizes.parse_size(value)
            return int(value) if number and _finite(value) and value == int(value) else _WRONG
        if kind is float:
            return float(value) if number and _finite(value) else _WRONG
        if typing.get_origin(kind) is dict:
            numbers = isinstance(value, Mapping) and all(
                isinstance(n, int | float) and not isinstance(n, bool) and _finite(n)
                for n in value.values()
            )
            return {str(name): float(item) for name, item in value.items()} if numbers else _WRONG
        if kind is str:
            return (
                value
                if self.is_mapping and isinstance(value, str) and not value.lstrip().startswith("{")
                else self._convert_text(value, number)
            )
        kinds = typing.get_args(kind)
        assert typing.get_origin(kind) is tuple, (
            f"{self.name}: the schema uses a type that has no conversion: {kind}"
        )
        if not isinstance(value, list | tuple) or len(value) != len(kinds):
            return _WRONG
        parts = tuple(self._convert_to(part, item) for part, item in zip(kinds, value, strict=True))
        return _WRONG if any(part is _WRONG for part in parts) else parts

    def _convert_text(self, value: Any, number: bool) -> Any:
        if not isinstance(value, str) and not (number and self.is_text and not self.choices):
            return _WRONG
        text = str(value)
        if self.name in PATHS and (problem := _path_problem(text)):
            raise ValueError(problem)
        if not self.is_text:  # int | str or float | str: a number, or the word auto
            return text if text == "auto" else _WRONG
        return text if not self.choices or text in self.choices else _WRONG


_NAME_MAX, _PATH_MAX = 255, 4095  # bytes, on Linux


def _path_problem(text: str) -> str | None:
    """Return why no file can have this name, or None."""
    try:
        data = os.fspath(Path(text).expanduser()).encode()
    except UnicodeEncodeError:
        return "is not UTF-8; rename it"
    except RuntimeError:
        return "begins with the name of a user unknown on this machine; give the whole path"
    if len(data) > _PATH_MAX or max(map(len, data.split(b"/"))) > _NAME_MAX:
        return f"is too long; a name has at most {_NAME_MAX} bytes, a path {_PATH_MAX}"
    if any(ord(letter) < 32 for letter in text):
        return "holds a control character; give the path of a file or folder"
    return None


def _finite(value: float) -> bool:
    """Return whether a float can hold the number and it is finite."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


_WRONG = object()


@functools.cache
def all_keys() -> dict[str, ConfigKey]:
    """Return all keys by dotted name, in schema order."""
    return {key.name: key for key in _flatten(Config, "")}


@functools.cache
def sections() -> tuple[str, ...]:
    """Return the dotted names that hold keys: ``model``, ``model.rope``, ``topology``, ..."""
    names: dict[str, None] = {}
    for name in all_keys():
        parts = name.split(".")[:-1]
        names.update({".".join(parts[: i + 1]): None for i in range(len(parts))})
    return tuple(names)


def flatten(nested: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a nested mapping by dotted name.

    A mapping that is the value of one key stays whole, and an empty mapping counts as a leaf.
    """
    leaves: dict[str, Any] = {}
    for name, value in nested.items():
        dotted = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and dotted not in all_keys():
            leaves.update(flatten(value, f"{dotted}."))
        else:
            leaves[dotted] = value
    return leaves


def values(config: Config) -> dict[str, Any]:
    """Return every leaf of ``config`` by dotted name."""
    return {name: functools.reduce(getattr, name.split("."), config) for name in all_keys()}


def build(leaves: Mapping[str, Any]) -> Config:
    """Build a configuration from a converted value for every key."""
    config = _build(Config, leaves, "")
    assert isinstance(config, Config)
    return config


def show(value: Any) -> str:
    """Format a value as a user would type it on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(show(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{show(item)}" for name, item in value.items()) + "}"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)


@functools.cache
def _hints(owner: type) -> dict[str, Any]:
    return typing.get_type_hints(owner)


def _flatten(owner: type, prefix: str) -> Iterator[ConfigKey]:
    hints = _hints(owner)
    for item in dataclasses.fields(owner):
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from _flatten(hint, f"{prefix}{item.name}.")
        else:
            yield ConfigKey(
                f"{prefix}{item.name}",
                hint,
                item.metadata.get("help", ""),
                tuple(item.metadata.get("choices", ())),
            )


def _build(owner: type, leaves: Mapping[str, Any], prefix: str) -> Any:
    hints = _hints(owner)
    values = {}
    for item in dataclasses.fields(owner):
        hint = hints[item.name]
        nested = dataclasses.is_dataclass(hint) and isinstance(hint, type)
        values[item.name] = (
            _build(hint, leaves, f"{prefix}{item.name}.")
            if nested
            else leaves[f"{prefix}{item.name}"]
        )
    return owner(**values)
