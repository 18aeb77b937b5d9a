"""Scores agree with generation, alone and packed, on any number of workers."""

from __future__ import annotations

from pathlib import Path

import gloo
import numpy as np
import pytest
from inference.small_models import engine, tokens, write_hf, write_run

from mtrain_cli.composition.compose import compose
from mtrain_cli.inference.sampling import Sampling
from mtrain_cli.inference.scorer import packs

PLACES = [1, 7, 127, 128, 129, 299]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_hf(tmp_path_factory.mktemp("scorer") / "hf")


def scored(rank: int, world: int, folder: str) -> list[np.ndarray]:
    found = engine(Path(folder), environment=gloo.environment(rank, world))
    both = [found.token_scores(tokens(300)), found.token_scores(tokens(300), places=PLACES)]
    return [part.numpy() for pair in both for part in pair]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_chosen_tokens_score_as_among_all(folder, world):
    expected, *_ = scored(0, 1, str(folder))
    for losses, hits, chosen, chosen_hits in gloo.run(world, scored, str(folder)):
        at = np.array(PLACES) - 1
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        np.testing.assert_allclose(chosen, losses[at], rtol=1e-6)
        assert (chosen_hits == hits[at]).all()


def test_an_answer_is_right_exactly_if_greedy_decoding_gives_it(folder):
    found, prompt = engine(folder), tokens(200)
    (completion,) = found.generate([prompt], 5, Sampling())
    greedy = prompt + completion.ids
    _, hits = found.token_scores(greedy, places=range(200, 205))
    assert hits.tolist() == [True] * 5
    greedy[203] = (greedy[203] + 1) % 97
    _, hits = found.token_scores(greedy, places=range(200, 205))
    assert hits.tolist()[:4] == [True, True, True, False]


def test_packs_hold_each_text_once_and_no_more_than_fits():
    lengths = [1500, 700, 548, 600, 3000, 1]
    assert packs(compose([]), "cpu", lengths) == [[4], [0, 2], [1, 3, 5]]
    assert packs(compose([]), "cpu", []) == []
    alone = [[4], [0], [1], [3], [2], [5]]
    for words in (
        ["sparsity=vertical_slash"],
        ["mask=chunked"],
        ["mask=sliding_window", "mask.window=64", "mask.global_tokens=4"],
    ):
        assert packs(compose(words), "cuda", lengths) == alone
    windowed = compose(["mask=sliding_window", "mask.window=64"])
    assert packs(windowed, "cuda", lengths) == [[4, 0, 1, 3, 2, 5]]


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_packed_texts_get_the_scores_of_single_ones(tmp_path, family):
    model = engine(write_hf(tmp_path, family, vocab_size=97))
    texts = [tokens(n, n) for n in (3, 40, 17, 130)]
    pairs = [(text[: n + 1], text[n + 1 :]) for n, text in enumerate(texts)]
    # The last continuation is what greedy decoding gives.
    best = next(n for n in range(97) if model.token_scores([*texts[0], n])[1][-1])
    pairs.append((texts[0], [best]))
    found = model.score_together(pairs)
    for (context, rest), (logprob, greedy) in zip(pairs, found, strict=True):
        losses, hits = model.token_scores([*context, *rest])
        assert logprob == pytest.approx(-float(losses[len(context) - 1 :].sum()), abs=1e-4)
        assert greedy == bool(hits[len(context) - 1 :].all())
    assert found[-1][1]
    assert not found[1][1]


def test_texts_under_a_window_do_not_see_each_other(tmp_path):
    write_run(tmp_path / "run", "mask=sliding_window", "mask.window=16")
    model = engine(tmp_path / "run")
    first, second = tokens(40, 1), tokens(50, 2)
    together = model.score_together([(first[:30], first[30:]), (second[:9], second[9:])])
    (alone,) = model.score_together([(second[:9], second[9:])])
    assert together[1][0] == pytest.approx(alone[0], abs=1e-4)
