"""A small corpus that is the same on every machine and with every Python."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

_SYLLABLES = ("ka", "lo", "mi", "ter", "un", "des", "or", "vel", "sa", "ph", "ing", "to")


def write(folder: Path) -> Path:
    """Write `folder`/text.jsonl with short documents, so that a sequence packs several."""
    folder.mkdir(parents=True, exist_ok=True)
    path, draw = folder / "text.jsonl", _numbers(2026)
    with path.open("w") as file:
        for _ in range(160):
            words = [_word(next(draw)) for _ in range(15 + next(draw) % 220)]
            file.write(json.dumps({"text": " ".join(words)}) + "\n")
    return path


def _word(number: int) -> str:
    # Squared, so that some words are frequent and there is something to learn.
    square = (number % 101) ** 2 % 57
    return "".join(
        _SYLLABLES[(square * (place + 3)) % len(_SYLLABLES)] for place in range(1 + square % 3)
    )


def _numbers(seed: int) -> Iterator[int]:
    """A linear congruential generator (Knuth's MMIX constants)."""
    state = seed
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield state >> 33
