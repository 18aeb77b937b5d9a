"""Kill training runs at random moments, resume them, and compare with an uninterrupted run.

Each kill is one of: SIGKILL of a worker or of the launcher, SIGTERM or SIGUSR2 to the launcher,
SIGINT once or twice, and SIGUSR1 before SIGKILL. Half of the kills wait for a save in progress. The
run is resumed by its folder until it finishes. Losses, gradient norms and all tensors of the last
checkpoint must then be those of a run that nobody killed, bit for bit.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import command
import torch

STEPS = 60
# The model is large enough for its checkpoint to take a while.
WORDS = (
    "seq=256 topology.block_size=16 model.hidden_size=64 model.num_layers=2 model.head_dim=16"
    " model.intermediate_size=96 topology.device=cpu topology.workers=2 topology.exchange=ring"
    f" topology.timeout_s=60 train.steps={STEPS} train.checkpoint_every=3 train.keep_checkpoints=2"
    " train.eval_every=10 data.eval_sequences=2 run.restarts=0"
).split()
KINDS = ("kill a worker", "kill the launcher", "TERM", "INT", "INT twice", "USR2", "USR1 and kill")
LIMIT_S = 300.0  # of a command
# What a command may exit with, by kind: it may also have finished before.
ENDS = {
    "kill a worker": (0, 1),
    "kill the launcher": (0, -signal.SIGKILL),
    "TERM": (0, 143, -signal.SIGTERM),
    "INT": (0, 130),
    "INT twice": (0, 130),
    "USR2": (0,),
    "USR1 and kill": (0, -signal.SIGKILL),
}


@dataclass(frozen=True)
class Kill:
    """A kill. step: the step before which it waits. saving: whether to wait for a save after it."""

    kind: str
    step: int
    saving: bool
    late_s: float


def kills(seed: int, count: int) -> list[Kill]:
    """Return random kills. Every kind comes before one comes again."""
    draw = random.Random(seed)
    kinds: list[str] = []
    while len(kinds) < count:
        kinds += draw.sample(KINDS, len(KINDS))
    return [
        Kill(kind, draw.randrange(STEPS // 2), draw.random() < 0.5, draw.random() * 0.3)
        for kind in kinds[:count]
    ]


def check(seed: int, count: int, folder: Path) -> Iterator[str]:
    """Yield a line for each kill after which something differs, and on standard error one for each.

    Args:
        folder: an empty folder for the runs.
    """
    _finish(folder, "whole", resume=False)
    expected = outcome(folder / "whole")
    assert len(expected[0]) == STEPS
    for number, kill in enumerate(kills(seed, count)):
        name = f"run-{number}"
        problem = _killed(folder, name, kill)
        if not problem:
            problem = _difference(expected, outcome(folder / name))
        line = f"{number}: {kill}: {problem or 'the same'}"
        print(line, file=sys.stderr, flush=True)
        if problem:
            yield line
        else:
            shutil.rmtree(folder / name)


def outcome(run: Path) -> tuple[list[list[object]], dict[str, torch.Tensor]]:
    """Return step, loss and gradient norm of each step, and all tensors of the last checkpoint."""
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    reader = FileSystemReader(run / f"checkpoints/step-{STEPS}")
    found = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in found.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, storage_reader=reader, no_dist=True)
    return [[row["step"], row["loss"], row["grad_norm"]] for row in rows], tensors


def _difference(expected: tuple, found: tuple) -> str:
    """Return what differs between two outcomes, or ""."""
    if expected[0] != found[0]:
        pairs = zip(expected[0], found[0], strict=False)
        first = next((pair for pair in pairs if pair[0] != pair[1]), "their number")
        return f"steps differ: {first}"
    if expected[1].keys() != found[1].keys():
        return f"tensors differ: {sorted(expected[1].keys() ^ found[1].keys())[:3]}"
    # Compare bytes: two NaN are not equal, and 0.0 equals -0.0.
    wrong = [
        name
        for name, one in expected[1].items()
        if one.numpy().tobytes() != found[1][name].numpy().tobytes()
    ]
    return f"values differ: {wrong[:3]}" if wrong else ""


def _killed(folder: Path, name: str, kill: Kill) -> str:
    """Start a run, kill it, and resume it until it finishes. Return what went wrong, or ""."""
    run = folder / name
    with _started(folder, name, resume=False) as process:
        _wait_for(process, lambda: _steps(run) >= kill.step)
        if kill.saving:
            _wait_for(process, lambda: any(run.glob("checkpoints/*.tmp-*")))
        else:
            time.sleep(kill.late_s)
        _kill(process, kill.kind)
        code = process.wait(LIMIT_S)
    if code not in ENDS[kill.kind]:
        return f"exit code {code}: {(folder / f'{name}.err').read_text()[-300:]}"
    saves = kill.kind in ("TERM", "INT", "USR2") and _steps(run)  # nothing to save before a step
    if saves and not list(run.glob("checkpoints/step-*[0-9]")):
        return "stopped without a checkpoint"
    has_checkpoint = bool(list(run.glob("checkpoints/step-*/manifest.json")))
    if not has_checkpoint:  # killed before the first one
        shutil.rmtree(run, ignore_errors=True)
    return _finish(folder, name, resume=has_checkpoint)


def _finish(folder: Path, name: str, *, resume: bool) -> str:
    with _started(folder, name, resume=resume) as process:
        code = process.wait(LIMIT_S)
    return f"exit code {code}: {(folder / f'{name}.err').read_text()[-300:]}" if code else ""


def _kill(process: subprocess.Popen, kind: str) -> None:
    if kind == "kill a worker":
        workers = _children(process.pid)
        if workers:
            os.kill(random.choice(workers), signal.SIGKILL)
        return
    numbers = {
        "kill the launcher": [signal.SIGKILL],
        "TERM": [signal.SIGTERM],
        "INT": [signal.SIGINT],
        "INT twice": [signal.SIGINT, signal.SIGINT],
        "USR2": [signal.SIGUSR2],
        "USR1 and kill": [signal.SIGUSR1, signal.SIGKILL],
    }[kind]
    for number in numbers:
        process.send_signal(number)
        if number != numbers[-1]:
            time.sleep(random.random() * 0.3)


def _children(pid: int) -> list[int]:
    found: list[str] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += file.read_text().split()
    return [int(word) for word in found]


@contextmanager
def _started(folder: Path, name: str, *, resume: bool) -> Iterator[subprocess.Popen]:
    words = ["--resume", name] if resume else [*WORDS, f"run.dir={name}"]
    variables = {**os.environ, "PYTHONPATH": command.python_path(), "OMP_NUM_THREADS": "1"}
    with (folder / f"{name}.err").open("a") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "mtrain_cli", "train", *words],
            cwd=folder, env=variables, stdout=subprocess.DEVNULL, stderr=err,
        )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def _wait_for(process: subprocess.Popen, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while process.poll() is None and not condition() and time.monotonic() < deadline:
        time.sleep(0.002)


def _steps(run: Path) -> int:
    try:
        return (run / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0
