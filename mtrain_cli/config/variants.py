"""Settings of which a run has one kind: the mask, and the pattern of a dynamic index."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Any


class Variant:
    """Settings of one kind. A subclass is a frozen dataclass whose fields are its keys.

    A configuration has the keys of all kinds; those of the other kinds are null.
    """

    @classmethod
    def own_keys(cls) -> tuple[str, ...]:
        """Return the names of the kind's keys, without the key that names the kind."""
        return tuple(item.name for item in fields(cls) if item.metadata)  # type: ignore[arg-type]


def check(base: type[Variant], name_field: str, name: str, kind: Any, others: Mapping) -> None:
    """Raise ValueError if a class of another package does not fit to the kinds before it.

    base: the class that it must extend. name_field: its attribute with its name, such as ``kind``.
    name: name of its entry point. others: {name: class} of the kinds before it.
    """
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise ValueError(f"it must be a subclass of {base.__name__}")
    if getattr(kind, name_field, None) != name:
        raise ValueError(f"its {name_field} must be {name}, like its entry point")
    declared = [_declared(other) for other in others.values()]
    for key, declaration in _declared(kind).items():
        known = [keys[key] for keys in declared if key in keys]
        if known and declaration not in known:
            raise ValueError(f"its key {key} has another type or range than in mtrain")


def _declared(kind: type[Any]) -> dict[str, Any]:
    """Return type, allowed values and whether it counts tokens, for each key of a class."""
    hints = typing.get_type_hints(kind)
    return {
        item.name: (hints[item.name], item.metadata["allowed"], item.metadata["tokens"])
        for item in fields(kind)
        if item.metadata
    }
