"""Figures of training: curves, restarts, moving averages, held-out losses, log axes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from reporting.training_runs import step, trained

from mtrain_cli.launch.restart import Restart
from mtrain_cli.reporting.html import write_page
from mtrain_cli.reporting.training_figures import (
    density_figure,
    held_out_figure,
    log_ticks,
    rate_restarts,
    smoothed,
    training_figure,
)
from mtrain_cli.training.evaluation import ContextBucket, Evaluation


def test_held_out_losses_are_drawn_over_steps_and_by_context(tmp_path):
    figure = held_out_figure([trained("one", tmp_path)])
    views = {view.labels[0]: view.data for view in figure.views}
    assert figure.together
    (line,) = views["all tokens, over steps"]
    assert (line["x"], line["y"]) == ([0, 40], [4.0, 3.0])
    begin, end = views["by context, last evaluation"]
    assert (end["x"], begin["y"], end["y"]) == ([128, 1024], [4.0, 3.5], [3.0, 2.5])
    assert [trace["name"] for trace in views["by context, over steps"]] == ["0 to 128", "128 to 1k"]
    assert views["by context, over steps"][1]["y"] == [3.5, 2.5]


def test_many_ranges_of_context_look_different(tmp_path):
    ends = [128 << n for n in range(14)]  # up to 1m
    buckets = tuple(ContextBucket(end // 2, end, 10, 3.0) for end in ends)
    evaluations = tuple(Evaluation(n, 3.0, 140, 2, 0.1, "dense", buckets) for n in (0, 40))
    source = replace(trained("one", tmp_path), evaluations=evaluations)
    *_, view = held_out_figure([source]).views
    looks = {(line["line"]["color"], line["line"]["dash"]) for line in view.data}
    assert len(looks) == 14


def test_restarts_of_run_and_learning_rate_are_marked(tmp_path):
    source = trained("one", tmp_path, restarts=(Restart(0.0, "rank 1 was killed", 1, 25, 20, 2),))
    assert rate_restarts(source.metrics) == [30]
    warm_up = [step(n, lr=n * 1e-4 if n < 5 else 5e-4) for n in range(1, 9)]
    assert rate_restarts(warm_up) == []
    shapes = {
        view.labels[0]: [(s["x0"], s["line"]["dash"]) for s in view.layout["shapes"]]
        for view in training_figure([source]).views
    }
    assert shapes["learning rate"] == [(30, "dot"), (20, "dash")]
    assert shapes["seconds per step"] == [(20, "dash")]
    text = write_page(tmp_path / "report.html", [source]).read_text()
    assert "from step 20, after step 25: rank 1 was killed" in text


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


def test_dips_of_the_density_are_explained_if_documents_are_masked(tmp_path):
    metrics = tuple(
        step(n, density=0.5 if n == 3 else 1.0, density_by_layer=[1.0, 0.9]) for n in range(1, 6)
    )
    masked = replace(
        trained("one", tmp_path, settings={"data.document_mask": True}), metrics=metrics
    )
    for draw in (training_figure, density_figure):
        assert "It dips in steps whose sequences have several documents" in draw([masked]).note
    flat = replace(masked, metrics=metrics[:2])
    whole = replace(masked, settings={"data.document_mask": False})
    for source in (flat, whole):
        assert "dips" not in training_figure([source]).note + density_figure([source]).note


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
