"""Samples follow the distribution of transformers, and depend only on seed, prompt and token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.inference.sampling import Sampling

LOGITS = torch.randn(3, 60, generator=torch.Generator().manual_seed(0)) * 3


def test_temperature_0_takes_the_largest_logit():
    for uniform in (0.0, 0.5, 0.999):
        chosen = Sampling().choose(LOGITS, torch.full((3,), uniform, dtype=torch.float64))
        assert torch.equal(chosen, LOGITS.argmax(-1))


@pytest.mark.parametrize("top_k", [0, 1, 7, 60, 99])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-9])
@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_probabilities_equal_transformers(temperature, top_p, top_k):
    transformers = pytest.importorskip("transformers")
    from transformers.generation import logits_process as warpers

    del transformers
    expected = warpers.TemperatureLogitsWarper(temperature)(None, LOGITS.double())
    if top_k:
        expected = warpers.TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = warpers.TopPLogitsWarper(top_p)(None, expected)
    found = Sampling(temperature, top_p, top_k).probabilities(LOGITS)
    found = found / found.sum(-1, keepdim=True)
    torch.testing.assert_close(found, expected.softmax(-1), atol=1e-9, rtol=0)


def test_frequencies_follow_the_probabilities():
    sampling = Sampling(temperature=1.0, top_p=0.9, top_k=20, seed=5)
    draws = 20_000
    uniforms = torch.from_numpy(sampling.uniforms(0, draws))
    chosen = sampling.choose(LOGITS[:1].expand(draws, -1), uniforms)
    found = torch.bincount(chosen, minlength=60).double() / draws
    expected = sampling.probabilities(LOGITS[:1])[0]
    expected = expected / expected.sum()
    assert not found[expected == 0].any()
    torch.testing.assert_close(found, expected, atol=0.015, rtol=0)


@pytest.mark.parametrize("uniform", [0.0, np.nextafter(1.0, 0.0)])
def test_the_extreme_random_numbers_give_possible_tokens(uniform):
    sampling = Sampling(temperature=1.0, top_k=2)
    chosen = sampling.choose(LOGITS, torch.full((3,), uniform, dtype=torch.float64))
    assert (sampling.probabilities(LOGITS).gather(1, chosen[:, None]) > 0).all()


def test_top_p_keeps_no_token_behind_those_that_reach_it():
    four = torch.zeros(1, 4)
    sampling = Sampling(temperature=1.0, top_p=0.5)
    assert sampling.probabilities(four).tolist() == [[0.25, 0.25, 0.0, 0.0]]
    # The kept probabilities add up to 0.5, so random numbers are shares of 0.5.
    assert sampling.choose(four, torch.tensor([0.4]).double()).tolist() == [0]
    assert sampling.choose(four, torch.tensor([0.6]).double()).tolist() == [1]


def test_a_tiny_temperature_takes_the_largest_logit():
    tiny = Sampling(temperature=5e-324)
    chosen = tiny.choose(LOGITS, torch.full((3,), 0.5).double())
    assert chosen.tolist() == LOGITS.argmax(-1).tolist()
    # Unlike temperature 0, it samples among equally likely tokens.
    assert tiny.choose(torch.zeros(1, 2), torch.tensor([0.9]).double()).tolist() == [1]


def test_random_numbers_depend_on_seed_and_prompt():
    sampling = Sampling(seed=7)
    assert np.array_equal(sampling.uniforms(2, 5), sampling.uniforms(2, 9)[:5])
    assert not np.array_equal(sampling.uniforms(2, 5), sampling.uniforms(3, 5))
    assert not np.array_equal(sampling.uniforms(2, 5), Sampling(seed=8).uniforms(2, 5))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"temperature": -0.1}, "--temperature -0.1: must be 0"),
        ({"temperature": float("inf")}, "--temperature inf: must be 0"),
        ({"temperature": float("nan")}, "--temperature nan: must be 0"),
        ({"top_p": 0.0}, "--top-p 0: must be above 0 and at most 1"),
        ({"top_p": 1.01}, "--top-p 1.01: must be above 0 and at most 1"),
        ({"top_k": -1}, "--top-k -1: must be 0"),
        ({"seed": -1}, "--seed -1: must be between 0 and 2^63 - 1"),
    ],
)
def test_values_out_of_range_are_refused(values, problem):
    with pytest.raises(ConfigError) as raised:
        Sampling(**values).require_valid()
    assert raised.value.problems[0].startswith(problem)
    assert len(raised.value.problems) == 1
    Sampling().require_valid()
