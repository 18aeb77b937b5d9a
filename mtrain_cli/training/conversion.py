"""Convert between mtrain checkpoints and Hugging Face folders."""

from __future__ import annotations

import contextlib
import dataclasses
import filecmp
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mtrain_cli.composition import compose
from mtrain_cli.composition.derived import folder_of
from mtrain_cli.config import documents, resolved_file
from mtrain_cli.config.data_kinds import KINDS
from mtrain_cli.config.documents import replace_text
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.data.mixture import parse_mix
from mtrain_cli.data.store import META, StoreMeta
from mtrain_cli.data.tokenizers import NO_BEGIN, Begin, ByteTokenizer, choose_begin, open_tokenizer
from mtrain_cli.launch import run_dir
from mtrain_cli.launch.manifest import Manifest, ManifestError, committed_steps
from mtrain_cli.launch.run_dir import RESOLVED, RunDir, checkpoints_of, find_source, run_of
from mtrain_cli.model import huggingface
from mtrain_cli.model.experts import BIAS
from mtrain_cli.model.huggingface import check_tensors
from mtrain_cli.model.huggingface_config import config_json, read_mask, require_new_folder
from mtrain_cli.model.rope import rope_factor
from mtrain_cli.model.tokenizer_files import TOKENIZER as TOKENIZER_JSON
from mtrain_cli.model.tokenizer_files import TokenizerFiles, of_bytes, of_file, of_folder
from mtrain_cli.model.transformers_decoder import export_foreign
from mtrain_cli.training import checkpointer
from mtrain_cli.training.checkpoint_files import CheckpointReader, tensors_of
from mtrain_cli.training.optimizer import GIVEN_WEIGHTS_LR

TOKENIZER = "tokenizer"  # in an imported run, the folder with the source's tokenizer files
BEGIN = "begin.json"  # in that folder: what the documents of the training start with


@dataclass(frozen=True)
class Exported:
    """Result of an export. tokenizer: a line on which tokenizer was exported, or why none was."""

    config: Config
    step: int
    tokenizer: str


