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


# CPUs with instructions for bfloat16 round elsewhere than CPUs without them.
_BFLOAT16 = 100.0


@dataclass(frozen=True)
class Group:
    """Cases that are computed in the same way.

    compute: yields the results of the named cases.
    tolerance: see `compare.differences`.
    """

    name: str
    names: tuple[str, ...]
    compute: Callable[[Collection[str]], Iterator[tuple[str, dict[str, Any]]]]
    tolerance: Mapping[str, float]

    @property
    def path(self) -> Path:
        return RECORDED / f"{self.name}.jsonl"

    def recorded(self) -> dict[str, Any]:
        """Return the recorded results by name."""
        rows = map(json.loads, self.path.read_text().splitlines()) if self.path.exists() else ()
        return {row["name"]: row["found"] for row in rows}

    def record(self, names: Collection[str]) -> None:
        """Replace the recorded results of these names, and remove cases that no longer exist."""
        known = self.recorded() | dict(self.compute(names))
        lines = [
            json.dumps({"name": name, "found": known[name]}, separators=(",", ":"))
            for name in self.names
            if name in known
        ]
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text("".join(f"{line}\n" for line in lines))

    def _allowed(self, name: str) -> dict[str, float]:
        """Return the tolerance of a case."""
        factor = _BFLOAT16 if "bfloat16" in name else 1.0
        return {key: factor * value for key, value in self.tolerance.items()}

    def check(self, names: Collection[str], exact: bool = False) -> Iterator[tuple[str, list[str]]]:
        """Yield each name with its differences."""
        recorded = self.recorded()
        for name, computed in self.compute(names):
            if name not in recorded:
                yield name, ["was never recorded"]
            else:
                yield (
                    name,
                    sorted(
                        differences(
                            recorded[name],
                            json.loads(json.dumps(computed)),
                            {"": 0.0} if exact else self._allowed(name),
                        )
                    ),
                )


# Other CPUs differ in the last bits of a loss, which sums and training steps amplify.
GROUPS = (
    Group("losses", tuple(losses.CASES), losses.compute, {"": 1e-5, "grad_norm": 1e-4}),
    Group("memory", tuple(memory.CASES), memory.compute, {"": 1e-3}),
    Group(
        "predictions",
        tuple(predictions.NAMES),
        predictions.compute,
        {"": 1e-3, "counts": 0.0, "bytes": 0.0},
    ),
    Group("profiles", tuple(profiles.NAMES), profiles.compute, {"": 1e-6}),
    Group(
        "files",
        files.NAMES,
        files.compute,
        {"": 1e-3, "loss": 1e-5, "grad_norm": 1e-4, "counts": 0.0, "bytes": 0.0},
    ),
)


def chosen(only: str | None) -> Iterator[tuple[Group, list[str]]]:
    """Select groups and names; all of them without `only`.

    only: a group, or else the start of "GROUP/NAME" or part of a name.
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
