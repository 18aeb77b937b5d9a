"""What other installed packages add to `mtrain`, and name as entry points.

`docs/extending.md` shows such a package. The studies of `mtrain_studies` come this way, too.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any, TypeVar

from mtrain_cli.commands.options import warn

COMMANDS, REPORTS = "mtrain.commands", "mtrain.reports"

T = TypeVar("T")


def load(group: str, use: Callable[[str, Any], T]) -> list[T]:
    """Load the entry points of a group, and return what `use` makes of each name and object.

    Those of mtrain come first. If loading or `use` fails, warn, and leave the entry point out.
    """
    found = []
    for entry in sorted(metadata.entry_points(group=group), key=_is_of_others):
        try:
            found.append(use(entry.name, entry.load()))
        except Exception as error:
            what = f"{group}: {entry.name} = {entry.value}"
            why = f"{type(error).__name__}: {error}"
            warn([f"{what} cannot be loaded, so it is left out ({why})"])
    return found


def _is_of_others(entry: metadata.EntryPoint) -> bool:
    return entry.dist is None or entry.dist.name != "mtrain"
