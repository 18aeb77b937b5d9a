"""Read docstrings whose text users see: the help of commands, options and configuration keys."""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

_ENTRY = re.compile(r"^(\w+): (.+(?:\n +.+)*)", re.MULTILINE)


def split(owner: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Split a docstring into its text and {parameter or field: description}.

    The entries of a function are under "Args:". The entries of a dataclass begin at the margin.
    """
    text = inspect.getdoc(owner) or ""
    if isinstance(owner, type):
        first = _ENTRY.search(text)
        text, entries = (text[: first.start()], text[first.start() :]) if first else (text, "")
    else:
        text, _, entries = text.partition("\nArgs:\n")
    found = _ENTRY.findall(textwrap.dedent(entries))
    return text.rstrip(), {name: " ".join(entry.split()) for name, entry in found}


@functools.cache
def entries(owner: Callable[..., Any]) -> dict[str, str]:
    """Return the description of each parameter of a function, or field of a dataclass."""
    merged: dict[str, str] = {}
    for origin in reversed(getattr(owner, "__mro__", (owner,))):
        merged |= split(origin)[1]
    return merged
