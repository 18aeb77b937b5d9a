"""Find profiles, predictions and calibrations that ship with mtrain by their names."""

from __future__ import annotations

from pathlib import Path

from mtrain_cli import resource_dir


def find_shipped(path: Path) -> Path:
    """Return the path if it exists, else the shipped folder or .json file of this name.

    If neither exists, return the path.
    """
    path = path.expanduser()
    if path.is_absolute() or path.exists():
        return path
    shipped = resource_dir("profiles") / path
    places = (shipped, shipped.with_name(f"{shipped.name}.json"))
    return next((place for place in places if place.exists()), path)


def shipped_with(pattern: str) -> list[str]:
    """Return the names of the shipped folders that hold a file of this pattern."""
    root = resource_dir("profiles")
    return sorted({str(file.parent.relative_to(root)) for file in root.glob(pattern)})
