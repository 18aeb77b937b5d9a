"""A damaged file of a run is named in one line, and hides nothing of the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.resolved_file import save
from mtrain_cli.evaluation.results import Result, ResultsFolder
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.launch.run_status import StateReporter, read_state, write_state
from mtrain_cli.reporting.run_files import read_run_files


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run with a file of each kind."""
    save(compose(["train.steps=3"]), tmp_path / "resolved.yaml")
    StateReporter(RunDir(tmp_path), chosen={"train.kernel": "sdpa"}, steps=3)
    (tmp_path / "environment.json").write_text('{"command": "mtrain train"}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n')
    (tmp_path / "evaluations.jsonl").write_text(
        '{"step": 0, "loss": 1.0, "tokens": 2, "sequences": 1, "seconds": 1.0, "attention": "dense"'
        ', "buckets": []}\n'
    )
    (tmp_path / "restarts.jsonl").write_text(
        '{"time": 1.0, "reason": "x", "rank": 0, "reached": 2, "step": 1, "workers": 1}\n'
    )
    folder = ResultsFolder.open(tmp_path / "evaluation", "..")
    folder.add_result(Result("k1", "niah", 512, "dense", "", 3, 2, 50.0, 5.0, "%"))
    return tmp_path


def test_an_undamaged_run_has_everything(run: Path):
    files = read_run_files(run)
    assert files.damage == ()
    assert files.state is not None
    assert files.state.chosen == {"train.kernel": "sdpa"}
    assert (files.steps_wanted, files.settings["train.steps"]) == (3, 3)
    assert files.facts == {"command": "mtrain train"}
    counts = (files.metrics, files.evaluations, files.results, files.restarts)
    assert list(map(len, counts)) == [2, 1, 1, 1]
    assert read_run_files(run / "evaluation").damage == ()
    (run / "empty").mkdir()
    assert read_run_files(run / "empty").damage == ()


@pytest.mark.parametrize("left", ["metrics.jsonl", "state.json"])
def test_the_missing_configuration_of_a_run_is_named(run: Path, left: str):
    for name in {"metrics.jsonl", "state.json", "resolved.yaml"} - {left}:
        (run / name).unlink()
    line = f"{run / 'resolved.yaml'}: missing; settings are not shown"
    assert line in read_run_files(run).damage


@pytest.mark.parametrize(
    ("name", "lost"),
    [("state.json", "choices of the run are"), ("environment.json", "command and machine are")],
)
def test_a_missing_file_of_a_run_is_named_with_what_it_had(run: Path, name: str, lost: str):
    (run / name).unlink()
    assert read_run_files(run).damage == (f"{run / name}: missing; {lost} not shown",)


def test_a_folder_of_evaluations_alone_lacks_no_file_of_a_run(run: Path):
    for name in ("metrics.jsonl", "state.json", "resolved.yaml", "environment.json"):
        (run / name).unlink()
    assert read_run_files(run).damage == ()


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("resolved.yaml", "settings are"),
        ("state.json", "choices of the run are"),
        ("environment.json", "command and machine are"),
    ],
)
def test_a_folder_in_the_place_of_a_file_is_named(run: Path, name: str, lost: str):
    (run / name).unlink()
    (run / name).mkdir()
    assert read_run_files(run).damage == (f"{run / name}: is a folder; {lost} not shown",)


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("resolved.yaml", "settings are not shown"),
        ("state.json", "choices of the run are not shown"),
        ("environment.json", "command and machine are not shown"),
        ("metrics.jsonl", "line 1 is damaged; this step is not shown"),
        ("evaluations.jsonl", "line 1 is damaged; this evaluation is not shown"),
        ("evaluation/results.jsonl", "line 1 is damaged; this result is not shown"),
        ("evaluation/evaluation.json", 'Write {"model": ".."} into it and give'),
        ("restarts.jsonl", "1 unreadable line skipped"),
    ],
)
def test_one_line_names_a_damaged_file_and_what_is_missing(run: Path, name: str, lost: str):
    whole = read_run_files(run)
    (run / name).write_text("{\n")
    files = read_run_files(run)
    (line,) = files.damage
    assert line.startswith(f"{run / name}: ")
    assert lost in line
    shown = "metrics", "evaluations", "restarts", "settings", "facts", "results"
    changed = [one for one in shown if getattr(files, one) != getattr(whole, one)]
    assert len(changed) <= 1


def test_a_wrong_number_of_steps_is_named(run: Path):
    file = run / "resolved.yaml"
    file.write_text(file.read_text().replace("steps: 3\n", "steps: three\n", 1))
    files = read_run_files(run)
    assert files.damage == (f"{file}: train.steps=three: expected a whole number",)
    assert files.steps_wanted is None
    assert files.settings


@pytest.mark.parametrize(
    ("lines", "remark"),
    [
        ('{"step": 1, "loss": 2.0}\n{"step": 3, "loss": 1.0}\n', "step 2 is missing"),
        (
            '{"step": 1, "loss": 2.0}\n{"step": -2, "loss": 1.0}\n{"step": 3, "loss": NaN}\n',
            "line 2 is damaged; this step is not shown; step 2 is missing; "
            "step 3 has no finite loss",
        ),
    ],
)
def test_one_line_names_missing_steps_and_losses(run: Path, lines: str, remark: str):
    (run / "metrics.jsonl").write_text(lines)
    assert read_run_files(run).damage == (f"{run / 'metrics.jsonl'}: {remark}",)


def test_held_out_losses_that_are_not_finite_are_named(run: Path):
    file = run / "evaluations.jsonl"
    first = file.read_text()
    bucket = '{"begin": 0, "end": 128, "tokens": 2, "loss": null}'
    second = first.replace("[]", f"[{bucket}]").replace('"step": 0', '"step": 3')
    file.write_text(first.replace('"loss": 1.0', '"loss": NaN') + second)
    files = read_run_files(run)
    assert files.damage == (f"{file}: steps 0, 3 have no finite loss",)
    assert len(files.evaluations) == 2
    file.write_text(second.replace('"tokens": 2, "loss": null', '"tokens": 0, "loss": null'))
    assert read_run_files(run).damage == (), "a range of context without tokens has no loss"


def test_steps_that_a_run_has_done_are_missed_in_its_metrics(run: Path):
    StateReporter(RunDir(run), steps=3, step=3).end("stopped")
    file = run / "metrics.jsonl"
    assert read_run_files(run).damage == (f"{file}: step 3 is missing",)
    file.write_text("")
    assert read_run_files(run).damage == (f"{file}: steps 1-3 are missing",)
    file.unlink()
    assert read_run_files(run).damage == (f"{file}: missing, although the run has done 3 steps",)


def test_the_steps_of_a_run_that_has_not_ended_may_not_be_written_yet(run: Path):
    state = read_state(RunDir(run))
    assert state is not None
    for phase, lines in (("training", 0), ("finished", 1)):
        write_state(RunDir(run), replace(state, phase=phase, step=3))
        damage = read_run_files(run).damage
        assert len(damage) == lines, damage
    assert "step 3 is missing" in damage[0]
