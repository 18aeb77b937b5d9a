"""Count tokens by adding up those of words."""

from __future__ import annotations

from pathlib import Path

import pytest
from evaluation.small_tokenizer import write_small_tokenizer

from mtrain_cli.data.tokenizers import ByteTokenizer, open_tokenizer
from mtrain_cli.evaluation import token_counts
from mtrain_cli.evaluation.token_counts import TokenCounter

_TEXT = (
    "Memorize the chain.\n\nVAR ABC = 12345 \nVAR DEF = VAR ABC \nThe grass is green. Here we go.\n"
    "One of the special magic numbers for calm-otter is: 1234567.\n1. red 2. blue 3. magic é"
)


@pytest.mark.parametrize("cut", ["bytes", "lines"])
def test_the_estimate_equals_the_count_of_a_tokenizer_that_never_joins_words(
    tmp_path: Path, cut: str
) -> None:
    counter = TokenCounter(open_tokenizer(str(write_small_tokenizer(tmp_path, cut))))
    for text in (_TEXT, _TEXT[::-1], _TEXT * 3, ""):
        assert [counter.estimate(text)] == counter.exact([text])


def test_the_estimate_is_near_the_count_of_a_tokenizer_that_joins_words(tmp_path: Path) -> None:
    counter = TokenCounter(open_tokenizer(str(write_small_tokenizer(tmp_path, "none"))))
    (tokens,) = counter.exact([_TEXT])
    assert tokens < counter.estimate(_TEXT) < 1.1 * tokens


def test_bytes_are_counted() -> None:
    counter = TokenCounter(ByteTokenizer())
    assert counter.exact([_TEXT, "é"]) == [len(_TEXT.encode()), 2]
    assert counter.estimate(_TEXT) == len(_TEXT.encode())


def test_known_words_are_forgotten_before_they_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_counts, "_MOST_KEPT", 10)
    counter = TokenCounter(ByteTokenizer())
    for number in range(50):
        text = f"{number} words {number + 7}"
        assert counter.estimate(text) == len(text)
        assert len(counter._known) <= 10 + 3
