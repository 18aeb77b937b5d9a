"""All configuration keys by dotted name, and the conversion of values to the type of their key.

The dataclasses of the schema are the only source. ``sparsity`` has the keys of all patterns, and
``mask`` those of all masks; those that the chosen pattern or mask does not use are null.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
import os
import re
import types
import typing
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mtrain_cli import docstrings
from mtrain_cli.config import cluster, sizes
from mtrain_cli.config.mask_settings import MASKS
from mtrain_cli.config.option import Range, Variant
from mtrain_cli.config.pattern_settings import PATTERNS
from mtrain_cli.config.problem import Problem, setting
from mtrain_cli.config.schema import Config
from mtrain_cli.config.suggest import did_you_mean

# {key that holds a file or folder: words that the key takes instead of a path}
PATHS: Mapping[str, tuple[str, ...]] = {
    "data.path": (),
    "data.mix": (),
    "data.tokenizer": ("auto", "bytes"),
    "data.chat_template": ("auto",),
    "train.init_from": (),
    "run.dir": ("auto",),
    "topology.cluster": ("auto", *cluster.shipped()),
}
# Integer keys that the user may set to auto. `composition/derived.py` replaces auto by a number.
DERIVED = frozenset({"model.vocab_size"})

_UNSHOWN_LIMIT = 10**9  # `ConfigKey.allowed` leaves out upper limits from this number on


@dataclass(frozen=True)
class Variants:
    """A section of which a run has one kind, which the key ``selector`` names: mask or pattern."""

    selector: str
    help: str
    kinds: Mapping[str, type[Variant]]

    def own_keys(self, kind: object) -> tuple[str, ...]:
        """Return the names of a kind's keys. An unknown kind has none."""
        return self.kinds[str(kind)].own_keys() if str(kind) in self.kinds else ()


VARIANTS = {
    "mask": Variants("kind", "name of the mask; `docs/masks.md` shows each", MASKS),
    "sparsity": Variants("pattern", "method that estimates the index", PATTERNS),
}


