"""Mistakes of users: lines for people that keep the settings which they name as data.

A message is written once, in the words of the command line. A caller with other names, such as a
Python function with arguments instead of options, renders the same parts with its own `Names`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mtrain_cli.printable import one_line


@dataclass(frozen=True)
class Setting:
    """A setting in a message.

    name: dotted key, or name of an option with underscores.
    value: None to show only the name.
    is_option: whether the command line has an option, such as --max-new 8, instead of a key. The
        value True then stands for a flag.
    """

    name: str
    value: Any = None
    is_option: bool = False

    def __str__(self) -> str:
        name = f"--{self.name.replace('_', '-')}" if self.is_option else self.name
        if self.value is None or (self.is_option and self.value is True):
            return name
        shown = str(self.value)
        # 1 for 1.0, but not for 1.0000001, which would be a mistake without a visible cause.
        if isinstance(self.value, float) and float(f"{self.value:g}") == self.value:
            shown = f"{self.value:g}"
        return f"{name}{' ' if self.is_option else '='}{shown}"


@dataclass(frozen=True)
class Allowed:
    """The part of a message that says which values are allowed."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class IfHas:
    """The part of a message that makes sense only to a caller that has the setting ``name``."""

    name: str
    text: str

    def __str__(self) -> str:
        return self.text


Part = str | Setting | Allowed | IfHas


def cli_option(name: str, value: Any = None) -> Setting:
    """Return an option of the command line for a message. name: with underscores."""
    return Setting(name, value, is_option=True)


@dataclass(frozen=True)
class Names:
    """How a caller names the settings in messages.

    options: whether it gives options such as --max-new 8. Otherwise, it gives max_new=8.
    other: its own name of a setting, by the name in the message.
    lacks: settings that it cannot give. Advice on them is left out.
    """

    options: bool = True
    other: Mapping[str, str] = field(default_factory=dict)
    lacks: Collection[str] = ()

    def of(self, part: Part) -> Part:
        """Return a part of a message in the words of the caller."""
        if isinstance(part, IfHas) and part.name in self.lacks:
            return ""
        if isinstance(part, Setting):
            name = self.other.get(part.name, part.name)
            return replace(part, name=name, is_option=part.is_option and self.options)
        return part

    @contextlib.contextmanager
    def in_errors(self) -> Iterator[None]:
        """Use these names in the messages of a ConfigError, which keeps its class."""
        try:
            yield
        except ConfigError as error:
            problems = (Problem(*map(self.of, one.parts)) for one in error.problems)
            raise type(error)(*problems) from error.__cause__


class Problem(str):
    """One line about a mistake, in the words of the command line. Line breaks in it are escaped.

    parts: the line as words and data. A line without data is one part.
    """

    parts: tuple[Part, ...]

    def __new__(cls, *parts: Part) -> Problem:
        """parts: of the line. The parts of a `Problem` among them count one by one."""
        flat = [one for part in parts for one in getattr(part, "parts", (part,))]
        problem = super().__new__(cls, one_line("".join(map(str, flat))))
        problem.parts = tuple(flat)
        return problem

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.parts

    @property
    def key(self) -> str | None:
        """The name of the setting that is wrong; None if the line does not have it as data."""
        return next((one.name for one in self.parts if isinstance(one, Setting)), None)

    @property
    def value(self) -> Any:
        """The value of `key`."""
        return next((one.value for one in self.parts if isinstance(one, Setting)), None)

    @property
    def allowed(self) -> str | None:
        """What is allowed instead; None if the line does not have it as data."""
        return next((one.text for one in self.parts if isinstance(one, Allowed)), None)


class ConfigError(ValueError):
    """One or more mistakes in a configuration.

    problems: one line for each mistake, with the key, its value and the allowed values.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = tuple(map(Problem, problems))
        super().__init__("\n".join(self.problems))


def as_typed(name: str, value: object) -> str:
    """Return ``--option value`` or ``key=value``: what the user typed."""
    return f"{name} {value}" if name.startswith("-") else f"{name}={value}"
