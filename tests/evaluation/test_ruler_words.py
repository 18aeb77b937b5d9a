"""Lists of words with common ones, and coded words by frequency."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from evaluation.small_tokenizer import write_small_tokenizer

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.tokenizers import open_tokenizer
from mtrain_cli.evaluation.fitting import Stream, TooShortError
from mtrain_cli.evaluation.ruler_words import CommonWordPrompts, FrequentWords
from mtrain_cli.evaluation.token_counts import TokenCounter

_LISTED = re.compile(r"\d+\. (.+?)(?= \d+\. |\n|$)")


@pytest.mark.parametrize(("length", "often", "seldom"), [(4095, 6, 1), (4096, 30, 3)])
def test_the_common_words_are_the_answer(length: int, often: int, seldom: int) -> None:
    draft = CommonWordPrompts(length, 42).draw(Stream(1), 100, 0)
    text = draft.prompt.split("\n")[4]
    counts = Counter(_LISTED.findall(text))
    assert Counter(counts.values()) == {often: 10, seldom: 90}
    assert {word for word, count in counts.items() if count == often} == set(draft.outputs)


def test_the_example_is_solved() -> None:
    _, context, answer, *_ = CommonWordPrompts(4096, 42).draw(Stream(1), 50, 0).prompt.split("\n")
    common = Counter(_LISTED.findall(context)).most_common(10)
    solved = _LISTED.findall(answer.partition("are:")[2])
    assert sorted(word for word, _ in common) == sorted(solved)


def test_long_lists_need_more_words() -> None:
    with pytest.raises(ConfigError, match=r"lists of 8,167 words .* there are only 8,166"):
        CommonWordPrompts(4096, 42).draw(Stream(1), 8167, 0)
    more = [f"more{number}" for number in range(9000)]
    prompts = CommonWordPrompts(4096, 42, more)
    assert all(word.startswith("more") for word in prompts.draw(Stream(1), 8167, 0).outputs)
    assert not any(word.startswith("more") for word in prompts.draw(Stream(1), 8166, 0).outputs)
    with pytest.raises(ConfigError, match="there are only 9,000"):
        prompts.draw(Stream(1), 9001, 0)
    with pytest.raises(ValueError, match="cannot hold 10 common ones"):
        prompts.draw(Stream(1), 9, 0)


def test_the_most_frequent_coded_words_are_the_answer(tmp_path: Path) -> None:
    counter = TokenCounter(open_tokenizer(str(write_small_tokenizer(tmp_path))))
    answers = set()
    for fitted in FrequentWords(2000, 42, counter).samples(Stream(1), 4):
        counts = Counter(fitted.draft.prompt.split("\n")[0].split()[21:])
        (dots, most), *ranked = counts.most_common(5)
        assert (dots, most > ranked[0][1]) == ("...", True)
        assert [word for word, _ in ranked[:3]] == list(fitted.draft.outputs)
        assert ranked[2][1] > ranked[3][1]
        assert fitted.length == counter.exact([fitted.draft.prompt])[0] + 50 <= 2050
        answers.add(fitted.draft.outputs)
    assert len(answers) == 4


def test_a_text_without_clear_ranks_is_refused(tmp_path: Path) -> None:
    counter = TokenCounter(open_tokenizer(str(write_small_tokenizer(tmp_path))))
    for limit in (0, 100, 249, 250):
        with pytest.raises(TooShortError):
            list(FrequentWords(limit, 42, counter).samples(Stream(1), 2))
