"""Find the checkpoint that a path names. This module does not import torch."""

from __future__ import annotations

import os
from pathlib import Path

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch import run_dir
from mtrain_cli.launch.failures import RunError
from mtrain_cli.launch.manifest import committed_steps
from mtrain_cli.printable import one_line

RESOLVED = "resolved.yaml"


class CheckpointError(RunError):
    """A checkpoint could not be saved or loaded. Training may continue after a failed save."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(map(one_line, problems)))


class NoCheckpointError(ConfigError, CheckpointError):
    """There is no intact checkpoint. The message has one line per damaged checkpoint."""


class NotARunError(ConfigError):
    """A path names neither a run nor a checkpoint of a run."""


def checkpoints_of(path: str | os.PathLike[str]) -> list[Path]:
    """Return the checkpoints of a run or of a checkpoints folder, newest first; else the folder.

    Raises NoCheckpointError if the run or checkpoints folder holds none.
    """
    folder = Path(path)
    if (folder / "checkpoints").is_dir():
        folder = folder / "checkpoints"
    checkpoints = [folder / f"step-{step}" for step in committed_steps(folder)]
    if not checkpoints and (folder.name == "checkpoints" or (folder / RESOLVED).is_file()):
        raise NoCheckpointError(f"{folder}: holds no checkpoint")
    return checkpoints or [folder]


def find_source(source: Path) -> Path:
    """Return the folder that `source` of `export_checkpoint` names, without verifying checkpoints.

    Raises NotARunError without such a run, and NoCheckpointError without such a checkpoint.
    """
    if not source.exists() and (run_dir.RUNS / source).is_dir():
        source = run_dir.RUNS / source
    run = run_of(source)
    in_run = source.resolve() in (run, run / "checkpoints")
    if not source.exists() or not (in_run or source.resolve().name.startswith("step-")):
        names = [f"step-{step}" for step in reversed(committed_steps(run / "checkpoints"))]
        held = f"the run has {', '.join(names) or 'none'}"
        raise NoCheckpointError(f"{source}: no such checkpoint; {held}")
    checkpoints_of(source)
    return source


def run_of(source: Path) -> Path:
    """Return the run of a run's folder, checkpoints folder or checkpoint, or raise NotARunError."""
    resolved = source.resolve()
    for folder in (resolved, resolved.parent, resolved.parent.parent):
        if (folder / RESOLVED).is_file():
            return folder
    raise NotARunError(
        f"{source}: not a run or a run's checkpoint (no {RESOLVED} in this folder or above it). "
        "Give a run, such as runs/latest."
    )