@dataclass(frozen=True)
class ConfigKey:
    """One key of the configuration.

    name: dotted name, such as optim.lr.
    type: int, float, bool, str, a tuple or mapping of these types, or a union with None or str.
    choices: allowed words; empty if any value of the type is allowed.
    range: allowed numbers; None if any number is allowed.
    counts_tokens: whether the key takes sizes such as 512k; 1k steps could mean 1000 or 1024.
    expects: text on the allowed values, for messages; "" if the type says it.
    words: regular expression of the texts that a key of numbers or text takes.
    """

    name: str
    type: Any
    help: str
    choices: tuple[str, ...] = ()
    range: Range | None = None
    counts_tokens: bool = False
    expects: str = ""
    words: str = "auto"

    @functools.cached_property
    def types(self) -> tuple[Any, ...]:
        """The members of ``type`` if it is a union, else ``type`` alone."""
        is_union = typing.get_origin(self.type) in (types.UnionType, typing.Union)
        return typing.get_args(self.type) if is_union else (self.type,)

    @property
    def optional(self) -> bool:
        """Whether null is allowed."""
        return type(None) in self.types

    @property
    def is_mapping(self) -> bool:
        """Whether the key takes numbers by name, or the path of a YAML file with such numbers."""
        return any(typing.get_origin(kind) is dict for kind in self.types)

    @property
    def is_text(self) -> bool:
        """Whether the value is taken as literal text, not parsed as a number or list."""
        return set(self.types) <= {str, type(None)}

    @property
    def expected(self) -> str:
        """The allowed values, as a text that continues "expected"."""
        if self.expects:
            return self.expects
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.counts_tokens:
            return f"{sizes.EXPECTED}, or auto" if str in self.types else sizes.EXPECTED
        if self.is_mapping:
            return "numbers by name such as {code: 0.3, book: 0.7}, a YAML file of them, or null"
        first, *rest = self.types
        if typing.get_origin(first) is tuple:
            parts = typing.get_args(first)
            sample = ",".join("0.9" if part is float else "4" for part in parts)
            return f"a list of {len(parts)} numbers such as [{sample}]"
        if str in rest or self.name in DERIVED:
            words = [_WORDS[first], "auto"]
        # Null only means that the pattern or mask lacks the key.
        elif self.name.startswith(("sparsity.", "mask.")):
            words = [_WORDS[first]]
        else:
            words = [_WORDS[kind] for kind in self.types]
        return " or ".join(words).replace("true or false or", "true, false or")

    @property
    def allowed(self) -> str:
        """The allowed values with their range, as a short text for tables."""
        if self.choices:
            return ", ".join(self.choices)
        kind = self.expected.removeprefix("a ").partition(" such as ")[0]
        if self.counts_tokens:
            kind = "tokens or auto" if str in self.types else "tokens"
        if self.range is None:
            return kind
        bounds = self.range.rule.removeprefix("must be ")
        if self.range.has_limit and self.range.most < _UNSHOWN_LIMIT:
            bounds += f", {self._limit_text(self.range)}"
        return bounds if bounds.startswith(("auto", "true")) else f"{kind}, {bounds}"

    def out_of_range(self, value: object) -> str | None:
        """Return why a number is not allowed, to follow ``key=value: ``; None for other values."""
        if self.range is None or not isinstance(value, int | float):
            return None
        if not self.range.fits(value):
            return self.range.rule
        return f"must be {self._limit_text(self.range)}" if self.range.is_beyond(value) else None

    def _limit_text(self, range: Range) -> str:
        most = sizes.format_size(int(range.most)) if self.counts_tokens else f"{range.most:,.0f}"
        return f"at most {most} ({range.reason})"

    def convert(self, value: Any) -> Any:
        """Convert a value from YAML or the command line to the key's type.

        Raises ValueError, whose message continues ``key=value: ``, for a value of another type.
        """
        for kind in self.types:
            with contextlib.suppress(TypeError):
                return _CONVERSIONS[typing.get_origin(kind) or kind](self, kind, value)
        if isinstance(value, float) and math.isinf(value) and (problem := self.out_of_range(value)):
            raise ValueError(problem)
        close = did_you_mean(str(value), self.choices) if self.choices else ""
        raise ValueError(f"expected {self.expected}{close}")


def _same(_key: ConfigKey, kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError
    return value


def _float(_key: ConfigKey, _kind: Any, value: Any) -> float:
    if not _is_number(value):
        raise TypeError
    return float(value)


def _int(key: ConfigKey, _kind: Any, value: Any) -> int:
    is_auto = value == "auto" and str in key.types
    if key.counts_tokens and isinstance(value, str) and not is_auto:
        return sizes.parse_size(value, key.expected)
    if not _is_number(value) or value != int(value):
        raise TypeError
    return int(value)


def _text(key: ConfigKey, _kind: Any, value: Any) -> str:
    if key.is_text and not key.choices and _is_number(value):
        value = str(value)
    is_words = key.is_text and bool(key.choices)
    # int | str and float | str take a number, or a word.
    is_number = not key.is_text and not key.is_mapping
    if (
        not isinstance(value, str)
        or (is_words and value not in key.choices)
        or (is_number and not re.fullmatch(key.words, value))
        or (key.is_mapping and value.lstrip().startswith("{"))
    ):
        raise TypeError
    if key.name in PATHS and (problem := path_problem(value)):
        raise ValueError(problem)
    return value


def _mapping(key: ConfigKey, _kind: Any, value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping) or not all(map(_is_number, value.values())):
        raise TypeError
    for name in value if key.name in PATHS else ():
        if problem := path_problem(str(name)):
            raise ValueError(f"a name in it {problem}")
    return {str(name): float(item) for name, item in value.items()}


def _list(key: ConfigKey, kind: Any, value: Any) -> tuple[Any, ...]:
    kinds = typing.get_args(kind)
    if not isinstance(value, list | tuple):
        raise TypeError
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(value)
    if len(value) != len(kinds):
        raise TypeError
    try:
        # A text in a list is literal; alone, it could only be the word auto.
        return tuple(
            (_same if part is str else _CONVERSIONS[part])(key, part, item)
            for part, item in zip(kinds, value, strict=True)
        )
    except ValueError:
        raise TypeError from None


# Each raises TypeError for a value of another type, and ValueError with the reason for a value
# that cannot be of any type of the key.
_CONVERSIONS: dict[Any, Callable[[ConfigKey, Any, Any], Any]] = {
    types.NoneType: _same,
    bool: _same,
    int: _int,
    float: _float,
    str: _text,
    dict: _mapping,
    tuple: _list,
}
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
}


