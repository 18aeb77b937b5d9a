"""A run of a study names the study's command, and any other run none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.launch.local import _resume_hint
from mtrain_cli.launch.run_dir import RunDir, study_command
from mtrain_cli.training.loop import _next_commands
from mtrain_studies.cells import Study
from mtrain_studies.tiers import TIERS

WORDS = ["mtrain", "study", "learning", "--out", "my study"]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Return the run of a cell."""
    Study(tmp_path, TIERS["tiny"]).save(WORDS)
    path = tmp_path / "dense" / "seed-0" / "run"
    path.mkdir(parents=True)
    return RunDir(path)


def test_a_run_of_a_study_resumes_with_the_command_of_the_study(run: RunDir):
    command = "mtrain study learning --out 'my study'"
    assert study_command(run.path) == command
    assert run.resume_command == command
    assert _resume_hint(run) == f"continue the study: {command}", "also without a checkpoint"
    study = Study.open(run.path.parents[2])
    assert study is not None
    assert study.tier == TIERS["tiny"]


@pytest.mark.parametrize(
    "about", [None, "{", "[]", "{}", '{"command": "x"}', '{"command": ["mtrain", 1]}']
)
def test_another_run_resumes_by_itself(run: RunDir, about: str | None):
    other = RunDir(run.path.parent)
    assert other.resume_command == f"mtrain train --resume {other.path}"
    file = run.path.parents[2] / "study.json"
    file.unlink() if about is None else file.write_text(about)
    assert study_command(run.path) == ""
    assert run.resume_command == f"mtrain train --resume {run.path}"
    assert study_command(Path("/run")) == ""


def test_the_summary_of_a_training_names_the_study_only_while_steps_are_left(run, monkeypatch):
    config = compose(["train.steps=9"])
    for step, commands in ((None, []), (7, [("resume", run.resume_command)]), (9, [])):
        monkeypatch.setattr(RunDir, "last_step", lambda _, step=step: step)
        assert _next_commands(run, config) == commands
    labels = [label for label, _ in _next_commands(RunDir(run.path.parent), config)]
    assert labels == ["resume", "export"]


@pytest.mark.parametrize(
    "words",
    [
        ["rm", "-rf", "/"],
        ["mtrain", "study"],
        ["mtrain", "train", "--resume", "x"],
        [*WORDS, "a\nerror: no"],
        [*WORDS, "\x1b[2J"],
        [*WORDS, "\u202e"],
        [*WORDS, "\ud800"],
        [],
    ],
)
def test_words_that_are_no_command_of_a_study_are_not_shown(run: RunDir, words: list[str]):
    (run.path.parents[2] / "study.json").write_text(json.dumps({"command": words}))
    said = study_command(run.path)
    assert said == "mtrain study learning, with the options it was started with"
    assert run.resume_command == said


def test_only_the_folder_named_run_belongs_to_a_study(run: RunDir):
    other = run.path.with_name("other")
    other.mkdir()
    assert study_command(other) == ""
    assert study_command(run.path) != ""
