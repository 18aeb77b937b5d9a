"""Suggest the nearest valid name for a mistyped one, and find what ships under a name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher
from pathlib import Path

from mtrain_cli import resource_dir

_CUTOFF = 0.6  # minimum similarity of a suggestion, from 0 to 1, as in difflib


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name that is most similar to ``word``, or None if no name is similar.

    The section and the key of a dotted name are compared separately, and the key counts more. So
    ``warmup_steps`` and ``train.warmup_steps`` find ``optim.warmup_steps``, and ``train.lr`` finds
    ``optim.lr`` rather than ``train.dtype``.
    """
    names = list(names)
    if word.lower() == "gpu" and "cuda" in names:
        return "cuda"  # "cpu" is more similar
    family, bar, _ = word.lower().partition("_")
    if bar and any(map(str.isdigit, family)):  # h200_4x8 is rather h200_1x8 than b200_4x8
        names = [name for name in names if name.lower().startswith(f"{family}_")] or names
    scored = [(_similarity(word.lower(), name.lower()), name) for name in names]
    best = max(scored, key=lambda pair: (pair[0], -len(pair[1])), default=(0.0, ""))
    return best[1] if best[0] >= _CUTOFF else None


def did_you_mean(word: str, names: Iterable[str], suffix: str = "") -> str:
    """Return `` (did you mean NAME?)`` with ``suffix`` after NAME, or "" if no name is similar."""
    name = nearest(word, names)
    return f" (did you mean {name}{suffix}?)" if name else ""


def no_such(
    kind: str, name: str, names: Iterable[str], otherwise: str = "", most: int | None = None
) -> str:
    """Return ``no such KIND (did you mean ...?); allowed: NAMES, or OTHERWISE``.

    most: how many names to list; None lists all.
    """
    names = list(names)
    allowed = ", ".join(names[:most])
    if len(names[:most]) < len(names):
        allowed += f" and {len(names[most:])} more"
    if otherwise:
        allowed = f"{allowed}, or {otherwise}" if names else otherwise
    return f"no such {kind}{did_you_mean(name, names)}; allowed: {allowed}"


def _similarity(word: str, name: str) -> float:
    section, _, leaf = name.rpartition(".")
    word_section, _, word_leaf = word.rpartition(".")
    ratio = _ratio(word_leaf, leaf)
    if not word_section:
        return max(_ratio(word, name), ratio - (0.01 if section else 0.0))
    if section and word.replace(".", "_") == leaf:  # checkpoint.every for train.checkpoint_every
        return 0.99
    return 0.75 * ratio + 0.25 * _ratio(word_section, section)


def _ratio(a: str, b: str) -> float:
    ratio = SequenceMatcher(None, a, b).ratio()
    # An abbreviation is similar to its long form, such as ``seq`` to ``sequence``.
    short, long = sorted((a, b), key=len)
    if short and short == "".join(part[:1] for part in long.split("_")) and "_" in long:
        return 0.9  # initials, such as ``lr``
    return max(ratio, 0.9) if len(short) >= 3 and long.startswith(short) else ratio


def adapter_hint(folder: Path) -> str:
    """Return what to do with a folder of PEFT; "" for another folder."""
    if not (folder / "adapter_config.json").is_file():
        return ""
    return ". This is a PEFT adapter: merge it with merge_and_unload() of peft, and save the model"


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