_NAME_MAX, PATH_MAX = 255, 4095  # bytes, on Linux


def path_problem(text: str) -> str | None:
    """Return why this text cannot be a path; None if it can."""
    try:
        data = os.fspath(Path(text).expanduser()).encode()
    except UnicodeEncodeError:
        return "is not UTF-8; rename it"
    except RuntimeError:
        return "begins with the name of a user unknown on this machine; give the whole path"
    if len(data) > PATH_MAX or max(map(len, data.split(b"/"))) > _NAME_MAX:
        return f"is too long; a name has at most {_NAME_MAX} bytes, a path {PATH_MAX}"
    if any(ord(letter) < 32 for letter in text):
        return "holds a control character; give the path of a file or folder"
    return None


def _is_number(value: Any) -> bool:
    """Return whether ``value`` is a finite number within the range of a float."""
    try:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and math.isfinite(value)
    except OverflowError:
        return False


@functools.cache
def all_keys() -> dict[str, ConfigKey]:
    """Return all keys by dotted name, in the order of the schema."""
    return {key.name: key for key in _flatten(Config, "")}


@functools.cache
def sections() -> tuple[str, ...]:
    """Return the dotted names of the sections: ``model``, ``model.rope``, ``topology``, ..."""
    parents = (name.split(".")[:-1] for name in all_keys())
    return tuple(
        dict.fromkeys(".".join(parts[: i + 1]) for parts in parents for i in range(len(parts)))
    )


