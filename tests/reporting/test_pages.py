"""Pages of trainings, steps and patterns: curves, settings, differences, escaping, size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from reporting.test_html import figures_in

from mtrain_cli.launch.restart import Restart
from mtrain_cli.records.metrics import StepMetrics
from mtrain_cli.reporting import html, tables
from mtrain_cli.reporting.curves import (
    POINTS,
    POINTS_OF_ALL,
    log_ticks,
    rate_restarts,
    smoothed,
    training_views,
)
from mtrain_cli.reporting.figures import HEAT_NUMBERS, TIMELINE_BARS, Figure, FigureView, _numbers
from mtrain_cli.reporting.html import write_page
from mtrain_cli.reporting.report_source import ReportSource, open_source
from mtrain_cli.reporting.run_settings import read_settings
from mtrain_cli.training.evaluation import ContextBucket, Evaluation

BAD = "</script><b>a & b"
VARIATION = "iterations without recording vary by up to 18.2%"
SAFE = "&lt;/script&gt;&lt;b&gt;a &amp; b"


def step(number: int, **more) -> StepMetrics:
    values = {
        "loss": 3.0,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": number,
        "tokens_per_second_per_gpu": 10.0,
        "mfu_model": None,
    }
    values |= {
        "mfu_executed": None,
        "density": 1.0,
        "peak_memory_gib": None,
        "seconds": 1.0,
        "epoch": 0.1,
        "consumed": number,
    }
    return StepMetrics(step=number, **{**values, **more})


def evaluation(number: int, loss: float) -> Evaluation:
    buckets = (
        ContextBucket(0, 128, 10, loss),
        ContextBucket(128, 1024, 20, loss - 0.5),
        ContextBucket(1024, 2048, 0, None),
    )
    return Evaluation(number, loss, 30, 2, 0.1, "dense", buckets)


def trained(name: str, folder: Path, **more) -> ReportSource:
    metrics = tuple(
        step(n, lr=1e-3 * (1 - n / 50 if n < 30 else 1.5 - n / 50), loss=4 - n / 40)
        for n in range(1, 41)
    )
    evaluations = (evaluation(0, 4.0), evaluation(40, 3.0))
    settings = {"seq": 4096, "optim.lr": 1e-3, "topology.workers": 2, "run.name": name}
    facts = {"host": "one", "gpus": []}
    return ReportSource(
        name,
        folder,
        facts,
        metrics=metrics,
        evaluations=evaluations,
        **{"settings": settings, **more},
    )


def page(folder: Path, *sources: ReportSource) -> tuple[str, dict[str, dict]]:
    text = write_page(folder / "report.html", sources).read_text()
    return text, {figure["name"]: figure for figure in figures_in(text)}


def test_held_out_losses_are_drawn_over_steps_and_by_context(tmp_path):
    _, drawn = page(tmp_path, trained("one", tmp_path))
    views = {view["labels"][0]: view["data"] for view in drawn["held-out"]["views"]}
    assert drawn["held-out"]["together"]
    (line,) = views["all tokens, over steps"]
    assert (line["x"], line["y"]) == ([0, 40], [4.0, 3.0])
    begin, end = views["by context, last evaluation"]
    assert (end["x"], begin["y"], end["y"]) == ([128, 1024], [4.0, 3.5], [3.0, 2.5])
    assert [trace["name"] for trace in views["by context, over steps"]] == ["0 to 128", "128 to 1k"]
    assert views["by context, over steps"][1]["y"] == [3.5, 2.5]


def test_restarts_of_run_and_learning_rate_are_marked(tmp_path):
    source = trained("one", tmp_path, restarts=(Restart(0.0, "rank 1 was killed", 1, 25, 20, 2),))
    assert rate_restarts(source.metrics) == [30]
    warm_up = [step(n, lr=n * 1e-4 if n < 5 else 5e-4) for n in range(1, 9)]
    assert rate_restarts(warm_up) == []
    text, drawn = page(tmp_path, source)
    shapes = {
        view["labels"][0]: [(s["x0"], s["line"]["dash"]) for s in view["layout"]["shapes"]]
        for view in drawn["training"]["views"]
    }
    assert shapes["learning rate"] == [(30, "dot"), (20, "dash")]
    assert shapes["seconds per step"] == [(20, "dash")]
    assert "from step 20, after step 25: rank 1 was killed" in text


def test_moving_averages_are_unbiased_and_raw_values_stay(tmp_path):
    assert smoothed([2.0] * 20, 5) == pytest.approx([2.0] * 20)
    assert smoothed([1.0, None, float("nan"), 1.0], 5) == [
        pytest.approx(1.0),
        None,
        None,
        pytest.approx(1.0),
    ]
    views, note = training_views([trained("one", tmp_path)])
    loss = next(data for labels, data, _ in views if labels == ("loss, nats",))
    assert loss[0]["y"] == pytest.approx([4 - n / 40 for n in range(1, 41)], rel=1e-4)
    assert loss[1]["y"] != loss[0]["y"]
    assert "moving average" in note


def test_ticks_of_log_axes_have_no_exponent():
    assert log_ticks(0.3, 40.0)["ticktext"] == [
        "0.2",
        "0.5",
        "1",
        "2",
        "5",
        "10",
        "20",
        "50",
        "100",
    ]
    assert log_ticks(1e-3, 5e6)["ticktext"][-3:] == ["100k", "1M", "10M"]


def test_settings_are_listed_and_differences_tabulated(tmp_path):
    one = trained("one", tmp_path)
    other = trained(
        "two",
        tmp_path,
        settings={**one.settings, "optim.lr": 2e-3, "topology.workers": 4, "run.name": "two"},
    )
    text, _ = page(tmp_path, one, other)
    assert "<dt>sequence</dt><dd>seq 4k</dd>" in text
    assert "<td class=words>optim.lr</td><td>0.001</td><td>0.002</td>" in text
    assert "<td class=words>run.name</td>" not in text
    warning = (
        "the runs differ in workers (one: 2; two: 4): settings alone do not explain their times"
    )
    assert tables.incomparable([one, other]) == [warning]
    assert warning in text
    assert tables.incomparable([one, one]) == []
    elsewhere = trained("far", tmp_path, settings=one.settings)
    elsewhere.facts.update(host="another")
    assert (
        "differ in machines (one: CPU of one; far: CPU of another)"
        in tables.incomparable([one, elsewhere])[0]
    )


def test_final_losses_are_compared(tmp_path):
    rows = {
        row.what: row
        for row in tables.comparison([trained("one", tmp_path), trained("two", tmp_path)])
    }
    assert rows["loss, last tenth of the steps"].first == pytest.approx(4 - 38.5 / 40)
    assert rows["held-out loss, last"].first == 3.0
    assert rows["held-out loss, last"].difference == "unknown", "one value has no spread"


@pytest.mark.parametrize(
    ("overhead", "plain", "message"),
    [
        (-0.14, [100, 120], f"cost within noise ({VARIATION})"),
        (0.1, [100, 120], f"cost within noise ({VARIATION})"),
        (0.3, [100, 120], f"costs 30.0% of an iteration ({VARIATION})"),
        (-0.14, [100], "cost unknown: only one iteration with and one without recording"),
    ],
)
def test_noise_does_not_count_as_a_cost_of_recording(overhead, plain, message):
    assert (
        tables.recording_cost({"overhead": overhead, "cases": [{"iteration_ms": plain}]}) == message
    )


def recorded_step() -> dict:
    rank = {
        "step_ms": 10.0,
        "plain_ms": 9.0,
        "recorded_ms": 10.0,
        "parts": {"attention": 6.0, "links": 1.0, "host": 3.0, BAD: 1.0},
    }
    rank |= {
        "links_hidden_ms": 0.0,
        "unmatched": 0,
        "launches": 0,
        "launching_ms": 0,
        "syncs": 0,
        "syncing_ms": 0,
        "ahead_us": None,
    }
    top = [{"name": BAD, "part": BAD, "calls": 2, "ms": 6.0}]
    return {
        "ranks": [{**rank, "rank": 0}, {**rank, "rank": 1}],
        "gpu": False,
        "workers": 2,
        "top": top,
    }


def test_a_recorded_step_has_a_page(tmp_path):
    text, drawn = page(tmp_path, ReportSource(BAD, tmp_path, step=recorded_step()))
    assert "</script><b>" not in text
    assert f"<h1>{SAFE} <small>recorded step" in text
    (view,) = drawn["step"]["views"]
    assert [trace["x"] for trace in view["data"]][:2] == [[6.0, 6.0], [1.0, 1.0]]
    # plotly interprets markup in labels, so kernel names are escaped there too.
    assert drawn["kernels"]["views"][0]["data"][0]["y"] == ["1. a &amp; b"]
    assert "<td class=words>attention</td><td>6</td><td>60.0%</td>" in text


def test_a_sparsity_profile_has_a_page_and_one_without_rows_is_refused(tmp_path):
    import pandas

    from mtrain_cli.config.schema import ConfigError
    from mtrain_cli.records.record_files import HEAD_ROWS, SPARSITY, write_summary

    numbers = {"density": 0.2, "of_mask": 0.2, "worst": 0.5, "slashes": 3, "columns": 9}
    places = [(at, layer, head) for at in (1, 5) for layer in (0, 1) for head in (0, 1)]
    rows = [
        {
            "step": at,
            "pattern": BAD,
            "layer": layer,
            "head": head,
            "recall": 0.8 + 0.1 * head,
            **numbers,
        }
        for at, layer, head in places
    ]
    folder = tmp_path / "measured"
    write_summary(folder, {"kind": SPARSITY, "complete": True})
    with pytest.raises(ConfigError, match=r"sparsity\.parquet: cannot be read"):
        open_source(folder)
    pandas.DataFrame(rows).to_parquet(folder / HEAD_ROWS)
    source = open_source(folder)
    assert (source.kind, source.complete, len(source.sparsity)) == ("sparsity profile", True, 8)
    text, drawn = page(tmp_path, source)
    assert "</script><b>" not in text
    assert SAFE in text
    recall = drawn["sparsity"]["views"][0]
    assert [trace["y"] for trace in recall["data"]] == [pytest.approx([0.85, 0.85])] * 2
    assert drawn["heads"]["views"][0]["data"][0]["z"] == [pytest.approx([0.8, 0.9])] * 2


def test_a_full_page_is_under_one_and_a_half_megabytes(tmp_path, monkeypatch):
    random = np.random.default_rng(0)

    def numbers(count: int) -> list[float]:
        return _numbers(random.random(count))

    heat = {"type": "heatmap", "z": numbers(HEAT_NUMBERS)}
    columns = {
        "x": numbers(TIMELINE_BARS),
        "base": _numbers(random.random(TIMELINE_BARS) * 100, 6),
        "y": [3] * TIMELINE_BARS,
    }
    columns["customdata"] = random.integers(0, 64, (TIMELINE_BARS, 2)).tolist()
    runs = POINTS_OF_ALL // POINTS
    curves = [{"x": list(range(POINTS)), "y": numbers(POINTS)} for _ in range(runs * 2 * 8)]
    filled = [Figure("all", "All", ("what",), [FigureView(("a",), [heat, columns, *curves], {})])]
    monkeypatch.setattr(html, "figures", lambda _: filled)
    size = len(write_page(tmp_path / "report.html", [trained("one", tmp_path)]).read_bytes())
    assert 1e6 < size < 1.5e6


def test_pages_follow_the_color_scheme_of_the_reader(tmp_path):
    text, _ = page(tmp_path, trained("one", tmp_path))
    assert "@media (prefers-color-scheme: dark)" in text
    assert 'matchMedia("(prefers-color-scheme: dark)")' in text
    assert '"#fff"' not in text, "figures take the colours of the page"


def test_unreadable_settings_count_as_none(tmp_path):
    for content in (b"a: " + b"[" * 5000, b"\xff\xfe", b"a: [", b"- 1"):
        (tmp_path / "resolved.yaml").write_bytes(content)
        assert read_settings(tmp_path) == {}