def import_folder(source: Path, run: Path) -> Config:
    """Create a run from a Hugging Face folder, with float32 weights in the checkpoint `step-0`.

    Return its configuration: the model of `source`, and defaults. The whole model must fit memory.
    Raises ConfigError for a wrong folder, and CheckpointError if the weights cannot be written.
    """
    folder = huggingface.HuggingFaceFolder(source)
    huggingface.verify_sums(source)
    named = {"name": run.resolve().name, "dir": str(run)}
    base = compose.compose().changed(optim={"lr": GIVEN_WEIGHTS_LR}, run=named)
    config = dataclasses.replace(base, seq=folder.max_position, model=folder.model)
    if (mask := read_mask(source)) is not None:
        config = dataclasses.replace(config, mask=mask)
    created = run_dir.create_here(config, [])
    try:
        parameters = huggingface.parameter_shapes(folder.model)
        weights = {
            name: folder.read(name).float() if name in parameters else torch.zeros(shape)
            for name, shape in huggingface.parameter_shapes(folder.model, biases=True).items()
        }
        checkpointer.write_model_state(created.checkpoints, 0, weights)
        files, copy = None, created.path / TOKENIZER  # an export reads the copy
        with contextlib.suppress(ConfigError):
            files = of_folder(source)
        if files is not None:
            copy.mkdir()
            files.write(copy)
            (copy / "config.json").write_text(json.dumps(dict(files.ids)), encoding="utf-8")
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
    adapter: bool = False,
    report: Callable[[str], None] | None = None,
) -> Exported:
    """Write the model of a run or of one checkpoint as a Hugging Face folder.

    The whole model must fit the memory of this process in float32.

    Args:
        source: path of a run or of a `step-N` folder, or the name of a run under runs/.
        target: a new folder.
        tokenizer: folder to copy the tokenizer from; by default, that of the run's training.
        adapter: write the adapters of `train.lora` as a PEFT folder, instead of a whole model.
        report: called with the reason why a checkpoint is skipped.

    Raises ConfigError without a fitting intact checkpoint, or if `target` cannot be written, and
    RunError if its disk is full or fails.
    """
    require_new_folder(target)
    source = find_source(source)
    run = run_of(source)
    config = resolved_file.load(run / RESOLVED)
    if adapter and not config.train.lora.rank:
        raise ConfigError(f"--adapter: {source} has no adapters (train.lora.rank=0); leave it out")
    named = None if tokenizer is None else of_folder(tokenizer)
    files, reason = tokenizer_of_run(config, run) if named is None else (named, "")
    remark = f"no tokenizer: {reason}; copy one with --tokenizer FOLDER" if reason else ""
    # Before reading weights, refuse shapes that the model family does not support.
    mask, model, seq = config.mask, config.model, config.seq
    if not model.is_foreign:
        config_json(model, rope_factor=1.0, seq=seq, dtype="float32", mask=mask)
    try:
        step, weights = checkpointer.load_model_state(source, report)
    except checkpointer.CheckpointError as error:
        raise ConfigError(*str(error).splitlines()) from error
    remark = remark or f"tokenizer: {files.name}" if files else remark
    if model.is_foreign:
        kept = RunDir(run).definition
        export_foreign(target, kept, config, weights, dtype, files, adapter=adapter)
        return Exported(config, step, remark)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    check_tensors(shapes, huggingface.parameter_shapes(model, biases=True), source, run / RESOLVED)
    biases = [weights[name] for name in shapes if name.endswith(BIAS)]
    if any(bias.any() for bias in biases):
        raise ConfigError(
            f"train.balance_bias: the routers of this checkpoint have a bias, which a Hugging Face "
            f"{model.family} model lacks; an export would choose other experts. Train without "
            "train.balance_bias to export the model"
        )

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        return {name: weights.pop(name) for name in names}

    factor = rope_factor(model.rope, seq)
    huggingface.write_folder(
        target, model, read, rope_factor=factor, seq=seq, dtype=dtype, mask=mask, tokenizer=files
    )
    if mask.plain_window is None and mask.kind != "causal":
        line = f"config.json cannot say that the run trained with mask.kind={mask.kind}"
        remark = f"{remark}; {line}" if remark else line
    if config.sparsity.has_learned_state:
        line = "exported for dense attention; the learned index stays in the checkpoint"
        remark = f"{remark}; {line}" if remark else line
    return Exported(config, step, remark)


def describe_learned(source: Path, step: int) -> str:
    """Return a line on what a checkpoint holds besides the model; "" if it is nothing."""
    folder = next(one for one in checkpoints_of(source) if one.name == f"step-{step}")
    tensors = tensors_of(CheckpointReader(folder).metadata, f"{checkpointer.LEARNED}.")
    if not tensors:
        return ""
    layers = len({name.split(".")[1] for name in tensors})
    numbers = sum(tensor.size.numel() for tensor in tensors.values())
    return (
        f"\n  learned index            {layers} layer{'s' * (layers > 1)}, {numbers:,} numbers; "
        "not compared, transformers has none"
    )


def tokenizer_of_run(config: Config, run: Path) -> tuple[TokenizerFiles | None, str]:
    """Return the tokenizer that a run was trained with and "", or None and why there is none.

    If the data do not name a tokenizer, return the tokenizer of `train.init_from`.
    """
    # The checkpoint of an import that was not trained has only weights.
    trained, steps = True, committed_steps(run / "checkpoints")
    with contextlib.suppress(ManifestError):  # loading reports the problem
        manifests = [Manifest.read(run / "checkpoints" / f"step-{step}") for step in steps]
        trained = not steps or any(manifest.trainer for manifest in manifests)
    if (run / TOKENIZER).is_dir():
        files = of_folder(run / TOKENIZER)
        begin = _recorded_begin(config, run) if trained else None
        return dataclasses.replace(files, begin=begin), ""
    if not trained:
        return None, "the imported folder has none"
    return tokenizer_of_data(config)


