"""Between an mtrain checkpoint and a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mtrain_cli.config import compose
from mtrain_cli.config.derived import folder_of
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.data.mixture import parse_mix
from mtrain_cli.data.store import META, StoreMeta
from mtrain_cli.data.tokenizers import ByteTokenizer, open_tokenizer
from mtrain_cli.launch import run_dir
from mtrain_cli.model.huggingface import (
    HuggingFaceFolder,
    parameter_problems,
    parameter_shapes,
    require_new_folder,
    write_folder,
)
from mtrain_cli.model.huggingface_config import config_json
from mtrain_cli.model.rope import rope_factor
from mtrain_cli.model.tokenizer_files import TokenizerFiles, of_bytes, of_file, of_folder
from mtrain_cli.training.checkpointer import (
    CheckpointError,
    checkpoints_of,
    load_model_state,
    write_model_state,
)
from mtrain_cli.training.manifest import Manifest, ManifestError, committed_steps
from mtrain_cli.training.optimizer import GIVEN_WEIGHTS_LR

RESOLVED = "resolved.yaml"
TOKENIZER = (
    "tokenizer"  # folder of an imported run: the tokenizer files of what it was imported from
)


@dataclass(frozen=True)
class Exported:
    """What was exported: the configuration of the run, the step of its checkpoint, and in words which tokenizer went with it."""

    config: Config
    step: int
    tokenizer: str


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
    config = dataclasses.replace(
        base, seq=folder.max_position, model=folder.model, optim=optim, run=named
    )
    created = run_dir.create(config, [])
    try:
        weights = {name: folder.read(name).float() for name in parameter_shapes(folder.model)}
        write_model_state(created.checkpoints, 0, weights)
        _copy_tokenizer(source, created.path / TOKENIZER)
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
    The tokenizer goes with it: of the folder ``tokenizer``, else the one that the run knows.
    ``report`` is shown what was wrong with a checkpoint that is passed over.
    Needs memory for the whole model in float32.

    Raises:
        ConfigError: there is no such run or usable checkpoint, the checkpoint is not of the run's model, or ``target`` cannot be written.
        RunError: the disk of ``target`` is full or fails.
    """
    require_new_folder(target)
    source = find_source(source)
    run = _run_of(source)
    config = compose.load(run / RESOLVED)
    files, remark = (
        (of_folder(tokenizer), "") if tokenizer is not None else tokenizer_of_run(config, run)
    )
    # Refuse a shape that the family lacks before reading weights.
    config_json(config.model, rope_factor=1.0, seq=config.seq, dtype="float32")
    try:
        step, weights = load_model_state(source, report)
    except CheckpointError as error:
        raise ConfigError(*str(error).splitlines()) from error
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    problems = parameter_problems(
        shapes, parameter_shapes(config.model), where=lambda _: source, asked_by=str(run / RESOLVED)
    )
    if problems:
        raise ConfigError(*problems)

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        return {name: weights.pop(name) for name in names}

    factor = rope_factor(config.model.rope, config.seq)
    write_folder(
        target, config.model, read, rope_factor=factor, seq=config.seq, dtype=dtype, tokenizer=files
    )
    return Exported(config, step, remark or f"tokenizer: {files.name}" if files else remark)


def tokenizer_of_run(config: Config, run: Path) -> tuple[TokenizerFiles | None, str]:
    """The tokenizer whose ids a run was trained on; or None, and why it is not known.

    Data that name no tokenizer of their own are taken to have the ids of ``train.init_from``.
    """
    if (run / TOKENIZER).is_dir():
        return of_folder(run / TOKENIZER), ""
    if not _was_trained(run):
        return (
            None,
            "no tokenizer: the folder that was imported has none; --tokenizer FOLDER copies one",
        )
    data, folder = config.data, folder_of(config.train.init_from)
    try:
        if data.kind in ("text", "stdlib"):
            return _chosen_tokenizer(data.tokenizer), ""
        if data.kind == "tokens" and (files := _tokenizer_of_stores(config, folder)):
            return files, ""
        if folder is not None:
            return of_folder(folder), ""
    except ConfigError as error:
        return None, f"no tokenizer: {error.problems[0]}; --tokenizer FOLDER copies one"
    return (
        None,
        f"no tokenizer: data.path={data.path} does not say which it has; --tokenizer FOLDER copies one",
    )


def _chosen_tokenizer(choice: str) -> TokenizerFiles:
    """The tokenizer of text. Files beside a tokenizer.json, such as a chat template, go with it."""
    if choice == "bytes":
        return _bytes()
    path = Path(choice)
    return (
        of_folder(path.parent, _eos_id(choice))
        if path.name == "tokenizer.json"
        else of_file(path, _eos_id(choice))
    )


def _eos_id(choice: str) -> int | None:
    """The id that ended each document of text; None too where the tokenizers package is missing, which training had."""
    try:
        return open_tokenizer(choice).eos
    except ConfigError:
        return None


def _tokenizer_of_stores(config: Config, folder: Path | None) -> TokenizerFiles | None:
    """The one tokenizer of what `mtrain data prepare` wrote; None where there are several, or arrays that name none.

    The folder of ``train.init_from`` takes the place of the same tokenizer.json, since it has more files.
    """
    data = config.data
    names = parse_mix(data.mix) if data.mix is not None else {"": 1.0}
    stores = [Path(data.path or ".", name) for name in names]
    if not all((store / META).is_file() for store in stores):
        return None
    metas = [StoreMeta.read(store, str(store)) for store in stores]
    if len({meta.tokenizer_identity for meta in metas}) > 1:
        return None
    if metas[0].tokenizer_identity == ByteTokenizer.identity:
        return _bytes()
    file = stores[0] / "tokenizer.json"
    same = folder is not None and _content(folder / "tokenizer.json") == _content(file)
    return of_folder(folder) if folder is not None and same else of_file(file, metas[0].eos)


def _bytes() -> TokenizerFiles:
    tokenizer = ByteTokenizer()
    assert tokenizer.eos is not None
    return of_bytes(tokenizer.bos, tokenizer.eos, tokenizer.pad)


def _content(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def _was_trained(run: Path) -> bool:
    """False for an import, whose one checkpoint holds weights alone."""
    checkpoints = run / "checkpoints"
    try:
        return any(
            Manifest.read(checkpoints / f"step-{step}").trainer
            for step in committed_steps(checkpoints)
        ) or not committed_steps(checkpoints)
    except ManifestError:
        return True  # loading tells


def _copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer of an imported folder, with its token ids, so that an export has it again."""
    try:
        files = of_folder(source)
    except ConfigError:
        return
    target.mkdir()
    files.write(target)
    (target / "config.json").write_text(json.dumps(dict(files.ids)), encoding="utf-8")


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
    raise ConfigError(
        f"{source}: no run and no checkpoint of one (no {RESOLVED} here or above it); give a run, such as runs/latest"
    )
