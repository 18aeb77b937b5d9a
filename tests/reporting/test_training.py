"""Tables of training runs: utilization of sparse runs, headings."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from reporting.test_tables import cells, printed
from reporting.training_runs import step, trained

from mtrain_cli.console import Console
from mtrain_cli.launch.restart import Restart
from mtrain_cli.launch.rollbacks import Rollback
from mtrain_cli.reporting.html import write_page
from mtrain_cli.reporting.report_source import ReportSource, open_source
from mtrain_cli.reporting.sections import files
from mtrain_cli.reporting.training import (
    held_out_figure,
    smoothed,
    training_figure,
    training_table,
)
from mtrain_cli.training.progress import TrainingProgress


def test_a_median_leaves_out_steps_without_a_rate():
    rates = [1.0, 1.0, 30.0, None, 20.0]
    metrics = [step(n, tokens_per_second_per_gpu=rate) for n, rate in enumerate(rates, 1)]
    source = ReportSource("odd", Path(), metrics=tuple(metrics))
    assert cells(training_table([source]))["tokens/s/worker"] == ["25"]
    unknown = ReportSource("odd", Path(), metrics=(step(1, tokens_per_second_per_gpu=None),))
    assert cells(training_table([unknown]))["tokens/s/worker"] == ["-"]


def test_sparse_trainings_show_hfu_without_mfu(tmp_path):
    facts = {
        "loss": 1.0,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": 1,
        "peak_memory_gib": 90.0,
        "epoch": 0.1,
        "consumed": 1,
        "seconds": 1.0,
    }

    def run(name: str, mfu: float, hfu: float, density: float) -> ReportSource:
        shares = {
            "tokens_per_second_per_gpu": 20000.0,
            "mfu_model": mfu,
            "mfu_executed": hfu,
            "density": density,
        }
        (tmp_path / name).mkdir()
        lines = (json.dumps({"step": step, **facts, **shares}) + "\n" for step in (1, 2, 3))
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
        return open_source(tmp_path / name)

    sources = [run("dense", 0.48, 0.54, 1.0), run("sparse", 3.59, 0.53, 0.05)]
    shown = cells(training_table(sources))
    assert (shown["MFU"], shown["HFU"]) == (["48.0%", "-"], ["54.0%", "53.0%"])
    assert max(map(len, printed(training_table(sources), width=80).splitlines())) <= 80
    (utilization,) = [table.records() for table in files(sources) if table.name == "training"]
    assert [(row["mfu_model"], row["mfu_executed"]) for row in utilization[2:4]] == [
        (0.48, 0.54),
        (None, 0.53),
    ]
    curves = {view.labels[0]: view.data for view in training_figure(sources).views}
    assert [line["name"] for line in curves["MFU, share of peak FLOP/s"]] == ["dense"]
    assert [line["name"] for line in curves["HFU, share of peak FLOP/s"]] == ["dense", "sparse"]


@pytest.mark.parametrize(("gib", "unit"), [(90.0, "GPU"), (None, "worker")])
def test_throughput_has_the_same_figure_and_unit_in_training_and_in_its_report(tmp_path, gib, unit):
    """Both exclude the steps that warm up, and take the median."""
    rates = (1.0, 2.0, 400.0, 300.0, 500.0, 600.0)
    steps = [
        step(number, tokens_per_second_per_gpu=rate, peak_memory_gib=gib)
        for number, rate in enumerate(rates, 1)
    ]
    out = io.StringIO()
    console = Console(file=out, width=100)
    with TrainingProgress(6, 0, True, console=console) as progress:
        for metrics in steps:
            progress.step(metrics)
        progress.summary("trained")
    assert f"throughput  450 tokens/s/{unit}, median of 4 steps" in out.getvalue()
    source = ReportSource("a", tmp_path, metrics=tuple(steps))
    assert cells(training_table([source]))[f"tokens/s/{unit}"] == ["450"]
    assert f"tokens/s/{unit}" in [view.labels[0] for view in training_figure([source]).views]


def test_a_page_shows_the_tokens_of_a_run_and_the_time_of_all_its_steps(tmp_path):
    """Also of the steps before a restart, and where the time of a step is missing."""
    times = (60.0, 30.0, None, 1.4)
    steps = [step(n, seconds=time, tokens=4096 * n) for n, time in enumerate(times, 1)]
    restart = Restart(0.0, "killed", 1, 2, 2, 2)
    source = ReportSource("a", tmp_path, metrics=tuple(steps), restarts=(restart,))
    shown = cells(training_table([source]))
    assert (shown["tokens"], shown["took"]) == (["16,384"], ["1:31"])
    page = write_page(tmp_path / "report.html", [source]).read_text()
    assert "<td>16,384</td><td>1:31</td>" in page


def test_targets_and_a_density_of_all_pairs_are_shown():
    steps = [step(n, targets=530, dense_density=1.0) for n in (1, 2, 3)]
    source = ReportSource("odd", Path(), metrics=tuple(steps))
    assert cells(training_table([source]))["targets"] == ["530"]
    note = "; density 100%: the pattern leaves nothing out at this length"
    assert training_table([source]).note.endswith(note)
    other = ReportSource("b", Path(), metrics=(step(1),))
    assert "; odd: density 100%: " in training_table([source, other]).note
    assert cells(training_table([other]))["targets"] == ["-"]


def test_held_out_losses_are_drawn_over_steps_and_by_context(tmp_path):
    figure = held_out_figure([trained("one", tmp_path)])
    views = {view.labels[0]: view.data for view in figure.views}
    assert figure.together
    (line,) = views["all tokens, over steps"]
    assert (line["x"], line["y"]) == ([0, 40], [4.0, 3.0])
    begin, end = views["by context, last evaluation"]
    assert (end["x"], begin["y"], end["y"]) == ([128, 1024], [4.0, 3.5], [3.0, 2.5])


def test_restarts_of_a_run_are_marked(tmp_path):
    source = trained("one", tmp_path, restarts=(Restart(0.0, "rank 1 was killed", 1, 25, 20, 2),))
    shapes = {
        view.labels[0]: [(s["x0"], s["line"]["dash"]) for s in view.layout["shapes"]]
        for view in training_figure([source]).views
    }
    assert shapes["seconds per step"] == [(20, "dash")]
    text = write_page(tmp_path / "report.html", [source]).read_text()
    assert "from step 20, after step 25: rank 1 was killed" in text


def test_a_page_says_what_was_rolled_back_and_skipped_and_why(tmp_path):
    source = trained("one", tmp_path)
    why = {3: "not finite", 4: "not finite", 9: "spike", 11: "not finite"}
    steps = [replace(m, skip_reason=why.get(m.step)) for m in source.metrics]
    rollback = Rollback(0.0, "step 25: loss <9>", 25, 20, 40, 50)
    source = replace(source, metrics=tuple(steps), rollbacks=(rollback,))
    text = write_page(tmp_path / "report.html", [source]).read_text()
    assert "<dt>skipped</dt><dd>not finite: 3-4, 11; spike: 9</dd>" in text
    assert (
        "back to the checkpoint of step 20, without the 10 sequences up to step 25: "
        "step 25: loss &lt;9&gt;</dd>"
    ) in text
    shapes = {(s["x0"], s["line"]["dash"]) for view in training_figure([source]).views
              for s in view.layout["shapes"]}  # fmt: skip
    assert shapes == {(20, "dot")}


def test_moving_averages_are_unbiased_and_raw_values_stay(tmp_path):
    assert smoothed([2.0] * 20, 5) == pytest.approx([2.0] * 20)
    assert smoothed([1.0, None, float("nan"), 1.0], 5) == [
        pytest.approx(1.0),
        None,
        None,
        pytest.approx(1.0),
    ]
    figure = training_figure([trained("one", tmp_path)])
    loss = next(view.data for view in figure.views if view.labels == ("loss, nats",))
    assert loss[0]["y"] == pytest.approx([4 - n / 40 for n in range(1, 41)], rel=1e-4)
    assert loss[1]["y"] != loss[0]["y"]
    assert "moving average" in figure.note
