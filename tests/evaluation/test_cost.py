"""The FLOP of an evaluation, and the time left by the pace since the start."""

from __future__ import annotations

import io

import pytest

from mtrain_cli.composition import compose
from mtrain_cli.console import Console
from mtrain_cli.evaluation.cost import EvaluationProgress, format_flop, forward_flop
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


def test_lines_on_the_work_left_are_rare_and_other_workers_say_nothing():
    out = io.StringIO()
    for enabled in (True, False):
        clock = iter([0.0, 1.0, 40.0, 41.0])
        console = Console(file=out, width=100)
        progress = EvaluationProgress(80.0, enabled=enabled, console=console, clock=clock.__next__)
        progress.advance(10.0, "niah")
        progress.advance(30.0, "niah 64k dense")  # 40 in 40 s; 40 are left
        progress.advance(10.0, "niah")
        progress.say("done")
    assert out.getvalue() == "50% niah 64k dense, 0:40 left\ndone\n"
