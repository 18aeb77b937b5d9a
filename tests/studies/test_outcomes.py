"""Paired differences, the words for them, and predictions, on numbers made by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from studies.finished_cell import write_results

from mtrain_cli.evaluation.results import NATS, PERCENT, RESULTS, Part, Result, ResultsFolder
from mtrain_extras.studies import outcomes
from mtrain_extras.studies.cells import DONE, EVALUATION, Done, Study
from mtrain_extras.studies.outcomes import (
    BETTER,
    FAILED,
    HELD,
    MEASURES,
    NOTHING,
    OPEN,
    UNKNOWN,
    WORSE,
    Evaluated,
    Measured,
    Prediction,
    compare,
    damage_of,
    judge,
    judge_key_tokens,
    losses,
    needles,
    outcome,
    place_of,
    read_cell,
    spread_of,
    summarize,
    unlike_dense,
)
from mtrain_extras.studies.t_interval import Interval, interval
from mtrain_extras.studies.tiers import AGAIN, DENSE, FIXED, TIERS, Cell, digest

A = TIERS["a"]
SPARSE = "vertical_slash-0.6"
PROBE, TAIL = 128, 2048


def measured(name, seed, attention=DENSE, buckets=None, **values):
    return Measured(Cell(seed, A.variant(name)), attention, 10.0, 0.5, values, buckets or {}, {})


def three(difference: list[float], again: float = 0.01, control: float = 0.5) -> list[Measured]:
    found = []
    for seed, more in enumerate(difference):
        dense = 2.0 + seed
        found += [
            measured(DENSE, seed, loss=dense),
            measured(AGAIN, seed, loss=dense + (again if seed else -again)),
            measured(SPARSE, seed, "vertical_slash", loss=dense + more),
            measured(FIXED, seed, FIXED, loss=dense + control + more / 100),
        ]
    return found


def sparse_of(found: list[Measured]):
    compared = compare(A, found, spread_of(found))
    return next(each for each in compared if each.variant.name == SPARSE)


def test_differences_are_paired_by_seed():
    """The seeds differ by 1 nat, and the pairs by a thousandth."""
    each = sparse_of(three([0.002, 0.003, 0.004]))
    assert each.difference["loss"].mean == pytest.approx(0.003)
    assert each.difference["loss"].high - 0.003 == pytest.approx(4.302653 * 0.001 / 3**0.5)
    assert each.mean["loss"].mean == pytest.approx(3.003)
    assert each.seeds == (0, 1, 2)


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        ([0.002, 0.003, 0.004], NOTHING),
        ([0.02, 0.021, 0.022], WORSE),
        ([-0.02, -0.021, -0.022], BETTER),
        ([0.0, 0.02, -0.02], OPEN),
        ([0.003], OPEN),  # one seed decides nothing
    ],
)
def test_loses_nothing_needs_the_interval_inside_the_spread(difference, words):
    assert sparse_of(three(difference)).verdict["loss"] == words


@pytest.mark.parametrize(
    ("difference", "words"),
    [
        ([0.002, 0.003, 0.004], OPEN),
        ([0.010, 0.011, 0.012], OPEN),  # as dense with other data
        ([0.02, 0.021, 0.022], WORSE),
        ([-0.02, -0.021, -0.022], BETTER),
        ([0.003], OPEN),
    ],
)
def test_key_tokens_are_those_of_dense_so_a_dense_training_may_be_worse_on_them(difference, words):
    found = [
        replace(one, values={"key_loss": one.values["loss"], "loss": one.values["loss"]})
        for one in three(difference)
    ]
    assert sparse_of(found).verdict["key_loss"] == words


def test_nothing_is_claimed_if_even_the_control_does_not_lose():
    found = three([0.002, 0.003, 0.004], control=0.0)
    assert sparse_of(found).difference["loss"].is_inside(spread_of(found)["loss"])
    assert sparse_of(found).verdict["loss"] == OPEN
    without = [one for one in three([0.002, 0.003, 0.004]) if one.cell.name != FIXED]
    assert sparse_of(without).verdict["loss"] == OPEN


def test_under_dense_inference_the_control_must_lose_under_dense_inference():
    small = [0.002, 0.003, 0.004]
    own = [
        replace(one, attention=DENSE) if one.cell.name == SPARSE else one for one in three(small)
    ]
    assert sparse_of(own).verdict["loss"] == OPEN
    both = [replace(one, attention=DENSE) for one in three(small)]
    assert sparse_of(both).verdict["loss"] == NOTHING


def test_a_control_that_loses_only_under_dense_inference_shows_nothing():
    found = [
        replace(one, attention=DENSE) if one.cell.name == FIXED else one
        for one in three([0.002, 0.003, 0.004])
    ]
    assert sparse_of(found).verdict["loss"] == OPEN


def test_the_spread_is_the_largest_difference_of_any_sign():
    assert spread_of(three([0.0, 0.0, 0.0], again=0.25)) == {"loss": 0.25}
    signs = {0: -0.5, 1: 0.25, 2: -0.125}
    found = [
        measured(name, seed, loss=2.0 + more * (name == AGAIN))
        for seed, more in signs.items()
        for name in (DENSE, AGAIN)
    ]
    assert spread_of(found) == {"loss": 0.5}


def test_dense_trainings_have_no_verdict():
    compared = compare(A, three([0.002, 0.003, 0.004]), {"loss": 0.01})
    dense, again = (
        next(each for each in compared if each.variant.name == name) for name in (DENSE, AGAIN)
    )
    assert (dense.difference, dense.verdict) == ({}, {})
    assert again.verdict == {"loss": outcomes.CONTROL}


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.0, 1.0, OPEN),
        (-1.0, 0.0, OPEN),
        (0.01, 1.0, WORSE),
        (-1.0, -0.01, BETTER),
        (-0.5, 0.5, NOTHING),
        (-0.51, 0.5, OPEN),
        (-0.5, 0.51, OPEN),
        (0.01, 0.5, NOTHING),
    ],
)
def test_words_change_at_0_and_at_the_spread(low, high, words):
    assert judge(Interval(0.0, low, high, 3), 0.5, lower=True) == words


@pytest.mark.parametrize(("low", "words"), [(0.5, OPEN), (0.51, WORSE)])
def test_key_tokens_are_worse_beyond_the_spread(low, words):
    assert judge_key_tokens(Interval(0.0, low, 1.0, 3), 0.5, lower=True) == words


def test_without_a_second_dense_training_nothing_is_claimed():
    found = [one for one in three([0.0, 0.0, 0.0]) if one.cell.name != AGAIN]
    assert spread_of(found) == {}
    assert sparse_of(found).verdict["loss"] == outcomes.CONTROL


def test_more_needles_are_better():
    assert judge(interval([-5.0, -6.0, -5.5]), 1.0, lower=False) == WORSE
    assert judge(interval([-5.0, -6.0, -5.5]), 1.0, lower=True) == BETTER


def test_questions_are_told_apart_by_their_place():
    length = A.long_seq
    places = [length - 1, length - PROBE, length - PROBE - 1, length - TAIL, length - TAIL - 1, 5]
    assert [place_of(at, length, A) for at in places] == [
        "inside", "inside", "tail", "tail", "elsewhere", "elsewhere",
    ]  # fmt: skip
    rows = [{"hits": [[0.05, 1], [0.99, 0], [1.0, 1]], "places": [length - 1, 5, 6]}]
    values, depths = needles(rows, A)
    assert values == {
        "needles": pytest.approx(200 / 3), "inside": 100.0, "elsewhere": 50.0, "outside": 50.0,
    }  # fmt: skip
    assert depths == {("inside", 0): 100.0, ("elsewhere", 9): 50.0}


def test_the_long_loss_counts_tokens_with_long_context():
    parts = (Part(0, 4096, 9, 5.0), Part(8192, 16384, 1, 2.0), Part(16384, 65536, 3, 3.0))
    keys = Part(4096, 65536, 7, 1.5)
    result = Result(
        "k", "perplexity", 65536, DENSE, "", 1, 2, 4.0, None, NATS, parts=parts, key_tokens=keys
    )
    values, buckets = losses(result, 8192)
    assert values == {"loss": 4.0, "long_loss": 2.75, "key_loss": 1.5}
    assert buckets[8192, 16384] == 2.0


def test_seconds_of_training_leave_out_the_compilation_of_the_first_steps():
    text = Result("k", "perplexity", 65536, DENSE, "", 1, 2, 4.0, None, NATS)
    questions = Result("n", "niah", 65536, DENSE, "", 1, 2, 90.0, None, PERCENT)
    done = Done("d", "c", steps=200, seconds=105.0, step_seconds=0.46, density=1.0)
    (found,) = read_cell(Evaluated([text, questions], []), A, Cell(0, A.variant(DENSE)), done)
    assert found.seconds == pytest.approx(92.0)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_cell_with_damaged_samples_is_named(tmp_path, rows):
    whole = [
        Result(task, task, 65536, DENSE, "", 1, 2, 4.0, None, NATS) for task in ("text", "niah")
    ]
    samples = [{"key": result.key} for result in whole for _ in range(rows)]
    lines = damage_of(Evaluated(whole, samples), Study(tmp_path, A), Cell(0, A.variant(DENSE)))
    cell = f"{tmp_path}/dense/seed-0"
    assert lines == [
        f"{cell}/evaluation/samples.jsonl: damaged, so numbers of this cell are missing. "
        f"Delete {cell} and run the study again."
    ] * (rows < 2)


@pytest.mark.parametrize("task", ["perplexity", "niah"])
def test_a_cell_without_one_of_its_tasks_is_not_measured(task):
    alone = Result("k", task, 65536, DENSE, "", 1, 2, 4.0, None, NATS)
    done = Done("d", "c", steps=2, seconds=1.0, step_seconds=0.5, density=1.0)
    assert read_cell(Evaluated([alone], []), A, Cell(0, A.variant(DENSE)), done) == []


def test_a_summary_has_the_gates_of_the_bases(tmp_path):
    study, base = Study(tmp_path, A), Cell(1)
    results = study.path(base) / EVALUATION / RESULTS
    done = Done(
        digest(A, base), "c", steps=2, seconds=1.0, step_seconds=0.5, density=1.0, gate=96.5
    )
    write_results(study, base)
    (study.path(base) / DONE).write_text(json.dumps(asdict(done)))
    assert summarize(study).gates == {1: 96.5}
    results.unlink()
    (line,) = summarize(study).damage
    assert line.startswith(f"{results}: missing, so base/seed-1 does not count as finished. ")


def test_a_summary_reads_the_files_of_a_cell_once_and_survives_damaged_samples(
    tmp_path, monkeypatch
):
    study, cell = Study(tmp_path, A), Cell(0, A.variant(DENSE))
    text = Result("k", "perplexity", 65536, DENSE, "", 1, 1, 4.0, None, NATS)
    questions = Result("n", "niah", 65536, DENSE, "", 1, 2, 90.0, None, PERCENT)
    folder = ResultsFolder.open(study.path(cell) / EVALUATION, "..")
    for result in (text, questions):
        folder.add_result(result)
    folder.add_sample({"key": "k", "index": 0})
    whole = {"key": "n", "hits": [[0.5, 1]], "places": [5]}
    for index, row in enumerate(
        (
            whole,
            {**whole, "hits": [5]},
            {**whole, "hits": [[1]]},
            {**whole, "places": 7},
            {"key": 5},
        )
    ):
        folder.add_sample({"key": "n", "index": index, **row})
    done = Done(digest(A, cell), "c", steps=2, seconds=1.0, step_seconds=0.5, density=1.0)
    (study.path(cell) / DONE).write_text(json.dumps(asdict(done)))
    read: list[Path] = []
    real = outcomes.read_sample_rows
    monkeypatch.setattr(
        outcomes, "read_sample_rows", lambda path: (read.append(path), real(path))[1]
    )
    summary = summarize(study)
    assert read == [folder.path]
    (found,) = summary.measured
    assert found.values == {"loss": 4.0, "needles": 100.0, "elsewhere": 100.0, "outside": 100.0}
    (line,) = summary.damage
    assert line.startswith(f"{folder.path}/samples.jsonl: damaged")
    other = study.path(Cell(1, A.variant(DENSE))) / DONE
    other.parent.mkdir()
    other.write_text("{")
    summary = summarize(study)
    assert list(summary.done) == [cell.key]
    assert summary.damage[1].startswith(f"{other}: damaged (line 1, column 2")


def predicted(rule, limit=0, measure="long_loss", attention="own", cell=SPARSE, **more):
    return Prediction("p", "2026-11-26", "text", cell, attention, measure, rule, limit, **more)


@pytest.mark.parametrize(
    ("rule", "limit", "own", "state"),
    [
        ("at_most_percent", 25, 5.0, HELD),
        ("at_most_percent", 25, 5.01, FAILED),
        ("above_percent", 25, 5.0, FAILED),
        ("above_percent", 25, 5.01, HELD),
        ("loses_at_most", 2, 2.0, HELD),
        ("loses_at_most", 2, 1.99, FAILED),
        ("loses_more_than", 2, 2.0, FAILED),
        ("loses_more_than", 2, 1.99, HELD),
        ("below_dense", 0, 4.0, FAILED),
        ("below_dense", 0, 3.99, HELD),
        ("below_cell", 0, 4.5, FAILED),
        ("below_cell", 0, 4.49, HELD),
        ("within_spread", 0, 4.25, HELD),
        ("within_spread", 0, 4.26, FAILED),
        ("within_spread", 0, 3.75, HELD),
        ("within_spread", 0, 3.74, FAILED),
    ],
)
def test_a_rule_ends_at_its_limit(rule, limit, own, state):
    found = [
        measured(DENSE, 0, long_loss=4.0),
        measured(AGAIN, 0, long_loss=4.25),
        measured("moba", 0, "moba", long_loss=4.5),
        measured(SPARSE, 0, "vertical_slash", long_loss=own),
    ]
    beside = "moba" if rule == "below_cell" else ""
    assert outcome(predicted(rule, limit, beside=beside), found, A).state == state


@pytest.mark.parametrize(("back", "state"), [(66.0, HELD), (65.9, FAILED)])
def test_half_of_the_lost_needles_is_enough(back, state):
    found = [
        measured(DENSE, 0, needles=96.0),
        measured("moba", 0, "moba", needles=0.0),
        measured(SPARSE, 0, "vertical_slash", needles=36.0),
        measured(SPARSE, 0, DENSE, needles=back),
    ]
    recovers = predicted("recovers_half", 50, "needles", DENSE)
    assert outcome(recovers, found, A).state == state
    nothing = [replace(one, values={"needles": 96.0}) for one in found]
    each = outcome(recovers, nothing, A)
    assert (each.state, each.found) == (UNKNOWN, "the measurement has no such part")


@pytest.mark.parametrize("measure", ["needles", "inside", "tail", "elsewhere", "outside"])
def test_dense_must_find_half_of_the_needles(measure):
    for share, state in ((50.0, HELD), (49.9, UNKNOWN)):
        found = [
            measured(DENSE, 0, **{measure: share}),
            measured(SPARSE, 0, "vertical_slash", **{measure: share}),
        ]
        assert outcome(predicted("loses_at_most", 5, measure), found, A).state == state


@pytest.mark.parametrize("worst", [(8192, 16384), (16384, 65536)])
def test_the_worst_range_of_context_begins_at_the_length_of_the_base(worst):
    spans = {(4096, 8192): 4.0, (8192, 16384): 4.0, (16384, 65536): 4.0}
    found = [
        measured(DENSE, 0, buckets=spans),
        measured(SPARSE, 0, "vertical_slash", buckets={**spans, (4096, 8192): 8.0, worst: 5.0}),
    ]
    rule = predicted("at_most_percent", 25, "worst_long_bucket")
    assert outcome(rule, found, A).found == "+25 % in the worst range, 1 seed"


def test_what_dense_never_finds_cannot_be_lost():
    found = [measured(DENSE, 0, inside=2.0), measured(SPARSE, 0, "vertical_slash", inside=1.0)]
    each = outcome(predicted("loses_at_most", 2, "inside"), found, A)
    assert (each.state, each.found) == (
        UNKNOWN, "dense finds only 2.0 %, so there is nothing to lose",
    )  # fmt: skip


def test_a_prediction_written_after_some_seeds_is_judged_by_the_others_only():
    found = [
        one
        for seed, loss in enumerate((9.0, 2.02, 2.04))
        for one in (
            measured(DENSE, seed, long_loss=2.0),
            measured(AGAIN, seed, long_loss=2.01 if seed else 9.0),
            measured(SPARSE, seed, "vertical_slash", long_loss=loss),
        )
    ]
    late = {"seeds": (1, 2)}
    each = outcome(predicted("at_most_percent", 2, **late), found, A)
    assert (each.state, each.found[:6], each.found[-7:]) == (HELD, "+1.5 [", "2 seeds")
    assert outcome(predicted("at_most_percent", 2), found, A).state == FAILED
    within = outcome(predicted("within_spread", **late), found, A)
    assert (within.state, "(spread 0.01)" in within.found) == (FAILED, True)
    assert outcome(predicted("within_spread"), found, A).state == HELD  # seed 0 differs by 7
    alone = outcome(predicted("within_spread"), [one for one in found if one.cell.name != AGAIN], A)
    assert (alone.state, alone.found) == (UNKNOWN, "dense-again of no such seed is finished")
    # The seeds are those of tier a.
    other = outcome(predicted("at_most_percent", 2, **late), found, replace(A, name="b"))
    assert (other.state, other.found[-7:]) == (FAILED, "3 seeds")
    early = [one for one in found if one.cell.seed == 0]
    each = outcome(predicted("at_most_percent", 2, **late), early, A)
    assert (each.state, each.found) == (UNKNOWN, "no such cell of the seeds 1, 2 is finished")


def test_a_summary_begins_with_the_predictions_that_failed(tmp_path, monkeypatch):
    states = [UNKNOWN, HELD, FAILED, HELD, FAILED]
    known = [predicted("below_dense", number) for number in range(5)]
    monkeypatch.setattr(outcomes, "read_predictions", lambda: known)
    monkeypatch.setattr(
        outcomes, "outcome", lambda p, *_: outcomes.Outcome(p, states[int(p.limit)], "")
    )
    found = [(one.state, one.prediction.limit) for one in summarize(Study(tmp_path, A)).outcomes]
    assert found == [(FAILED, 2), (FAILED, 4), (HELD, 1), (HELD, 3), (UNKNOWN, 0)]


def test_a_tier_judges_predictions_about_its_own_cells_only(tmp_path):
    tiny, every = TIERS["tiny"], outcomes.read_predictions()
    shown = [one.prediction for one in summarize(Study(tmp_path, tiny)).outcomes]
    assert shown == [one for one in every if one.cell not in ("vertical_slash-0.9", "moba")]
    assert 0 < len(shown) < len(every)
    assert [one.prediction for one in summarize(Study(tmp_path, A)).outcomes] == every
    assert not predicted("below_cell", cell=SPARSE, beside="moba").is_about(tiny)


def test_a_prediction_may_compare_two_cells_of_a_seed():
    windows = f"{SPARSE}-windows"
    found = [
        measured(DENSE, 0, needles=98.0),
        measured(SPARSE, 0, "vertical_slash", needles=16.0),
        measured(SPARSE, 0, DENSE, needles=1.0),
        measured(windows, 0, "vertical_slash", needles=8.0),
    ]
    rule = predicted("below_cell", measure="needles", cell=windows, beside=SPARSE)
    each = outcome(rule, found, A)
    assert (each.state, each.found) == (HELD, f"-8 points ({windows} minus {SPARSE}), 1 seed")
    assert outcome(predicted("below_cell", measure="needles", beside=windows), found, A).state == (
        FAILED
    )
    second = [
        measured(DENSE, 1, needles=98.0),
        measured(SPARSE, 1, "vertical_slash", needles=6.0),
        measured(windows, 1, "vertical_slash", needles=8.0),
    ]
    each = outcome(rule, found + second, A)  # -8 and +2
    assert (each.found.partition(" ")[0], each.found[-7:]) == ("-3", "2 seeds")
    alone = outcome(rule, [one for one in found if one.cell.name != SPARSE], A)
    assert (alone.state, alone.found) == (UNKNOWN, f"no cell {SPARSE} is finished")


FIRST = (
    "p90-loss", "inside", "outside-fails", "outside-recovers", "windows-repair",
    "dense-layers-repair", "equal-time", "control", "p60-loss", "moba-needles",
)  # fmt: skip


def test_the_predictions_of_the_repository_are_about_cells_of_tier_a():
    names = {variant.name for variant in A.variants}
    predictions = outcomes.read_predictions()
    for prediction in predictions:
        assert prediction.cell in names
        assert prediction.beside in ("", *names)
        assert prediction.measure in (*outcomes.MEASURES, outcomes.WORST_BUCKET)
        assert outcome(prediction, [], A).state == UNKNOWN
        everything = [
            measured(name, seed, attention, {(8192, 16384): 2.0}, **dict.fromkeys(MEASURES, 90.0))
            for seed in A.seeds
            for name in names
            for attention in (DENSE, "own")
        ]
        outcome(prediction, everything, A)  # the rule is known
    assert [each.id for each in predictions][: len(FIRST)] == list(FIRST)
    assert all(each.seeds in ((), (1, 2)) for each in predictions)
    assert len({each.id for each in predictions}) == len(predictions)


def test_cells_with_another_base_than_dense_are_named():
    def done(base: str) -> Done:
        return Done("d", "c", 1, 1.0, 1.0, 1.0, base=base)

    finished = {
        "base/seed-0": done(""), "dense/seed-0": done("x"), "moba/seed-0": done("x"),
        "dense/seed-1": done("y"), "moba/seed-1": done("z"), "fixed/seed-1": done("z"),
        "dense/seed-2": done(""), "moba/seed-2": done("z"),  # of an earlier version
        "moba/seed-3": done("z"),
    }  # fmt: skip
    assert unlike_dense(finished, "base") == {"seed-1": ["moba/seed-1", "fixed/seed-1"]}


def test_a_cell_with_another_base_or_other_texts_than_dense_does_not_count(tmp_path):
    study = Study(tmp_path, A)
    cells = ((DENSE, "x", "c"), (SPARSE, "z", "c"), ("moba", "x", "other"))
    for name, base, corpus in cells:
        cell = Cell(0, A.variant(name))
        write_results(study, cell)
        done = Done(digest(A, cell), corpus, 2, 1.0, 0.5, 1.0, base=base)
        (study.path(cell) / DONE).write_text(json.dumps(asdict(done)))
    summary = summarize(study)
    assert [each.cell.name for each in summary.measured] == [DENSE]
    assert list(summary.done) == ["dense/seed-0"]
    assert summary.damage == (
        f"{SPARSE}/seed-0: began with other weights than dense/seed-0, so the numbers are left "
        "out.",
        "moba/seed-0: has other texts than dense/seed-0, so the numbers are left out.",
    )
