"""The FLOP of an evaluation."""

from __future__ import annotations

import pytest

from mtrain_cli.composition import compose
from mtrain_cli.evaluation.cost import format_flop, forward_flop
from mtrain_cli.training.flops import flops_per_token


def test_a_forward_pass_is_a_third_of_a_training_step():
    config = compose.compose(["seq=2k"])
    whole = flops_per_token(config.model, 1024).model * 1024
    assert forward_flop(config, 1024) == pytest.approx(whole / 3)


@pytest.mark.parametrize(
    ("flop", "text"), [(5, "5 FLOP"), (1.234e15, "1.23 PFLOP"), (2e21, "2e+03 EFLOP")]
)
def test_units(flop, text):
    assert format_flop(flop) == text
