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


def progress_at(times: list[float], **options) -> tuple[EvaluationProgress, io.StringIO]:
    out = io.StringIO()
    clock = iter(times)
    now = [0.0]

    def tick() -> float:
        now[0] = next(clock, now[0])
        return now[0]

    console = Console(file=out, width=100)
    return EvaluationProgress(80.0, console=console, clock=tick, **options), out


def test_the_time_left_follows_from_the_pace():
    progress, out = progress_at([0.0, 40.0, 40.0, 40.0])
    assert progress.left() == "time left unknown"
    progress, out = progress_at([0.0, 40.0])
    progress.advance(40.0, "niah 64k dense")  # 40 in 40 s; 40 are left
    assert out.getvalue() == "50% niah 64k dense, 0:40 left\n"


def test_plain_lines_are_rare_and_other_workers_say_nothing():
    progress, out = progress_at([0.0, 1.0, 2.0, 3.0, 4.0])
    progress.advance(10.0, "niah")
    assert out.getvalue() == ""
    progress.say("done")
    assert out.getvalue() == "done\n"
    silent, out = progress_at([0.0, 99.0], enabled=False)
    silent.advance(10.0, "niah")
    silent.say("done")
    assert out.getvalue() == ""
