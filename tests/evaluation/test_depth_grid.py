"""Needles at given depths, with positions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from data.framed_tokenizers import write_framed
from evaluation.small_tokenizer import write_small_tokenizer

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.tokenizers import ByteTokenizer, Tokenizer, open_tokenizer
from mtrain_cli.evaluation.retrieval import DepthGrid

_TEXT = "".join(f"Sentence {number} costs 3.5 or more. Line {number}?\n" for number in range(300))
_DEPTHS = (0.0, 0.25, 0.5, 1.0)


@pytest.fixture(params=["byte", "bpe", "framed"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param == "byte":
        return ByteTokenizer()
    if request.param == "framed":
        return open_tokenizer(str(write_framed(tmp_path)))
    return open_tokenizer(str(write_small_tokenizer(tmp_path)))


def _check(sample: dict, length: int, tokenizer: Tokenizer) -> list[str]:
    """Check each needle and answer by reading the text of the sample. Return the answers."""
    ids = np.array(sample["ids"])
    assert len(ids) == length
    text, answers = tokenizer.decode(ids), []
    assert text.count("<begin>") == text.startswith("<begin>") == len(tokenizer.begin.ids)
    for place, asked in zip(sample["needles"], sample["answers"], strict=True):
        needle = tokenizer.decode(ids[slice(*place)])
        name = needle.split(" of ")[1].split(" is ")[0]
        answers.append(tokenizer.decode(ids[slice(*asked)]).strip())
        assert needle == f"\nThe magic number of {name} is {answers[-1]}.\n"
        before = tokenizer.decode(ids[: asked[0]])
        assert before.endswith(f"What is the magic number of {name}? The magic number of {name} is")
        assert text.count(answers[-1]) == 2
    return answers


def test_each_depth_has_its_needle(tokenizer: Tokenizer) -> None:
    length, answers = 2000, set()
    grid = DepthGrid(_TEXT, tokenizer)
    for depth in _DEPTHS:
        for sample in grid.samples(length, (depth,), 3):
            answers |= {*_check(sample, length, tokenizer)}
            room = length - 140 if tokenizer.name == "bytes" else length - 60
            assert abs(sample["needles"][0][0] - depth * room) < 80
            assert sample["answers"][0][1] == length
    assert len(answers) == 3 * len(_DEPTHS)


def test_one_sample_can_hold_all_depths(tokenizer: Tokenizer) -> None:
    length, last = 3000, set()
    for sample in DepthGrid(_TEXT, tokenizer).samples(length, _DEPTHS, 12):
        _check(sample, length, tokenizer)
        pairs = sorted(zip(sample["depths"], sample["needles"], strict=True))
        depths, places = zip(*pairs, strict=True)
        assert depths == _DEPTHS
        assert list(places) == sorted(places)
        last.add(sample["depths"][-1])
    assert len(last) > 1


def test_needles_stand_behind_a_sentence() -> None:
    for sample in DepthGrid(_TEXT, ByteTokenizer()).samples(4000, (0.3, 0.6, 0.9), 8):
        for first, _ in sample["needles"]:
            assert bytes(sample["ids"][:first]).decode().endswith((". ", "?\n", ".\n"))


def test_a_short_text_repeats_and_the_rest_stays_in_order() -> None:
    text = "Alpha one. Beta two.\nGamma three. "
    for sample in DepthGrid(text, ByteTokenizer()).samples(800, (0.5,), 5):
        ((first, end),) = sample["needles"]
        whole = bytes(sample["ids"]).decode()
        assert whole[:first] + whole[end:].split("\nWhat is")[0] in text * 40


def test_samples_depend_on_the_seed_only() -> None:
    def ids(seed: int) -> list[list[int]]:
        grid = DepthGrid(_TEXT, ByteTokenizer())
        return [sample["ids"] for sample in grid.samples(900, (0.5,), 2, seed=seed)]

    assert ids(1) == ids(1) != ids(2)
    first, second = ids(1)
    assert first != second


def test_mistakes_are_named() -> None:
    grid = DepthGrid(_TEXT, ByteTokenizer())
    with pytest.raises(
        ConfigError, match=r"^--length 100: too few tokens for 1 needle and .* or more$"
    ):
        next(grid.samples(100, (0.5,)))
    with pytest.raises(ConfigError) as refused:
        next(grid.samples(150, (0.2, 0.8)))
    least = int(refused.value.problems[0].split("give ")[1].split()[0].replace(",", ""))
    for length in range(least, least + 20):  # each length draws other names
        assert len(next(grid.samples(length, (0.2, 0.8)))["ids"]) == length
    for depth in (-0.1, 1.5):
        with pytest.raises(ConfigError, match="must be a share from 0 to 1"):
            next(grid.samples(1000, (0.5, depth)))
    with pytest.raises(ConfigError, match="holds no text"):
        DepthGrid(" \n", ByteTokenizer())


def test_a_haystack_that_brings_its_begin_token_gets_no_second_one(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(write_framed(tmp_path)))
    grid = DepthGrid("<begin>One. " * 3, tokenizer)
    (sample,) = DepthGrid("<begin>" + "One " * 200, tokenizer).samples(200, [0.5])
    assert sample["ids"].count(tokenizer.begin.ids[0]) == 1
    assert len(next(grid.samples(200, [0.5]))["ids"]) == 200
