"""A damaged file of a run is named in one line, and hides nothing of the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config import keys
from mtrain_cli.config.documents import UnreadableError
from mtrain_cli.config.resolved_file import save
from mtrain_cli.evaluation.results import Result, ResultsFolder
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.launch.run_status import StateReporter, read_state, write_state
from mtrain_cli.reporting.report_source import read_run, read_settings, with_choices
from mtrain_cli.reporting.sections import attention_lines


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
    (tmp_path / "rollbacks.jsonl").write_text(
        '{"time": 1.0, "reason": "x", "reached": 2, "step": 1, "first": 4, "end": 8}\n'
    )
    folder = ResultsFolder.open(tmp_path / "evaluation", "..")
    folder.add_result(Result("k1", "niah", 512, "dense", "", 3, 2, 50.0, 5.0, "%"))
    return tmp_path


def test_an_undamaged_run_has_everything(run: Path):
    files = read_run(run)
    assert files.damage == ()
    assert files.chosen == {"train.kernel": "sdpa"}
    assert (files.steps_wanted, files.settings["train.steps"]) == (3, 3)
    assert files.facts == {"command": "mtrain train"}
    counts = (files.metrics, files.evaluations, files.results, files.restarts, files.rollbacks)
    assert list(map(len, counts)) == [2, 1, 1, 1, 1]
    assert read_run(run / "evaluation").damage == ()
    (run / "empty").mkdir()
    assert read_run(run / "empty").damage == ()


LOST = {
    "resolved.yaml": "settings are not shown",
    "state.json": "choices of the run may be missing",
    "environment.json": "command and machine may be missing",
}


@pytest.mark.parametrize("name", LOST)
def test_a_missing_file_of_a_run_and_a_folder_in_its_place_are_named(run: Path, name: str):
    (run / name).unlink()
    assert f"{run / name}: missing; {LOST[name]}" in read_run(run).damage
    (run / name).mkdir()
    (line,) = read_run(run).damage
    assert line.startswith(f"{run / name}: cannot be read (")
    assert line.endswith(LOST[name])


def test_a_folder_of_evaluations_alone_lacks_no_file_of_a_run(run: Path):
    for name in ("metrics.jsonl", "state.json", "resolved.yaml", "environment.json"):
        (run / name).unlink()
    assert read_run(run).damage == ()


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        *LOST.items(),
        ("metrics.jsonl", "line 1 is damaged; "),
        ("evaluations.jsonl", "line 1 is damaged; "),
        ("evaluation/results.jsonl", "line 1 is damaged; "),
        ("restarts.jsonl", "1 unreadable line skipped"),
        ("rollbacks.jsonl", "1 unreadable line skipped"),
    ],
)
def test_one_line_names_a_damaged_file_and_what_is_missing(run: Path, name: str, lost: str):
    whole = read_run(run)
    (run / name).write_text("{\n")
    files = read_run(run)
    (line,) = files.damage
    assert line.startswith(f"{run / name}: ")
    assert lost in line
    shown = "metrics", "evaluations", "restarts", "rollbacks", "settings", "facts", "results"
    changed = [one for one in shown if getattr(files, one) != getattr(whole, one)]
    assert len(changed) <= 1


def test_a_wrong_number_of_steps_is_named(run: Path):
    file = run / "resolved.yaml"
    file.write_text(file.read_text().replace("steps: 3\n", "steps: three\n", 1))
    files = read_run(run)
    assert files.damage == (f"{file}: train.steps=three: expected a whole number",)
    assert files.steps_wanted is None
    assert files.settings


@pytest.mark.parametrize(
    ("lines", "remark"),
    [
        ('{"step": 1, "loss": 2.0}\n{"step": 3, "loss": 1.0}\n', "step 2 is missing"),
        (
            '{"step": 1, "loss": 2.0}\n{"step": -2, "loss": 1.0}\n{"step": 3, "loss": NaN}\n',
            "step 2 is missing; step 3 has no finite loss",
        ),
    ],
)
def test_one_line_names_missing_steps_and_losses(run: Path, lines: str, remark: str):
    (run / "metrics.jsonl").write_text(lines)
    (line,) = read_run(run).damage
    assert line.startswith(f"{run / 'metrics.jsonl'}: ")
    assert line.endswith(remark)


def test_held_out_losses_that_are_not_finite_are_named(run: Path):
    file = run / "evaluations.jsonl"
    first = file.read_text()
    bucket = '{"begin": 0, "end": 128, "tokens": 2, "loss": null}'
    second = first.replace("[]", f"[{bucket}]").replace('"step": 0', '"step": 3')
    file.write_text(first.replace('"loss": 1.0', '"loss": NaN') + second)
    files = read_run(run)
    assert files.damage == (f"{file}: steps 0, 3 have no finite loss",)
    assert len(files.evaluations) == 2
    file.write_text(second.replace('"tokens": 2, "loss": null', '"tokens": 0, "loss": null'))
    assert read_run(run).damage == (), "a range of context without tokens has no loss"


def test_steps_that_a_run_has_done_are_missed_in_its_metrics(run: Path):
    StateReporter(RunDir(run), steps=3, step=3).end("stopped")
    file = run / "metrics.jsonl"
    assert read_run(run).damage == (f"{file}: step 3 is missing",)
    file.write_text("")
    assert read_run(run).damage == (f"{file}: steps 1-3 are missing",)
    file.unlink()
    assert read_run(run).damage == (f"{file}: missing, although the run has done 3 steps",)


def test_the_steps_of_a_run_that_has_not_ended_may_not_be_written_yet(run: Path):
    state = read_state(RunDir(run))
    assert state is not None
    for phase, lines in (("training", 0), ("finished", 1)):
        write_state(RunDir(run), replace(state, phase=phase, step=3))
        damage = read_run(run).damage
        assert len(damage) == lines, damage
    assert "step 3 is missing" in damage[0]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"a: " + b"[" * 5000, "nested"),
        (b"\xff\xfe", "UTF-8"),
        (b"a: [", "line 1"),
        (b"- 1", "no settings"),
        (b"a: &x [*x]", "nested too deeply"),
        (b"seed: 0\nnote: " + b"x" * 10_001, "note is longer than 10,000 characters"),
        (b"seed: 0x" + b"f" * 5000, "too many digits"),
    ],
)
def test_settings_that_cannot_be_shown_say_why(tmp_path, content, why):
    file = tmp_path / "resolved.yaml"
    file.write_bytes(content)
    with pytest.raises(UnreadableError, match=why):
        read_settings(file)


def test_the_lines_on_attention_name_mask_layout_and_exchange():
    words = ["mask=sliding_window", "mask.window=64", "topology.exchange=ring"]
    settings = with_choices(keys.values(compose(words)), {"topology.layout": "balanced"})
    assert attention_lines(settings) == [
        "mask: kind sliding_window, window 64, global_tokens 0, full_every 0, full_first 0, "
        "document_mask true",
        "workers: workers auto, context_parallel auto, layout balanced (auto), exchange ring",
        "attention: pattern dense, kernel auto, dtype auto",
    ]
    (_, line, *_) = attention_lines(keys.values(compose(["topology.tensor_parallel=2"])))
    assert line.startswith(
        "workers: workers auto, context_parallel auto, tensor_parallel 2, layout"
    )
    (line, *_) = attention_lines(keys.values(compose(["mask=video"], plan=True)))
    assert "kind video, " in line
    assert "causal false" in line
    assert attention_lines({"data.mask_key": "mask", "mask.kind": "causal"}) == [
        "mask: mask_key mask, kind causal"
    ]
    assert attention_lines({}) == []


def test_the_line_on_attention_names_layers_and_steps_that_are_dense():
    settings = {"sparsity.pattern": "moba", "sparsity.dense_layers": 2, "sparsity.dense_steps": 0}
    assert attention_lines(settings) == ["attention: pattern moba, dense_layers 2"]
