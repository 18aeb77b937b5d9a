"""The groups of golden traces, and the files that hold them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from golden import files, losses, memory, predictions, profiles
from golden.compare import differences

RECORDED = Path(__file__).parent / "recorded"


@dataclass(frozen=True)
class Group:
    """Cases that are made alike.

    found: computes cases by name. tolerance: see `compare.differences`.
    """

    name: str
    names: tuple[str, ...]
    found: Callable[[Collection[str]], Iterator[tuple[str, dict[str, Any]]]]
    tolerance: Mapping[str, float]

    @property
    def path(self) -> Path:
        return RECORDED / f"{self.name}.jsonl"

    def recorded(self) -> dict[str, Any]:
        """By name."""
        rows = map(json.loads, self.path.read_text().splitlines()) if self.path.exists() else ()
        return {row["name"]: row["found"] for row in rows}

    def record(self, names: Collection[str]) -> None:
        """Replace what was recorded of these names; cases that are gone go."""
        known = self.recorded() | dict(self.found(names))
        lines = [
            json.dumps({"name": name, "found": known[name]}, separators=(",", ":"))
            for name in self.names
            if name in known
        ]
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text("".join(f"{line}\n" for line in lines))

    def check(self, names: Collection[str], exact: bool = False) -> Iterator[tuple[str, list[str]]]:
        """-> name and what differs, of each."""
        recorded = self.recorded()
        for name, found in self.found(names):
            if name not in recorded:
                yield name, ["was never recorded"]
            else:
                yield (
                    name,
                    sorted(
                        differences(
                            recorded[name],
                            json.loads(json.dumps(found)),
                            {"": 0.0} if exact else self.tolerance,
                        )
                    ),
                )


# Losses of other CPUs differ in the last bits, which sums and a few steps of training make more of.
GROUPS = (
    Group("losses", tuple(losses.CASES), losses.found, {"": 1e-5, "grad_norm": 1e-4}),
    Group("memory", tuple(memory.CASES), memory.found, {"": 1e-3}),
    Group(
        "predictions",
        tuple(predictions.NAMES),
        predictions.found,
        {"": 1e-3, "counts": 0.0, "bytes": 0.0},
    ),
    Group("profiles", tuple(profiles.NAMES), profiles.found, {"": 1e-6}),
    Group(
        "files",
        files.NAMES,
        files.found,
        {"": 1e-3, "loss": 1e-5, "grad_norm": 1e-4, "counts": 0.0, "bytes": 0.0},
    ),
)


def chosen(only: str | None) -> Iterator[tuple[Group, list[str]]]:
    """Groups with the names that ``only`` means; all without it.

    only: a group, else the beginning of "GROUP/NAME" or a part of names.
    """
    groups = [group for group in GROUPS if group.name == only]
    for group in groups or GROUPS:
        names = [
            name
            for name in group.names
            if groups or only is None or only in name or f"{group.name}/{name}".startswith(only)
        ]
        if names:
            yield group, names
