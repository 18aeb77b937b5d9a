"""`mtrain status` reports a run's state, whatever became of its processes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mtrain_cli.commands.app import app
from mtrain_cli.composition.compose import compose
from mtrain_cli.launch import progress_record, rollbacks, run_dir, run_status
from mtrain_cli.launch.restart import Restart
from mtrain_cli.launch.rollbacks import Rollback
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.launch.run_status import StateReporter

WORKERS = ["node7, GPU 0 (NVIDIA H200)", "node7, GPU 1 (NVIDIA H200)", "node8, GPU 0 (NVIDIA H200)"]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def status(*words: str):
    return CliRunner().invoke(app, ["status", *words], prog_name="mtrain")


def found(*words: str) -> dict:
    return json.loads(status(*words, "--json").stdout)


def begun(name: str = "first", words: Sequence[str] = ()) -> RunDir:
    own = [f"run.name={name}", "topology.device=cpu", "train.steps=100"]
    run = run_dir.create(compose([*own, *words]), [])
    run.release()
    return run


def reporter(run: RunDir) -> StateReporter:
    records = str(run.path / "where-{rank}")
    return StateReporter(
        run, launcher="mtrain", steps=100, step=0, workers=WORKERS, records=records
    )


def stepped(run: RunDir, step: int = 12) -> StateReporter:
    told = reporter(run)
    values = {
        "loss": 2.5,
        "grad_norm": 0.75,
        "tokens": 99,
        "tokens_per_second_per_gpu": 12345.6,
        "seconds": 4.2,
        "seconds_left": 370.0,
    }
    told.step(last=False, step=step - 1, **values)
    told.step(last=True, step=step, **values)
    return told


def holder(run: RunDir) -> subprocess.Popen[str]:
    """A process that holds the run's lock, as the launcher does."""
    code = "import time\nfrom mtrain_cli.launch import run_dir\n"
    code += f"run = run_dir.open({str(run.path)!r})\n"
    code += "print('has it', flush=True)\ntime.sleep(600)"
    environment = {**os.environ, "PYTHONPATH": str(Path(run_dir.__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "has it\n"
    return process


def test_a_run_is_alive_while_its_lock_is_held():
    run = begun()
    stepped(run)
    process = holder(run)
    try:
        alive = found()
        assert (alive["what"], alive["alive"], alive["step"], alive["seconds_left"]) == (
            "running",
            True,
            12,
            370.0,
        )
        assert alive["holder"] == f"process {process.pid} on {socket.gethostname()}"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (found()["what"], found()["alive"]) == ("lost", False)
    finally:
        process.kill()
    shown = status().stdout
    assert "lost; it ended without a report: it was killed, or its machine failed" in " ".join(
        shown.split()
    )


def test_other_machines_rely_on_the_heartbeat():
    run = begun()
    stepped(run)
    lock = run.path / ".lock"
    lock.write_text("process 12 on node7\n")
    assert found()["what"] == "running"
    long_ago = time.time() - 2 * run_status.SILENT_S
    os.utime(lock, (long_ago, long_ago))
    assert found()["what"] == "lost"


def test_the_sheet_shows_progress_and_health(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    run = begun()
    told = stepped(run)
    told.warn("step 11 is a spike: loss 9.9")
    (run.path / ".lock").write_text("process 12 on node7\n")
    with run.metrics.open("w") as file:
        for step in range(1, 13):
            file.write(json.dumps({"step": step, "loss": 4 - step / 8}) + "\n")
    manifest = run.checkpoints / "step-10" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.touch()
    os.utime(manifest, (time.time() - 125, time.time() - 125))
    entry = Restart(time.time() - 3600, "rank 1 was killed by SIGKILL", 1, 9, 8, 3)
    run.restarts.write_text(json.dumps(dataclasses.asdict(entry)) + "\n")
    lines = [line.rstrip() for line in status("first").stdout.splitlines()]
    assert max(map(len, lines)) <= 80
    assert lines[0] == "run         runs/first"
    assert re.match(r"state +running; last step \d s ago; process 12 on node7", lines[1])
    lines[5] = re.sub(r"2:0[5-9] ago", "2:05 ago", lines[5])  # the command may start late
    assert lines[2:7] == [
        "step        12 of 100, 12%, 6:10 left",
        "loss        2.5000, gradient norm 0.75  █▇▇▆▅▅▄▄▃▂▂▁",
        "speed       12,346 tokens/s/GPU in the last step (4.20 s)",
        "checkpoint  step 10, 2:05 ago, 2 steps behind",
        "workers     ranks 0 to 1 on node7: 2 x NVIDIA H200",
    ]
    lines[8] = re.sub(r"1:00:0\d ago", "1:00:00 ago", lines[8])
    assert lines[7:9] == [
        "            rank 2 on node8: 1 x NVIDIA H200",
        "restarts    1, the last one 1:00:00 ago: rank 1 was killed by SIGKILL",
    ]
    assert lines[9] == "            stopped after step 9; resumed from step 8, on 3 workers"
    assert re.fullmatch(
        r"warnings +1, the last one \d s ago: step 11 is a spike: loss 9.9", lines[10]
    )


def test_the_sheet_says_what_was_rolled_back_and_skipped_and_why():
    run = begun()
    stepped(run)
    reason = "step 19: loss 9.1000, 25 sigma above the median 3.2000 of the last steps\x1b[2J"
    rollbacks.write_rollbacks(run, [Rollback(time.time() - 3600, reason, 19, 16, 32, 38)])
    with run.metrics.open("w") as file:
        for step in range(1, 13):
            why = "not finite" if step in (5, 9) else None
            file.write(json.dumps({"step": step, "loss": why and 2.0, "skip_reason": why}) + "\n")
    lines = [line.rstrip() for line in status("first").stdout.splitlines()]
    at = next(n for n, line in enumerate(lines) if line.startswith("rollbacks"))
    assert re.fullmatch(r"rollbacks +1, the last one 1:00:0\d ago:", lines[at])
    assert " ".join(" ".join(lines[at + 1 :]).split()).startswith(
        "back to the checkpoint of step 16, without the 6 sequences up to step 19: step 19: "
        "loss 9.1000, 25 sigma above the median 3.2000 of the last steps"
    )
    assert "\x1b" not in "".join(lines)
    assert "skipped     2 updates lately, last of step 9: not finite" in lines
    (rolled,) = found("first")["rollbacks"]
    assert (rolled["reached"], rolled["step"], rolled["first"], rolled["end"]) == (19, 16, 32, 38)
    assert found("first")["skipped"] == [[5, "not finite"], [9, "not finite"]]


def test_a_stalled_run_shows_where_its_workers_are(monkeypatch):
    run = begun()
    stepped(run)
    (run.path / ".lock").write_text("process 12 on node7\n")
    monkeypatch.setattr(progress_record, "_record", None)
    progress_record.start_record(run.path / "where-1")
    progress_record.begin_step(13)
    progress_record.note("ring, layer 3, forward, step 2 of 3")
    later = time.time() + 70
    monkeypatch.setattr(run_status, "SILENT_S", 1000.0)
    monkeypatch.setattr(time, "time", lambda: later)
    shown = found()
    assert (shown["what"], shown["detail"], shown["alive"]) == (
        "stalled",
        "no step since step 12",
        True,
    )
    assert len(shown["where"]) == 1
    assert "rank 1: training step 13, ring, layer 3, forward, step 2 of 3 (7" in shown["where"][0]


def test_a_stopped_rank_is_named_before_the_others_end_after_a_short_timeout(monkeypatch):
    run = begun(words=["topology.timeout_s=50"])
    stepped(run)
    (run.path / ".lock").write_text("process 12 on node7\n")
    for rank, waits_for in (0, 1), (1, 0), (2, 1):
        monkeypatch.setattr(progress_record, "_record", None)
        progress_record.start_record(run.path / f"where-{rank}", 50)
        progress_record.note("a message", waits_for)
    now = time.time()
    for rank, seconds in (0, 26), (1, 0), (2, 26):
        os.utime(run.path / f"where-{rank}", (now + seconds, now + seconds))
    monkeypatch.setattr(run_status, "SILENT_S", 1000.0)
    monkeypatch.setattr(time, "time", lambda: now + 26)
    assert (found()["what"], found()["detail"]) == ("stalled", "no step since step 12")
    (_, named), *_ = found()["notes"]
    assert named.startswith(
        "rank 1 (node7, GPU 1 (NVIDIA H200)) keeps others waiting. It shows no sign of life for 26 "
    )


def test_a_run_that_hangs_in_its_first_second_of_steps_shows_the_step_that_it_has_done(monkeypatch):
    run = begun()
    reporter(run).step(last=False, step=7)  # too early to be written
    (run.path / ".lock").write_text("process 12 on node7\n")
    monkeypatch.setattr(progress_record, "_record", None)
    progress_record.start_record(run.path / "where-0")
    assert (found()["what"], found()["step"]) == ("starting", 0)
    progress_record.begin_step(8)
    assert (found()["what"], found()["step"]) == ("running", 7)
    later = time.time() + 70
    monkeypatch.setattr(run_status, "SILENT_S", 1000.0)
    monkeypatch.setattr(time, "time", lambda: later)
    assert (found()["what"], found()["detail"]) == ("stalled", "no step since step 7")


def test_a_run_that_was_killed_in_its_first_second_of_steps_shows_the_step_of_its_metrics():
    run = begun()
    reporter(run)
    rows = [{"step": step, "loss": 2.5} for step in range(1, 6)]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (found()["what"], found()["step"]) == ("lost", 5)


@pytest.mark.parametrize(
    ("phase", "what"),
    [("finished", "finished"), ("stopped", "stopped"), ("failed", "failed"), ("training", "lost")],
)
def test_the_final_state_is_the_last_one_written(phase, what):
    run = begun()
    stepped(run)
    run_status.set_phase(run, phase, "rank 1 was killed")
    shown = found("first")
    assert (shown["what"], shown["alive"], shown["step"]) == (what, False, 12)


def test_all_lists_every_run_despite_a_damaged_state(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("first", "second"):
        stepped(begun(name))
    Path("runs/second/state.json").write_text("{")
    result = status("--all")
    assert result.exit_code == 0
    names = [
        line.split()[:2]
        for line in result.stdout.splitlines()
        if line.startswith((" first", "first", " second", "second"))
    ]
    assert sorted(names) == [["first", "lost"], ["second", "not"]]
    assert len(status("--all", "--json").stdout.splitlines()) == 2


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "mtrain: there are no runs in runs/. Give the folder of a run.\n"),
        (
            ["nothing"],
            "mtrain: nothing: no such run; allowed: a folder with a resolved.yaml; there are no "
            "runs in runs/\n",
        ),
        (["--all"], "mtrain: --all: there are no runs in runs/\n"),
        (["--all", "x"], "mtrain: --all: shows every run under runs/; give it without x\n"),
    ],
)
def test_mistakes_are_one_line(words, line):
    result = status(*words)
    assert (result.exit_code, result.stderr) == (2, line)


def test_targets_and_the_predicted_time_are_shown():
    run = begun()
    told = StateReporter(run, steps=100, step=0, workers=("a, GPU 0 (H200)",), predicted_seconds=4)
    rate = {"tokens_per_second_per_gpu": 12.0, "seconds": 4.2}
    told.step(last=True, step=12, loss=2.5, targets=1530, expert_load=1.725, **rate)
    shown = status("first").stdout
    assert "targets     1,530 labels of the last step count toward the loss" in shown
    assert "(4.20 s, 4 s predicted)" in shown
    assert "experts     largest load 1.73x the mean in the last step" in shown
    assert found()["targets"] == 1530
