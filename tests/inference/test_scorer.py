"""Scores agree with generation, on any number of workers."""

from __future__ import annotations

from pathlib import Path

import gloo
import numpy as np
import pytest
from inference.small_models import engine, tokens, write_hf

from mtrain_cli.inference.sampling import Sampling

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
