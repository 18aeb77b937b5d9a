"""Needles at given depths, with positions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from data.framed_tokenizers import write_framed
from evaluation.small_tokenizer import write_small_tokenizer

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.tokenizers import ByteTokenizer, Tokenizer, open_tokenizer
from mtrain_cli.evaluation.retrieval import DepthGrid, DepthSample

_TEXT = "".join(f"Sentence {number} costs 3.5 or more. Line {number}?\n" for number in range(300))
_DEPTHS = (0.0, 0.25, 0.5, 1.0)


@pytest.fixture(params=["byte", "bpe", "framed"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param == "byte":
        return ByteTokenizer()
    if request.param == "framed":
        return open_tokenizer(str(write_framed(tmp_path)))
    return open_tokenizer(str(write_small_tokenizer(tmp_path)))


def _check(sample: DepthSample, length: int, tokenizer: Tokenizer) -> None:
    """Check each probe by reading the text of the sample."""
    assert (sample.ids.shape, sample.ids.dtype) == ((length,), np.int64)
    text = tokenizer.decode(sample.ids)
    assert text.count("<begin>") == text.startswith("<begin>") == len(tokenizer.begin.ids)
    for probe in sample.probes:
        needle = tokenizer.decode(sample.ids[slice(*probe.needle)])
        name = needle.split(" of ")[1].split(" is ")[0]
        assert needle == f"\nThe magic number of {name} is {probe.text}.\n"
        assert tokenizer.decode(sample.ids[slice(*probe.answer)]) == f" {probe.text}"
        asked = tokenizer.decode(sample.ids[: probe.answer[0]])
        assert asked.endswith(f"What is the magic number of {name}? The magic number of {name} is")
        assert text.count(probe.text) == 2


def test_each_depth_has_its_needle(tokenizer: Tokenizer) -> None:
    length = 2000
    grid = DepthGrid(_TEXT, tokenizer)
    samples = [sample for depth in _DEPTHS for sample in grid.samples(length, (depth,), 3)]
    for sample in samples:
        _check(sample, length, tokenizer)
        (probe,) = sample.probes
        room = length - 140 if tokenizer.name == "bytes" else length - 60
        assert abs(probe.needle[0] - probe.depth * room) < 80
        assert probe.answer[1] == length
    texts = {probe.text for sample in samples for probe in sample.probes}
    assert len(texts) == len(samples)


def test_one_sample_can_hold_all_depths(tokenizer: Tokenizer) -> None:
    length, last = 3000, set()
    for sample in DepthGrid(_TEXT, tokenizer).samples(length, _DEPTHS, 12):
        _check(sample, length, tokenizer)
        ordered = sorted(sample.probes, key=lambda probe: probe.depth)
        assert [probe.needle for probe in ordered] == sorted(probe.needle for probe in ordered)
        assert sorted(probe.depth for probe in sample.probes) == list(_DEPTHS)
        last.add(sample.probes[-1].depth)
    assert len(last) > 1


def test_needles_stand_behind_a_sentence() -> None:
    for sample in DepthGrid(_TEXT, ByteTokenizer()).samples(4000, (0.3, 0.6, 0.9), 8):
        for probe in sample.probes:
            before = bytes(sample.ids[: probe.needle[0]].tolist()).decode()
            assert before.endswith((". ", "?\n", ".\n"))


def test_a_short_text_repeats_and_the_rest_stays_in_order() -> None:
    text = "Alpha one. Beta two.\nGamma three. "
    for sample in DepthGrid(text, ByteTokenizer()).samples(800, (0.5,), 5):
        (probe,) = sample.probes
        whole = bytes(sample.ids.tolist()).decode()
        hay = whole[: probe.needle[0]] + whole[probe.needle[1] :].split("\nWhat is")[0]
        assert hay in text * 40


def test_samples_depend_on_the_seed_only() -> None:
    def ids(seed: int) -> list[int]:
        grid = DepthGrid(_TEXT, ByteTokenizer())
        return [int(i) for s in grid.samples(900, (0.5,), 2, seed=seed) for i in s.ids]

    assert ids(1) == ids(1) != ids(2)
    grid = DepthGrid(_TEXT, ByteTokenizer())
    first, second = grid.samples(900, (0.5,), 2)
    assert first.ids.tolist() != second.ids.tolist()


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
        assert len(next(grid.samples(length, (0.2, 0.8))).ids) == length
    for depth in (-0.1, 1.5):
        with pytest.raises(ConfigError, match="must be a share from 0 to 1"):
            next(grid.samples(1000, (0.5, depth)))
    with pytest.raises(ConfigError, match="holds no text"):
        DepthGrid(" \n", ByteTokenizer())


def test_a_haystack_that_brings_its_begin_token_gets_no_second_one(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(write_framed(tmp_path)))
    grid = DepthGrid("<begin>One. " * 3, tokenizer)
    (sample,) = DepthGrid("<begin>" + "One " * 200, tokenizer).samples(200, [0.5])
    assert sample.ids.tolist().count(tokenizer.begin.ids[0]) == 1
    assert len(next(grid.samples(200, [0.5])).ids) == 200
