"""The word lists of the package wonderwords, from which RULER takes its keys and words.

The nouns differ between versions of the package, so `identity` belongs into every result. Each
function raises ConfigError if the package is missing.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import importlib.resources
import itertools
from collections.abc import Sequence
from random import Random

from mtrain_cli import install_command
from mtrain_cli.config.schema import ConfigError

_FILES = ("nounlist.txt", "adjectivelist.txt", "verblist.txt")


@functools.cache
def _lists() -> tuple[tuple[str, ...], ...]:
    """Return the nouns, the adjectives and the verbs in the order of the package."""
    try:
        folder = importlib.resources.files("wonderwords") / "assets"
        texts = [(folder / name).read_text(encoding="utf-8") for name in _FILES]
    except (ModuleNotFoundError, OSError):
        raise ConfigError(
            f"RULER's words: needs the wonderwords package: {install_command('eval')}"
        ) from None
    return tuple(tuple(line.rstrip() for line in text.split("\n")[:-1]) for text in texts)


def identity() -> str:
    """Return the SHA-256 of the three lists."""
    return hashlib.sha256("\n\n".join("\n".join(words) for words in _lists()).encode()).hexdigest()


@functools.cache
def all_words(seed: int) -> tuple[str, ...]:
    """Return all distinct words, shuffled."""
    words = sorted({word for words in _lists() for word in words})
    Random(seed).shuffle(words)
    return tuple(words)


@functools.cache
def adjective_nouns() -> HyphenPairs:
    """Return the sorted list of all distinct pairs such as ``calm-otter``."""
    nouns, adjectives, _ = _lists()
    return HyphenPairs(adjectives, nouns)


class HyphenPairs(Sequence[str]):
    """The sorted list of all distinct ``FIRST-SECOND``, without the memory for all of them.

    All pairs of one first word are neighbours in the list, in the order of the second words. The
    exception is a first word such as ``far`` next to ``far-off``: ``far-off-road`` may belong to
    both. The pairs of such a family of words are sorted together.
    """

    def __init__(self, first: Sequence[str], second: Sequence[str]) -> None:
        families: list[list[str]] = []
        for prefix in sorted({f"{word}-" for word in first}):
            if families and prefix.startswith(families[-1][0]):
                families[-1].append(prefix)
            else:
                families.append([prefix])
        seconds = sorted(set(second))
        # The prefix of a group of pairs, and what follows it.
        self._groups: list[tuple[str, list[str]]] = [
            (own[0], seconds)
            if len(own) == 1
            else ("", sorted({prefix + word for prefix in own for word in seconds}))
            for own in families
        ]
        self._ends = list(itertools.accumulate(len(words) for _, words in self._groups))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        group = bisect.bisect_right(self._ends, index)
        prefix, words = self._groups[group]
        return prefix + words[index - (self._ends[group - 1] if group else 0)]
