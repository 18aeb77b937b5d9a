"""Find the profiles, predictions and calibrations that ship with mtrain, by name."""

from __future__ import annotations

from pathlib import Path

from mtrain_cli import resource_dir


def find_shipped(path: Path) -> Path:
    """Return the shipped folder or .json file with this name.

    If the path itself exists, or nothing with this name ships, return the path.
    """
    path = path.expanduser()
    if path.is_absolute() or path.exists():
        return path
    shipped = resource_dir("profiles") / path
    places = (shipped, shipped.with_name(f"{shipped.name}.json"))
    return next((place for place in places if place.exists()), path)


def shipped_with(pattern: str) -> list[str]:
    """Return the names of the shipped folders that hold a file whose name fits a glob pattern."""
    root = resource_dir("profiles")
    return sorted({str(file.parent.relative_to(root)) for file in root.glob(pattern)})
