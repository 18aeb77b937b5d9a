"""Mistakes in `train.eval_tasks` and `eval` are reported with key, value and what is allowed."""

from __future__ import annotations

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ConfigError

NIAH = "train.eval_tasks=[niah]"


def test_a_length_is_one_several_or_that_of_training():
    lengths = [
        compose([NIAH, "seq=2k", *words]).eval.lengths(2048)
        for words in ([], ["eval.length=1k"], ["eval.length=[512,1k,512]"])
    ]
    assert lengths == [(2048,), (1024,), (512, 1024)]


def test_tasks_without_held_out_text_allow_an_interval():
    assert compose([NIAH, "train.eval_every=5"]).train.eval_every == 5


@pytest.mark.parametrize(("allowed", "refused"), [("2", "1"), ("64m", "67108865")])
def test_a_length_ends_at_its_last_allowed_value(allowed, refused):
    compose([NIAH, f"eval.length={allowed}"])
    with pytest.raises(ConfigError, match=r"eval\.length="):
        compose([NIAH, f"eval.length={refused}"])
