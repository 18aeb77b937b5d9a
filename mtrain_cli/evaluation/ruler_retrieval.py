"""RULER's needles in a haystack (arXiv:2404.06654, section 3): find values by their keys."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from mtrain_cli.evaluation.fitting import Draft, Prompts, Stream
from mtrain_cli.evaluation.ruler_templates import NEEDLE, NEEDLES, NOISE, SINGULAR
from mtrain_cli.evaluation.sources import split_sentences
from mtrain_cli.evaluation.word_lists import adjective_nouns

_DEPTHS = [int(depth) for depth in np.round(np.linspace(0, 100, num=40, endpoint=True))]


@dataclass(frozen=True)
class NeedleKinds:
    """What a task hides and asks.

    haystack: ``noise`` repeats one sentence, ``needle`` repeats other needles, ``essay`` is text.
    key, value: ``words``, ``numbers`` or ``uuids``.
    keys: number of keys in the text.
    values: number of values for each key.
    queries: number of keys to ask for.
    """

    haystack: str
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


def _number(stream: Stream) -> str:
    return str(stream.python.randint(1_000_000, 9_999_999))


def _word(stream: Stream) -> str:
    return stream.python.choice(adjective_nouns())


def _uuid(stream: Stream) -> str:
    return str(uuid.UUID(int=stream.python.getrandbits(128), version=4))


_DRAW: dict[str, Callable[[Stream], str]] = {"numbers": _number, "words": _word, "uuids": _uuid}


class NeedlePrompts(Prompts):
    """Prompts of one needle task.

    kinds: what to hide.
    length: tokens of a sample.
    seed: seed of the order of the needles.
    haystack: words of the essays; empty for other haystacks.
    """

    def __init__(
        self, kinds: NeedleKinds, length: int, seed: int, haystack: Sequence[str] = ()
    ) -> None:
        self._kinds, self._seed, self._haystack = kinds, seed, list(haystack)
        self.step = 500 if kinds.haystack == "essay" else 25 if length >= 4096 else 5
        self.first = self.step
        self.reserved = self.reserved_in_search = NEEDLES.tokens
        self._template, self._unit = NEEDLES.prompt, kinds.value
        if kinds.queries * kinds.values == 1:
            for plural, singular in SINGULAR:
                self._template = self._template.replace(plural, singular)
            self._unit = self._unit[:-1]

    def draw(self, stream: Stream, size: int, index: int) -> Draft:  # noqa: ARG002
        """Return a prompt with ``size`` sentences or words of haystack."""
        kinds = self._kinds
        keys, values, needles = [], [], []
        for _ in range(max(kinds.keys, kinds.queries)):
            keys.append(_DRAW[kinds.key](stream))
            values.append([_DRAW[kinds.value](stream) for _ in range(kinds.values)])
            needles += [self._needle(keys[-1], value) for value in values[-1]]
        Random(self._seed).shuffle(needles)
        hide = self._essay if kinds.haystack == "essay" else self._lines
        context = hide(stream, size, needles)
        asked = stream.python.sample(range(len(keys)), kinds.queries)
        query = ", ".join(keys[i] for i in asked[:-1])
        query = f"{query}, and {keys[asked[-1]]}" if query else keys[asked[-1]]
        prompt = self._template.format(type_needle_v=self._unit, context=context, query=query)
        return Draft(prompt, tuple(value for i in asked for value in values[i]))

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(type_needle_v=self._kinds.value, key=key, value=value)

    def _lines(self, stream: Stream, size: int, needles: list[str]) -> str:
        """Return ``size`` lines of noise or of other needles, with the needles among them."""
        key, value = _DRAW[self._kinds.key], _DRAW[self._kinds.value]
        if self._kinds.haystack == "noise":
            lines = [NOISE] * size
        else:
            lines = [self._needle(key(stream), value(stream)) for _ in range(size)]
        places = sorted(stream.python.sample(range(size), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)

    def _essay(self, stream: Stream, size: int, needles: list[str]) -> str:
        """Return ``size`` words of essays, with the needles between sentences at random depths."""
        repeats = -(-size // len(self._haystack))
        text = " ".join((self._haystack * repeats if repeats > 1 else self._haystack)[:size])
        sentences = split_sentences(text.strip())
        depths = stream.python.sample(_DEPTHS, len(needles))
        ends = sorted(int(len(sentences) * (depth / 100)) for depth in depths)
        parts, start = [], 0
        for end, needle in zip(ends, needles, strict=True):
            parts += [" ".join(sentences[start:end]), needle]
            start = end
        return " ".join([*parts, " ".join(sentences[start:])])
