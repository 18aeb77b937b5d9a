"""Checkpoints that all ranks write in the background and verify when they load.

torch.distributed.checkpoint (DCP) writes and reads the tensors, in any sharding. This module adds a
commit by one atomic rename, checksums, and a limit on the number of checkpoints.

    checkpoints/step-50/            complete: DCP's files, .metadata, manifest.json
    checkpoints/step-60.tmp-1/      being written, or left by a crash: never read, removed on start
    checkpoints/step-50.replaced/   the old step-50 while a new one replaces it, restored on start
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch.failures import RunError, is_peer_loss
from mtrain_cli.launch.manifest import (
    FileEntry,
    Manifest,
    ManifestError,
    checksum,
    committed_steps,
    incomplete_after,
    is_kept,
)
from mtrain_cli.launch.run_dir import CheckpointError, NoCheckpointError, checkpoints_of
from mtrain_cli.parallel.collectives import share
from mtrain_cli.training import checkpoint_files
from mtrain_cli.training.checkpoint_files import CheckpointReader, ForeignFileError

T = TypeVar("T")
Targets = Callable[[dict[str, tuple[int, ...]]], dict[str, Tensor]]
LEARNED = "index"  # the part of a checkpoint with what a pattern has learned
_MODEL = "model."  # begins the names of the model's tensors in a checkpoint
# A rank with a slow disk keeps the other ranks waiting in a collective.
GROUP_TIMEOUT = timedelta(hours=1)


class Checkpointer:
    """Save and load the folders `step-N` of one directory.

    All ranks must call every method together, except `latest`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int,
        report: Callable[[str], None] | None = None,
        keep_every: int = 0,
    ) -> None:
        """Remove what crashed saves left in `directory`, or raise CheckpointError.

        directory: created if missing. All ranks must see the same directory.
        keep: number of newest checkpoints to keep, at least 1. The disk must hold one more.
        report: called on rank 0 with the reason why a checkpoint is skipped; default: log it.
        keep_every: the checkpoints of multiples of this step stay for good; 0 for none.
        """
        assert keep >= 1
        self._directory, self._keep, self._keep_every = Path(directory), keep, keep_every
        self._group, self._rank, self._workers = None, 0, 1
        if dist.is_initialized():
            # A group of its own, so that saving never mixes with other collectives.
            self._group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
            self._rank, self._workers = dist.get_rank(), dist.get_world_size()
        else:
            _silence_single_process_warning()
        self._report = report or logging.getLogger(__name__).warning
        self._attempts = 0
        self._unusable: set[int] = set()  # newer than the step that was loaded
        self._saving: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._alone: RunError | None = None  # an error in a save that the other ranks do not have
        try:
            self._on_rank_0(self._clean_up)
        except _Failed as failed:
            reason = f"{self._directory}: cannot hold checkpoints: {failed}"
            raise CheckpointError(reason) from failed

    def save(self, step: int, state: Mapping[str, Any], asynchronous: bool = True) -> None:
        """Save `state` as the checkpoint of `step`, replacing an earlier checkpoint of that step.

        Wait for the previous save, copy the tensors to the CPU, and write them in the background.

        state: `model` and `optimizer` are state dicts of DTensors or tensors, `trainer` has JSON
            values that are equal on all ranks, `rng` this rank's generators as tensors, and
            `LEARNED` tensors that are equal on all ranks that have them.

        Raises CheckpointError on all ranks, if the previous save failed or, without `asynchronous`,
        this one. This save runs even if the previous one failed. Committed checkpoints stay intact.
        """
        earlier = self._finish()
        self._attempts += 1
        partial = self._directory / f"step-{step}.tmp-{self._attempts}"
        trainer = json.loads(json.dumps(state.get("trainer", {})))
        written = dcp.async_save(
            self._tensors(state),
            storage_writer=_CheckpointWriter(partial),
            planner=_CheckpointPlanner(),
            process_group=self._group,
            no_dist=self._group is None,
        )
        arguments = step, partial, written, trainer
        self._saving = threading.Thread(
            target=self._commit, args=arguments, name="checkpoint", daemon=True
        )
        self._saving.start()
        own = None if asynchronous else self._finish()
        if earlier or own:
            raise CheckpointError(*(str(error) for error in (earlier, own) if error))

    def wait(self) -> None:
        """Wait for the save in progress. If it failed, raise CheckpointError on all ranks."""
        if failure := self._finish():
            raise failure

    def latest(self) -> int | None:
        """Return the step of the newest committed checkpoint on this rank, without verifying it."""
        return next(iter(committed_steps(self._directory)), None)

    def holds_only_weights(self) -> bool:
        """Return whether the newest checkpoint on rank 0's disk is an import: only weights."""

        def has_no_trainer() -> bool:
            if (step := self.latest()) is not None:
                with contextlib.suppress(OSError, ValueError):  # loading reports the damage
                    return not Manifest.read(self._directory / f"step-{step}").trainer
            return False

        return self._on_all_ranks(has_no_trainer)[0]

    def describe_fallback(self) -> str:
        """Return a clause that says whether an earlier checkpoint is left to resume from."""
        # At the next start, `_clean_up` restores a checkpoint that a save had set aside.
        if self.latest() is not None or any(self._directory.glob("step-*.replaced")):
            return "the previous checkpoint is intact"
        return "there is no earlier checkpoint"

    def load(self, state: dict[str, Any]) -> int:
        """Load the newest intact checkpoint into `state` and return its step.

        Fill the tensors of `state` in place, in any sharding, and replace `state["trainer"]`. Leave
        `rng` unchanged if a different number of ranks wrote the checkpoint. If none is usable,
        raise NoCheckpointError on all ranks, with a line for each checkpoint. Raise ConfigError if
        the newest intact one does not fit `LEARNED`: an older one would undo training.
        """
        self.wait()
        steps = self._on_all_ranks(lambda: committed_steps(self._directory))[0]
        lines = []
        for step in steps:
            problem = self._load_step(step, state)
            if problem is None:
                self._unusable = set(steps[: steps.index(step)])
                return step
            lines.append(f"{self._directory / f'step-{step}'}: {problem}")
            if self._rank == 0 and step != steps[-1]:
                self._report(f"{lines[-1]}; using the previous checkpoint instead")
        nothing = f"{self._directory}: holds no checkpoint; --resume auto begins the run again"
        raise NoCheckpointError(*(lines or [nothing]))

    def _load_step(self, step: int, state: dict[str, Any]) -> str | None:
        """Load one checkpoint. Return None, or the reason why the checkpoint cannot be used."""
        folder = self._directory / f"step-{step}"
        try:
            parts = self._on_all_ranks(lambda: _verify(folder, self._rank, self._workers))
            problems = list(dict.fromkeys(problem for part in parts for problem in part))
            if problems:
                more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
                return "; ".join(problems[:3]) + more
            manifest = Manifest.read(folder)
            if "optimizer" in state and not manifest.trainer:
                return (
                    "holds only weights, so there is no training to resume; "
                    "start a new run with train.init_from=HF_FOLDER"
                )
            tensors = self._tensors(state)
            if manifest.workers != self._workers:
                tensors.pop("rng", None)
            index = state.get(LEARNED, {})
            unfit = self._on_all_ranks(lambda: _unfit_index(CheckpointReader(folder), index))
            if problem := next(filter(None, unfit), ""):
                new = "or start a new run with train.init_from=HF_FOLDER"
                raise ConfigError(f"{folder}: {problem}, {new}")
            foreign = self._on_all_ranks(lambda: _read(folder, tensors))
        except _Failed as error:
            return str(error)
        # With pipeline parallelism, each rank has a part of the model.
        extra = [name for name in foreign[0] if all(name in names for names in foreign)]
        if extra and "model" in state:
            return f"holds {extra[0]}, which this model does not have"
        if "trainer" in state:
            state["trainer"] = dict(manifest.trainer)
        return None

    def _tensors(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of `state` that DCP saves, with `rng` under this rank's name."""
        tensors = {key: value for key, value in state.items() if key not in ("trainer", "rng")}
        return tensors | ({"rng": {f"rank-{self._rank}": state["rng"]}} if "rng" in state else {})

    def _finish(self) -> CheckpointError | None:
        """Wait for the save in progress. Return its error, or None. Raise this rank's own."""
        while self._saving is not None and self._saving.is_alive() and self._alone is None:
            self._saving.join(0.5)
        if self._alone is not None:
            raise self._alone
        failure, self._saving, self._failure = self._failure, None, None
        return failure

    def _commit(self, step: int, partial: Path, written: Any, trainer: dict[str, Any]) -> None:
        """Wait in a thread for DCP's files, collect checksums, and let rank 0 rename the folder."""

        def own_files() -> dict[str, dict[str, int]]:
            try:
                written.result()
            except Exception as error:  # DCP raises a CheckpointException on all ranks
                # The others wait for this rank in DCP, so the job must end.
                if self._workers > 1 and not is_peer_loss(error):
                    line = f"cannot save together with the other ranks ({_one_line(error)})"
                    self._alone = RunError(f"{partial}: rank {self._rank} {line}")
                raise
            paths = [*partial.glob(f"__{self._rank}_*")]
            if self._rank == 0:
                paths.append(partial / checkpoint_files.METADATA)
            return {path.name: asdict(checksum(path)) for path in paths}

        try:
            parts = self._on_all_ranks(own_files)
            files = {name: FileEntry(**e) for part in parts for name, e in part.items()}
            manifest = Manifest(step, self._workers, torch.__version__, files, trainer)
            self._on_rank_0(lambda: self._publish(manifest, partial))
        except Exception as error:  # any failure, such as a lost peer, must reach the main thread
            # Machines may not share the disk, so every rank removes the files that it sees.
            shutil.rmtree(partial, ignore_errors=True)
            reason = error if isinstance(error, _Failed) else self._reason(error)
            self._failure = CheckpointError(
                f"{self._directory / f'step-{step}'}: the checkpoint of step {step} was not saved "
                f"({reason}); {self.describe_fallback()}"
            )

    def _publish(self, manifest: Manifest, partial: Path) -> None:
        """Write the manifest, rename `partial` to `step-N`, and remove superseded checkpoints."""
        unseen = next((name for name in manifest.files if not (partial / name).is_file()), None)
        if unseen:
            raise OSError(
                errno.ENOENT,
                "rank 0 cannot see a file of another rank; all machines must share this disk",
                unseen,
            )
        manifest.write(partial)
        _fsync_folder(partial)
        final = self._directory / f"step-{manifest.step}"
        replaced = final.with_name(f"{final.name}.replaced")
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
        _fsync_folder(self._directory)
        _remove(replaced)
        # A run that fell back to an earlier checkpoint leaves later ones, which do not count.
        self._unusable.discard(manifest.step)
        steps = [
            step
            for step in committed_steps(self._directory)
            if step <= manifest.step and step not in self._unusable
        ]
        for step in steps[self._keep :]:
            if not is_kept(step, self._keep_every):
                _remove(self._directory / f"step-{step}")

    def _clean_up(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        for replaced in self._directory.glob("step-*.replaced"):
            final = replaced.with_suffix("")
            if final.exists():
                shutil.rmtree(replaced)
            else:
                replaced.rename(final)
        for partial in self._directory.glob("step-*.tmp-*"):
            shutil.rmtree(partial)

    def _on_rank_0(self, action: Callable[[], None]) -> None:
        """Run `action` on rank 0. If the action fails, raise `_Failed` on all ranks."""
        self._on_all_ranks(lambda: action() if self._rank == 0 else None)

    def _on_all_ranks(self, action: Callable[[], T]) -> list[T]:
        """Return the results of an action by rank. If it fails on any rank, all raise _Failed."""
        result: T | None = None
        failure = None
        try:
            result = action()
        except (Exception, CheckpointException) as error:
            failure = self._reason(error)
        answers: list[Any] = [(result, failure)]
        if self._group is not None:
            answers = share((result, failure), self._group)
        failed = next((reason for _, reason in answers if reason), None)
        if failed:
            raise _Failed(failed)
        return [result for result, _ in answers]

    def _reason(self, error: BaseException) -> str:
        """Return one line that names the lowest failed rank and its error."""
        rank = self._rank
        if isinstance(error, CheckpointException) and error.failures:
            rank, (error, _) = min(error.failures.items())
        return f"rank {rank}: {_one_line(error)}" if self._workers > 1 else _one_line(error)


def load_model_state(
    path: str | os.PathLike[str],
    report: Callable[[str], None] | None = None,
    targets: Targets | None = None,
    learned: Mapping[str, Tensor] | None = None,
) -> tuple[int, dict[str, Tensor]]:
    """Return the step and the whole model of `newest_intact`, by parameter name, in this process.

    targets: returns the tensors to fill, of any dtype and device, from the stored shapes. By
        default, allocate them on the CPU in the checkpoint's dtype.
    learned: what a pattern learns, to fill. ConfigError if it does not fit the checkpoint.
    """
    index = learned or {}

    def read(folder: Path) -> tuple[int, dict[str, Tensor]]:
        reader = CheckpointReader(folder)
        stored = checkpoint_files.tensors_of(reader.metadata, _MODEL)
        entries = {name.removeprefix(_MODEL): entry for name, entry in stored.items()}
        if targets is None:
            model = {n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in entries.items()}
        else:
            model = targets({name: tuple(entry.size) for name, entry in entries.items()})
        if problem := _unfit_index(reader, index):
            raise ConfigError(f"{folder}: {problem}")
        tensors = {f"{_MODEL}{name}": tensor for name, tensor in model.items()}
        tensors |= {f"{LEARNED}.{name}": tensor for name, tensor in index.items()}
        try:
            _read(folder, tensors, reader)
        except (OSError, ForeignFileError):
            raise
        except Exception as error:
            raise ForeignFileError(_one_line(error)) from error
        return Manifest.read(folder).step, model

    return newest_intact(path, read, report)


def newest_intact(
    path: str | os.PathLike[str],
    use: Callable[[Path], T],
    report: Callable[[str], None] | None = None,
) -> T:
    """Return what ``use`` makes of the newest checkpoint whose files have their checksums.

    Args:
        path: a `step-N` folder, or a run or checkpoints folder.
        use: gets the folder. If it raises ForeignFileError, the checkpoint counts as damaged.
        report: called with the reason why a checkpoint is skipped. By default, log the reason.

    Raises:
        NoCheckpointError: there is no intact checkpoint.
    """
    path = Path(path).absolute()
    candidates = checkpoints_of(path)
    report = report or logging.getLogger(__name__).warning
    problems = []
    for candidate in candidates:
        damage = _verify(candidate, 0, 1)
        try:
            if not damage:
                for folder in [] if candidate == path else incomplete_after(candidate):
                    report(f"{folder}: is incomplete; using {candidate.name} instead")
                return use(candidate)
        except ForeignFileError as error:
            damage = [str(error)]
        problems.append(f"{candidate}: {'; '.join(damage)}")
        if candidate != candidates[-1]:
            report(f"{problems[-1]}; using the previous checkpoint instead")
    raise NoCheckpointError(*problems)


def write_model_state(
    directory: str | os.PathLike[str], step: int, model: Mapping[str, Tensor]
) -> Path:
    """Write a checkpoint that holds only a model, from this process alone. Return its folder."""
    Checkpointer(directory, keep=2**31).save(step, {"model": dict(model)}, asynchronous=False)
    return Path(directory) / f"step-{step}"


class _Failed(Exception):
    """An action of `Checkpointer._on_all_ranks` failed on some rank. All ranks raise this error."""


def _plainly(function: Callable[..., T]) -> Callable[..., T]:
    """Let a step of DCP raise only what a pickle can carry, since DCP sends it to the other ranks.

    They would wait for a rank that cannot send or read an error.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> T:
        try:
            return function(*arguments, **options)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise RuntimeError(_one_line(error)) from error
            # A full disk is the cause of an error about a file position.
            name = os.fspath(cause.filename) if cause is error and cause.filename else None
            raise OSError(cause.errno, cause.strerror or str(cause), name) from error

    return call


class _CheckpointWriter(dcp.FileSystemWriter):
    """DCP's writer, whose errors reach all ranks."""

    set_up_storage_writer = _plainly(dcp.FileSystemWriter.set_up_storage_writer)
    prepare_local_plan = _plainly(dcp.FileSystemWriter.prepare_local_plan)
    prepare_global_plan = _plainly(dcp.FileSystemWriter.prepare_global_plan)
    write_data = _plainly(dcp.FileSystemWriter.write_data)
    finish = _plainly(dcp.FileSystemWriter.finish)


class _CheckpointPlanner(DefaultSavePlanner):
    """DCP's planner, whose errors reach all ranks."""

    set_up_planner = _plainly(DefaultSavePlanner.set_up_planner)
    create_local_plan = _plainly(DefaultSavePlanner.create_local_plan)
    create_global_plan = _plainly(DefaultSavePlanner.create_global_plan)
    finish_plan = _plainly(DefaultSavePlanner.finish_plan)


def _read(
    folder: Path, tensors: dict[str, Any], reader: CheckpointReader | None = None
) -> list[str]:
    """Fill this rank's part of `tensors`. Return the model's tensors that `tensors` lacks."""
    # Every rank reads on its own, because ranks exchange pickles in DCP's collective load.
    reader, planner = reader or CheckpointReader(folder), checkpoint_files.CheckpointPlanner()
    _silence_single_process_warning()
    try:
        dcp.load(tensors, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:
        if not error.failures:
            raise
        raise min(error.failures.items())[1][0] from error
    stored = checkpoint_files.tensors_of(reader.metadata, _MODEL)
    return [name for name in stored if name not in planner.state_dict]


def _unfit_index(reader: CheckpointReader, index: Mapping[str, Tensor]) -> str:
    """Return why a checkpoint cannot fill what a pattern learns, and the remedy; "" if it can."""
    stored = checkpoint_files.tensors_of(reader.metadata, f"{LEARNED}.")
    for name, tensor in index.items():
        layer, _, part = name.partition(".")
        entry = stored.get(f"{LEARNED}.{name}")
        if entry is None:
            reason = f"holds no learned index of layer {layer}, which sparsity.score=learned needs"
        elif entry.size != tensor.shape:
            ranks = f"sparsity.rank={entry.size[-1]}, not {tensor.shape[-1]}"
            shapes = f"the shape {list(entry.size)}, not {list(tensor.shape)}"
            learned = ranks if entry.size[:-1] == tensor.shape[:-1] else shapes
            reason = f"the learned index of layer {layer} ({part}) has {learned}"
        else:
            continue
        return f"{reason}; give the sparsity that the run had, sparsity.score=exact, sparsity=dense"
    return ""


def _verify(folder: Path, part: int, parts: int) -> list[str]:
    try:
        return Manifest.read(folder).problems(folder, part, parts)
    except ManifestError as error:
        return [str(error)]


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    text = str(error).strip()
    if isinstance(error, ForeignFileError):
        return text
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _silence_single_process_warning() -> None:
    """Silence DCP's warning that no process group exists, in all threads."""
    warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")


def _remove(folder: Path) -> None:
    """Rename a checkpoint before removing it. A crash then never leaves an incomplete `step-N`."""
    leftover = folder.with_name(f"{folder.name}.tmp-removed")
    # Failing to remove an old folder wastes space, but must not fail the new checkpoint.
    with contextlib.suppress(OSError):
        if folder.exists():
            folder.rename(leftover)
        shutil.rmtree(leftover)


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
