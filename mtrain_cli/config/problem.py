"""Mistakes of users: lines for people that keep the keys which they are about as data.

A message names options as the command line does. A caller that names them otherwise, such as a
Python function with arguments, says so by `Names`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from mtrain_cli.printable import one_line


class Problem(str):
    """One line about a mistake, in the words of the command line. Line breaks in it are escaped.

    keys: names of the keys or options that the line is about, the wrong one first. A name that ends
        in a dot stands for all keys of a section.
    value: the value of the first key; None if it is not known.
    allowed: what is allowed instead, as a text; None if the line does not say it.
    """

    keys: tuple[str, ...]
    value: Any
    allowed: str | None

    def __new__(
        cls, text: str, *keys: str, value: Any = None, allowed: str | None = None
    ) -> Problem:
        problem = super().__new__(cls, one_line(text))
        problem.keys, problem.value, problem.allowed = keys, value, allowed
        return problem

    @property
    def key(self) -> str | None:
        """The name of the key or option that is wrong; None if the line is about none."""
        return next(iter(self.keys), None)

    def is_about(self, names: Collection[str]) -> bool:
        """Return whether the line is about one of these keys or sections, such as ``train.``."""
        pairs = ((key, name) for key in self.keys for name in names)
        return any(contains(name, key) or contains(key, name) for key, name in pairs)


class ConfigError(ValueError):
    """One or more mistakes in a configuration.

    problems: one line for each mistake, with the key, its value and the allowed values.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = tuple(p if isinstance(p, Problem) else Problem(p) for p in problems)
        super().__init__("\n".join(self.problems))


def contains(name: str, key: str) -> bool:
    """Return whether ``name`` is the key ``key`` or its section, such as ``train.``."""
    return name == key or (name.endswith(".") and key.startswith(name))


@dataclass(frozen=True)
class Names:
    """How a caller names the options of the command line in messages.

    options: whether it gives options such as --max-new 8. Otherwise, it gives max_new=8.
    other: its own name of a setting, by the name in the message.
    lacks: settings that it cannot give. Advice on them is left out.
    """

    options: bool = True
    other: Mapping[str, str] = field(default_factory=dict)
    lacks: Collection[str] = ()

    @contextlib.contextmanager
    def in_errors(self) -> Iterator[None]:
        """Write the messages of this block with these names, besides those of an outer block."""
        outer = _names.get()
        options, other = outer.options and self.options, {**outer.other, **self.other}
        token = _names.set(Names(options, other, {*outer.lacks, *self.lacks}))
        try:
            yield
        finally:
            _names.reset(token)


_COMMAND_LINE = Names()
_names: ContextVar[Names] = ContextVar("names", default=_COMMAND_LINE)


def setting(name: str) -> str:
    """Return how the caller names a setting."""
    return _names.get().other.get(name, name)


def if_has(name: str, text: str) -> str:
    """Return a text that makes sense only to a caller with the setting ``name``, or ""."""
    return "" if name in _names.get().lacks else text


def cli_option(name: str, value: Any = None) -> str:
    """Return an option as the caller gives it, such as ``--max-new 8`` or ``max_new=8``.

    name: with underscores.
    value: None for the name alone. The command line shows no value for a flag, True.
    """
    shown, options = str(value), _names.get().options
    # 1 for 1.0, but not for 1.0000001, which would be a mistake without a visible cause.
    if isinstance(value, float) and float(f"{value:g}") == value:
        shown = f"{value:g}"
    typed = f"--{setting(name).replace('_', '-')}" if options else setting(name)
    if value is None or (options and value is True):
        return typed
    return f"{typed}{' ' if options else '='}{shown}"


def as_typed(name: str, value: object) -> str:
    """Return ``--option value`` or ``key=value``: what the user typed."""
    return f"{name} {value}" if name.startswith("-") else f"{name}={value}"
