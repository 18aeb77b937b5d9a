"""The word lists of the package wonderwords, from which RULER takes its keys and words.

The nouns differ between versions of the package, so `identity` belongs into every result.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import importlib.resources
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
    """Return the SHA-256 of the three lists.

    Raises:
        ConfigError: the package wonderwords is missing.
    """
    return hashlib.sha256("\n\n".join("\n".join(words) for words in _lists()).encode()).hexdigest()


@functools.cache
def all_words(seed: int) -> tuple[str, ...]:
    """Return all distinct words, shuffled.

    Raises:
        ConfigError: the package wonderwords is missing.
    """
    words = sorted({word for words in _lists() for word in words})
    Random(seed).shuffle(words)
    return tuple(words)


@functools.cache
def adjective_nouns() -> HyphenPairs:
    """Return the sorted list of all distinct pairs such as ``calm-otter``.

    Raises:
        ConfigError: the package wonderwords is missing.
    """
    nouns, adjectives, _ = _lists()
    return HyphenPairs(adjectives, nouns)


class HyphenPairs(Sequence[str]):
    """The sorted list of all distinct ``FIRST-SECOND``, without the memory for all of them.

    All pairs of one first word are neighbours in the list, in the order of the second words. The
    exception is a first word such as ``far`` next to ``far-off``: ``far-off-road`` may belong to
    both. The pairs of such words are sorted together.
    """

    def __init__(self, first: Sequence[str], second: Sequence[str]) -> None:
        self._second = sorted(set(second))
        self._groups: list[tuple[str, list[str] | None]] = []  # prefix, and its pairs if shared
        for prefixes in _families(sorted({f"{word}-" for word in first})):
            shared = None
            if len(prefixes) > 1:
                shared = sorted({prefix + word for prefix in prefixes for word in self._second})
            self._groups.append((prefixes[0], shared))
        self._ends = []
        end = 0
        for _, shared in self._groups:
            end += len(self._second) if shared is None else len(shared)
            self._ends.append(end)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        group = bisect.bisect_right(self._ends, index)
        prefix, shared = self._groups[group]
        place = index - (self._ends[group - 1] if group else 0)
        return prefix + self._second[place] if shared is None else shared[place]


def _families(prefixes: list[str]) -> list[list[str]]:
    """Group sorted prefixes: a family is a prefix and all others that begin with it."""
    families: list[list[str]] = []
    for prefix in prefixes:
        if families and prefix.startswith(families[-1][0]):
            families[-1].append(prefix)
        else:
            families.append([prefix])
    return families
