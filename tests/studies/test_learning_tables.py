"""Tables of a study: failures first, and no claim without an interval."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from rich.console import Console
from studies.finished_cell import write_results
from studies.test_outcomes import A, measured, three

from mtrain_cli.evaluation.cost import format_flop
from mtrain_extras.studies import learning_tables
from mtrain_extras.studies.cells import DONE, Done, Study, estimated_flop, estimated_seconds
from mtrain_extras.studies.learning_tables import document, remarks, show_plan, show_summary, tables
from mtrain_extras.studies.outcomes import (
    FAILED,
    HELD,
    UNKNOWN,
    Compared,
    Outcome,
    Prediction,
    Summary,
    compare,
    spread_of,
)
from mtrain_extras.studies.t_interval import Interval
from mtrain_extras.studies.tiers import FIXED, Cell, digest


def summary(difference: list[float]) -> Summary:
    found = three(difference)
    spread = spread_of(found)
    states = (FAILED, HELD, UNKNOWN)
    outcomes = tuple(
        Outcome(Prediction(s, "2026-11-26", f"that <{s}>", "moba", "own", "loss", "r", 1), s, "+1")
        for s in states
    )
    return Summary(A, tuple(found), tuple(compare(A, found, spread)), spread, outcomes, {0: 96.0})


def test_the_tables_show_failures_first_and_words_only_with_an_interval():
    predictions, _, differences, noise, _, _ = tables(summary([0.002, 0.003, 0.004]))
    assert [row[0] for row in predictions.rows] == [FAILED, HELD, UNKNOWN]
    sparse = next(row for row in differences.rows if row[0].startswith("vertical_slash-0.6, sp"))
    assert sparse[1:] == ["loss", "3.0030 [0.5164, 5.4896]", "+0.0030 [+0.0005, +0.0055]",
                          "loses nothing", "3"]  # fmt: skip
    # The spread is of one seed; the mean of -0.01, 0.01 and 0.01 has an interval far beyond it.
    assert noise.rows == [["loss", "0.0100", "+0.0033 [-0.0254, +0.0320]"]]
    alone = tables(summary([0.002]))[2]
    assert {(row[0], row[4]) for row in alone.rows} == {
        ("dense", "-"), ("dense-again", "-"),
        ("fixed, sparse inference", "not decided"),
        ("vertical_slash-0.6, sparse inference", "not decided"),
    }  # fmt: skip


def test_remarks_say_what_is_missing():
    found = summary([0.0, 0.0, 0.0])
    lines = remarks(replace(found, compared=found.compared[:2]))  # without dense-again
    assert lines == [
        "Needles that the bases find at 8k: 96.0 % (seed 0); gate 95 %.",
        "0 of 69 cells are finished.",
    ]


def test_a_toy_is_called_one_before_its_tables(capsys):
    found = summary([0.002, 0.003, 0.004])
    show_summary(Console(width=200), replace(found, tier=replace(found.tier, gate=None)))
    text = capsys.readouterr().out
    assert text.startswith(learning_tables.TOY[:60])
    assert text.count("Toy size") == 1


def test_a_study_that_has_just_begun_has_no_remark_on_seeds_or_on_the_control():
    begun = Summary(A, (), (), {}, (), {})
    assert remarks(begun) == ["0 of 69 cells are finished."]
    found = summary([0.0, 0.0, 0.0])
    others = tuple(each for each in found.compared if each.variant.name != FIXED)
    assert not any("control" in line for line in remarks(replace(found, compared=others)))


@pytest.mark.parametrize(("gate", "misses"), [(95.0, False), (94.9, True)])
def test_a_base_that_misses_the_gate_and_damaged_cells_are_remarks(gate, misses):
    damage = ("one is\n\x1bdamaged", "so is\ntwo")
    lines = remarks(replace(summary([0.0]), gates={0: 99.0, 1: gate}, damage=damage))
    assert lines[:2] == ["one is\\n\\x1bdamaged", "so is\\ntwo"]
    assert any("misses the gate" in line for line in lines) == misses


def test_a_plan_counts_the_time_of_the_seeds_that_are_left(tmp_path, capsys):
    study = Study(tmp_path, A)
    cells = [Cell(seed, A.variant("dense")) for seed in A.seeds]
    for cell in cells[:2]:
        write_results(study, cell)
        done = Done(digest(A, cell), "", 200, 80.0, 0.4, 1.0)
        (study.path(cell) / DONE).write_text(json.dumps(asdict(done)))
    show_plan(Console(width=300), study, cells)
    text = " ".join(capsys.readouterr().out.split())
    flop, seconds = sum(estimated_flop(A, cells[0])), estimated_seconds(A, cells[0])
    assert 1 < seconds / 60 < 10
    assert f"{format_flop(flop)} are left, {seconds / 60:.1f} minutes" in text


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        ((-1.69, -1.74, -1.64), "-1.7 [-1.7, -1.6]"),
        ((-1.69, -1.71, -1.67), "-1.69 [-1.71, -1.67]"),
        ((-1.69, -1.69, -1.69), "-1.7 [-1.7, -1.7]"),  # all seeds are equal
    ],
)
def test_the_ends_of_an_interval_differ_if_their_numbers_do(interval, text):
    assert learning_tables.value(Interval(*interval, 3), loss=False, signed=True) == text


def test_losses_by_context_are_those_of_the_attention():
    spans = {(8192, 16384): 2.0}
    found = [
        measured("moba", 0, attention, {span: loss + more for span, loss in spans.items()})
        for attention, more in (("dense", 0.0), ("moba", 1.0))
    ]
    rows = tables(Summary(A, tuple(found), tuple(compare(A, found, {})), {}, (), {}))[-1].rows
    assert rows == [["moba, dense inference", "2.0000"], ["moba, sparse inference", "3.0000"]]


def test_one_seed_decides_nothing_and_does_not_call_the_experiment_blind():
    lines = remarks(summary([0.002]))
    assert lines[1] == "One seed decides nothing: a verdict needs at least two."
    assert not any("control" in line for line in lines)


def test_a_row_has_the_price_of_a_step_beside_the_loss():
    found = summary([0.002, 0.003, 0.004])
    names = ("dense", "vertical_slash-0.6")
    variants = {each.name: each for each in A.variants}
    seconds = dict(zip(names, (0.4, 0.1), strict=True))
    done = {
        Cell(0, variants[name]).key: Done("", "", 200, 40.0, seconds[name], 0.2) for name in names
    }
    prices = tables(replace(found, done=done))[1]
    # A model that does not train has no step, and dense inference no price of its own.
    untrained, sparse = Cell(0, variants["untrained"]), variants["vertical_slash-0.6"]
    done[untrained.key] = Done("", "", 0, 0.0, 0.0, 1.0)
    more = [Compared(each, "dense", (0,), {}, {}, {}, 0.0, 1.0)
            for each in (variants["untrained"], sparse)]  # fmt: skip
    compared = (*found.compared, *more)
    assert tables(replace(found, done=done, compared=compared))[1].rows == prices.rows
    assert [row[:4] for row in prices.rows] == [
        ["dense", "50.0%", "0.400", "1.00x"], ["vertical_slash-0.6", "50.0%", "0.100", "4.00x"],
    ]  # fmt: skip


def test_predictions_name_the_seeds_that_judge_them():
    found = summary([0.002, 0.003, 0.004])
    late = replace(found.outcomes[0].prediction, seeds=(1, 2))
    outcomes = (Outcome(late, HELD, "+1"), found.outcomes[1])
    table = tables(replace(found, outcomes=outcomes))[0]
    assert [row[3] for row in table.rows] == ["1, 2", "0, 1, 2"]
    assert "written after the other seeds had run" in table.note
    assert not tables(found)[0].note


def test_a_toy_shows_only_the_predictions_that_it_judges():
    found = summary([0.002, 0.003, 0.004])
    table = tables(replace(found, tier=replace(A, gate=None)))[0]
    assert [row[0] for row in table.rows] == [FAILED, HELD]
    assert table.note == "1 other is not judged yet, or not at this size."


def test_the_terminal_and_json_show_the_same(capsys):
    found = summary([0.002, 0.003, 0.004])
    show_summary(Console(width=200), found)
    text = capsys.readouterr().out
    assert "loses nothing" in text
    assert "that <failed>" in text
    values = json.loads(json.dumps(document(found)))
    (sparse,) = (
        row
        for row in values["compared"]
        if (row["variant"], row["attention"]) == ("vertical_slash-0.6", "vertical_slash")
    )
    assert sparse["verdict"] == {"loss": "loses nothing"}
    assert learning_tables.TOY not in text
