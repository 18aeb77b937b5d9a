"""The words of RULER."""

from __future__ import annotations

import sys
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrain_cli.config.schema import ConfigError
from mtrain_extras.ruler import word_lists
from mtrain_extras.ruler.word_lists import HyphenPairs, adjective_nouns, all_words, identity

_WORDS = st.lists(st.text(alphabet="ab-", min_size=1, max_size=4), min_size=1, max_size=8)


@given(first=_WORDS, second=_WORDS)
def test_pairs_are_the_sorted_list_of_distinct_pairs(first: list[str], second: list[str]) -> None:
    expected = sorted({f"{a}-{b}" for a in first for b in second})
    assert list(HyphenPairs(first, second)) == expected
    assert len(HyphenPairs(first, second)) == len(expected)


def test_pairs_have_ends() -> None:
    pairs = HyphenPairs(["a"], ["b", "c"])
    for index in (2, -1):
        with pytest.raises(IndexError):
            pairs[index]
    assert len(HyphenPairs([], ["b"])) == 0


def test_the_lists_are_those_of_wonderwords_3_0_1() -> None:
    assert identity() == "cbb917d42c3e3c8003157593bc43921f8a6375dc20f6f4378528d47c6cb67206"
    assert len(all_words(42)) == 8166
    assert sorted(all_words(42)) == sorted(set(all_words(1)))
    assert all_words(42) != all_words(1)
    pairs = adjective_nouns()
    assert len(pairs) == 6_171_620
    sampled = [pairs[i] for i in sorted(Random(0).sample(range(len(pairs)), 1000))]
    assert sampled == sorted(set(sampled))


def test_missing_words_name_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    word_lists._lists.cache_clear()
    with pytest.raises(ConfigError, match=r"needs the wonderwords package: pip install .*\[eval\]"):
        identity()
