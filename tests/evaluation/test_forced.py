"""Forced scoring agrees with generation and with the losses, on any number of workers."""

from __future__ import annotations

from pathlib import Path

import gloo
import numpy as np
import pytest
from inference.small_models import engine, tokens, write_hf

from mtrain_cli.evaluation.forced import forced
from mtrain_cli.inference.sampling import Sampling


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_hf(tmp_path_factory.mktemp("forced") / "hf")


def test_an_answer_is_right_exactly_if_greedy_decoding_gives_it(folder):
    found, prompt = engine(folder), tokens(200)
    (completion,) = found.generate([prompt], 5, Sampling())
    greedy = prompt + completion.ids
    hits, _ = forced(found, greedy, range(200, 205))
    assert hits.tolist() == [True] * 5
    wrong = list(greedy)
    wrong[203] = (wrong[203] + 1) % 97
    hits, _ = forced(found, wrong, range(200, 205))
    assert hits.tolist()[:4] == [True, True, True, False]


def test_losses_are_those_of_all_tokens(folder):
    found, ids = engine(folder), tokens(300)
    places = [1, 7, 128, 299]
    _, losses = forced(found, ids, places)
    whole = found.token_losses(ids).numpy()
    np.testing.assert_allclose(losses, whole[np.array(places) - 1], rtol=1e-5)


def test_documents_do_not_see_each_other(folder):
    found, first, second = engine(folder), tokens(100), tokens(60, seed=1)
    documents = np.repeat([0, 1], [100, 60]).astype(np.int32)
    places = [101, 130, 159]
    _, packed = forced(found, first + second, places, documents)
    _, alone = forced(found, second, [place - 100 for place in places])
    np.testing.assert_allclose(packed, alone, rtol=2e-4)
    _, joined = forced(found, first + second, places)
    assert np.abs(joined - alone).max() > 1e-2


def on_workers(rank: int, world: int, folder: str) -> tuple[list[bool], np.ndarray]:
    found = engine(Path(folder), environment=gloo.environment(rank, world))
    hits, losses = forced(found, tokens(300), [1, 5, 127, 128, 129, 250, 299])
    return hits.tolist(), losses


@pytest.mark.parametrize("world", [2, 3, 4])
def test_workers_agree(folder, world):
    hits, losses = on_workers(0, 1, str(folder))
    for found, costs in gloo.run(world, on_workers, str(folder)):
        assert found == hits
        np.testing.assert_allclose(costs, losses, rtol=1e-5)
