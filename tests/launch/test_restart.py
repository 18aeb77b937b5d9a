"""When a run restarts, and on how many workers."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path

import gloo
import pytest

from mtrain_cli.composition import compose
from mtrain_cli.launch import restart
from mtrain_cli.launch.environment import Environment, resolve_environment
from mtrain_cli.launch.failures import Failure
from mtrain_cli.launch.restart import RestartDecision, RestartPolicy
from mtrain_cli.launch.run_dir import RunDir

KILLED = Failure(
    1, -signal.SIGKILL, "died", "was killed by SIGKILL (host out of memory? see dmesg)", "", 0.0
)


class Run:
    """A run's folder in which steps and checkpoints appear."""

    def __init__(self, path: Path) -> None:
        self.dir = RunDir(path)
        self.commits = 0

    def reach(self, step: int, checkpoint: int | None = None) -> None:
        with self.dir.metrics.open("a") as file:
            file.write(json.dumps({"step": step}) + "\n")
        if checkpoint is not None:
            self.commits += 1
            manifest = self.dir.checkpoints / f"step-{checkpoint}" / "manifest.json"
            manifest.parent.mkdir(parents=True, exist_ok=True)
            manifest.touch()
            os.utime(manifest, (self.commits, self.commits))


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def policy(run: Run, limit: str = "auto") -> tuple[RestartPolicy, Environment]:
    config = compose.compose([f"run.restarts={limit}", "topology.device=cpu"])
    return RestartPolicy(run.dir, config, False), resolve_environment(config)


def test_a_run_restarts_as_long_as_each_failure_has_a_newer_checkpoint(run):
    restarts, e = policy(run)
    run.reach(10, checkpoint=8)
    for number in range(1, 9):
        run.reach(10 * number + 3, checkpoint=10 * number)
        decision = restarts.after(KILLED, e)
        assert isinstance(decision, RestartDecision)
        assert decision.resume
        assert (decision.entry.step, decision.entry.reached) == (10 * number, 10 * number + 3)
        assert decision.environment.restarts == number
        assert decision.wait_s == restart.WAITS_S[min(number, 5) - 1]
        e = decision.environment
    assert restarts.after(KILLED, e) == restarts.after(KILLED, e), (
        "no restart without a new checkpoint"
    )
    assert "no checkpoint was written since" in str(restarts.after(KILLED, e))
    assert len(restart.read_restarts(run.dir)[0]) == 8


def test_a_checkpoint_that_replaces_a_damaged_one_counts_as_progress(run):
    restarts, e = policy(run)
    run.reach(10, checkpoint=8)
    assert isinstance(restarts.after(KILLED, e), RestartDecision)
    run.reach(7, checkpoint=6)
    assert isinstance(restarts.after(KILLED, e), RestartDecision)


def test_a_number_limits_the_restarts(run):
    restarts, e = policy(run, "1")
    run.reach(5)
    first = restarts.after(KILLED, e)
    assert isinstance(first, RestartDecision)
    assert (first.resume, first.entry.step) == (False, 0)
    run.reach(9, checkpoint=8)
    assert restarts.after(KILLED, e) == "no restart: the limit run.restarts=1 is reached"


@pytest.mark.parametrize(
    ("limit", "reached", "reason"),
    [
        ("0", 5, ""),
        (
            "auto",
            5,
            "no restart: there is no checkpoint yet. Set run.restarts=N to restart from step 0.",
        ),
        ("auto", 0, ""),
        ("3", 0, "no restart: the run failed before its first step"),
    ],
    ids=["not wanted", "auto before the first checkpoint", "auto at the start", "at the start"],
)
def test_without_a_checkpoint_few_failures_are_retried(run, limit, reached, reason):
    restarts, e = policy(run, limit)
    if reached:
        run.reach(reached)
    assert restarts.after(KILLED, e) == reason