def flatten(nested: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested mapping by dotted name.

    A mapping stays whole if it is the value of one key, or if it is empty.
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
    """Return the value of every key by dotted name."""
    return {name: _value(config, name) for name in all_keys()}


def _value(config: Config, name: str) -> Any:
    section, _, leaf = name.partition(".")
    if variants := VARIANTS.get(section):
        settings = getattr(config, section)
        is_own = leaf in (variants.selector, *settings.own_keys())
        return getattr(settings, leaf) if is_own else None
    return operator.attrgetter(name)(config)


def nested(config: Config) -> dict[str, Any]:
    """Return ``config`` as nested dictionaries and lists, in the order of the schema."""
    tree: dict[str, Any] = {}
    for name, value in values(config).items():
        *parents, leaf = name.split(".")
        section = tree
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = list(value) if isinstance(value, tuple) else value
    return tree


def build(leaves: Mapping[str, Any]) -> Config:
    """Build a configuration. leaves: the converted value of every key, by dotted name."""
    config: Config = _build(Config, leaves, "")
    return config


def with_other_variants(leaves: Mapping[str, Any], typed: Container[str] = ()) -> dict[str, Any]:
    """Set keys that the pattern or mask does not use to null, unless in ``leaves``.

    typed: keys that the user set. A pattern or mask that is chosen by its key alone, without its
    group, has no value for any of its keys.
    """
    absent: dict[str, Any] = {}
    for section, variants in VARIANTS.items():
        selector = f"{section}.{variants.selector}"
        own = () if selector in typed else variants.own_keys(leaves.get(selector))
        used = {selector, *(f"{section}.{key}" for key in own)}
        names = (name for name in all_keys() if name.startswith(f"{section}."))
        absent |= {name: None for name in names if name not in used}
    return {**absent, **leaves}


def show(value: Any) -> str:
    """Format a value as a user would type it on the command line."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list() | tuple():
            return f"[{','.join(map(show, value))}]"
        case Mapping():
            return "{" + ",".join(f"{name}:{show(item)}" for name, item in value.items()) + "}"
        case float() if value.is_integer() and abs(value) < 1e15:
            return str(int(value))
    return str(value)


def first_few(texts: Sequence[str]) -> str:
    """Join the first three texts. If there are more, append how many more."""
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return ", ".join(texts[:3]) + more


def conflict(config: Config, text: str, **words: object) -> Problem:
    """Return a problem of keys whose values contradict each other. A `Problem` stays as it is.

    Args:
        text: the line. ``{seq}`` in it becomes ``seq=4096``, and ``{seq!s}`` only ``seq``. The line
            is about these keys, of which the first is wrong.
        words: texts for other fields of ``text``, such as names that the user chose.
    """
    if isinstance(text, Problem):
        return text
    names: list[str] = []

    def filled(field: re.Match[str]) -> str:
        name = field[1]
        if name not in all_keys():
            return str(words[name])
        names.append(name)
        return setting(name) + ("" if field[2] else f"={show(_value(config, name))}")

    line = re.sub(r"\{([a-z0-9_.]+)(!s)?\}", filled, text)
    return Problem(line, *names, value=_value(config, names[0]))


@functools.cache
def _hints(owner: Any) -> dict[str, Any]:
    return typing.get_type_hints(owner)


def _flatten(owner: type, prefix: str) -> Iterator[ConfigKey]:
    hints = _hints(owner)
    for item in dataclasses.fields(owner):
        name, hint = f"{prefix}{item.name}", hints[item.name]
        if variants := VARIANTS.get(name):
            yield from _variant_keys(f"{name}.", variants)
        elif _is_section(hint):
            yield from _flatten(hint, f"{name}.")
        else:
            yield _key(owner, name, item)


def _variant_keys(prefix: str, variants: Variants) -> Iterator[ConfigKey]:
    """Yield the keys of all kinds. A key that only some kinds have names them in its help."""
    yield ConfigKey(f"{prefix}{variants.selector}", str, variants.help, tuple(variants.kinds))
    owners: dict[str, dict[str, Any]] = {}
    for kind, settings in variants.kinds.items():
        for name in settings.own_keys():
            owners.setdefault(name, {})[kind] = settings
    with_keys = sum(bool(settings.own_keys()) for settings in variants.kinds.values())
    for name, users in owners.items():
        types, kinds_by_help = [], dict[str, list[str]]()
        for kind, settings in users.items():
            (item,) = (field for field in dataclasses.fields(settings) if field.name == name)
            key = _key(settings, f"{prefix}{name}", item)
            types.append(key.type)
            kinds_by_help.setdefault(key.help, []).append(kind)
        helps = (f"{', '.join(kinds)}: {help}" for help, kinds in kinds_by_help.items())
        yield dataclasses.replace(
            key,
            type=functools.reduce(operator.or_, (*dict.fromkeys(types), None)),
            help=key.help if len(users) == with_keys else ". ".join(helps),
        )


def _key(owner: type, name: str, item: dataclasses.Field[Any]) -> ConfigKey:
    hint, help = _hints(owner)[item.name], docstrings.entries(owner).get(item.name, "")
    allowed = item.metadata["allowed"]
    numbers = allowed if isinstance(allowed, Range) else None
    choices = () if isinstance(allowed, Range) else allowed() if callable(allowed) else allowed
    expected = item.metadata["expected"]
    expected = expected() if callable(expected) else expected
    rest = item.metadata["tokens"], expected, item.metadata["words"]
    return ConfigKey(name, hint, help, choices, numbers, *rest)


def _is_section(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) and isinstance(hint, type)


def _build(owner: type, leaves: Mapping[str, Any], prefix: str) -> Any:
    if variants := VARIANTS.get(prefix.rstrip(".")):
        kind = variants.kinds[leaves[f"{prefix}{variants.selector}"]]
        return kind(**{name: leaves[f"{prefix}{name}"] for name in kind.own_keys()})
    return owner(
        **{
            name: _build(hint, leaves, f"{prefix}{name}.")
            if _is_section(hint)
            else leaves[f"{prefix}{name}"]
            for name, hint in _hints(owner).items()
            if typing.get_origin(hint) is not ClassVar
        }
    )
