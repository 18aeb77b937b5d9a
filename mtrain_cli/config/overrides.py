"""Parse the overrides of a command line: ``group=option`` and ``key=value``.

Hydra composes only the groups. This module parses values by the type of their key. So a path such
as ``~/corpus#1.txt`` needs no second layer of quotes, and messages name the key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtrain_cli.config.earlier_versions import RENAMED, REPLACED
from mtrain_cli.config.groups import Groups
from mtrain_cli.config.keys import PATHS, ConfigKey, all_keys, sections, show
from mtrain_cli.config.problem import Problem
from mtrain_cli.config.suggest import did_you_mean, nearest, no_such

_SWEEP = re.compile(r"^(choice|range|glob|interval)\(.*\)$")
_SHOWN = 80  # maximum characters of a value in a message
ONE_VALUE = "one value per run; start a run for each value"


@dataclass
class Overrides:
    """Parsed overrides.

    groups: option by group.
    values: value by key, before conversion to the key's type.
    problems: one problem for each override that cannot be parsed.
    """

    groups: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def parse(texts: Sequence[str], groups: Groups) -> Overrides:
    """Parse the overrides ``texts``. The last override of a key or group wins."""
    parsed = Overrides()
    problems = [_parse_one(text, groups, parsed) for text in texts]
    parsed.problems.extend(problem for problem in problems if problem is not None)
    return parsed


def convert(
    raw: Mapping[str, Any], files: Mapping[str, Path] | None = None
) -> tuple[dict[str, Any], list[Problem]]:
    """Convert values to the types of the schema. Return the valid values and the problems.

    Args:
        raw: values by dotted name.
        files: YAML file of each group, for messages.
    """
    leaves: dict[str, Any] = {}
    problems = []
    for name, value in raw.items():
        key = all_keys().get(name)
        if key is None:
            problems.append(_no_key(name, value, files or {}))
            continue
        try:
            converted = key.convert(value)
            if range_problem := key.out_of_range(converted):
                raise ValueError(range_problem)
            leaves[name] = converted
        except (ValueError, OverflowError) as error:
            problems.append(_wrong(name, show(value), str(error)))
    return leaves, problems


def _wrong(name: str, shown: str, allowed: str) -> Problem:
    clipped = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return Problem(f"{name}={clipped}: {allowed}", name, value=clipped, allowed=allowed)


def _no_key(name: str, value: Any, files: Mapping[str, Path]) -> Problem:
    file = files.get(name.partition(".")[0])
    where = f"{file}: " if file else ""
    if name in sections():
        return Problem(f"{where}{name}={show(value)}: holds keys, not a value", f"{name}.")
    current = RENAMED.get(name) or REPLACED.get(name)
    hint = f" (did you mean {current}?)" if current else did_you_mean(name, all_keys())
    return Problem(f"{where}no key is called {name}{hint}")


def _parse_one(raw_text: str, groups: Groups, parsed: Overrides) -> Problem | None:
    text = raw_text.strip()
    # +key=value is how Hydra adds a key. Every key exists here, so it means key=value.
    name, equals, raw = (part.strip() for part in text.lstrip("+").partition("="))
    dotted = name.replace("/", ".")
    name = dotted if dotted in all_keys() else name
    try:
        text.encode()
    except UnicodeEncodeError:
        return Problem(f"{text}: is not UTF-8; rename the file or folder", name)
    if text.startswith("~"):
        return Problem(f"{text}: a key cannot be deleted; leave it out, or set it", name[1:])
    if not equals:
        return Problem(_without_equals(text, groups))
    if not name:
        return Problem(f"{text}: the key before = is missing; expected key=value, such as seq=4k")
    if name in groups.options:
        return _parse_group(name, raw, groups, parsed)
    if name in all_keys():
        # A file name may begin or end with a space.
        exact = raw_text.partition("=")[2]
        return _parse_value(text, all_keys()[name], exact if name in PATHS and raw else raw, parsed)
    if name in sections():
        example = next(key for key in all_keys() if key.startswith(f"{name}."))
        line = f"{text}: {name} is a section; set one of its keys, such as {example}=..."
        return Problem(line, f"{name}.")
    return _unknown(text, name, raw, groups)


def _without_equals(text: str, groups: Groups) -> str:
    options = {option for options in groups.options.values() for option in options}
    if text in groups.options:
        return f"{text}: expected {text}=OPTION; options: {', '.join(groups.options[text])}"
    if text in all_keys():
        return f"{text}: expected {text}=VALUE; VALUE is {all_keys()[text].expected}"
    line = f"{text or repr(text)}: expected key=value"
    if text.endswith((".yaml", ".yml")):
        return f"{line}; give a file DIR/recipe/mine.yaml as --config-dir DIR recipe=mine"
    if option := text if text in options else nearest(text, options):
        return f"{line} (did you mean {groups.groups_of(option)[0]}={option}?)"
    hint = did_you_mean(text.lstrip("-"), all_keys(), "=...")
    return f"{line}, such as model=tiny or optim.lr=1e-3{hint}; quote spaces: 'key=a b'"


def _parse_group(group: str, raw: str, groups: Groups, parsed: Overrides) -> Problem | None:
    option, options = _unquoted(raw), groups.options[group]
    if option in options:
        parsed.groups[group] = option
        return None
    reason = no_such(group, option, options)
    if "," in option or _SWEEP.match(option):
        reason = ONE_VALUE
    return Problem(f"{group}={raw}: {reason}", group, f"{group}.", value=raw, allowed=reason)


def _parse_value(text: str, key: ConfigKey, raw: str, parsed: Overrides) -> Problem | None:
    def wrong(allowed: str) -> Problem:
        return Problem(f"{text}: {allowed}", key.name, value=raw, allowed=allowed)

    if raw == "":
        return wrong(f"expected {key.expected}")
    if key.is_text or (key.is_mapping and not raw.startswith("{")):
        is_null = raw.lower() == "null" or (key.optional and raw.lower() == "none")
        parsed.values[key.name] = None if is_null else _unquoted(raw)
        return None
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(f"{key.name}={raw}")
    except (HydraException, ValueError, RecursionError):  # Hydra's message describes its grammar
        return wrong(f"expected {key.expected}")
    if override.is_sweep_override():
        is_list = "a list" in key.expected and not _SWEEP.match(raw)
        return wrong(f"a list needs brackets: {key.name}=[{raw}]" if is_list else ONE_VALUE)
    value = override.value()
    if isinstance(value, float) and not math.isfinite(value):
        # Reported here, where the text is known: 1e999 would show as inf.
        try:
            key.convert(value)
        except ValueError as error:
            return wrong(str(error))
    parsed.values[key.name] = value
    return None


def _unknown(text: str, name: str, raw: str, groups: Groups) -> Problem:
    if name == "cluster":
        return Problem(f"{text}: is for `mtrain simulate`; write --cluster {raw}")
    if name.startswith("MTRAIN_"):  # such as a secret, which a message must not repeat
        return Problem(f"{name}: belongs in the environment; others can read command lines")
    bare = name.lstrip("-")
    close = RENAMED.get(bare) or nearest(bare, [*groups.options, *all_keys()])
    line = f"{text}: no key or group is called {name}"
    if bare in REPLACED:
        return Problem(f"{line} (did you mean {REPLACED[bare]}?)")
    if close is None:
        return Problem(f"{line}; `mtrain config list` shows all groups and keys")
    return Problem(f"{line} (did you mean {close}={raw}?)", f"{close}.", close)


def _unquoted(raw: str) -> str:
    return raw[1:-1] if len(raw) >= 2 and raw[0] == raw[-1] and raw[0] in "'\"" else raw
