"""`mtrain train` recovers from lost workers bit for bit, and stops where it should not retry."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from command import mtrain
from commands.typed_line import split
from launch.faulty_train import Fault

import mtrain_cli

LAUNCH = Path(__file__).parents[1] / "launch"
RUN = [
    *(
        "seq=96",
        "topology.block_size=16",
        "model.hidden_size=32",
        "model.num_layers=1",
        "model.head_dim=8",
        "model.intermediate_size=48",
    ),
    *(
        "topology.device=cpu",
        "topology.workers=2",
        "topology.exchange=ring",
        "topology.timeout_s=60",
        "run.dir=run",
    ),
]
FORWARD = ("ring, layer 0, forward", "step 1 of 2")


def environment(**more: str) -> dict[str, str]:
    paths = os.pathsep.join([str(Path(mtrain_cli.__file__).parents[1]), str(LAUNCH)])
    return {
        **os.environ,
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **more,
    }


def train(fault: Fault, *words: str) -> subprocess.CompletedProcess[str]:
    words = ("train", *RUN, *words)
    return warm.run("faulty_train", words, Path.cwd(), environment(**fault.variable()), 200)


def rows(folder: str = "run") -> list[tuple[int, float, float]]:
    lines = (json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row["loss"], row["grad_norm"]) for row in lines]


def restarts() -> list[tuple[int, int, int]]:
    lines = (json.loads(line) for line in Path("run/restarts.jsonl").read_text().splitlines())
    return [(row["rank"], row["reached"], row["step"]) for row in lines]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_losses_after_two_restarts_equal_an_undisturbed_run(
    tmp_path,
):
    words = ["train.steps=10", "train.checkpoint_every=3"]
    ended = train(Fault(1, signal.SIGKILL, 5, *FORWARD, later=(8,), once=True), *words)
    assert ended.returncode == 0, ended.stderr
    told = [line for line in ended.stderr.splitlines() if not line.startswith(("  rank", "Where"))]
    killed = "error: rank 1 was killed by SIGKILL (host out of memory? see dmesg)"
    assert told == [
        killed,
        "restart 1: resumes from the checkpoint of step 3 on 2 workers in 1 s; repeats step 4",
        killed,
        "restart 2: resumes from the checkpoint of step 6 on 2 workers in 5 s; repeats step 7",
    ]
    assert restarts() == [(1, 4, 3), (1, 7, 6)]
    log = Path("run/log.txt").read_text()
    assert [line[:9] for line in log.splitlines() if line.startswith("restart ")] == [
        "restart 1",
        "restart 2",
    ]
    assert "resumed from the checkpoint of step 6, restart 2, on 2 workers" in log
    assert mtrain(tmp_path, "train", *RUN, "run.dir=whole", *words).returncode == 0
    assert rows() == rows("whole"), "bitwise, one line a step"
    status = json.loads(mtrain(tmp_path, "status", "run", "--json").stdout)
    assert (status["what"], status["step"], len(status["restarts"])) == ("finished", 10, 2)


@pytest.mark.slow
def test_a_restart_with_fewer_workers_continues_the_losses(tmp_path):
    words = ["train.steps=8", "train.checkpoint_every=3", "topology.workers=auto"]
    ended = train(Fault(1, signal.SIGKILL, 5, *FORWARD, once=True, fewer=True), *words)
    assert ended.returncode == 0, ended.stderr
    assert (
        "from the checkpoint of step 3 on 1 worker (without GPU 1, which does not respond) in 1 s"
        in ended.stderr
    )
    assert mtrain(tmp_path, "train", *RUN, "run.dir=whole", *words).returncode == 0
    assert [row[0] for row in rows()] == list(range(1, 9))
    for mine, whole in zip(rows(), rows("whole"), strict=True):
        assert mine == pytest.approx(whole, rel=2e-5)
    assert rows() != rows("whole"), "other workers add up in another order"


@pytest.mark.slow
def test_a_repeated_failure_without_a_new_checkpoint_ends_the_run():
    ended = train(
        Fault(1, signal.SIGKILL, 5, *FORWARD), "train.steps=10", "train.checkpoint_every=3"
    )
    assert ended.returncode == 1
    assert restarts() == [(1, 4, 3)]
    assert ended.stderr.splitlines()[-2] == (
        "no restart: no checkpoint was written since the previous restart"
    )
    assert ended.stderr.splitlines()[-1].startswith(
        "resume from the checkpoint of step 3: mtrain train --resume "
    )
    assert json.loads(Path("run/state.json").read_text())["phase"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "code"), [("auto", 1), ("1", 0)])
def test_before_the_first_checkpoint_only_a_number_of_restarts_restarts(limit, code):
    ended = train(
        Fault(1, signal.SIGKILL, 3, *FORWARD, once=True), "train.steps=5", f"run.restarts={limit}"
    )
    assert ended.returncode == code
    if limit == "auto":
        assert not Path("run/restarts.jsonl").exists()
        assert ended.stderr.splitlines()[-1].startswith("no restart: there is no checkpoint yet")
    else:
        assert "restart 1: starts again from step 0 (no checkpoint) on 2 workers" in ended.stderr
        assert [row[0] for row in rows()] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_program_errors_are_not_retried():
    fault = Fault(9, signal.SIGKILL, 5, *FORWARD)
    words = ["train.steps=20", "train.checkpoint_every=1", "run.restarts=3"]
    ended = train(fault, *words, "optim.lr=100", "optim.warmup_steps=0", "optim.clip_norm=0")
    assert ended.returncode == 1
    assert "the loss is not finite" in ended.stderr or "the gradient is not finite" in ended.stderr
    assert "no restart: the same failure would happen again" in ended.stderr
    mistake = train(fault, "run.dir=other", *words, "data=tokens", "data.path=.")
    assert mistake.returncode == 2
    assert "restart" not in mistake.stderr
    assert not Path("other").exists()


@pytest.mark.slow
def test_sigusr2_saves_and_stops_with_success_and_the_resumed_losses_are_the_same(tmp_path):
    words = ["train.steps=7", "train.checkpoint_at_end=false"]
    ended = train(Fault(0, signal.SIGUSR2, 3, *FORWARD, once=True, to_launcher=True), *words)
    assert ended.returncode == 0, ended.stderr
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["step-4"]
    assert "stopped on request after step 4, saved" in ended.stdout
    assert f"mtrain train --resume {Path('run').absolute()}" in ended.stdout
    again = mtrain(tmp_path, "train", "--resume", "run")
    assert again.returncode == 0, again.stderr
    assert mtrain(tmp_path, "train", *RUN, "run.dir=whole", *words).returncode == 0
    assert rows() == rows("whole"), "bitwise"


@pytest.mark.slow
@pytest.mark.parametrize("to_launcher", [True, False])
def test_sigusr1_saves_and_goes_on_with_the_same_losses(tmp_path, to_launcher):
    words = ["train.steps=7", "train.checkpoint_at_end=false"]
    fault = Fault(1, signal.SIGUSR1, 2, *FORWARD, later=(5,), once=True, to_launcher=to_launcher)
    ended = train(fault, *words)
    assert ended.returncode == 0, ended.stderr
    assert {path.name for path in Path("run/checkpoints").iterdir()} == {"step-3", "step-6"}
    assert mtrain(tmp_path, "train", *RUN, "run.dir=whole", *words).returncode == 0
    assert rows() == rows("whole"), "bitwise"
    assert not Path("whole/checkpoints/step-3").exists()


def test_a_worker_that_alone_gets_sigusr2_stops_all_with_success():
    ended = train(Fault(1, signal.SIGUSR2, 3, *FORWARD, once=True), "train.steps=7")
    assert ended.returncode == 0, ended.stderr
    assert "stopped on request after step 4, saved" in ended.stdout
    assert len(rows()) == 4


@pytest.mark.slow
def test_a_stop_is_not_a_failure():
    command = [
        sys.executable,
        str(LAUNCH / "faulty_train.py"),
        "train",
        *RUN,
        "train.steps=1000",
        "train.checkpoint_every=2",
    ]
    fault = Fault(1, signal.SIGKILL, 6, *FORWARD)
    launcher = subprocess.Popen(
        command,
        env=environment(**fault.variable()),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert launcher.stderr is not None
    for line in launcher.stderr:
        if line.startswith("restart 1"):
            launcher.send_signal(signal.SIGINT)
            break
    rest = launcher.stderr.read()
    assert launcher.wait(60) == 130
    assert rest.splitlines()[0] == "stopping: the restart is cancelled"
    assert "resume from the checkpoint of step 4" in rest


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False])
def test_under_torchrun_the_same_command_line_resumes_its_run(named):
    fault = Fault(1, signal.SIGKILL, 5, *FORWARD, once=True)
    folder = Path("runs/mine")
    words = [
        *(word for word in RUN if not word.startswith("run.")),
        "train.steps=8",
        "train.checkpoint_every=2",
    ]
    torchrun = [
        sys.executable,
        *split("-m torch.distributed.run --standalone --nproc-per-node=2", "--max-restarts=2"),
    ]
    command = [
        *torchrun,
        str(LAUNCH / "faulty_train.py"),
        "train",
        *words,
        *(["run.name=mine"] if named else []),
    ]
    ended = subprocess.run(
        command, env=environment(**fault.variable()), capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    assert (
        "torchrun restarts the workers (restart 1 of 2) from the checkpoint of step 4"
        in ended.stderr
    )
    result = [path for path in Path("runs").iterdir() if not path.is_symlink()]
    assert result == [folder] if named else len(result) == 1
    assert [row[0] for row in rows(str(result[0]))] == list(range(1, 9))
    if named:
        again = subprocess.run(
            command,
            env=environment(**fault.variable()),
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert "already holds a run" in again.stderr, "another job does not go on with it unasked"
