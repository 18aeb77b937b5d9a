"""Parse the axes of a sweep. An axis is a name and the values to combine with other axes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from mtrain_cli.config.groups import open_groups
from mtrain_cli.config.keys import all_keys
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.sizes import parse_share
from mtrain_cli.config.suggest import did_you_mean

NODES, WORKERS, DENSITY, COLUMNS = "nodes", "workers", "density", "columns"
OWN = (NODES, WORKERS, DENSITY, COLUMNS)  # axes that are not settings
EXAMPLE = "seq=128k,512k nodes=1,2,4"
_LARGEST = {NODES: 2**14, WORKERS: 2**14, COLUMNS: 2**26}  # the limits of topology.workers and seq
_DIGITS = 18


def is_axis(word: str) -> bool:
    """Return whether a word such as ``seq=128k,512k`` is an axis and not a plain setting.

    An axis has several values or a name in `OWN`. A list in brackets is one value.
    """
    name, _, values = word.partition("=")
    return name in OWN or ("," in values and values[0] not in "[{")


def axes(words: Sequence[str], settings: Sequence[str] = ()) -> dict[str, list[str]]:
    """Parse words such as ``["seq=128k,512k", "nodes=1,2"]`` into the values of each name.

    The values of settings are checked later, when a configuration is composed.


    Raises:
        ConfigError: a word is not NAME=VALUE,..., or its name or a value cannot be swept.
    """
    found: dict[str, list[str]] = {}
    for word in words:
        name, equals, listed = word.partition("=")
        values = list(dict.fromkeys(value for value in listed.split(",") if value))
        if not equals or not values:
            raise ConfigError(f"{word}: expected NAME=VALUE,..., such as {EXAMPLE}")
        if name in ("layout", "exchange", "topology.layout", "topology.exchange"):
            option = name.rpartition(".")[2]
            raise ConfigError(f"{word}: use --{option} {listed} to compare these")
        if name in ("cluster", "topology.cluster"):
            raise ConfigError(f"{word}: a sweep predicts for one cluster; start a sweep for each")
        if name in found:
            raise ConfigError(f"{word}: {name} is swept twice; give all its values at once")
        known = name in OWN or "." in name or name in all_keys() or name in open_groups().options
        if not known and (hint := did_you_mean(name, OWN)):
            raise ConfigError(f"{word}: {name} cannot be swept{hint}")
        for value in values:
            if (expected := _expected(name, value)) is not None:
                raise ConfigError(f"{name}={value}: {expected}")
        found[name] = values
    if not found:
        raise ConfigError(_nothing_to_sweep(settings))
    if NODES in found and WORKERS in found:
        raise ConfigError("nodes and workers: both set the number of GPUs; sweep one of them")
    return found


def _nothing_to_sweep(settings: Sequence[str]) -> str:
    """Return the problem that no word is an axis."""
    given: dict[str, list[str]] = {}
    for word in settings:
        name, equals, value = word.partition("=")
        if equals:
            given.setdefault(name, []).append(value)
    for name, values in given.items():
        typed = " ".join(f"{name}={value}" for value in values)
        filled = list(dict.fromkeys(value for value in values if value))
        if len(filled) > 1:
            return f"{typed}: give all values at once, as {name}={','.join(filled)}"
        if not filled:
            example = "64k,128k" if name == "seq" else "VALUE,VALUE"
            return f"{typed}: has no value; give several, as {name}={example}"
    return f"nothing to sweep: give NAME=VALUE,..., such as {EXAMPLE}"


def _expected(name: str, value: str) -> str | None:
    """Check a value of an axis in `OWN`. Return None if it is valid, else the allowed values."""
    if name == DENSITY:
        with contextlib.suppress(ValueError):
            if 0 < parse_share(value) <= 1:
                return None
        return "must be above 0 and at most 1, such as 0.05 or 5%"
    if name not in _LARGEST:
        return None
    least, most = 0 if name == COLUMNS else 1, _LARGEST[name]
    whole = value.isascii() and value.isdecimal() and len(value) <= _DIGITS
    if whole and least <= int(value) <= most:
        return None
    return f"expected a whole number of at least {least} and at most {most:,}"
