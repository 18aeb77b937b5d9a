"""Between an mtrain checkpoint and a Hugging Face folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mtrain_cli.config import compose
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.launch import run_dir
from mtrain_cli.model.huggingface import HuggingFaceFolder, parameter_problems, parameter_shapes, require_new_folder, write_folder
from mtrain_cli.model.rope import rope_factor
from mtrain_cli.training.checkpoint import CheckpointError, checkpoints_of, load_model_state, write_model_state
from mtrain_cli.training.optimizer import GIVEN_WEIGHTS_LR

RESOLVED = "resolved.yaml"


@dataclass(frozen=True)
class Exported:
    """What was exported: the configuration of the run, and the step of its checkpoint."""

    config: Config
    step: int


def import_folder(source: Path, run: Path) -> Config:
    """Make ``run`` a run whose checkpoint ``step-0`` holds the float32 weights of the Hugging Face folder ``source`` and nothing else.

    Needs memory for the whole model. Returns the configuration written to the run: the folder's model, and defaults.

    Raises:
        ConfigError: ``source`` cannot be read, ``run`` holds a run already or cannot be written. Nothing is left behind.
        CheckpointError: the weights could not be written, such as on a full disk; nothing is left behind either.
    """
    folder = HuggingFaceFolder(source)
    base = compose.compose()
    named = dataclasses.replace(base.run, name=run.resolve().name, dir=str(run))
    optim = dataclasses.replace(base.optim, lr=GIVEN_WEIGHTS_LR)
    config = dataclasses.replace(base, seq=folder.max_position, model=folder.model, optim=optim, run=named)
    created = run_dir.create(config, [])
    try:
        weights = {name: folder.read(name).float() for name in parameter_shapes(folder.model)}
        write_model_state(created.checkpoints, 0, weights)
    except BaseException:
        created.discard()
        raise
    finally:
        created.release()
    return config


def export_checkpoint(
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype,
    tokenizer: Path | None = None,
    report: Callable[[str], None] | None = None,
) -> Exported:
    """Write the model of a run (its newest usable checkpoint) or of one ``step-N`` folder as a Hugging Face folder.

    ``source`` may be a path or, for a run, its name under runs/.
    ``tokenizer`` is a folder whose tokenizer files go with it. ``report`` is shown what was wrong with a checkpoint that is passed over.
    Needs memory for the whole model in float32.

    Raises:
        ConfigError: there is no such run or usable checkpoint, the checkpoint is not of the run's model, or ``target`` cannot be written.
        RunError: the disk of ``target`` is full or fails.
    """
    require_new_folder(target)
    source = find_source(source)
    run = _run_of(source)
    config = compose.load(run / RESOLVED)
    try:
        step, weights = load_model_state(source, report)
    except CheckpointError as error:
        raise ConfigError(*str(error).splitlines()) from error
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    problems = parameter_problems(shapes, parameter_shapes(config.model), where=lambda _: source, asked_by=str(run / RESOLVED))
    if problems:
        raise ConfigError(*problems)

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        return {name: weights.pop(name) for name in names}

    factor = rope_factor(config.model.rope, config.seq)
    write_folder(target, config.model, read, rope_factor=factor, seq=config.seq, dtype=dtype, tokenizer=tokenizer)
    return Exported(config, step)


def find_source(source: Path) -> Path:
    """The folder of what `export_checkpoint` is given. That a checkpoint of it is usable is not checked.

    Raises:
        ConfigError: there is no such run, or no checkpoint in it.
    """
    if not source.exists() and (run_dir.RUNS / source).is_dir():
        source = run_dir.RUNS / source
    _run_of(source)
    try:
        checkpoints_of(source)
    except CheckpointError as error:
        raise ConfigError(*str(error).splitlines()) from error
    return source


def _run_of(source: Path) -> Path:
    """The run that ``source``, itself a run, its folder of checkpoints or one checkpoint, belongs to."""
    resolved = source.resolve()
    for folder in (resolved, resolved.parent, resolved.parent.parent):
        if (folder / RESOLVED).is_file():
            return folder
    raise ConfigError(f"{source}: no run and no checkpoint of one (no {RESOLVED} here or above it); give a run, such as runs/latest")