def tokenizer_of_data(config: Config) -> tuple[TokenizerFiles | None, str]:
    """Return the tokenizer of the data, or that of `train.init_from`, as `tokenizer_of_run`."""
    data, folder = config.data, folder_of(config.train.init_from)
    try:
        if KINDS[data.kind].tokenizes:
            files: TokenizerFiles | None = _chosen_tokenizer(data.tokenizer)
        else:
            files = _tokenizer_of_stores(config, folder) if data.kind == "tokens" else None
            files = of_folder(folder) if files is None and folder is not None else files
        if files is not None:
            return dataclasses.replace(files, begin=_begin(config)), ""
    except ConfigError as error:
        return None, error.problems[0]
    return None, f"data.path={data.path} does not name a tokenizer"


def record_begin(config: Config, run: Path) -> None:
    """Write what documents start with into a run that has a copy of its tokenizer.

    Call this where the run trains: its data may be missing where it is evaluated.
    """
    if (run / TOKENIZER).is_dir():
        begin = _begin(config)
        content = None if begin is None else dataclasses.asdict(begin)
        replace_text(run / TOKENIZER / BEGIN, json.dumps(content))


def _recorded_begin(config: Config, run: Path) -> Begin | None:
    """Return what `record_begin` wrote; for a run of an earlier version, ask its data."""
    try:
        begin = documents.read_json(run / TOKENIZER / BEGIN)
        return None if begin is None else Begin(tuple(map(int, begin["ids"])), str(begin["name"]))
    except (OSError, ValueError, TypeError, KeyError):
        return _begin(config)


def _begin(config: Config) -> Begin | None:
    """Return what the documents of a run start with; None for what the tokenizer prescribes."""
    data = config.data
    if KINDS[data.kind].tokenizes and data.bos is True:
        tokenizer = open_tokenizer(data.tokenizer)
        choose_begin(tokenizer, data.bos)
        return tokenizer.begin
    if metas := _metas_of_stores(config):
        return max((meta.begin or NO_BEGIN for meta in metas), key=lambda begin: len(begin.ids))
    return NO_BEGIN if data.bos is False else None


def _chosen_tokenizer(choice: str) -> TokenizerFiles:
    """Return the tokenizer that `data.tokenizer` names, with files such as a chat template."""
    if choice == "bytes":
        return of_bytes()
    path, eos = Path(choice), None
    with contextlib.suppress(ConfigError):  # the tokenizer does not open
        eos = open_tokenizer(choice).eos
    return of_folder(path.parent, eos) if path.name == TOKENIZER_JSON else of_file(path, eos)


def _tokenizer_of_stores(config: Config, folder: Path | None) -> TokenizerFiles | None:
    """Return the tokenizer of the run's token stores; None if they differ or some is no store.

    folder: that of `train.init_from`, which holds more files if its tokenizer.json is the same.
    """
    metas = _metas_of_stores(config)
    if len({meta.tokenizer_identity for meta in metas}) != 1:
        return None
    if metas[0].tokenizer_identity == ByteTokenizer.identity:
        return of_bytes()
    file = _stores(config)[0] / TOKENIZER_JSON
    theirs = None if folder is None else folder / TOKENIZER_JSON
    if theirs and theirs.is_file() and file.is_file() and filecmp.cmp(theirs, file, shallow=False):
        return of_folder(theirs.parent)
    return of_file(file, metas[0].eos)


def _stores(config: Config) -> list[Path]:
    """Return the paths of the corpora of a run."""
    data = config.data
    names = parse_mix(data.mix) if data.mix is not None else {"": 1.0}
    return [Path(data.path or ".", name) for name in names]


def _metas_of_stores(config: Config) -> list[StoreMeta]:
    """Return the metadata of the run's token stores; an empty list if a corpus is no store."""
    stores = _stores(config)
    if config.data.kind != "tokens" or not all((store / META).is_file() for store in stores):
        return []
    return [StoreMeta.read(store, str(store)) for store in stores]
