"""Decide whether a run restarts after a failure, from which step, on how many workers, and when.

A run restarts after a failure of a machine: a killed process, a failed device, a peer that hangs.
It does not restart if the failure would happen again (a mistake, an exception, out of memory), or
if it has written no checkpoint since the previous failure and so makes no progress.
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
from itertools import compress
from pathlib import Path
from typing import TypeVar

from mtrain_cli.config import documents, validate
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.launch.environment import Environment, resolve_environment
from mtrain_cli.launch.failures import Failure
from mtrain_cli.launch.run_dir import RunDir

T = TypeVar("T")
# Seconds to wait before the first, second, ... restart within RECENT_S. The last value repeats.
WAITS_S = (1.0, 5.0, 15.0, 30.0, 60.0)
RECENT_S = 3600.0
PROBE_S = 120.0  # a device that takes longer than this for a small sum does not respond
# Messages of torch, CUDA and Linux about a failed device, driver or network. A message that also
# matches _PROGRAM is about the program: out of memory, or a bug in a CUDA kernel.
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
_WITHOUT = "without GPU {}, which does not respond"
_TAIL_BYTES = 1 << 16  # bytes to read at the end of metrics.jsonl
_DEVICE_PROBE = "import torch; assert torch.ones(1024, device='cuda').sum().item() == 1024"


@dataclass(frozen=True)
class Restart:
    """One restart, a line of `restarts.jsonl`."""

    time: float  # seconds since the epoch
    reason: str
    rank: int  # which failed
    reached: int  # last step before the failure
    step: int  # of the checkpoint that the run resumes from; 0 for the beginning
    workers: int  # after the restart


@dataclass(frozen=True)
class LoggedStep:
    """What a restart and a status need from a line of metrics.jsonl."""

    step: int
    loss: float | None = None  # None without labels, or not finite
    skip_reason: str | None = None
    grad_norm: float | None = None
    tokens_per_second_per_gpu: float | None = None
    seconds: float | None = None
    targets: int | None = None
    expert_load: float | None = None


@dataclass(frozen=True)
class RestartDecision:
    """How to restart the workers."""

    environment: Environment
    resume: bool  # from a checkpoint
    wait_s: float
    entry: Restart
    devices: tuple[str, ...] | None = None  # CUDA_VISIBLE_DEVICES; None keeps the current value
    remark: str = ""  # about missing GPUs


class RestartPolicy:
    """Decides on the restarts of one call of `local.launch`."""

    def __init__(self, run: RunDir, config: Config, resume: bool) -> None:
        self._run, self._config, self._resume = run, config, resume
        self._limit = None if config.run.restarts == "auto" else int(config.run.restarts)
        self._restarts: list[Restart] = []
        self._last_commit: int | None = None  # newest checkpoint at the previous failure

    def after(self, failure: Failure, environment: Environment) -> RestartDecision | str:
        """Return how to restart after a failure, and record it in the run's folder.

        Or return a line that says why not, which is empty if nobody expects a restart.
        """
        step = self._run.last_step()
        reached = max((done.step for done in latest_steps(self._run)), default=0)
        refusal = self._refusal(failure, step, reached)
        if refusal is not None:
            return refusal
        choice = self._choose_workers(environment)
        if isinstance(choice, str):
            return choice
        environment, devices, remark = choice
        now = time.time()
        recent = sum(entry.time > now - RECENT_S for entry in self._restarts)
        reason, workers = failure_summary(failure), environment.dims.workers
        entry = Restart(now, reason, failure.rank, reached, step or 0, workers)
        self._restarts.append(entry)
        with contextlib.suppress(OSError), self._run.restarts.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(entry)) + "\n")
        environment = replace(environment, restarts=len(self._restarts))
        resume, wait_s = self._resume or step is not None, WAITS_S[min(recent, len(WAITS_S) - 1)]
        return RestartDecision(environment, resume, wait_s, entry, devices, remark)

    def _refusal(self, failure: Failure, step: int | None, reached: int) -> str | None:
        """Return a line that says why the run does not restart, or None if it may restart."""
        if self._limit == 0 or failure.kind == "config":
            return ""
        if not is_machine_failure(failure):
            return "no restart: the same failure would happen again"
        if self._limit is not None and len(self._restarts) >= self._limit:
            return f"no restart: the limit run.restarts={self._limit} is reached"
        if step is None and not reached:  # this usually comes from a wrong setting
            return "" if self._limit is None else "no restart: the run failed before its first step"
        if step is None and self._limit is None:
            return (
                "no restart: there is no checkpoint yet. Set run.restarts=N to restart from step 0."
            )
        commit = self._run.last_commit()
        if self._last_commit is not None and commit <= self._last_commit:
            return "no restart: no checkpoint was written since the previous restart"
        self._last_commit = commit
        return None

    def _choose_workers(
        self, before: Environment
    ) -> tuple[Environment, tuple[str, ...] | None, str] | str:
        """Return environment, devices and remark, or a line that says why there is no restart."""
        if before.device != "cuda":
            return before, None, ""
        listed = visible_devices(before.dims.workers)
        answering = answering_devices(listed)
        if len(answering) == len(listed):
            return before, None, ""
        lost = ", ".join(device for device in listed if device not in answering)
        if len(answering) >= before.dims.workers:
            return before, tuple(answering[: before.dims.workers]), _WITHOUT.format(lost)
        return shrink_environment(self._config, before, answering, lost)


def is_machine_failure(failure: Failure) -> bool:
    if failure.kind in ("died", "silent", "peer lost"):
        return True
    text = failure.message if failure.kind == "error" else ""
    return bool(_MACHINE.search(text)) and not _PROGRAM.search(text)


def shrink_environment(
    config: Config, before: Environment, answering: Sequence[str], lost: str
) -> tuple[Environment, tuple[str, ...], str] | str:
    """Choose the largest number of workers that fits the GPUs that still respond.

    Every step computes the same as before: the global batch stays. Return environment, devices and
    remark of a `RestartDecision`, or a line that says why none fits.
    """
    left, given = len(answering), config.topology.workers
    no_restart = f"no restart: GPU {lost} does not respond, and"
    if given != "auto":
        return (
            f"{no_restart} topology.workers={given} does not fit the {left} remaining GPUs. "
            "Resume with topology.workers=auto."
        )
    problem = "no GPU is left"
    for workers in range(left, 0, -1):
        tried = config.changed(topology={"workers": workers})
        try:
            conflicts = [one for one in validate.problems(tried) if one.is_about(["topology."])]
            if not conflicts:
                environment = replace(resolve_environment(tried), launcher=before.launcher)
                return environment, tuple(answering[:workers]), _WITHOUT.format(lost)
        except ConfigError as error:
            conflicts = [*error.problems]
        problem = conflicts[0] if workers == left else problem
    return f"{no_restart} the run does not fit the {left} remaining GPUs: {problem}"


def visible_devices(workers: int) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES, or else numbers from 0, at least one for each worker."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if named := [name.strip() for name in names if name.strip()]:
        return named
    import torch

    return [str(index) for index in range(max(workers, torch.cuda.device_count()))]


def answering_devices(devices: Sequence[str]) -> list[str]:
    """Return the devices on which a new process can compute.

    This process may not see the failure of a device that it has used before.
    """

    def answers(device: str) -> bool:
        variables = {**os.environ, "CUDA_VISIBLE_DEVICES": device}
        command = [sys.executable, "-c", _DEVICE_PROBE]
        try:
            run = subprocess.run(command, env=variables, capture_output=True, timeout=PROBE_S)
        except (subprocess.SubprocessError, OSError):
            return False
        return run.returncode == 0

    with ThreadPoolExecutor(len(devices)) as pool:
        return list(compress(devices, pool.map(answers, devices)))


def read_restarts(run: RunDir) -> tuple[list[Restart], int]:
    """Return the restarts of a run, oldest first, and the number of lines that cannot be read."""
    return entries(run.restarts, Restart)


def latest_steps(run: RunDir) -> list[LoggedStep]:
    """Return the steps at the end of metrics.jsonl."""
    return entries(run.metrics, LoggedStep, _TAIL_BYTES)[0]


def entries(path: Path, kind: type[T], last_bytes: int | None = None) -> tuple[list[T], int]:
    """Return a dataclass for each line of JSON, and the number of lines that cannot be read."""
    found, skipped, text = [], 0, ""
    with contextlib.suppress(OSError), path.open("rb") as file:
        if last_bytes is not None:
            file.seek(max(0, file.seek(0, os.SEEK_END) - last_bytes))
        text = file.read().decode(errors="replace").removesuffix("\n")
    for line in text.split("\n") if text else ():  # only a newline ends a line of JSON
        try:
            found.append(documents.checked(kind, json.loads(line)))
        except (ValueError, RecursionError):
            skipped += 1
    return found, skipped


def failure_summary(failure: Failure) -> str:
    first = failure.message.splitlines()[0] if failure.message else failure.kind
    return f"rank {failure.rank} {first}" if failure.kind == "died" else first


def describe_restart(decision: RestartDecision) -> str:
    entry, number = decision.entry, decision.environment.restarts
    start = "starts again from step 0 (no checkpoint)"
    if decision.resume:
        start = f"resumes from the checkpoint of step {entry.step}"
    workers = f"{entry.workers} worker{'s' * (entry.workers > 1)}"
    if decision.remark:
        workers += f" ({decision.remark})"
    repeated, first = "", entry.step + 1
    if entry.reached >= first:
        repeated = f"; repeats step {first}" + f" to {entry.reached}" * (entry.reached > first)
    return f"restart {number}: {start} on {workers} in {decision.wait_s:g} s{repeated}"
