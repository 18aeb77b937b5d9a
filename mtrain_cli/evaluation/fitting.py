"""Fill a prompt with as much text as fits a number of tokens, as RULER's generators do.

RULER searches for the largest size by bisection, and draws random numbers for every try. A sample
that comes out too long is drawn again with a smaller size. The next sample continues the random
numbers where the last try ended, so each sample depends on the exact lengths of all tries before.
Counting them one by one uses one core. Here an estimate of the length decides first, and exact
counts of many tries at once, on all cores, confirm the decisions. After a wrong decision, the
samples from there on are drawn again. The result is that of exact counting in any case.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

import numpy as np

from mtrain_cli.evaluation.token_counts import TokenCounter

T = TypeVar("T")
# RULER repeats the smallest size until it fits, if need be for ever.
_MOST_TRIES = 64
# Characters to count exactly at once. A tokenizer holds about 50 bytes a character meanwhile.
BATCH = 1 << 23
MOST_TEXTS = 64


class Stream:
    """The random numbers of one task: RULER seeds `random` and `numpy.random` once.

    Both generators are objects of their own, so those of the process stay as they are.
    """

    def __init__(self, seed: int) -> None:
        self.python = Random(seed)
        self.numpy = np.random.RandomState(seed)

    def state(self) -> tuple[Any, Any]:
        """Return the state of both generators."""
        return self.python.getstate(), self.numpy.get_state()

    def restore(self, state: tuple[Any, Any]) -> None:
        """Continue from a state."""
        self.python.setstate(state[0])
        self.numpy.set_state(state[1])


@dataclass(frozen=True)
class Draft:
    """A prompt that may be too long, and its answers."""

    prompt: str
    outputs: tuple[str, ...]


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

        Raises:
            ValueError: the size is too small for the task.
        """


@dataclass(frozen=True)
class Fitted:
    """A prompt that fits. length: its tokens with those reserved for the answer."""

    draft: Draft
    length: int


@dataclass(frozen=True)
class _Try:
    """A try for a sample.

    draft: the prompt; None after the last try, if none fits.
    length: its tokens with those reserved for the answer; without a prompt, the fewest of all.
    is_exact: whether the length is counted, not estimated.
    """

    index: int
    draft: Draft | None
    length: int
    fits: bool = False
    is_exact: bool = False


class TooShortError(Exception):
    """No prompt fits. shortest: tokens of the shortest that was drawn; 0 if none can be drawn."""

    def __init__(self, shortest: int) -> None:
        super().__init__(shortest)
        self.shortest = shortest


def batched(
    items: Iterable[T],
    characters: Callable[[T], int],
    most_texts: Callable[[], int] = lambda: MOST_TEXTS,
) -> Iterator[Sequence[T]]:
    """Group items so that a group has about ``BATCH`` characters, and few items."""
    batch: list[T] = []
    total = 0
    for item in items:
        batch.append(item)
        total += characters(item)
        if total >= BATCH or len(batch) >= most_texts():
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def find_size(prompts: Prompts, stream: Stream, limit: int, counter: TokenCounter) -> int:
    """Return the largest size whose prompt has at most ``limit`` tokens, by bisection.

    If no size fits, return the smallest size.
    """
    (tokens,) = counter.exact([prompts.probe(stream, prompts.first)])
    low, best = prompts.step, prompts.step
    high = max(prompts.most(tokens, limit), 2 * prompts.step)
    while low <= high:
        size = (low + high) // 2
        (tokens,) = counter.exact([prompts.probe(stream, size)])
        if tokens + prompts.reserved_in_search <= limit:
            best, low = size, size + 1
        else:
            high = size - 1
    return best


class Fitting:
    """Samples of a task that fit a number of tokens.

    prompts: the prompts of the task.
    stream: random numbers, after the search.
    size: size of the first try for each sample.
    limit: most tokens of a sample, with those reserved for the answer.
    """

    def __init__(
        self, prompts: Prompts, stream: Stream, size: int, limit: int, counter: TokenCounter
    ) -> None:
        self._prompts, self._stream, self._size = prompts, stream, size
        self._limit, self._counter = limit, counter
        self._starts: dict[int, tuple[Any, Any]] = {}  # state of the stream before each sample
        self._is_exact = False  # whether to count every try of the next sample
        self._bias = 0  # tokens to add to estimates
        self._most_texts = MOST_TEXTS

    def samples(self, count: int) -> Iterator[Fitted]:
        """Yield ``count`` samples.

        Raises:
            TooShortError: a sample does not fit, whatever its size.
        """
        index = 0
        while index < count:
            for fitted in self._confirmed(index, count):
                if fitted is None:
                    self._stream.restore(self._starts[index])
                    self._is_exact = True
                    self._most_texts = max(1, self._most_texts // 4)
                    break
                yield fitted
                self._is_exact = False
                self._starts.pop(index)
                index += 1

    def _confirmed(self, first: int, count: int) -> Iterator[Fitted | None]:
        """Yield samples from number ``first`` on; None and stop after a wrong decision."""
        tries = self._tries(first, count)
        # After a try without a prompt, nothing is left to try.
        for batch in batched(
            tries,
            lambda one: len(one.draft.prompt) if one.draft else BATCH,
            lambda: self._most_texts,
        ):
            drafts = [one.draft for one in batch if one.draft is not None]
            lengths = self._counter.exact([draft.prompt for draft in drafts])
            bias = self._bias
            for one, draft, tokens in zip(batch, drafts, lengths, strict=False):
                length = tokens + self._prompts.reserved
                if not one.is_exact:
                    self._bias = bias + length - one.length
                if (length <= self._limit) != one.fits:
                    yield None
                    return
                if one.fits:
                    yield Fitted(draft, length)
            if batch[-1].draft is None:
                raise TooShortError(batch[-1].length)
            self._most_texts = min(MOST_TEXTS, 2 * self._most_texts)

    def _tries(self, first: int, count: int) -> Iterator[_Try]:
        """Yield the tries for the samples from number ``first`` on, by estimated lengths."""
        for index in range(first, count):
            self._starts[index] = self._stream.state()
            yield from self._tries_of(index, self._is_exact and index == first)

    def _tries_of(self, index: int, is_exact: bool) -> Iterator[_Try]:
        prompts, size, shortest = self._prompts, self._size, 0
        for _ in range(self._size // prompts.step + _MOST_TRIES):
            draft = self._draw(size, index)
            if draft is not None:
                length = self._length(draft.prompt, is_exact)
                shortest = min(shortest or length, length)
                yield _Try(index, draft, length, length <= self._limit, is_exact)
                if length <= self._limit:
                    return
            if size > prompts.step:
                size -= prompts.step
        yield _Try(index, None, shortest)

    def _draw(self, size: int, index: int) -> Draft | None:
        try:
            return self._prompts.draw(self._stream, size, index)
        except ValueError:
            return None

    def _length(self, prompt: str, is_exact: bool) -> int:
        if is_exact:
            return self._counter.exact([prompt])[0] + self._prompts.reserved
        return self._counter.estimate(prompt) + self._bias + self._prompts.reserved
