"""Needles at given depths of the user's own text, with the positions of needle and answer.

A sample ends with its questions and their answers. One forward pass scores them all: a model that
writes greedily begins with an answer exactly when, at each of its tokens, the token before has
predicted it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from mtrain_cli.config.problem import ConfigError, cli_option
from mtrain_cli.config.sizes import with_count
from mtrain_cli.data.needles import NAMES
from mtrain_cli.data.tokenizers import Tokenizer

_NEEDLE = "\nThe magic number of {name} is {answer}.\n"
_QUESTION = "\nWhat is the magic number of {name}? The magic number of {name} is"
_ANSWER = " {answer}"
_BREAK = re.compile(r"(?<=[.!?]\s)|(?<=\n)")  # behind a sentence or a line
_LEAST_TEXT = 16  # tokens of haystack in the shortest sample


@dataclass(frozen=True)
class DepthProbe:
    """One needle and the question about it. Positions count tokens of the sample.

    depth: share of the haystack before the needle, from 0 to 1.
    text: the answer.
    needle: first and last position of the needle, the last excluded.
    answer: first and last position of the answer, the last excluded.
    """

    depth: float
    text: str
    needle: tuple[int, int]
    answer: tuple[int, int]


@dataclass(frozen=True)
class DepthSample:
    """A sequence of tokens with its probes. ids: int64[length]."""

    ids: np.ndarray
    probes: tuple[DepthProbe, ...]


class DepthGrid:
    """Samples from one haystack.

    text: the user's text. It repeats if it is too short.
    tokenizer: tokenizer of the model to evaluate.

    Raises:
        ConfigError: the text is empty.
    """

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        pieces = [piece for piece in _BREAK.split(text) if piece]
        if not text.strip():
            raise ConfigError("The haystack holds no text.")
        encoded = tokenizer.encode(pieces)
        self._tokenizer = tokenizer
        begin = tokenizer.begin.before(np.zeros(0, dtype=np.int64))
        if begin.size and tokenizer.begin.before(encoded[0]) is encoded[0]:
            encoded[0] = encoded[0][begin.size :]  # every sample gets one
        self._begin = begin
        self._ids = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in encoded])
        self._ends = np.cumsum([0, *map(len, encoded)])  # tokens before each possible place

    def samples(
        self, length: int, depths: Sequence[float], repeats: int = 1, *, seed: int = 1,
        together: bool = False,
    ) -> Iterator[DepthSample]:  # fmt: skip
        """Yield ``repeats`` samples for each depth, or with all depths in one sample.

        Args:
            length: tokens of each sample.
            depths: share of the haystack before each needle, from 0 to 1.
            seed: determines names, numbers and the part of the haystack.
            together: whether one sample has a needle at each depth. Its questions come in random
                order, so that no answer is always the last.

        Raises:
            ConfigError: the length is too short, or a depth is not from 0 to 1.
        """
        for depth in depths:
            if not 0 <= depth <= 1:
                raise ConfigError(f"Depth {depth}: must be a share from 0 to 1.")
        groups = [tuple(depths)] if together else [(depth,) for depth in depths]
        for group in groups:
            for repeat in range(repeats):
                yield self._sample(length, group, Random(f"{seed} {length} {group} {repeat}"))

    def _sample(self, length: int, depths: Sequence[float], random: Random) -> DepthSample:
        names = random.sample(NAMES, len(depths))
        answers = [
            str(number) for number in random.sample(range(1_000_000, 10_000_000), len(depths))
        ]
        needles = self._encode(_NEEDLE, names, answers)
        questions = self._encode(_QUESTION, names, answers)
        replies = self._encode(_ANSWER, names, answers)
        room = length - sum(map(len, [self._begin, *needles, *questions, *replies]))
        if room < _LEAST_TEXT:
            raise ConfigError(
                f"{cli_option('length', length)}: too few tokens for "
                f"{with_count(len(depths), 'needle')} and their questions; give "
                f"{self._longest(len(depths)):,} or more"
            )
        start = int(self._ends[random.randrange(len(self._ends) - 1)])
        parts: list[np.ndarray] = [self._begin]
        spans: dict[int, tuple[int, int]] = {}
        passed = 0
        for number in sorted(range(len(depths)), key=lambda number: depths[number]):
            place = max(passed, self._place(start, round(depths[number] * room)))
            parts += [self._text(start + passed, place - passed), needles[number]]
            spans[number], passed = _span(parts), place
        parts.append(self._text(start + passed, room - passed))
        order = random.sample(range(len(depths)), len(depths))
        probes = []
        for number in order:
            parts += [questions[number], replies[number]]
            answer = _span(parts)
            probes.append(DepthProbe(depths[number], answers[number], spans[number], answer))
        return DepthSample(np.concatenate(parts), tuple(probes))

    def _longest(self, needles: int) -> int:
        """Return a length that is enough for every draw of names."""
        answers = ["9999999"] * len(NAMES)
        texts = (self._encode(each, NAMES, answers) for each in (_NEEDLE, _QUESTION, _ANSWER))
        own = len(self._begin) + _LEAST_TEXT
        return needles * sum(max(map(len, each)) for each in texts) + own

    def _encode(
        self, template: str, names: Sequence[str], answers: Sequence[str]
    ) -> list[np.ndarray]:
        pairs = zip(names, answers, strict=True)
        texts = [template.format(name=name, answer=answer) for name, answer in pairs]
        return [np.asarray(ids, dtype=np.int64) for ids in self._tokenizer.encode(texts)]

    def _place(self, start: int, tokens: int) -> int:
        """Return how many tokens behind ``start``, at most ``tokens``, the last sentence ends."""
        rounds, rest = divmod(start + tokens, len(self._ids))
        end = int(self._ends[np.searchsorted(self._ends, rest, side="right") - 1])
        return max(0, rounds * len(self._ids) + end - start)

    def _text(self, start: int, tokens: int) -> np.ndarray:
        """Return ``tokens`` ids of the haystack from position ``start``, which may repeat it."""
        return self._ids.take(np.arange(start, start + tokens), mode="wrap")


def _span(parts: Sequence[np.ndarray]) -> tuple[int, int]:
    """Return the first and last position of the last part."""
    end = sum(map(len, parts))
    return end - len(parts[-1]), end
