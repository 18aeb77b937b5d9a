"""Whether a run that lost a worker begins again, from where, on how many workers, and when.

A restart helps against what happens to a machine: a killed process, a device that fails, a peer that hangs. What the program or its input
does would happen again, so mistakes, exceptions, losses that are no number and full memory end a run. So does a second failure with no
checkpoint written since the first: whatever it is, it comes back before the run gets anywhere.
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

WAITS_S = (
    1.0,
    5.0,
    15.0,
    30.0,
    60.0,
)  # before the first restart within an hour, the second, ...; the last one from then on
RECENT_S = 3600.0
PROBE_S = 120.0
# Errors of a device, a driver or a network, as torch, CUDA and the kernel word them; memory that is full is none, and no bug in a kernel.
_MACHINE = re.compile(
    r"CUDA error|AcceleratorError|CUDNN_STATUS|CUBLAS_STATUS|NCCL|[Uu]ncorrectable|\bECC\b|GPU is lost|no CUDA-capable device"
    r"|Input/output error|Stale file handle|Transport endpoint|No such device|Connection timed out|Remote I/O error|Host is down"
)
_PROGRAM = re.compile(
    r"out of memory|device-side assert|invalid argument|invalid configuration|no kernel image|NotImplementedError"
)
_DEVICE_PROBE = "import torch; assert torch.ones(1024, device='cuda').sum().item() == 1024"


@dataclass(frozen=True)
class Restart:
    """One restart, as `restarts.jsonl` has it: time (seconds since the epoch), why, of which rank, after which step the run was lost, from
    which it goes on (0: the beginning), and on how many workers."""

    time: float
    reason: str
    rank: int
    reached: int
    step: int
    workers: int


@dataclass(frozen=True)
class _LoggedStep:
    """What a restart asks of a line of metrics.jsonl."""

    step: int
    loss: float | None = None


@dataclass(frozen=True)
class RestartDecision:
    """What the launcher is to do. devices: for CUDA_VISIBLE_DEVICES where not all answer; None: as before. remark: on the workers."""

    environment: Environment
    resume: bool
    wait_s: float
    entry: Restart
    devices: tuple[str, ...] | None = None
    remark: str = ""


class RestartPolicy:
    """Those of one launch."""

    def __init__(self, run: RunDir, config: Config, resume: bool) -> None:
        """resume: whether the launch itself goes on from a checkpoint."""
        self._run = run
        self._config = config
        self._resume = resume
        self._limit = None if config.run.restarts == "auto" else int(config.run.restarts)
        self._restarts: list[Restart] = []
        self._last_commit: int | None = None  # of the newest checkpoint at the failure before

    def after(self, failure: Failure, environment: Environment) -> RestartDecision | str:
        """What comes after a failure; a line why nothing does, empty where none is expected."""
        if self._limit == 0 or failure.kind == "config":
            return ""
        if not is_machine_failure(failure):
            return "not restarted: it would happen again"
        if self._limit is not None and len(self._restarts) >= self._limit:
            return f"not restarted: run.restarts={self._limit} {'has' if self._limit == 1 else 'have'} been made"
        commit, step, reached = (
            self._run.last_commit(),
            self._run.last_step(),
            last_step_done(self._run),
        )
        if step is None and self._limit is None:
            # A failure before the first checkpoint is most often one of how the run was set up.
            return (
                "not restarted: there is no checkpoint yet; run.restarts=N would begin again from step 0"
                if reached
                else ""
            )
        if step is None and not reached:
            return "not restarted: no step was done"
        if self._last_commit is not None and commit <= self._last_commit:
            return "not restarted: no checkpoint was written since the restart before, so it would go on like this"
        self._last_commit = commit
        found = self._choose_workers(environment)
        if isinstance(found, str):
            return found
        environment, devices, remark = found
        recent = sum(made.time > time.time() - RECENT_S for made in self._restarts)
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
        """On which workers, or why on none."""
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
                f"without GPU {lost}, which does not answer",
            )
        return shrink_environment(self._config, before, answering, lost)


def is_machine_failure(failure: Failure) -> bool:
    """Whether a failure may be gone when the run begins again."""
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
    """As many workers as fit on the devices that are left; the global batch stays, and so does what every step computes."""
    left = len(answering)
    if config.topology.workers != "auto":
        return (
            f"not restarted: GPU {lost} does not answer, and topology.workers={config.topology.workers}; "
            f"{left} are left: resume with topology.workers=auto"
        )
    problem = "none is left"
    for workers in range(left, 0, -1):
        tried = replace(config, topology=replace(config.topology, workers=workers))
        try:
            found = [line for line in validate.problems(tried) if "topology." in line]
            if not found:
                environment = replace(resolve_environment(tried), launcher=before.launcher)
                return (
                    environment,
                    tuple(answering[:workers]),
                    f"without GPU {lost}, which does not answer",
                )
        except ConfigError as error:
            found = list(error.problems)
        problem = found[0] if workers == left else problem
    return f"not restarted: GPU {lost} does not answer, and the run does not fit the {left} that are left: {problem}"


def visible_devices(workers: int) -> list[str]:
    """The GPUs of this machine as CUDA_VISIBLE_DEVICES names them, at least those of the workers."""
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
    """Those on which a process of its own can compute: what this process knows of them may be of before the failure."""

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
    """The restarts of a run, oldest first; what cannot be read is left out."""
    found = []
    with contextlib.suppress(OSError):
        for line in run.restarts.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                found.append(documents.checked(Restart, json.loads(line)))
    return found


def count_unreadable_lines(run: RunDir) -> int:
    """Lines of restarts.jsonl that `read` leaves out."""
    with contextlib.suppress(OSError):
        return len(run.restarts.read_text(errors="replace").splitlines()) - len(read_restarts(run))
    return 0


def latest_steps(run: RunDir) -> list[tuple[int, float | None]]:
    """(step, loss) of the last whole lines of metrics.jsonl, oldest first; of a long file only the end is read."""
    found = []
    with contextlib.suppress(OSError):
        for line in _tail(run.metrics).splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                row = documents.checked(_LoggedStep, json.loads(line))
                found.append((row.step, row.loss))
    return found


def last_step_done(run: RunDir) -> int:
    """The last step of metrics.jsonl; 0 where there is none."""
    return max((step for step, _ in latest_steps(run)), default=0)


def failure_summary(failure: Failure) -> str:
    """What failed, for a list."""
    first = failure.message.splitlines()[0] if failure.message else failure.kind
    return f"rank {failure.rank} {first}" if failure.kind == "died" else first


def describe_restart(decision: RestartDecision, number: int) -> str:
    """What the user reads before a restart."""
    entry = decision.entry
    start = (
        f"goes on from the checkpoint of step {entry.step}"
        if decision.resume
        else "begins again from step 0, there is no checkpoint"
    )
    lost = ""
    if entry.reached > entry.step:
        steps = (
            f"{entry.step + 1}"
            if entry.reached == entry.step + 1
            else f"{entry.step + 1} to {entry.reached}"
        )
        lost = f"; step{'s' * (entry.reached > entry.step + 1)} {steps} {'are' if ' to ' in steps else 'is'} done again"
    workers = f"{entry.workers} worker{'s' * (entry.workers > 1)}" + (
        f" ({decision.remark})" if decision.remark else ""
    )
    return f"restart {number}: {start}, on {workers}, in {decision.wait_s:g} s{lost}"


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - (1 << 16)))
        return file.read().decode(errors="replace")


def _append(run: RunDir, entry: Restart) -> None:
    with contextlib.suppress(OSError), run.restarts.open("a") as file:
        file.write(json.dumps(dataclasses.asdict(entry)) + "\n")
