"""Names from users appear literally on pages and terminals: no markup, scripts or control codes."""

from __future__ import annotations

import io
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import command
import pytest
from reporting.every_kind import every_kind
from reporting.test_html import figures_in
from reporting.training_runs import step as metrics_of
from reporting.training_runs import trained
from synthetic_records import Play, recorded_once, ring
from test_console import MARKUP

from mtrain_cli.console import Console
from mtrain_cli.reporting.html import write_page
from mtrain_cli.reporting.report_source import ReportSource, open_source
from mtrain_cli.reporting.sections import show_sources
from mtrain_cli.reporting.table import data

TAG = "<img src=x onerror=alert(1)></script><!--<script>"
STEP = metrics_of(1)


def source_named(tmp_path: Path, name: str) -> ReportSource:
    source = open_source(recorded_once(tmp_path / "one", Play(ring(2)), layers=(0,), iterations=2))
    cases = tuple(replace(case, label=f"{case.label} {name}") for case in source.cases)
    facts = {
        **source.facts,
        "host": name,
        "gpus": [name],
        "command": ["mtrain", name],
        "git_revision": name,
        "versions": {name: name},
    }
    metrics = (STEP, replace(STEP, step=2))
    kinds = every_kind(tmp_path)
    step = kinds["step"][0].step or {}
    ranks = [{**rank, "parts": {name: 1.0, **rank["parts"]}} for rank in step["ranks"]]
    sparsity = tuple({**row, "pattern": name} for row in kinds["sparsity"][0].sparsity)
    return replace(
        source,
        name=name,
        cases=cases,
        facts=facts,
        metrics=metrics,
        step={**step, "ranks": ranks},
        sparsity=sparsity,
    )


def texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for key, item in value.items() for text in (key, *texts(item))]
    return [text for item in value for text in texts(item)] if isinstance(value, list) else []


def test_a_page_shows_names_and_executes_none(tmp_path):
    sources = [source_named(tmp_path / "a", TAG), source_named(tmp_path / "b", "b")]
    text = write_page(tmp_path / "report.html", sources).read_text()
    assert "<img" not in text
    figures = figures_in(text)
    # Labels become the text of selectors. In all other strings, plotly interprets some tags.
    labels = {
        label for figure in figures for view in figure["views"] for label in view.pop("labels")
    }
    assert any(TAG in label for label in labels)
    tags = {tag for text in texts(figures) for tag in re.findall(r"<[^>]*>?", text)}
    assert tags <= {"<br>", "<extra>", "</extra>", "<b>", "</b>", "<i>", "</i>"}
    assert any("&lt;img" in text for text in texts(figures))


def test_spreadsheets_evaluate_no_name_and_file_names_need_not_be_text(tmp_path):
    row = {"a": "=cmd()", "b": "@x", "c": -1.5, "d": "a\x1b-b", "e": "\udcff"}
    written = data("names", [row]).write(tmp_path).read_text()
    assert written.splitlines()[1] == r"'=cmd(),'@x,-1.5,a\x1b-b,\udcff"
    run = tmp_path / os.fsdecode(b"n\xff")
    run.mkdir()
    (run / "metrics.jsonl").write_text(f"{STEP.to_json()}\n")
    source = open_source(run)
    assert "n\ufffd" in write_page(tmp_path / "report.html", [source]).read_text()


def test_errors_escape_control_characters(tmp_path):
    result = command.mtrain(tmp_path, "report", "no\x1b]0;title\x07[/red]thing")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "no\\x1b]0;title\\x07[/red]thing: no such run" in result.stderr


def test_remarks_on_a_folder_with_a_line_break_are_one_line(tmp_path):
    run = tmp_path / "a\nb"
    run.mkdir()
    (run / "metrics.jsonl").write_text(f"{STEP.to_json()}\n")
    remarks = open_source(run).remarks
    assert f"{tmp_path}/a\\nb/resolved.yaml: missing; settings are not shown" in remarks


def test_a_terminal_shows_names_literally(tmp_path):
    sources = [source_named(tmp_path / "a", MARKUP), source_named(tmp_path / "b", "b")]
    file = io.StringIO()
    show_sources(Console(file=file, width=200), sources)
    text = file.getvalue()
    assert "[/red][bold]a :smile:" in text
    assert not set(text) & set("\x1b\x07\r\b\u202e")


@pytest.mark.parametrize("exchange", ["group_cast (auto)", MARKUP])
def test_a_terminal_names_mask_layout_and_exchange_of_a_run(tmp_path, exchange):
    settings = {
        "mask.kind": "sliding_window",
        "mask.window": 64,
        "topology.layout": "balanced (auto)",
        "topology.exchange": exchange,
    }
    file = io.StringIO()
    show_sources(Console(file=file, width=200), [trained("a", tmp_path, settings=settings)])
    lines = file.getvalue().splitlines()
    assert lines[1] == "  mask: kind sliding_window, window 64"
    assert lines[2].startswith("  workers: layout balanced (auto), exchange ")
    assert exchange == MARKUP or lines[2].endswith(exchange)
    assert not set(file.getvalue()) & set("\x1b\x07\r\b\u202e")
