"""Texts packed into one sequence get the scores that each gets alone."""

from __future__ import annotations

import time
from random import Random

import pytest
import torch
from inference.small_models import engine, tokens, write_hf, write_run

from mtrain_cli.composition.compose import compose
from mtrain_cli.evaluation.continuations import pack_size, packs, score_together


def test_packs_hold_each_text_once_and_no_more_than_fits():
    lengths = [5, 9, 2, 4, 30, 1]
    found = packs(lengths, 10)
    assert sorted(n for pack in found for n in pack) == list(range(6))
    assert found == [[4], [1, 5], [0, 3], [2]]
    assert packs(lengths, 0) == [[4], [1], [0], [3], [2], [5]]


def test_packs_are_those_of_first_fit_and_take_no_quadratic_time():
    random = Random(1)
    for most, count in ((10, 1), (10, 40), (64, 300), (0, 5)):
        lengths = [random.randrange(1, 70) for _ in range(count)]
        room, expected = [], []
        for number in sorted(range(count), key=lambda n: (-lengths[n], n)):
            fitting = [n for n, free in enumerate(room) if free >= lengths[number]]
            if not fitting:
                fitting = [len(room)]
                room.append(most)
                expected.append([])
            room[fitting[0]] -= lengths[number]
            expected[fitting[0]].append(number)
        assert packs(lengths, most) == expected
    assert packs([], 10) == []
    started = time.process_time()
    assert len(packs([6] * 30_000, 10)) == 30_000  # first fit alone compares 450 million times
    assert time.process_time() - started < 5


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_packed_texts_get_the_scores_of_single_ones(tmp_path, family):
    model = engine(write_hf(tmp_path, family, vocab_size=97))
    texts = [tokens(n, n) for n in (3, 40, 17, 130)]
    pairs = [(text[: n + 1], text[n + 1 :]) for n, text in enumerate(texts)]
    # The last continuation is what greedy decoding gives.
    losses, _ = model.token_scores([*texts[0], 0])
    best = next(n for n in range(97) if model.token_scores([*texts[0], n])[1][-1])
    pairs.append((texts[0], [best]))
    found = score_together(model, pairs)
    for (context, rest), (logprob, greedy) in zip(pairs, found, strict=True):
        losses, hits = model.token_scores([*context, *rest])
        assert logprob == pytest.approx(-float(losses[len(context) - 1 :].sum()), abs=1e-4)
        assert greedy == bool(hits[len(context) - 1 :].all())
    assert found[-1][1]
    assert not found[1][1]


def test_texts_under_a_sparse_pattern_and_other_masks_stay_alone(tmp_path):
    assert pack_size(compose([]), "cpu") == 2048
    assert pack_size(compose(["mask=sliding_window", "mask.window=64"]), "cuda") == 16384
    for words in (
        ["sparsity=vertical_slash"],
        ["mask=chunked"],
        ["mask=sliding_window", "mask.window=64", "mask.global_tokens=4"],
    ):
        assert pack_size(compose(words), "cuda") == 0
    write_run(tmp_path / "run", "mask=sliding_window", "mask.window=16")
    model = engine(tmp_path / "run")
    first, second = tokens(40, 1), tokens(50, 2)
    together = score_together(model, [(first[:30], first[30:]), (second[:9], second[9:])])
    (alone,) = score_together(model, [(second[:9], second[9:])])
    assert torch.tensor(together[1][0]).item() == pytest.approx(alone[0], abs=1e-4)
