"""Records that other packages add to the folder of a measurement: the group `mtrain.records`.

An entry point is an object of such a kind: how to read its files, and how a report shows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mtrain_cli.config import plugins

Named = Sequence[tuple[str, Any]]  # (name of the run, its records)


class RecordKind(Protocol):
    """What a report needs of records of another package."""

    def read(self, folder: Path) -> Any:
        """Return the records of a folder, or None if it has none.

        Raises:
            ConfigError: a file is damaged.
        """

    def rows(self, records: Any) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Return {name of a CSV file: rows of text and numbers}."""

    def tables(self, records: Any) -> Sequence[Any]:
        """Return each `TextTable`, with its title, note and finding."""

    def figures(self, named: Named) -> Sequence[Any]:
        """Return each `plots.Figure` for the page."""


def read(folder: Path) -> tuple[tuple[RecordKind, Any], ...]:
    """Return each kind of records in a folder, with the records."""
    read_kinds = plugins.load("mtrain.records", lambda _, kind: (kind, kind.read(folder)))
    return tuple((kind, records) for kind, records in read_kinds if records)


def by_kind(of_runs: Sequence[tuple[str, Sequence[tuple[RecordKind, Any]]]]) -> Iterator[Any]:
    """Yield (kind, [(run, records)]) for each kind that a run has."""
    for one in dict.fromkeys(kind for _, others in of_runs for kind, _ in others):
        named = [
            (name, records) for name, others in of_runs for kind, records in others if kind is one
        ]
        yield one, named
