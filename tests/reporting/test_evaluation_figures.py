"""Figures of evaluations."""

from __future__ import annotations

import dataclasses

import pytest
from reporting.test_evaluation_tables import NIAH, SPARSE

from mtrain_cli.evaluation.results import NATS, Part
from mtrain_cli.reporting.evaluation_figures import evaluation_figures
from mtrain_cli.reporting.plots import STYLES


def test_a_map_has_a_row_per_depth_and_a_column_per_length():
    longer = dataclasses.replace(NIAH, length=65536, parts=(Part(0, 10, 20, 40.0),))
    maps, _, _ = evaluation_figures([("run", [NIAH, longer, SPARSE])])
    assert [view.labels for view in maps.views] == [
        ("niah, dense, step 100",), ("niah, moba, step 100",),
    ]  # fmt: skip
    (heat,) = maps.views[0].data
    assert (heat["x"], heat["y"]) == (["8k", "64k"], ["0-10%", "90-100%"])
    assert heat["z"] == [[95.0, 40.0], [100.0, None]]


def test_losses_have_a_line_per_length_and_attention_with_errors():
    parts = (Part(0, 128, 9, 3.0, 0.1), Part(128, 256, 9, 2.0, None))
    loss = dataclasses.replace(NIAH, task="perplexity", unit=NATS, parts=parts)
    maps, contexts, _ = evaluation_figures([("<run>", [loss]), ("b", [loss])])
    assert maps.views == []
    lines = contexts.views[0].data
    assert (lines[0]["x"], lines[0]["y"]) == ([128, 256], [3.0, 2.0])
    assert lines[0]["error_y"]["array"] == [0.196, 0.0]
    assert lines[0]["name"].startswith("&lt;run&gt;, 8k dense")


def test_many_lines_of_losses_look_different_or_are_left_out_with_a_word():
    parts = (Part(0, 128, 9, 3.0, 0.1), Part(128, 256, 9, 2.0, None))
    one = dataclasses.replace(NIAH, task="perplexity", unit=NATS, parts=parts)
    many = [dataclasses.replace(one, key=str(n), step=n) for n in range(12)]
    _, contexts, _ = evaluation_figures([("run", many)])
    looks = {
        (line["line"]["color"], line["line"]["dash"], line["marker"]["symbol"])
        for line in contexts.views[0].data
    }
    assert len(looks) == 12
    assert "Shows" not in contexts.note
    many = [dataclasses.replace(one, key=str(n), step=n) for n in range(STYLES + 3)]
    _, contexts, _ = evaluation_figures([("run", many)])
    lines = contexts.views[0].data
    assert (len(lines), lines[0]["name"]) == (STYLES, "8k dense, step 3")
    assert f"Shows {STYLES} of {STYLES + 3} lines, those of the newest checkpoints" in contexts.note


def test_checkpoints_give_a_line_over_steps():
    later = dataclasses.replace(NIAH, step=200, score=99.0)
    _, _, steps = evaluation_figures([("run", [later, NIAH])])
    (line,) = steps.views[0].data
    assert (line["x"], line["y"]) == ([100, 200], [97.5, 99.0])
    assert NIAH.error is not None
    assert line["error_y"]["array"] == pytest.approx([1.96 * NIAH.error] * 2)
    sparse = [dataclasses.replace(result, attention="moba") for result in (later, NIAH)]
    _, _, steps = evaluation_figures([("run", [later, NIAH, *sparse])])
    assert [line["name"] for line in steps.views[0].data] == ["niah 8k dense", "niah 8k moba"]
    assert evaluation_figures([("run", [NIAH])])[2].views == []