@pytest.mark.parametrize(
    ("kind", "message", "retried"),
    [
        ("died", "was killed by SIGKILL", True),
        ("silent", "topology.timeout_s=600: rank 3 kept the others waiting longer than this", True),
        ("peer lost", "Connection closed by peer", True),
        ("error", "AcceleratorError: CUDA error: uncorrectable ECC error encountered", True),
        ("error", "RuntimeError: NCCL error in: ..., unhandled cuda error", True),
        ("error", "OSError: [Errno 5] Input/output error: 'shard-00017.mds'", True),
        ("error", "AcceleratorError: CUDA error: device-side assert triggered", False),
        ("error", "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("error", "rank 1 ran out of GPU memory in training step 5", False),
        ("error", "step 3: the loss is not finite on rank 1; the step was not applied", False),
        ("error", "KeyError: 'text'", False),
    ],
)
def test_only_machine_failures_are_retried(run, kind, message, retried):
    run.reach(10, checkpoint=8)
    restarts, e = policy(run)
    decision = restarts.after(Failure(1, 1, kind, message, "", 0.0), e)
    assert isinstance(decision, RestartDecision) == retried
    assert retried or decision == "no restart: the same failure would happen again"


def on_gpus(workers: int, *overrides: str):
    config = compose.compose([*overrides])
    return config, dataclasses.replace(gloo.environment(0, workers), device="cuda")


@pytest.fixture
def _four_gpus(monkeypatch):
    monkeypatch.setattr("mtrain_cli.launch.environment._visible_gpus", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")


@pytest.mark.usefixtures("_four_gpus")
@pytest.mark.parametrize(
    ("overrides", "workers"),
    [
        ([], 3),
        (["topology.context_parallel=2", "train.global_batch=2"], 2),
        (["topology.context_parallel=1", "train.global_batch=4"], 2),
        (
            ["topology.workers=4"],
            "topology.workers=4 does not fit the 3 remaining GPUs. Resume with "
            "topology.workers=auto.",
        ),
        (
            ["topology.context_parallel=4"],
            "the run does not fit the 3 remaining GPUs: topology.context_parallel=4: does not "
            "divide topology.workers=3",
        ),
    ],
    ids=["any number", "groups of two", "the global batch divides", "a number", "none"],
)
def test_after_losing_a_gpu_the_run_continues_on_as_many_workers_as_fit(
    run, monkeypatch, overrides, workers
):
    monkeypatch.setattr(
        restart, "answering_devices", lambda devices: [d for d in devices if d != "6"]
    )
    config, e = on_gpus(4, *overrides)
    run.reach(10, checkpoint=8)
    decision = RestartPolicy(run.dir, config, False).after(KILLED, e)
    if isinstance(workers, str):
        assert isinstance(decision, str)
        assert decision.startswith("no restart: GPU 6 does not respond, and ")
        assert workers in decision
        return
    assert isinstance(decision, RestartDecision)
    assert (decision.environment.dims.workers, decision.entry.workers) == (workers, workers)
    assert decision.devices == ("4", "5", "7")[:workers]
    assert decision.environment.launcher == "mtrain"
    assert "without GPU 6, which does not respond" in restart.describe_restart(decision)


@pytest.mark.usefixtures("_four_gpus")
def test_a_broken_gpu_that_no_worker_needs_is_skipped(run, monkeypatch):
    monkeypatch.setattr(
        restart, "answering_devices", lambda devices: [d for d in devices if d != "4"]
    )
    config, e = on_gpus(2, "topology.workers=2")
    run.reach(10, checkpoint=8)
    decision = RestartPolicy(run.dir, config, False).after(KILLED, e)
    assert isinstance(decision, RestartDecision)
    assert (decision.environment.dims.workers, decision.devices) == (2, ("5", "6"))


def test_the_restart_message_lists_the_repeated_steps():
    entry = restart.Restart(0.0, "reason", 1, 17, 10, 2)
    e = dataclasses.replace(on_gpus(2)[1], restarts=2)
    assert restart.describe_restart(RestartDecision(e, True, 1.0, entry)) == (
        "restart 2: resumes from the checkpoint of step 10 on 2 workers in 1 s; repeats "
        "step 11 to 17"
    )
    at_once = dataclasses.replace(entry, reached=10, workers=1)
    assert restart.describe_restart(RestartDecision(e, True, 1.0, at_once)).endswith(
        "of step 10 on 1 worker in 1 s"
    )
