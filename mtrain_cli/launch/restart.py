"""Decide whether a run that lost a worker restarts, from where, on how many workers, and when.

A restart helps against failures of a machine: a killed process, a failed device, a peer that hangs.
Failures of the program or its input would happen again, so mistakes, exceptions, losses that are
not finite and out of memory end a run. So does a second failure without a checkpoint since the
first: the run would make no progress.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from mtrain_cli.config import documents, validate
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.launch.environment import Environment, resolve_environment
from mtrain_cli.launch.failures import Failure
from mtrain_cli.launch.run_dir import RunDir

# Wait before the first restart within an hour, the second and so on. The last value repeats.
WAITS_S = (1.0, 5.0, 15.0, 30.0, 60.0)
RECENT_S = 3600.0
PROBE_S = 120.0
# Errors of a device, driver or network, in the words of torch, CUDA and the kernel. Out of memory
# and bugs in a kernel are excluded by _PROGRAM.
_MACHINE = re.compile(
    r"CUDA error|AcceleratorError|CUDNN_STATUS|CUBLAS_STATUS|NCCL|[Uu]ncorrectable|\bECC\b"
    r"|GPU is lost|no CUDA-capable device"
    r"|Input/output error|Stale file handle|Transport endpoint|No such device"
    r"|Connection timed out|Remote I/O error|Host is down"
)
_PROGRAM = re.compile(
    r"out of memory|device-side assert|invalid argument|invalid configuration|no kernel image"
    r"|NotImplementedError"
)
_DEVICE_PROBE = "import torch; assert torch.ones(1024, device='cuda').sum().item() == 1024"


@dataclass(frozen=True)
class Restart:
    """One restart, as recorded in `restarts.jsonl`.

    time: seconds since the epoch.
    reason: the failure, in one line.
    rank: the rank that failed.
    reached: last step before the failure.
    step: step of the checkpoint that the run resumes from, 0 for the beginning.
    workers: number of workers from then on.
    """

    time: float
    reason: str
    rank: int
    reached: int
    step: int
    workers: int


@dataclass(frozen=True)
class _LoggedStep:
    """The fields of a line of metrics.jsonl that a restart needs."""

    step: int
    loss: float | None = None


@dataclass(frozen=True)
class RestartDecision:
    """What the launcher must do.

    environment: of the next attempt.
    resume: whether to resume from a checkpoint.
    wait_s: seconds to wait first.
    entry: the restart to record.
    devices: value for CUDA_VISIBLE_DEVICES if some GPUs do not respond, None to keep it.
    remark: addition to the number of workers in the message, or empty.
    """

    environment: Environment
    resume: bool
    wait_s: float
    entry: Restart
    devices: tuple[str, ...] | None = None
    remark: str = ""


class RestartPolicy:
    """Decides about the restarts of one launch."""

    def __init__(self, run: RunDir, config: Config, resume: bool) -> None:
        """Start with no restarts.

        Args:
            resume: whether the launch itself resumes from a checkpoint.
        """
        self._run = run
        self._config = config
        self._resume = resume
        self._limit = None if config.run.restarts == "auto" else int(config.run.restarts)
        self._restarts: list[Restart] = []
        # time of the newest checkpoint at the previous failure
        self._last_commit: int | None = None

    def after(self, failure: Failure, environment: Environment) -> RestartDecision | str:
        """Decide what follows a failure.

        Returns:
            The restart, or a line that says why there is none. The line is empty if no restart was
            to be expected.
        """
        if self._limit == 0 or failure.kind == "config":
            return ""
        if not is_machine_failure(failure):
            return "no restart: the same failure would happen again"
        if self._limit is not None and len(self._restarts) >= self._limit:
            return f"no restart: the limit run.restarts={self._limit} is reached"
        commit, step, reached = (
            self._run.last_commit(),
            self._run.last_step(),
            last_step_done(self._run),
        )
        if step is None and self._limit is None:
            # A failure before the first checkpoint usually means that the run is set up wrong.
            return (
                "no restart: there is no checkpoint yet. Set run.restarts=N to restart from step 0."
                if reached
                else ""
            )
        if step is None and not reached:
            return "no restart: the run failed before its first step"
        if self._last_commit is not None and commit <= self._last_commit:
            return (
                "no restart: no checkpoint was written since the previous restart, "
                "so the run would make no progress"
            )
        self._last_commit = commit
        choice = self._choose_workers(environment)
        if isinstance(choice, str):
            return choice
        environment, devices, remark = choice
        recent = sum(entry.time > time.time() - RECENT_S for entry in self._restarts)
        entry = Restart(
            time.time(),
            failure_summary(failure),
            failure.rank,
            reached,
            step or 0,
            environment.workers,
        )
        self._restarts.append(entry)
        _append(self._run, entry)
        environment = replace(environment, restarts=len(self._restarts))
        return RestartDecision(
            environment,
            self._resume or step is not None,
            WAITS_S[min(recent, len(WAITS_S) - 1)],
            entry,
            devices,
            remark,
        )

    def _choose_workers(
        self, before: Environment
    ) -> tuple[Environment, tuple[str, ...] | None, str] | str:
        """Return environment, devices and remark for the restart, or why none is possible."""
        if before.device != "cuda":
            return before, None, ""
        listed = visible_devices(before.workers)
        answering = answering_devices(listed)
        if len(answering) == len(listed):
            return before, None, ""
        lost = ", ".join(device for device in listed if device not in answering)
        if len(answering) >= before.workers:
            return (
                before,
                tuple(answering[: before.workers]),
                f"without GPU {lost}, which does not respond",
            )
        return shrink_environment(self._config, before, answering, lost)


def is_machine_failure(failure: Failure) -> bool:
    """Return whether a restart may get past this failure."""
    if failure.kind in ("died", "silent", "peer lost"):
        return True
    return (
        failure.kind == "error"
        and bool(_MACHINE.search(failure.message))
        and not _PROGRAM.search(failure.message)
    )


def shrink_environment(
    config: Config, before: Environment, answering: Sequence[str], lost: str
) -> tuple[Environment, tuple[str, ...], str] | str:
    """Return the environment with the most workers that fit the remaining GPUs, or why none fits.

    The global batch stays, so every step computes the same.
    """
    left = len(answering)
    if config.topology.workers != "auto":
        return (
            f"no restart: GPU {lost} does not respond, and "
            f"topology.workers={config.topology.workers} "
            f"does not fit the {left} that are left. Resume with topology.workers=auto."
        )
    problem = "none is left"
    for workers in range(left, 0, -1):
        tried = replace(config, topology=replace(config.topology, workers=workers))
        try:
            conflicts = [line for line in validate.problems(tried) if "topology." in line]
            if not conflicts:
                environment = replace(resolve_environment(tried), launcher=before.launcher)
                return (
                    environment,
                    tuple(answering[:workers]),
                    f"without GPU {lost}, which does not respond",
                )
        except ConfigError as error:
            conflicts = list(error.problems)
        problem = conflicts[0] if workers == left else problem
    return (
        f"no restart: GPU {lost} does not respond, and the run does not fit the {left} that are "
        f"left: {problem}"
    )


def visible_devices(workers: int) -> list[str]:
    """Return the GPUs of this machine as CUDA_VISIBLE_DEVICES names them.

    Without that variable, return at least one for each of the workers.
    """
    named = [
        name.strip()
        for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if name.strip()
    ]
    if named:
        return named
    import torch

    return [str(index) for index in range(max(workers, torch.cuda.device_count()))]


def answering_devices(devices: Sequence[str]) -> list[str]:
    """Return the devices on which a new process can compute.

    What this process knows about them may date from before the failure.
    """

    def answers(device: str) -> bool:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": device}
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            command = [sys.executable, "-c", _DEVICE_PROBE]
            return (
                subprocess.run(
                    command, env=environment, capture_output=True, timeout=PROBE_S
                ).returncode
                == 0
            )
        return False

    with ThreadPoolExecutor(len(devices)) as pool:
        return [
            device for device, good in zip(devices, pool.map(answers, devices), strict=True) if good
        ]


def read_restarts(run: RunDir) -> list[Restart]:
    """Return the restarts of a run, oldest first, without lines that cannot be read."""
    found = []
    with contextlib.suppress(OSError):
        for line in run.restarts.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                found.append(documents.checked(Restart, json.loads(line)))
    return found


def count_unreadable_lines(run: RunDir) -> int:
    """Return how many lines of restarts.jsonl `read_restarts` skips."""
    with contextlib.suppress(OSError):
        return len(run.restarts.read_text(errors="replace").splitlines()) - len(read_restarts(run))
    return 0


def latest_steps(run: RunDir) -> list[tuple[int, float | None]]:
    """Return (step, loss) of the last complete lines of metrics.jsonl, oldest first.

    Read only the end of a long file.
    """
    found = []
    with contextlib.suppress(OSError):
        for line in _tail(run.metrics).splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                row = documents.checked(_LoggedStep, json.loads(line))
                found.append((row.step, row.loss))
    return found


def last_step_done(run: RunDir) -> int:
    """Return the last step in metrics.jsonl, or 0 without one."""
    return max((step for step, _ in latest_steps(run)), default=0)


def failure_summary(failure: Failure) -> str:
    """Return what failed, in one line."""
    first = failure.message.splitlines()[0] if failure.message else failure.kind
    return f"rank {failure.rank} {first}" if failure.kind == "died" else first


def describe_restart(decision: RestartDecision, number: int) -> str:
    """Return the line that announces a restart."""
    entry = decision.entry
    start = (
        f"resumes from the checkpoint of step {entry.step}"
        if decision.resume
        else "starts again from step 0 (no checkpoint)"
    )
    lost = ""
    if entry.reached > entry.step:
        steps = (
            f"{entry.step + 1}"
            if entry.reached == entry.step + 1
            else f"{entry.step + 1} to {entry.reached}"
        )
        several = entry.reached > entry.step + 1
        lost = f"; step{'s' * several} {steps} {'are' if several else 'is'} repeated"
    workers = f"{entry.workers} worker{'s' * (entry.workers > 1)}" + (
        f" ({decision.remark})" if decision.remark else ""
    )
    return f"restart {number}: {start} on {workers} in {decision.wait_s:g} s{lost}"


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - (1 << 16)))
        return file.read().decode(errors="replace")


def _append(run: RunDir, entry: Restart) -> None:
    with contextlib.suppress(OSError), run.restarts.open("a") as file:
        file.write(json.dumps(dataclasses.asdict(entry)) + "\n")
