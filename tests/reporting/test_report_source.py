"""Reports find runs and profiles, and say what is missing in them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from reporting.training_runs import step
from synthetic_records import Play, facts_of, recorded_once, ring, rows_of, write

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.resolved_file import save
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.launch.run_status import RunState, StateReporter, write_state
from mtrain_cli.records.metrics import StepMetrics
from mtrain_cli.reporting.report_source import (
    ReportSource,
    default,
    find,
    known,
    open_source,
    ships,
)

PLAY = Play(ring(4))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def steps(count: int) -> tuple[StepMetrics, ...]:
    return tuple(map(step, range(1, count + 1)))


def test_a_training_is_complete_after_its_last_step(tmp_path):
    run = ReportSource("a", tmp_path, metrics=steps(3), steps_wanted=3)
    assert (run.complete, run.remarks) == (True, [])
    assert replace(run, steps_wanted=None).complete  # the planned number is unknown
    stopped = replace(run, steps_wanted=4)
    assert (stopped.complete, stopped.remarks) == (False, ["step 3 of 4"])
    # A complete profile does not make up for missing steps.
    profile = open_source(recorded_once(tmp_path / "profile", PLAY))
    assert replace(profile, metrics=steps(3), steps_wanted=3).complete
    assert not replace(profile, metrics=steps(3), steps_wanted=4).complete


def test_a_profile_is_complete_with_all_samples_of_all_ranks(tmp_path):
    assert open_source(recorded_once(tmp_path / "whole", PLAY)).complete
    partial = open_source(recorded_once(tmp_path / "partial", PLAY, complete=False, wanted=2))
    assert (partial.complete, partial.remarks) == (
        False,
        ["1 of the 2 requested iterations recorded; all figures cover only these iterations"],
    )
    rows = rows_of(PLAY)
    missing = open_source(
        write(tmp_path / "missing", [rows[rows["rank"] != 2]], [facts_of(ring(4))])
    )
    assert (missing.complete, missing.remarks) == (
        False,
        ["no rows from rank 2 (1 of 4); imbalance degrees cover the other ranks"],
    )
    for profile in (partial, missing):
        assert not replace(profile, metrics=steps(3), steps_wanted=3).complete


@pytest.mark.parametrize(
    ("environment", "shared"),
    [
        ({"cpu_cores": 3, "gpus": []}, True),
        ({"cpu_cores": 4, "gpus": []}, False),
        ({"cpu_cores": 3, "gpus": ["A"] * 4}, False),
        ({"cpu_cores": None, "gpus": []}, False),
        ({}, False),
    ],
)
def test_a_remark_says_if_workers_share_cores(tmp_path, environment, shared):
    remarks = open_source(recorded_once(tmp_path, PLAY, environment=environment)).remarks
    expected = [
        "4 workers share 3 CPU cores: times depend on the OS scheduler; compare work instead"
    ]
    assert remarks == (expected if shared else [])


@pytest.mark.parametrize("training", [False, True])
def test_settings_name_the_choices_of_the_run_or_else_of_its_cases(tmp_path, training):
    cases = [{**facts_of(ring(4)), "pattern": pattern} for pattern in ("dense", "moba")]
    write(tmp_path, [rows_of(PLAY)], cases)
    save(compose(["topology.layout=zigzag"]), tmp_path / "resolved.yaml")
    if training:
        chosen = {"topology.layout": "zigzag", "topology.exchange": "hop", "train.memory": "x"}
        StateReporter(RunDir(tmp_path), chosen=chosen)
    settings, facts = open_source(tmp_path).settings, facts_of(ring(4))
    assert facts["exchange"] == "ring"
    assert settings["topology.exchange"] == f"{'hop' if training else 'ring'} (auto)"
    assert settings["topology.layout"] == ("zigzag" if training else facts["layout"])
    assert settings["train.memory"] == "manual"
    assert settings["sparsity.pattern"] == ("dense" if training else "dense, moba")


def test_shipped_profiles_are_found_by_name():
    assert open_source(find("step-128k-4xh200")).kind == "recorded step"
    with pytest.raises(
        ConfigError, match="kernels-h200: no such run, measurement or shipped profile"
    ):
        find("kernels-h200")  # a calibration, not a profile
    # Shipped profiles are read-only.
    assert ships(find("predicted-4xh200"))
    assert not ships(Path())
    # Own measurements come first.
    mine = recorded_once(Path("measurements/step-128k-4xh200"), PLAY)
    assert find("step-128k-4xh200") == mine


def test_a_study_is_suggested_by_its_name_and_by_its_path():
    folder = Path("measurements/learning-tiny")
    folder.mkdir(parents=True)
    (folder / "study.json").touch()
    for name in ("learning-tinyy", "measurements/learning-tinyy"):
        with pytest.raises(ConfigError, match=r"did you mean learning-tiny.*allowed: .*learning-t"):
            find(name)
    with pytest.raises(ConfigError) as refused:
        find("learning-tinyy", "index.npz")  # which a study does not have
    assert "learning-tiny," not in refused.value.problems[0]
    assert known() == []


def test_folders_without_anything_to_report_are_skipped():
    assert known() == []
    write(Path("measurements/no-sample"), [], [facts_of(ring(4))], complete=False, wanted=5)
    write(Path("runs/no-step/profile"), [], [facts_of(ring(4))], complete=False, wanted=5)
    Path("runs/no-step/metrics.jsonl").touch()
    Path("runs/empty").mkdir()
    Path("runs/file").touch()
    assert known() == []
    assert [path.stem for path in default()] == ["real-512k-4xh200"]
    folders = [
        recorded_once(Path("measurements/whole"), PLAY),
        recorded_once(Path("measurements/killed"), PLAY, complete=False),
        recorded_once(Path("runs/profiled/profile"), PLAY).parent,
        Path("runs/trained"),
    ]
    folders[-1].mkdir()
    (folders[-1] / "metrics.jsonl").write_text("{}\n")
    for age, path in enumerate(folders):
        (file,) = (
            path / name
            for name in ("summary.json", "profile/summary.json", "metrics.jsonl")
            if (path / name).is_file()
        )
        os.utime(file, (1e9 - age,) * 2)
    os.utime("measurements/no-sample/summary.json", (2e9,) * 2)
    Path("runs/latest").symlink_to("trained")
    assert known() == folders
    assert default() == folders[:1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"step": 1, "loss": []}\n[]\n', "lines 1, 2 are damaged; "),
        ('{"step": 1, "lo', "no steps"),
    ],
)
def test_a_profile_shows_despite_damaged_metrics_with_a_remark(tmp_path, content, message):
    folder = recorded_once(tmp_path / "run", Play(ring(2)), layers=(0,), iterations=2)
    (folder / "metrics.jsonl").write_text(content)
    source = open_source(folder)
    assert source.cases
    assert source.metrics == ()
    assert any(f"{folder}/metrics.jsonl: {message}" in remark for remark in source.remarks)
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "metrics.jsonl").write_text(content)
    with pytest.raises(ConfigError):
        open_source(tmp_path / "alone")


def test_a_run_shows_its_steps_despite_a_damaged_line_and_a_damaged_profile(tmp_path):
    (tmp_path / "resolved.yaml").write_text("seed: 0\n")
    (tmp_path / "environment.json").write_text("{}")
    write_state(RunDir(tmp_path), RunState(phase="training", time=2.0, began=1.0))
    file = tmp_path / "metrics.jsonl"
    first, second, third = (metrics.to_json() for metrics in steps(3))
    file.write_text(f"{first}\noops\n{third}\n")
    source = open_source(tmp_path)
    assert [metrics.step for metrics in source.metrics] == [1, 3]
    line = "; step 2 is missing"
    (remark,) = source.remarks
    assert remark.startswith(f"{file}: line 2 is damaged")
    assert remark.endswith(line)
    summary = tmp_path / "profile" / "summary.json"
    summary.parent.mkdir()
    summary.write_text("{")
    file.write_text(f"{first}\n{second}\n")
    source = open_source(tmp_path)
    assert len(source.metrics) == 2
    (remark,) = source.remarks
    assert remark.startswith(f"{summary}: not the summary of a profile")
    assert remark.endswith("; the profile is not shown")
