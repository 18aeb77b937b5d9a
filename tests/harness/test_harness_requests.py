"""Generation settings of tasks, and requests that are refused before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtrain_cli.attention.named_masks import SlidingWindow
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.inference.model_source import ModelSource
from mtrain_cli.inference.sampling import Sampling
from mtrain_extras.lm_eval.requests import Continuing, Plan, request_names


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, Continuing(256)),
        ({"until": "\n"}, Continuing(256, ("\n",))),
        ({"until": ["a", ""], "max_new_tokens": "7"}, Continuing(7, ("a",))),
        ({"max_gen_toks": 3, "max_tokens": 9, "until": None}, Continuing(3)),
        ({"do_sample": False, "temperature": 0.7}, Continuing(256)),
        ({"temperature": 0.5, "top_p": 0.9}, Continuing(256, (), Sampling(0.5, 0.9))),
        ({"do_sample": True, "top_k": 4}, Continuing(256, (), Sampling(1.0, 1.0, 4))),
    ],
)
def test_settings_mean_what_they_mean_to_lm_eval(settings, expected):
    assert Continuing.of(settings) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 5}, "generation_kwargs num_beams=5: mtrain does not support this setting"),
        ({"max_gen_toks": 0}, "max_gen_toks=0: must be at least 1"),
        ({"max_gen_toks": "many"}, "must be numbers"),
        ({"until": [1]}, "must be texts"),
        ({"temperature": -1, "do_sample": True}, "--temperature -1: must be 0"),
    ],
)
def test_wrong_settings_get_a_line(settings, message):
    with pytest.raises(ConfigError) as refused:
        Continuing.of(settings)
    assert message in str(refused.value)


def test_a_text_ends_before_its_first_ending():
    assert Continuing(9, ("\n", "b")).cut("aab\nb") == "aa"
    assert Continuing(9).cut("aab") == "aab"


def test_equal_greedy_requests_have_one_name_and_samples_have_their_own():
    first, second = request_names([[1], [1]], Continuing(3))
    assert first == second
    sampled = request_names([[1], [2], [1]], Continuing(3, (), Sampling(1.0)))
    assert len({first, *sampled}) == 4


def test_a_plan_has_the_limits_and_the_mask_of_the_model():
    config = compose(["mask=sliding_window", "mask.window=128"])
    source = ModelSource(Path(), False, config)
    plan = Plan.of(source, beyond=True)
    assert (plan.mask, plan.vocabulary) == (config.mask, config.model.vocab_size)
    assert (plan.positions, plan.beyond) == (source.max_position, True)


def test_a_plan_counts_requests_and_refuses_what_does_not_fit():
    plan = Plan(positions=10, vocabulary=20, task="sums")
    assert plan.scores([([1] * 8, [2] * 3)]) == [(0.0, False)]  # nothing follows the last token
    assert plan.texts([[1, 2]], Continuing(8)) == [""]
    assert plan.lengths == [11, 10]
    for refuse, message in (
        (lambda: plan.scores([([1] * 8, [2] * 4)]), "--tasks sums: a request has 12 tokens, more "),
        (lambda: plan.texts([[1] * 3], Continuing(8)), "3 tokens and 8 new ones, more than the 10"),
        (lambda: plan.scores([([], [1])]), "a context without tokens"),
        (lambda: plan.scores([([1], [])]), "a continuation without tokens"),
        (lambda: plan.texts([[]], Continuing(8)), "an empty prompt"),
        (lambda: plan.scores([([20], [1])]), "the id 20; the model's 20 ids are 0 to 19"),
    ):
        with pytest.raises(ConfigError, match=message):
            refuse()
    assert Plan(10, 20, beyond=True).texts([[1] * 30], Continuing(8)) == [""]


def test_a_plan_refuses_texts_under_a_mask_that_hides_the_cache():
    plan = Plan(positions=100, vocabulary=20, task="sums", mask=SlidingWindow(16))
    assert plan.texts([[1] * 8], Continuing(8)) == [""]
    assert plan.scores([([1] * 50, [2])]) == [(0.0, False)]
    with pytest.raises(ConfigError, match=r"--tasks sums: mask .*window ends after 16 tokens"):
        plan.texts([[1] * 9], Continuing(8))
