"""`mtrain study learning`: the list of runs, mistakes, and one small study in two sittings."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from command import mtrain
from studies.finished_cell import write_results
from typer.testing import CliRunner, Result

from mtrain_cli.commands.app import app
from mtrain_cli.launch import local
from mtrain_extras.studies import cells, package_corpus, study_learning
from mtrain_extras.studies.cells import Done, Study
from mtrain_extras.studies.tiers import TIERS, cells_of, digest

NO_TENSORS = b"\2" + bytes(7) + b"{}"  # a whole safetensors file


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["study", "learning", *map(str, arguments)])


def test_a_dry_run_lists_the_cells_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("--tier", "a", "--dry-run", "--seeds", "1")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    for cell in cells_of(TIERS["a"], (), [1]):
        (row,) = [line for line in lines if line.startswith(f" {cell.name} ")]
        assert " 1 " in row
    assert any("p_v=p_s=0.6 windows=16" in line for line in lines)
    assert max(len(line.rstrip()) for line in lines if not line.startswith("left:")) <= 100
    assert "minutes at an assumed 160 TFLOP/s of each worker for a base" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_counts_a_damaged_cell_as_not_finished(tmp_path):
    done = tmp_path / "dense" / "seed-0" / "done.json"
    done.parent.mkdir(parents=True)
    done.write_text("{")
    result = run("--dry-run", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    (row,) = [line for line in result.stdout.splitlines() if line.startswith(" dense ")]
    assert " 0, 1 " in row
    assert " ".join(result.stdout.split()).endswith(
        f"so dense/seed-0 does not count as finished. Delete {done.parent} and run the study again"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--tier c", "--tier c: expected tiny, a, b"),
        (
            "--only sparse",
            "--only sparse: no such cell; allowed: base, dense, vertical_slash-0.6, ",
        ),
        ("--only base,base", "--only base,base: base appears twice; give each name once"),
        ("--seeds 5", "--seeds 5: tier tiny has the seeds 0, 1"),
        ("--seeds 0,0", "--seeds 0,0: 0 appears twice; give each seed once"),
        ("--seeds x", "--seeds x: expected whole numbers; allowed: 0, 1"),
        ("--seeds=-1", "--seeds -1: expected whole numbers; allowed: 0, 1"),
        ("--seeds 0,0.5", "--seeds 0,0.5: expected whole numbers; allowed: 0, 1"),
        (f"--seeds {'9' * 20}", f"--seeds {'9' * 20}: expected whole numbers; allowed: 0, 1"),
        ("--only=", "--only '': is empty; give NAME,..."),
        ("--only ,", "--only ',': names no cell; allowed: base, dense, vertical_slash-0.6, "),
        ("--seeds=", "--seeds '': is empty; give N,..."),
        ("--budget-minutes -1", "--budget-minutes -1: must be from 0 to 1,000,000"),
        ("--packages nowhere", "--packages nowhere: no such folder"),
        (f"--packages {__file__}", f"--packages {__file__}: is a file; give a folder"),
        ("--packages=", "--packages '': is empty; give DIR"),
        ("--out=", "--out '': is empty; give DIR"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments.split())
    assert result.exit_code == 2
    assert result.stderr.startswith(f"mtrain: {said}")
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_packages_without_text_leave_nothing(tmp_path):
    (tmp_path / "packages").mkdir()
    result = run("--packages", tmp_path / "packages", "--out", tmp_path / "new" / "study")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert "too little Python text" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["packages"]


@pytest.mark.parametrize("dry_run", [["--dry-run"], []])
def test_texts_that_changed_are_refused(tmp_path, dry_run):
    Study(tmp_path, TIERS["tiny"]).save()
    facts = package_corpus.CorpusFacts(1, 1, ("a",), 1, 0, 1, hashlib.sha256(b"old").hexdigest())
    text, about = tmp_path / "corpus/held_out.jsonl", tmp_path / "corpus/corpus.json"
    text.parent.mkdir()
    about.write_text(json.dumps(vars(facts)))
    text.write_text("old")
    assert run("--out", tmp_path, "--dry-run").exit_code == 0
    text.write_text("new")
    result = run("--out", tmp_path, *dry_run)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"mtrain: --out {tmp_path}: the texts in {text.parent} have ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("dry_run", [["--dry-run"], []])
@pytest.mark.parametrize(
    ("name", "shown", "why"),
    [
        ("a\x1bb", "a\\x1bb", "holds a control character; give the path of a file or folder"),
        ("a\nb", "a\\nb", "holds a control character; give the path of a file or folder"),
        ("\udcff", "\\udcff", "is not UTF-8; rename it"),
        ("${HOME}", "${HOME}", "holds ${, which begins the name of a setting; give another folder"),
        ("a" * 256, "a" * 256, "is too long; a name has at most 255 bytes, a path 4095"),
    ],
)
def test_a_folder_that_settings_cannot_name_is_refused(tmp_path, dry_run, name, shown, why):
    result = run("--out", tmp_path / name, *dry_run)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"mtrain: --out {tmp_path}/{shown}: {why}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dry_run", [["--dry-run"], []])
def test_a_folder_of_something_else_is_refused(tmp_path, dry_run):
    file, other, study = tmp_path / "file", tmp_path / "other", tmp_path / "study"
    file.write_text("mine")
    for folder in (other, study):
        folder.mkdir()
    (other / "mine").touch()
    Study(study, TIERS["a"]).save()
    for out, why in (
        (file, "is a file; give a folder"),
        (file / "sub", f"{file} is a file; give a folder"),
        (other, "is not empty and holds no study; give a new folder"),
        (study, "holds a study of tier a; give --tier a, or another folder"),
    ):
        result = run("--out", out, *dry_run)
        assert (result.exit_code, result.stdout) == (2, "")
        assert " ".join(result.stderr.split()) == f"mtrain: --out {out}: {why}"
    assert file.read_text() == "mine"
    assert [path.name for path in other.iterdir()] == ["mine"]


def test_a_study_whose_mark_is_lost_goes_on(tmp_path):
    (tmp_path / "base/mine").mkdir(parents=True)
    assert run("--out", tmp_path, "--dry-run").exit_code == 2, "a folder of that name is no study"
    (tmp_path / "base/seed-0").mkdir()
    assert run("--out", tmp_path, "--dry-run").exit_code == 0
    (tmp_path / "corpus").mkdir()
    (tmp_path / "study.json").write_text("{")
    assert run("--out", tmp_path, "--dry-run").exit_code == 0


def test_a_stop_between_trainings_names_the_command(tmp_path, monkeypatch):
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(study_learning, "_prepare", lambda study, *_: study)
    monkeypatch.setattr(study_learning, "_compute", stop)
    words = ["mtrain", "study", "learning", "--out", str(tmp_path / "it\x9b")]
    monkeypatch.setattr("sys.argv", words)
    result = run("--out", tmp_path / "it")
    assert result.exit_code == 130
    command = shlex.join(words).replace("\x9b", "\\x9b")
    assert " ".join(result.stderr.split()) == f"stopped; continue the study: {command}"


class Console:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def print(self, line: str, **_) -> None:
        self.lines.append(line)


@pytest.fixture
def computed(tmp_path, monkeypatch):
    """A study whose cells take a minute each, by a clock that stands still otherwise."""
    study = Study(tmp_path, TIERS["tiny"], "texts")
    now, keys = [0.0], []

    def compute(study, cell, _train, *, below_gate):  # noqa: ARG001
        keys.append(cell.key)
        now[0] += 60
        done = Done(digest(study.tier, cell), "texts", 1, 60.0, 60.0, 1.0)
        (study.path(cell) / cells.HF).mkdir(parents=True, exist_ok=True)
        (study.path(cell) / cells.HF / "model.safetensors").write_bytes(NO_TENSORS)
        (study.path(cell) / cells.DONE).write_text(json.dumps(vars(done)))
        write_results(study, cell)

    monkeypatch.setattr(cells, "compute", compute)
    monkeypatch.setattr(study_learning.time, "monotonic", lambda: now[0])
    return study, keys


def test_json_is_all_on_standard_output(tmp_path, monkeypatch, capfd):
    def prepare(study, _packages, console):
        console.print("text    7 packages")
        subprocess.run(["echo", "from another process"], check=True)
        return study

    monkeypatch.setattr(study_learning, "_prepare", prepare)
    monkeypatch.setattr(study_learning, "_compute", lambda *_, **__: print("cell    1 of 2"))
    study_learning.learning(out=tmp_path / "new", as_json=True)
    said = capfd.readouterr()
    assert json.loads(said.out)["tier"] == "tiny"
    for line in ("text    7 packages", "from another process", "cell    1 of 2"):
        assert line in said.err


@pytest.mark.slow
def test_sittings_never_repeat_a_cell(computed):
    study, keys = computed
    wanted = cells_of(study.tier)
    sittings = 0
    while len(keys) < len(wanted):
        console = Console()
        study_learning._compute(study, wanted, 4.5, console)
        sittings += 1
    assert keys == [cell.key for cell in wanted]
    assert sittings == -(-len(wanted) // 5)  # no cell begins after 4.5 minutes
    study_learning._compute(study, wanted, 4.5, console)
    assert len(keys) == len(wanted)


def test_a_base_that_is_trained_again_is_announced(computed):
    study, keys = computed
    study_learning._compute(study, cells_of(study.tier, ["base"], [0]), 0.0, Console())
    shutil.rmtree(study.folder / "base/seed-0/hf")
    planned = run("--out", study.folder, "--only", "dense", "--seeds", "0", "--dry-run")
    assert re.search(r"base +dense +0 ", planned.stdout), "not done"
    console = Console()
    study_learning._compute(study, cells_of(study.tier, ["dense"], [0]), 0.0, console)
    assert keys == ["base/seed-0", "base/seed-0", "dense/seed-0"]
    assert [line.strip() for line in console.lines] == [
        "cell    1 of 2: base/seed-0",
        "base/seed-0 is trained again: its weights are gone",
        "cell    2 of 2: dense/seed-0",
    ]


def test_a_dry_run_refuses_cells_of_other_texts(computed):
    study, _ = computed
    study_learning._compute(study, cells_of(study.tier, ["base"], [0]), 0.0, Console())
    study.texts.mkdir()
    (study.texts / "held_out.jsonl").write_text("new")
    sha256 = hashlib.sha256(b"new").hexdigest()
    facts = package_corpus.CorpusFacts(1, 1, ("a",), 1, 0, 1, sha256)
    (study.texts / "corpus.json").write_text(json.dumps(vars(facts)))
    result = run("--out", study.folder, "--dry-run")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"mtrain: --out {study.folder}: base/seed-0 was trained on other texts; give another "
        "folder\n"
    )


def test_a_dry_run_names_damaged_weights(computed):
    study, _ = computed
    study_learning._compute(study, cells_of(study.tier, ["base"], [0]), 0.0, Console())
    file = study.folder / "base/seed-0/hf/model.safetensors"
    words = ("--out", study.folder, "--only", "dense", "--seeds", "0", "--dry-run")
    assert str(file) not in run(*words).stdout
    file.write_bytes(NO_TENSORS[:-1])
    planned = run(*words)
    assert planned.exit_code == 0
    assert f"{file}: truncated or damaged (" in planned.stdout.replace("\n", " ")
    file.rename(file.with_name("of\nmine.safetensors"))
    assert "/of\\nmine.safetensors: truncated" in run(*words).stdout


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_study_keeps_the_steps_of_its_base(tmp_path, monkeypatch, dry_run):
    monkeypatch.setattr(study_learning, "_prepare", None)  # nothing may be computed
    study = Study(tmp_path, replace(TIERS["tiny"], base_steps=61))
    study.save(["mtrain", "study", "learning", "--out", str(tmp_path)])
    before = (tmp_path / "study.json").read_text()
    result = run("--out", tmp_path, "--base-steps", "5", *(["--dry-run"] * dry_run))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--base-steps 5: the study in" in result.stderr
    assert "has 61; give another --out" in " ".join(result.stderr.split())
    assert (tmp_path / "study.json").read_text() == before
    for words in ([], ["--base-steps", "61"]):
        planned = run("--out", tmp_path, *words, "--only", "base", "--dry-run")
        assert planned.exit_code == 0
        assert " 61 " in planned.stdout


def test_a_sitting_says_what_is_left(computed):
    study, keys = computed
    console = Console()
    study_learning._compute(study, cells_of(study.tier, ["dense"]), 1.5, console)
    assert keys == ["base/seed-0", "dense/seed-0"]
    assert console.lines[-1].startswith("budget  2.0 minutes used; 2 cells are left.")


@pytest.mark.slow
def test_a_study_continues_and_ends_with_a_page(tmp_path):
    first = mtrain(
        tmp_path, "study", "learning", "--only", "base", "--seeds", "0", "--budget-minutes", "9"
    )
    assert first.returncode == 0, first.stderr
    folder = tmp_path / "measurements" / "learning-tiny"
    done = folder / "base" / "seed-0" / "done.json"
    before = done.stat().st_mtime_ns
    second = mtrain(
        tmp_path, "study", "learning", "--only", "vertical_slash-0.6,untrained", "--seeds", "0"
    )
    assert second.returncode == 0, second.stderr
    assert "trained to step 12" in second.stdout + second.stderr
    assert done.stat().st_mtime_ns == before
    assert not list(folder.rglob("checkpoints"))
    assert (folder / "predictions.yaml").is_file()
    names = {path.parents[1].name for path in folder.rglob("done.json")}
    assert names == {"base", "dense", "vertical_slash-0.6", "untrained"}
    evaluation = folder / "vertical_slash-0.6" / "seed-0" / "evaluation"
    rows = [json.loads(line) for line in (evaluation / "results.jsonl").open()]
    assert {(row["task"], row["attention"]) for row in rows} == {
        (task, attention)
        for task in ("perplexity", "niah")
        for attention in ("dense", "vertical_slash")
    }
    sparse = {row["score"] for row in rows if row["task"] == "perplexity"}
    assert len(sparse) == 2  # dense and sparse inference differ
    page = (folder / "report.html").read_text()
    assert "Toy size" in page
    assert "vertical_slash-0.6, sparse inference" in page
    again = mtrain(tmp_path, "study", "learning", "--only", "vertical_slash-0.6", "--seeds", "0",
                   "--json")  # fmt: skip
    assert json.loads(again.stdout[again.stdout.index("{") :])["toy"] is True


@pytest.mark.parametrize(("code", "ends"), [(130, 130), (143, 143), (local.WARNED, 143), (0, None)])
def test_a_study_does_not_go_on_after_a_training_that_was_stopped(monkeypatch, code, ends):
    def train(*_: object, **__: object) -> None:
        raise typer.Exit(code)

    monkeypatch.setattr("mtrain_cli.commands.train.train", train)
    if ends is None:
        study_learning._train([])
        return
    with pytest.raises(typer.Exit) as stopped:
        study_learning._train([])
    assert stopped.value.exit_code == ends
