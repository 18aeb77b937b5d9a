"""The state of a run, whether the run is alive, and `mtrain status` on files that are damaged.

A run writes its state whole and at a limited rate. Its lock shows whether it is alive.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mtrain_cli.commands.app import app
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.resolved_file import save
from mtrain_cli.launch import restart, run_status
from mtrain_cli.launch.run_dir import LOCK, RunDir, RunLock
from mtrain_cli.launch.run_status import (
    SILENT_S,
    WARNINGS,
    RunState,
    StateReporter,
    check_liveness,
    read_state,
    read_status,
    set_phase,
    write_state,
)


def reporter(run: RunDir) -> StateReporter:
    return StateReporter(run, launcher="mtrain", steps=9, step=0, workers=["a, cpu"], records="")


def test_a_state_is_read_back_without_keys_of_other_versions(tmp_path):
    run = RunDir(tmp_path)
    assert read_state(run) is None
    state = RunState(phase="training", time=2.0, began=1.0, step=3, warnings=((1.5, "slow"),))
    write_state(run, state)
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"], "no partial file is left"
    run.state.write_text(json.dumps(json.loads(run.state.read_text()) | {"colour": "red"}))
    assert read_state(run) == state
    run.state.write_text("{")
    assert read_state(run) is None


def test_a_number_that_is_not_finite_is_null(tmp_path):
    run = RunDir(tmp_path)
    bad = {"loss": float("nan"), "expert_load": float("inf")}
    write_state(run, RunState(phase="training", time=2.0, began=1.0, step=3, **bad))

    def refuse(name: str) -> None:
        raise AssertionError(name)

    json.loads(run.state.read_text(), parse_constant=refuse)
    assert (read_state(run).step, read_state(run).loss) == (3, None)
    run.state.write_text(run.state.read_text().replace("null", "NaN"))
    assert (read_state(run).step, read_state(run).expert_load) == (3, None), "an earlier version"


def test_a_resumed_run_keeps_the_metrics_of_its_last_step(tmp_path):
    run = RunDir(tmp_path)
    metrics = {"loss": 2.5, "grad_norm": 0.5, "tokens": 64, "seconds": 0.25}
    reporter(run).step(last=True, step=7, **metrics)
    stepped = read_state(run).stepped
    StateReporter(run, steps=7, step=7).end("finished")
    state = read_state(run)
    assert {name: getattr(state, name) for name in metrics} == metrics
    assert (state.phase, state.stepped) == ("finished", stepped)
    StateReporter(run, steps=9, step=5)  # resumed from an earlier checkpoint
    assert (read_state(run).loss, read_state(run).stepped) == (None, None)


def test_a_status_shows_the_norm_and_speed_of_the_step_that_it_names(tmp_path):
    run = RunDir(tmp_path)
    old = {"grad_norm": 3.0, "seconds": 9.0, "targets": 5, "expert_load": 1.5}
    new = {"grad_norm": 0.5, "seconds": 1.0, "targets": 6, "expert_load": 1.25}
    reporter(run).step(last=True, step=1, **old)
    rows = [{"step": 1, **old}, {"step": 2, "loss": 2.5, **new}]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    status = run_status.read_status(run)
    assert (status.step, status.losses) == (2, (2.5,))
    assert {name: getattr(status.written, name) for name in new} == new


def test_steps_are_written_at_most_once_a_second_but_the_last_always(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(run_status.time, "monotonic", lambda: now[0])
    run = RunDir(tmp_path)
    report = reporter(run)

    def after(step: int, seconds: float, last: bool = False) -> int:
        now[0] += seconds
        report.step(last=last, step=step)
        state = read_state(run)
        assert state is not None
        return state.step

    assert [after(1, 0.4), after(2, 0.4), after(3, 0.4), after(4, 0.1)] == [0, 0, 3, 3]
    assert after(9, 0.0, last=True) == 9


def test_the_latest_warnings_are_kept_and_survive_a_restart(tmp_path):
    run = RunDir(tmp_path)
    report = reporter(run)
    for number in range(WARNINGS + 5):
        report.warn(f"warning {number}")
    reporter(run)
    state = read_state(run)
    assert state is not None
    assert [text for _, text in state.warnings] == [f"warning {n}" for n in range(5, WARNINGS + 5)]


def test_a_phase_is_written_with_or_without_an_earlier_state(tmp_path):
    run = RunDir(tmp_path)
    set_phase(run, "failed", "a reason")
    state = read_state(run)
    assert (state.phase, state.reason, state.host) == ("failed", "a reason", socket.gethostname())
    reporter(run).step(last=True, step=4)
    set_phase(run, "restarting")
    state = read_state(run)
    assert (state.phase, state.reason, state.step) == ("restarting", "", 4)


def test_the_lock_decides_on_its_own_machine(tmp_path):
    run, lock = RunDir(tmp_path), RunLock(tmp_path)
    renewed = (tmp_path / LOCK).stat().st_mtime
    assert check_liveness(run, renewed + 2 * SILENT_S).alive
    lock.release()
    life = check_liveness(run, renewed + 7)
    assert not life.alive
    assert life.holder == f"process {os.getpid()} on {socket.gethostname()}"
    assert life.silent == pytest.approx(7)


@pytest.mark.parametrize(("silent", "alive"), [(SILENT_S - 1, True), (SILENT_S + 1, False)])
def test_the_time_stamp_decides_on_other_machines(tmp_path, silent, alive):
    lock = tmp_path / LOCK
    lock.write_text("process 7 on another-machine\n")
    dated = time.time() - silent
    os.utime(lock, (dated, dated))
    for wrong in (0.0, time.time() + 1e6):  # by the disk's clock, whatever the one here says
        life = check_liveness(RunDir(tmp_path), wrong)
        assert life.alive is alive
        assert life.silent == pytest.approx(silent, abs=0.9)


@pytest.mark.parametrize("ahead", [-5000.0, 0.0, 5000.0])
def test_ages_do_not_depend_on_the_clock_of_the_machine_that_runs(run, ahead):
    began = time.time() + ahead
    facts = {"phase": "training", "host": "another-machine", "step": 2, "steps": 9}
    state = {**facts, "time": began, "began": began - 40, "stepped": began - 30}
    (run / "state.json").write_text(json.dumps(state))
    (run / LOCK).write_text("process 7 on another-machine\n")
    found = read_status(RunDir(run))
    assert found.what == "running"
    assert found.since_step == pytest.approx(30, abs=2)


def test_without_a_lock_file_nothing_is_alive(tmp_path):
    life = check_liveness(RunDir(tmp_path), 0.0)
    assert (life.alive, life.holder, life.silent) == (False, "", None)


GOOD = (
    '{"time": 1.7e9, "reason": "rank 1 died", "rank": 1, "reached": 2, "step": 2, "workers": 2}\n'
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save(compose(["seq=256"]), tmp_path / "resolved.yaml")
    return tmp_path


def status(run: Path, *options: str) -> str:
    result = CliRunner().invoke(app, ["status", str(run), *options], prog_name="mtrain")
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(
    ("name", "data"),
    [
        (".lock", b"\xff\xfe\x00garbage"),
        (
            "restarts.jsonl",
            b"\xff\xfe[1, 2\n[]\n"
            + GOOD.replace("1.7e9", '"yesterday"').encode()
            + GOOD.replace("2,", "null,").encode(),
        ),
        ("resolved.yaml", b"seq: 25"),
        ("state.json", b'{"phase": "training", "time": "noon", "began": null, "step": [1]}'),
        ("state.json", b'{"phase": "training", "time": 1e400, "began": 1, "seconds_left": NaN}'),
        ("metrics.jsonl", b'{"step": 1, "loss": "high"}\n{"step": "one"}\n\xff\n'),
        ("metrics.jsonl", b'{"step": 1, "loss": NaN}\n{"step": 2, "loss": Infinity}\n'),
    ],
)
def test_status_skips_damaged_files(run, name, data):
    (run / name).write_bytes(data)
    json.loads(status(run, "--json"))
    shown = status(run)
    if name in ("restarts.jsonl", "resolved.yaml"):
        assert "damaged" in shown
        assert name in shown.partition("damaged")[2]


def test_status_shows_readable_restarts_among_damaged_ones(run):
    (run / "restarts.jsonl").write_text("{garbage\n" + GOOD + GOOD.replace("1.7e9", '"yesterday"'))
    assert [entry.reason for entry in restart.read_restarts(RunDir(run))[0]] == ["rank 1 died"]
    assert "rank 1 died" in status(run)
    (run / "restarts.jsonl").write_text(GOOD.replace("rank 1 died", "a\u2028b"))
    assert restart.read_restarts(RunDir(run))[1] == 0, "only a newline ends a line"
