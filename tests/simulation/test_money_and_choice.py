"""The cost of a training, the best configuration, and the figures of its row, each by hand."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
import yaml
from typer.testing import CliRunner

from mtrain_cli.commands import app as command_line
from mtrain_cli.commands import simulate_actions
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.cluster import load_cluster, shipped
from mtrain_cli.simulation import scenario as scenarios
from mtrain_cli.simulation.scenario import (
    PairSource,
    PredictedScenario,
    Scenario,
    evaluate,
    plan_on,
)
from mtrain_cli.simulation.sweep import row_of, with_cost


def test_days_and_dollars_of_a_row():
    """86.4M tokens on 8 GPUs at 2 $: one day at 125 tokens/s/GPU, 2.5 at worst, 0.5 at best."""
    row = {"workers": 8, "tokens_per_second_per_gpu": {"low": 50.0, "value": 125.0, "high": 250.0}}
    found = with_cost(row, 86.4e6, 2.0)
    assert found["days"] == pytest.approx({"low": 0.5, "value": 1.0, "high": 2.5})
    assert found["dollars"] == pytest.approx({"low": 192.0, "value": 384.0, "high": 960.0})
    assert with_cost(row, None, 2.0) == row


def test_the_best_is_the_fastest_that_fits(tmp_path, monkeypatch):
    """Figures are of zigzag if striped, which is faster, does not fit; else of striped."""
    # Imported later, it would keep the substitute for all tests that follow.
    assert simulate_actions.evaluate is evaluate
    monkeypatch.chdir(tmp_path)
    words = [
        "simulate",
        "model=tiny",
        "seq=16k",
        "sparsity=dense",
        "--exchange",
        "ring",
        "--no-files",
        "--tokens",
        "1b",
        "--price",
        "2",
    ]
    made: dict[str, PredictedScenario] = {}

    def said(*more: str) -> str:
        found = CliRunner(env={"COLUMNS": "80", "TERM": "dumb"}).invoke(
            command_line.app, [*words, *more], prog_name="mtrain"
        )
        assert found.exit_code == 0, found.output
        return found.stdout

    def found(
        cluster, scenario, plan, *, faster: str, small: str = "", **more
    ) -> PredictedScenario:
        name = plan.layout.name
        if name not in made:
            made[name] = evaluate(cluster, scenario, plan, **more)
        step = made[name].step
        seconds = dataclasses.replace(
            step.seconds, value=step.seconds.low if name == faster else step.seconds.high
        )
        if name == small:
            plan = dataclasses.replace(plan, hardware=dataclasses.replace(plan.hardware, memory=1))
        return dataclasses.replace(
            made[name], plan=plan, step=dataclasses.replace(step, plan=plan, seconds=seconds)
        )

    monkeypatch.setattr(
        scenarios, "evaluate", lambda *a, **k: found(*a, **k, faster="striped", small="striped")
    )
    assert "time   zigzag ring:" in (text := said())
    assert "best   zigzag ring; `mtrain simulate recommend` also tries" in text
    rows = json.loads(said("--json"))["predicted"]
    assert [row["step"]["fits"] for row in rows] == [True, False]
    for step in (row["step"] for row in rows):
        rate = step["tokens_per_second_per_gpu"]
        for name, other in (("low", "high"), ("value", "value"), ("high", "low")):
            assert step["dollars"][name] == pytest.approx(1e9 / rate[other] / 3600 * 2), (
                "GPU hours at 2 $, however many share them"
            )
        assert step["days"]["low"] < step["days"]["value"] < step["days"]["high"]
    monkeypatch.setattr(scenarios, "evaluate", lambda *a, **k: found(*a, **k, faster="striped"))
    assert "time   striped ring:" in (text := said())
    gap = made["zigzag"].step.seconds.high / made["striped"].step.seconds.low - 1
    assert f"best   striped ring, {gap:.1%} faster than the next; `mtrain simulate" in " ".join(
        text.replace("\n       ", " ").splitlines()
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


def test_if_nothing_fits_the_least_memory_is_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = yaml.safe_load(shipped()["h100_4x8"].read_text()) | {"nodes": 1}
    content["gpu"]["hbm_gib"] = {"value": 1, "source": "guess"}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(content))
    words = [
        "simulate",
        "model=tiny",
        "seq=16k",
        "--columns",
        "64",
        "cluster=small.yaml",
        "--exchange",
        "all_gather,ring",
        "--no-files",
    ]
    found, parsed = (
        CliRunner(env={"COLUMNS": "80", "TERM": "dumb"}).invoke(command_line.app, [*words, *more])
        for more in ([], ["--json"])
    )
    assert (found.exit_code, parsed.exit_code) == (0, 0), found.output
    rows = [row["step"] for row in json.loads(parsed.stdout)["predicted"]]
    assert not any(row["fits"] for row in rows)
    least = min(rows, key=lambda row: row["memory_bytes"])
    assert least["memory_bytes"] < max(row["memory_bytes"] for row in rows)
    flat = " ".join(found.stdout.split())
    assert "small (1 x 8 NVIDIA H100 80GB HBM3)" in flat, "cluster=FILE is --cluster FILE"
    assert f"time {least['layout']} {least['exchange']}: " in flat
    assert f"memory {least['memory_bytes'] / 2**30:.2f} GiB of 1.0 (0.9 usable) at its peak" in flat
    assert (
        "best none of these fits; `mtrain simulate recommend` tries settings that need less "
        "memory, or says what would fit" in flat
    )
