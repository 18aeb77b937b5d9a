"""The best configuration, and the figures of its row, each by hand."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from mtrain_cli.commands.simulate_actions import row_of
from mtrain_cli.commands.simulate_output import best_line, main_outcome
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.cluster import load_cluster
from mtrain_cli.simulation.scenario import (
    PairSource,
    Scenario,
    evaluate,
    plan_on,
)


def test_the_figures_of_a_row():
    """16 GPUs are two nodes of eight; a degree is the mean of the two passes."""
    cluster = load_cluster("a100_4x8")
    config = compose(["model=tiny", "seq=32k"])
    plan = plan_on(cluster, config, workers=16, layout="striped", exchange="ring")
    real = evaluate(
        cluster, Scenario(config, PairSource("dense").problem(config)), plan, bounds=False
    )

    def of_pass(worker: float, step: float) -> SimpleNamespace:
        return SimpleNamespace(
            time=SimpleNamespace(worker=worker, step=step),
            work=SimpleNamespace(worker=worker + 1, step=step + 1),
        )

    # Recomputation does not count as a third pass of a degree.
    passes = {
        "forward": of_pass(1.2, 1.4),
        "backward": of_pass(1.6, 2.2),
        "recompute": of_pass(9, 9),
    }
    row = row_of(
        dataclasses.replace(real, attention=dataclasses.replace(real.attention, passes=passes))
    )
    assert row["degrees"] == pytest.approx(
        {"worker_time": 1.4, "step_time": 1.8, "worker_work": 2.4, "step_work": 2.8}
    )
    assert (row["nodes"], row["workers"], row["cp"], row["dp"]) == (2, 16, 16, 1)
    assert row["seconds"]["value"] * 16 * row["tokens_per_second_per_gpu"][
        "value"
    ] == pytest.approx(32768, rel=1e-5)


def test_the_best_is_the_fastest_that_fits():
    def outcome(name: str, seconds: float, total: int, *, fits: bool) -> SimpleNamespace:
        step = SimpleNamespace(fits=fits, seconds=SimpleNamespace(value=seconds), order=(seconds,))
        memory, exchange = SimpleNamespace(total=total), SimpleNamespace(label="ring")
        plan = SimpleNamespace(memory=memory, exchange=exchange)
        return SimpleNamespace(layout=name, step=step, plan=plan)

    slow, fast = outcome("slow", 2.0, 1, fits=True), outcome("fast", 1.0, 2, fits=True)
    large, small = outcome("large", 0.5, 9, fits=False), outcome("small", 3.0, 8, fits=False)
    assert main_outcome([slow, large, fast]) is fast
    assert best_line([slow, large, fast]).startswith(
        "best   fast ring, 100.0% faster than the next;"
    )
    assert main_outcome([large, small]) is small
    assert best_line([large, small]).startswith("best   none of these fits")
