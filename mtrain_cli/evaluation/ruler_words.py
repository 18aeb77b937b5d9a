"""RULER's aggregation (arXiv:2404.06654, section 3): the most common words of a long list."""

from __future__ import annotations

import math
import string
from collections.abc import Iterator, Sequence
from random import Random

import numpy as np

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.evaluation.fitting import Draft, Fitted, Prompts, Stream, TooShortError, batched
from mtrain_cli.evaluation.ruler_templates import COMMON_WORDS, FREQUENT_WORDS
from mtrain_cli.evaluation.token_counts import TokenCounter
from mtrain_cli.evaluation.word_lists import all_words

_COMMON = 10  # words to name
_LETTERS = 6  # of a coded word
_NAMED = 3  # coded words to name
_ZETA_2 = math.pi**2 / 6


class CommonWordPrompts(Prompts):
    """Prompts of the task cwe: numbered words, of which ten appear more often.

    length: tokens of a sample.
    seed: seed of the order of the words.
    more_words: words for lists that are longer than wonderwords; None if not given.
    """

    step = 10
    first = 4096
    reserved = reserved_in_search = COMMON_WORDS.tokens

    def __init__(self, length: int, seed: int, more_words: Sequence[str] | None = None) -> None:
        self._words, self._seed, self._more_words = all_words(seed), seed, more_words
        is_short = length < 4096
        # Number of words, repeats of the ten, and repeats of the others.
        self._example = (20, 3, 1) if is_short else (40, 10, 3)
        self._repeats = (6, 1) if is_short else (30, 3)

    def most(self, tokens: int, limit: int) -> int:
        """Return twice the size that the first try suggests."""
        return int(limit // (tokens / self.first)) * 2

    def draw(self, stream: Stream, size: int, index: int) -> Draft:  # noqa: ARG002
        """Return a solved example and a list of ``size`` different words.

        Raises:
            ConfigError: the word lists have fewer words.
            ValueError: the list would have fewer words than the question asks for.
        """
        if size < _COMMON:
            raise ValueError(f"{size} words cannot hold {_COMMON} common ones")
        context, common = self._list(stream, *self._example)
        solved = f"{COMMON_WORDS.prompt.format(context=context)} {_numbered(common)}"
        context, common = self._list(stream, size, *self._repeats)
        prompt = f"{solved}\n{COMMON_WORDS.prompt.format(context=context)}"
        return Draft(prompt, tuple(common))

    def _list(
        self, stream: Stream, size: int, often: int, seldom: int
    ) -> tuple[str, Sequence[str]]:
        words = self._words if size <= len(self._words) else self._more_words
        if words is None or size > len(words):
            raise ConfigError(
                f"--tasks cwe: tries lists of {size:,} words at this length, and there are only "
                f"{len(words or self._words):,}; give a smaller length, or RULER's "
                "english_words.json"
            )
        drawn = stream.python.sample(words, size)
        common = drawn[:_COMMON]
        listed = common * often + drawn[_COMMON:] * seldom
        Random(self._seed).shuffle(listed)
        return _numbered(listed), common


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


class FrequentWords:
    """Samples of the task fwe: coded words, with frequencies that follow a zeta distribution.

    limit: most tokens of a prompt.
    seed: seed of the order of the words.
    """

    def __init__(self, limit: int, seed: int, counter: TokenCounter) -> None:
        self._limit, self._seed, self._counter = limit, seed, counter
        self._step, self._coded = limit // 32, limit // 50

    def samples(self, stream: Stream, count: int) -> Iterator[Fitted]:
        """Yield ``count`` samples.

        Raises:
            TooShortError: no sample fits, or the words to name would not be the most frequent.
        """
        if self._coded < _NAMED + 2:
            raise TooShortError(0)
        most = self._most_words(self._vocabulary(stream))
        vocabularies = (self._vocabulary(stream) for _ in range(count))
        # About eight characters a coded word.
        for batch in batched(vocabularies, lambda _: 8 * max(0, most)):
            yield from self._fit(batch, most)

    def _fit(self, vocabularies: Sequence[list[str]], most: int) -> list[Fitted]:
        """Return one sample for each vocabulary. Those that are too long lose words."""
        sizes = [most] * len(vocabularies)
        fitted: dict[int, Fitted] = {}
        while len(fitted) < len(vocabularies):
            waiting = [number for number in range(len(vocabularies)) if number not in fitted]
            drafts = [self._draft(vocabularies[number], sizes[number]) for number in waiting]
            counts = self._counter.exact([draft.prompt for draft in drafts])
            for number, draft, tokens in zip(waiting, drafts, counts, strict=True):
                if tokens <= self._limit:
                    fitted[number] = Fitted(draft, tokens + FREQUENT_WORDS.tokens)
                sizes[number] -= self._step
        return [fitted[number] for number in range(len(vocabularies))]

    def _vocabulary(self, stream: Stream) -> list[str]:
        """Return different coded words. The first, which is the most frequent, is noise."""
        words = [_coded_word(stream) for _ in range(self._coded)]
        distinct = set(words)
        while len(distinct) < self._coded:
            distinct.add(_coded_word(stream))
        vocabulary = sorted(distinct)
        Random(self._seed).shuffle(vocabulary)
        vocabulary[0] = "..."
        return vocabulary

    def _most_words(self, vocabulary: list[str]) -> int:
        """Return how many words to draw, by growing the text until it is long enough."""
        words = self._limit // _LETTERS
        while self._counter.exact([self._draft(vocabulary, words).prompt])[0] < self._limit:
            words += self._step
        return words - self._step

    def _draft(self, vocabulary: list[str], words: int) -> Draft:
        """Return a prompt with about ``words`` words."""
        ranks = np.arange(1, len(vocabulary) + 1)
        counts = (words * (ranks**-2.0) / _ZETA_2).astype(int)
        if counts[_NAMED] == counts[_NAMED + 1]:
            raise TooShortError(0)
        text = [word for word, times in zip(vocabulary, counts, strict=True) for _ in range(times)]
        Random(self._seed).shuffle(text)
        prompt = FREQUENT_WORDS.prompt.format(context=" ".join(text))
        return Draft(prompt, tuple(vocabulary[1 : 1 + _NAMED]))


def _coded_word(stream: Stream) -> str:
    return "".join(stream.python.choices(string.ascii_lowercase, k=_LETTERS))
