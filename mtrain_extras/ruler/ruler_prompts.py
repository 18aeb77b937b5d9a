"""The prompts of RULER's tasks (arXiv:2404.06654, section 3), as long as a number of tokens allows.

RULER searches for the largest size by bisection, and draws random numbers for every try. A sample
that comes out too long is drawn again with a smaller size. The next sample continues the random
numbers where the last try ended, so each sample depends on the exact lengths of all tries before.
"""

from __future__ import annotations

import math
import re
import string
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from mtrain_cli.config.schema import ConfigError
from mtrain_extras.ruler.ruler_files import Question, Questions
from mtrain_extras.ruler.ruler_templates import (
    COMMON_WORDS,
    DOCUMENT,
    FREQUENT_WORDS,
    NEEDLE,
    NEEDLES,
    NOISE,
    QUESTIONS,
    SINGULAR,
    TRACKING,
)
from mtrain_extras.ruler.word_lists import adjective_nouns, all_words

Count = Callable[[str], int]  # tokens of a text, without special tokens
_MOST_TRIES = 64  # of the smallest size, which RULER repeats until it fits, if need be for ever
_DEPTHS = [int(depth) for depth in np.round(np.linspace(0, 100, num=40, endpoint=True))]
_EXAMPLE_TOKENS = 500  # most tokens of the solved example of vt
_EXAMPLE_VALUE = "12345"
_VARIABLES = 5  # in a chain, which has one hop less
_COMMON = 10  # words to name in cwe
_LETTERS = 6  # of a coded word in fwe
_NAMED = 3  # coded words to name
_ZETA_2 = math.pi**2 / 6


class Stream:
    """The random numbers of one task, apart from those of the process; RULER seeds both once."""

    def __init__(self, seed: int) -> None:
        self.python = Random(seed)
        self.numpy = np.random.RandomState(seed)


@dataclass(frozen=True)
class Draft:
    """A prompt with its answers. length: its tokens with those for the answer; 0 if not counted."""

    prompt: str
    outputs: tuple[str, ...]
    length: int = 0


class TooShortError(Exception):
    """No prompt fits. shortest: tokens of the shortest that was drawn; 0 if none can be drawn."""

    def __init__(self, shortest: int) -> None:
        super().__init__(shortest)
        self.shortest = shortest


class Prompts(ABC):
    """Prompts of one task.

    step: smallest size, and the amount by which a size shrinks after a prompt that is too long.
    first: size of the first try, from which the number of tokens for each unit of size follows.
    reserved: tokens to add to each sample, for the answer.
    reserved_in_search: tokens to add to each try of the search.
    """

    step: int
    first: int
    reserved: int
    reserved_in_search: int

    def most(self, tokens: int, limit: int) -> int:
        """Return an upper bound of the size. tokens: tokens of the first try."""
        return int((limit / (tokens / self.first)) * 3)

    def probe(self, stream: Stream, size: int) -> str:
        """Return a prompt for the search."""
        return self.draw(stream, size, 0).prompt

    @abstractmethod
    def draw(self, stream: Stream, size: int, index: int) -> Draft:
        """Return a prompt for sample number ``index``.

        Raises ValueError if the size is too small for the task.
        """


def find_size(prompts: Prompts, stream: Stream, limit: int, count: Count) -> int:
    """Return the largest size whose prompt has at most ``limit`` tokens, or the smallest size."""
    tokens = count(prompts.probe(stream, prompts.first))
    low, best = prompts.step, prompts.step
    high = max(prompts.most(tokens, limit), 2 * prompts.step)
    while low <= high:
        size = (low + high) // 2
        if count(prompts.probe(stream, size)) + prompts.reserved_in_search <= limit:
            best, low = size, size + 1
        else:
            high = size - 1
    return best


