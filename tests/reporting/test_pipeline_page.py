"""A report shows measured and predicted pipelines in one table and one figure."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from records.test_pipeline_times import TIMED, rows_of_stages, wait
from synthetic_records import Play, facts_of, ring, rows_of, write

from mtrain_cli.parallel.pipeline_schedule import TimedPipeline
from mtrain_cli.records.pipeline_times import prediction_entry
from mtrain_cli.reporting import sections
from mtrain_cli.reporting.html import write_page
from mtrain_cli.reporting.report_source import ReportSource, open_source
from mtrain_cli.reporting.sections import figures, pipeline_figure, pipeline_table


def measured(folder: Path, timed: TimedPipeline = TIMED, label: str = "one") -> ReportSource:
    """Write a profile of two stages of two ranks."""
    facts = facts_of(ring(2), groups=2, label=label, pipeline=asdict(timed.pipeline))
    rows = [rows_of(Play(ring(2)), groups=2), rows_of_stages(timed, 2), wait(2, 3, 2)]
    return open_source(write(folder, [np.concatenate(rows)], [facts]))


def simulated(folder: Path, timed: TimedPipeline = TIMED, label: str = "two") -> ReportSource:
    """Write a prediction. timed: times in microseconds."""
    entry = {"label": label, "pipeline": prediction_entry(timed)}
    facts = facts_of(ring(2), label=label)
    return open_source(
        write(folder, [rows_of(Play(ring(2)))], [facts], kind="simulation", predicted=[entry])
    )


def test_the_table_compares_measured_idle_time_with_formula_and_prediction(tmp_path):
    found = pipeline_table([measured(tmp_path / "a"), simulated(tmp_path / "b")]).cells()
    bubble = f"{TIMED.played.bubble:.1%}"
    schedule = "interleaved, 2 x 2 virtual stages, 4 micro-batches"
    assert found[0][:7] == ["a: one", schedule, "39", bubble, bubble, "11.1%", "1.20"]
    assert found[0][7:] == ["24, 36", "1", "0.5"]
    assert found[1][:2] == ["b: two, predicted", schedule]
    assert found[1][3:7] == [bubble, bubble, "11.1%", "1.20"]
    assert found[1][8:] == ["-", "-"]


def test_the_same_figure_shows_measured_and_predicted_passes(tmp_path):
    drawn = pipeline_figure([measured(tmp_path / "a"), simulated(tmp_path / "b")])
    assert drawn.together
    played, predicted = drawn.views
    assert played.labels == ("a: one",)
    assert predicted.labels == ("b: two, predicted",)
    for view, factor in ((played, 1.0), (predicted, 1e-3)):
        bars = {
            (*trace["name"].split(", part "), place, stage): (begin, length)
            for trace in view.data
            for place, stage, begin, length in zip(
                trace["customdata"], trace["y"], trace["base"], trace["x"], strict=True
            )
        }
        assert len(bars) == len(TIMED.played.spans) == 2 * 4 * 4
        for span in TIMED.played.spans:
            action = span.action
            part = str(action.virtual_stage // 2 + 1)
            begin, length = bars[action.kind, part, action.micro_batch, span.stage]
            assert begin == pytest.approx(factor * span.begin, rel=1e-3, abs=1e-3 * factor)
            assert length == pytest.approx(factor * (span.end - span.begin), rel=1e-3)
        for trace in view.data:
            assert trace["text"] == list(map(str, trace["customdata"]))


def test_a_report_without_a_pipeline_shows_nothing(tmp_path):
    source = open_source(write(tmp_path, [rows_of(Play(ring(2)))], [facts_of(ring(2))]))
    assert pipeline_table([source]).rows == []
    assert "pipeline" not in {figure.name for figure in figures([source])}


def test_too_many_passes_are_not_drawn(tmp_path, monkeypatch):
    sources = [measured(tmp_path / "a"), simulated(tmp_path / "b")]
    monkeypatch.setattr(sections, "BARS", 32 + 31)
    assert len(pipeline_figure(sources).views) == 1
    monkeypatch.setattr(sections, "BARS", 31)
    assert pipeline_figure(sources).views == []


def test_a_prediction_of_a_foreign_file_is_left_out(tmp_path):
    simulated(tmp_path / "b")
    summary = json.loads((tmp_path / "b/summary.json").read_text())
    summary["predicted"] = [1, None, {"label": 1, "pipeline": {"stages": "2"}}]
    (tmp_path / "b/summary.json").write_text(json.dumps(summary))
    assert pipeline_table([open_source(tmp_path / "b")]).rows == []


def test_a_page_escapes_the_label_once(tmp_path):
    source = measured(tmp_path / "a", label="<b>one</b>")
    text = write_page(tmp_path / "report.html", [source]).read_text()
    assert "&lt;b&gt;one&lt;/b&gt;" in text
    assert "<b>one" not in text
    assert "&amp;lt;" not in text
