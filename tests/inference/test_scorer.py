"""A scorer scores the chosen tokens of a text, on any number of workers."""

from __future__ import annotations

from pathlib import Path

import gloo
import numpy as np
import pytest
from inference.small_models import engine, tokens, write_hf

PLACES = [1, 7, 128, 299]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_hf(tmp_path_factory.mktemp("scorer") / "hf")


def scored(rank: int, world: int, folder: str) -> list[np.ndarray]:
    found = engine(Path(folder), environment=gloo.environment(rank, world))
    both = [found.token_scores(tokens(300)), found.token_scores(tokens(300), places=PLACES)]
    return [part.numpy() for pair in both for part in pair]


@pytest.mark.parametrize("world", [1, 2])
def test_chosen_tokens_score_as_among_all(folder, world):
    for losses, hits, chosen, chosen_hits in gloo.run(world, scored, str(folder)):
        at = np.array(PLACES) - 1
        np.testing.assert_allclose(chosen[at], losses[at], rtol=1e-6)
        assert (chosen_hits[at] == hits[at]).all()
        others = np.setdiff1d(np.arange(299), at)
        assert (chosen[others] == 0).all()
        assert not chosen_hits[others].any()
        assert (losses > 0).all()