def fitting(
    prompts: Prompts, stream: Stream, limit: int, count: Count, samples: int
) -> Iterator[Draft]:
    """Yield samples of at most ``limit`` tokens with the answer; TooShortError if none fits."""
    largest = find_size(prompts, stream, limit, count)
    for index in range(samples):
        size, shortest = largest, 0
        for _ in range(largest // prompts.step + _MOST_TRIES):
            try:
                draft = prompts.draw(stream, size, index)
            except ValueError:
                pass
            else:
                length = count(draft.prompt) + prompts.reserved
                if length <= limit:
                    yield Draft(draft.prompt, draft.outputs, length)
                    break
                shortest = min(shortest or length, length)
            if size > prompts.step:
                size -= prompts.step
        else:
            raise TooShortError(shortest)


@dataclass(frozen=True)
class NeedleKinds:
    """How many keys a task hides, how many it asks for, and how many values each key has.

    haystack: ``noise`` repeats one sentence, ``needle`` repeats other needles, ``essay`` is text.
    key, value: ``words``, ``numbers`` or ``uuids``.
    """

    haystack: str
    key: str = "words"
    value: str = "numbers"
    keys: int = 1
    values: int = 1  # number of values for each key
    queries: int = 1


_DRAW: dict[str, Callable[[Stream], str]] = {
    "numbers": lambda stream: str(stream.python.randint(1_000_000, 9_999_999)),
    "words": lambda stream: stream.python.choice(adjective_nouns()),
    "uuids": lambda stream: str(uuid.UUID(int=stream.python.getrandbits(128), version=4)),
}


class NeedlePrompts(Prompts):
    """Needles in a haystack: find values by their keys.

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
        # RULER uses NLTK's trained Punkt model, so its sentences differ behind abbreviations.
        sentences = re.split(r"(?<=[.!?])\s+", text.strip())
        depths = stream.python.sample(_DEPTHS, len(needles))
        ends = sorted(int(len(sentences) * (depth / 100)) for depth in depths)
        parts, start = [], 0
        for end, needle in zip(ends, needles, strict=True):
            parts += [" ".join(sentences[start:end]), needle]
            start = end
        return " ".join([*parts, " ".join(sentences[start:])])


class ChainPrompts(Prompts):
    """One chain of assignments to follow, without a solved example.

    letters: letters in the name of a variable.
    value: draws the value of the first variable.
    """

    def __init__(self, step: int, letters: int, value: Callable[[Stream], str]) -> None:
        self.step = self.first = step
        self.reserved = self.reserved_in_search = 0
        self._letters, self._value = letters, value

    def probe(self, stream: Stream, size: int) -> str:
        """Return a prompt for the search."""
        while True:
            try:
                return self._question(stream, size).prompt
            except ValueError:
                continue  # two variables had one name, where RULER's search ends with an error

    def draw(self, stream: Stream, size: int, index: int) -> Draft:  # noqa: ARG002
        """Return a prompt with ``size`` lines of noise."""
        return self._question(stream, size)

    def _question(self, stream: Stream, size: int) -> Draft:
        names = [_letters(stream, self._letters) for _ in range(_VARIABLES)]
        drawn = list(names)
        while len(set(drawn)) < _VARIABLES:
            drawn.append(_letters(stream, self._letters))
        value = self._value(stream)
        if drawn != names:
            self._value(stream)  # RULER begins a second chain and fails
            raise ValueError("two variables have one name")
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {names[i + 1]} = VAR {names[i]} " for i in range(_VARIABLES - 1)]
        lines = [NOISE] * size
        places = sorted(stream.python.sample(range(size), len(chain)))
        for number, (place, link) in enumerate(zip(places, chain, strict=True)):
            lines.insert(place + number, link)
        context = "\n".join(lines).replace(". \n", ".\n")
        prompt = TRACKING.prompt.format(context=context, query=value, num_v=_VARIABLES)
        return Draft(prompt, tuple(names))


class TrackingPrompts(ChainPrompts):
    """A chain of assignments to follow, after a solved example with other names and values."""

    def __init__(self, length: int, stream: Stream, count: Count) -> None:
        """Draw the solved example. Raises ConfigError if it has too many tokens."""
        super().__init__(10 if length >= 4096 else 5, letters=5, value=_five_digits)
        solved = ChainPrompts(5, letters=3, value=lambda _: _EXAMPLE_VALUE)
        try:
            (draft,) = fitting(solved, stream, _EXAMPLE_TOKENS, count, 1)
        except TooShortError as error:
            raise ConfigError(
                f"--tasks vt: the solved example has {error.shortest:,} tokens of this tokenizer "
                f"and may have {_EXAMPLE_TOKENS}; name the other tasks, or use a tokenizer with "
                "longer tokens"
            ) from None
        self._example = f"{draft.prompt} {' '.join(draft.outputs)}\n"
        self.reserved = TRACKING.tokens
        self.reserved_in_search = TRACKING.tokens + count(self._example)

    def draw(self, stream: Stream, size: int, index: int) -> Draft:
        draft = super().draw(stream, size, index)
        example = self._example
        for name in example.split()[-_VARIABLES:]:
            example = example.replace(name, _letters(stream, len(name)))
        example = example.replace(_EXAMPLE_VALUE, _five_digits(stream))
        return Draft(f"{example}\n{draft.prompt}", draft.outputs)


def _letters(stream: Stream, count: int, alphabet: str = string.ascii_uppercase) -> str:
    return "".join(stream.python.choices(alphabet, k=count))


def _five_digits(stream: Stream) -> str:
    return str(stream.numpy.randint(10000, 99999))


class CommonWordPrompts(Prompts):
    """Numbered words, of which ten appear more often (cwe).

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

        Raises ConfigError if the word lists have fewer words. Raises ValueError if the list would
        have fewer words than the question asks for.
        """
        if size < _COMMON:
            raise ValueError(f"{size} words cannot hold {_COMMON} common ones")
        context, common = self._list(stream, *self._example)
        solved = f"{COMMON_WORDS.prompt.format(context=context)} {_numbered(common)}"
        context, common = self._list(stream, size, *self._repeats)
        prompt = f"{solved}\n{COMMON_WORDS.prompt.format(context=context)}"
        return Draft(prompt, tuple(common))

    def _list(self, stream: Stream, size: int, often: int, seldom: int) -> tuple[str, list[str]]:
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


class QuestionPrompts(Prompts):
    """Questions about documents, among others that distract (qa_1 and qa_2)."""

    step = first = 10
    reserved = reserved_in_search = QUESTIONS.tokens

    def __init__(self, content: Questions, seed: int) -> None:
        self._content, self._seed = content, seed

    def draw(self, stream: Stream, size: int, index: int) -> Draft:
        """Return question number ``index`` with ``size`` documents."""
        asked, documents = self._content.questions[index], self._content.documents
        if size < len(documents):
            chosen = [documents[number] for number in self._choose(stream, asked, size)]
        else:
            chosen = (list(documents) * -(-size // len(documents)))[:size]
        Random(self._seed).shuffle(chosen)
        numbered = enumerate(chosen, 1)
        context = "\n\n".join(DOCUMENT.format(i=n, document=document) for n, document in numbered)
        prompt = QUESTIONS.prompt.format(context=context, query=asked.text)
        return Draft(prompt, asked.outputs)

    def _choose(self, stream: Stream, asked: Question, size: int) -> list[int]:
        """Return the numbers of ``size`` documents, those of the question among them."""
        own, related = list(asked.documents), list(asked.related)
        missing = size - len(own)
        if missing <= len(related):
            return own + stream.python.sample(related, missing)
        taken = {*own, *related}
        others = [number for number in range(len(self._content.documents)) if number not in taken]
        return own + related + stream.python.sample(others, max(0, missing - len(related)))


def frequent_words(
    limit: int, seed: int, stream: Stream, count: Count, samples: int
) -> Iterator[Draft]:
    """Yield samples of fwe: coded words, with frequencies that follow a zeta distribution.

    limit: most tokens of a prompt. Raises TooShortError if none fits or ranks are not clear.
    """
    step, coded = limit // 32, limit // 50
    if coded < _NAMED + 2:
        raise TooShortError(0)

    def vocabulary() -> list[str]:
        """Return different coded words. The first, which is the most frequent, is noise."""
        drawn = [_letters(stream, _LETTERS, string.ascii_lowercase) for _ in range(coded)]
        distinct = set(drawn)
        while len(distinct) < coded:
            distinct.add(_letters(stream, _LETTERS, string.ascii_lowercase))
        words = sorted(distinct)
        Random(seed).shuffle(words)
        words[0] = "..."
        return words

    def draft(words: list[str], total: int) -> Draft:
        """Return a prompt with about ``total`` words."""
        times = (total * (np.arange(1, len(words) + 1) ** -2.0) / _ZETA_2).astype(int)
        if times[_NAMED] == times[_NAMED + 1]:
            raise TooShortError(0)
        text = [word for word, number in zip(words, times, strict=True) for _ in range(number)]
        Random(seed).shuffle(text)
        prompt = FREQUENT_WORDS.prompt.format(context=" ".join(text))
        return Draft(prompt, tuple(words[1 : 1 + _NAMED]))

    words, most = vocabulary(), limit // _LETTERS
    while count(draft(words, most).prompt) < limit:  # grow until the text is long enough
        most += step
    for _ in range(samples):
        words, total = vocabulary(), most - step
        while (tokens := count((made := draft(words, total)).prompt)) > limit:
            total -= step
        yield Draft(made.prompt, made.outputs, tokens + FREQUENT_WORDS.tokens)
