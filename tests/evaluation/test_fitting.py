"""Fill prompts up to a length: the result of estimates, confirmed together, is that of counting."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain_cli.evaluation import fitting
from mtrain_cli.evaluation.fitting import Draft, Fitting, Stream, TooShortError, batched, find_size

_RESERVED = 4


class _Prompts:
    """Prompts whose number of letters is random; a try draws as many numbers as its size."""

    step, first, reserved, reserved_in_search = 3, 5, _RESERVED, _RESERVED

    def most(self, tokens: int, limit: int) -> int:
        return int(limit / (tokens / self.first) * 3)

    def probe(self, stream: Stream, size: int) -> str:
        return self.draw(stream, size, 0).prompt

    def draw(self, stream: Stream, size: int, index: int) -> Draft:
        letters = sum(stream.python.randint(1, 5) for _ in range(size))
        if stream.numpy.randint(0, 12) == 0:
            raise ValueError("cannot be drawn")
        return Draft("x" * letters, (str(index),))


class _Counter:
    """Counts letters. Estimates are wrong by up to ``error`` for some texts."""

    name = "letters"

    def __init__(self, error: int) -> None:
        self.error = error
        self.calls = 0

    def exact(self, texts: Sequence[str]) -> list[int]:
        self.calls += 1
        return [len(text) for text in texts]

    def estimate(self, text: str) -> int:
        return len(text) + (len(text) * 7919 % (2 * self.error + 1)) - self.error


def _one_by_one(stream: Stream, size: int, limit: int, count: int) -> list[tuple[Draft, int]]:
    """The loop of the original: every try is counted before the next is drawn."""
    found, prompts = [], _Prompts()
    for index in range(count):
        used = size
        for _ in range(1000):
            try:
                draft = prompts.draw(stream, used, index)
                if len(draft.prompt) + _RESERVED <= limit:
                    found.append((draft, len(draft.prompt) + _RESERVED))
                    break
            except ValueError:
                pass
            if used > prompts.step:
                used -= prompts.step
    return found


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 10**6),
    limit=st.integers(40, 200),
    count=st.integers(1, 90),
    error=st.integers(0, 9),
    grow=st.integers(-3, 3),
)
def test_any_estimate_gives_the_samples_of_the_loop_that_counts(
    seed: int, limit: int, count: int, error: int, grow: int
) -> None:
    size = max(3, limit // 3 + grow)
    expected = _one_by_one(Stream(seed), size, limit, count)
    counter = _Counter(error)
    fitted = Fitting(_Prompts(), Stream(seed), size, limit, counter).samples(count)  # type: ignore[arg-type]
    assert [(one.draft, one.length) for one in fitted] == expected
    assert len(expected) == count


def test_right_estimates_are_confirmed_many_at_once() -> None:
    counter = _Counter(0)
    list(Fitting(_Prompts(), Stream(1), 30, 100, counter).samples(200))  # type: ignore[arg-type]
    assert counter.calls < 20


@pytest.mark.parametrize("error", [0, 9])
def test_a_length_that_no_prompt_fits_ends(error: int) -> None:
    samples = Fitting(_Prompts(), Stream(1), 9, _RESERVED + 1, _Counter(error)).samples(5)  # type: ignore[arg-type]
    with pytest.raises(TooShortError) as caught:
        next(samples)
    assert caught.value.shortest > _RESERVED + 1


def test_the_search_finds_the_largest_size_of_regular_prompts() -> None:
    class Regular(_Prompts):
        def probe(self, stream: Stream, size: int) -> str:  # noqa: ARG002
            return "x" * (10 + 2 * size)

    for limit in (30, 31, 32, 33, 200):
        size = find_size(Regular(), Stream(1), limit, _Counter(0))  # type: ignore[arg-type]
        assert 10 + 2 * size + _RESERVED <= limit < 10 + 2 * (size + 1) + _RESERVED
    assert find_size(Regular(), Stream(1), 5, _Counter(0)) == Regular.step  # type: ignore[arg-type]


def test_a_stream_is_that_of_the_global_generators_and_leaves_them_alone() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()
    stream = Stream(42)
    state = stream.state()
    first = stream.python.random(), stream.numpy.randint(10**6)
    stream.restore(state)
    assert (stream.python.random(), stream.numpy.randint(10**6)) == first
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    try:
        random.seed(42)
        np.random.seed(42)
        assert (random.random(), np.random.randint(10**6)) == first
    finally:
        random.setstate(before[0])


def test_batches_hold_a_limited_number_of_characters_and_items(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fitting, "BATCH", 10)
    monkeypatch.setattr(fitting, "MOST_TEXTS", 3)
    assert list(batched([4, 4, 4, 20, 1, 1, 1, 1], int)) == [[4, 4, 4], [20], [1, 1, 1], [1]]
