"""Checkpoints: all ranks write them in the background, one rename commits them, loading verifies.

torch.distributed.checkpoint (DCP) writes and reads the tensors, so a checkpoint loads into any
sharding. This module adds an atomic commit, checksums, a limit on the number of checkpoints, and
training that goes on when the disk is full.

    checkpoints/step-50/            complete: DCP's files, .metadata, manifest.json
    checkpoints/step-60.tmp-1/      being written, or left by a crash: never read, removed on start
    checkpoints/step-50.replaced/   an older step-50; restored if its replacement never arrived
"""

from __future__ import annotations

import contextlib
import errno
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
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch.failures import RunError
from mtrain_cli.launch.manifest import FileEntry, Manifest, ManifestError, checksum, committed_steps
from mtrain_cli.parallel.collectives import share
from mtrain_cli.training.checkpoint_files import (
    METADATA,
    CheckpointPlanner,
    CheckpointReader,
    ForeignFileError,
    tensors_of,
)

T = TypeVar("T")
# A rank with a slow disk keeps the other ranks waiting in a collective.
GROUP_TIMEOUT = timedelta(hours=1)


class CheckpointError(RunError):
    """A checkpoint could not be saved or loaded. Training may continue after a failed save."""


class NoCheckpointError(ConfigError, CheckpointError):
    """There is no checkpoint, or none is intact; one line per damaged checkpoint."""


class Checkpointer:
    """Save and load the folders `step-N` of one directory.

    All ranks must call every method together, except `latest`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int,
        process_group: dist.ProcessGroup | None = None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        """Remove what crashed saves left in `directory`.

        Args:
            directory: created if missing; all ranks must see the same one.
            keep: number of newest checkpoints to keep, at least 1; the disk must hold one more.
            process_group: the ranks that save together; None for all ranks, or for this process
                alone without torch.distributed. They use a gloo group of their own, so that a save
                in progress never mixes with other collectives.
            report: receives, on rank 0, the reason why a checkpoint is skipped; logs by default.

        Raises:
            CheckpointError: the directory cannot be created or cleaned.
        """
        assert keep >= 1
        self._directory = Path(directory)
        self._keep = keep
        self._group = None
        if dist.is_initialized():
            ranks = None if process_group is None else dist.get_process_group_ranks(process_group)
            self._group = dist.new_group(ranks, backend="gloo", timeout=GROUP_TIMEOUT)
        else:
            _silence_single_process_warning()
        self._rank = dist.get_rank(self._group) if self._group is not None else 0
        self._workers = dist.get_world_size(self._group) if self._group is not None else 1
        self._report = report or logging.getLogger(__name__).warning
        self._attempts = 0
        self._saving: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        try:
            self._on_rank_0(self._clean_up)
        except _Failed as failed:
            reason = f"{self._directory}: cannot hold checkpoints: {failed}"
            raise CheckpointError(reason) from failed

    def save(self, step: int, state: Mapping[str, Any], asynchronous: bool = True) -> None:
        """Save `state` of `step`, replacing an earlier checkpoint of that step.

        Copies the tensors to the CPU before it returns, then writes in the background unless
        `asynchronous` is false. Waits first for the previous save.

        Args:
            step: number of completed optimizer steps.
            state: any of `model` and `optimizer` (state dicts of DTensors or tensors), `trainer`
                (JSON-serialisable, equal on all ranks) and `rng` (tensors of this rank).

        Raises:
            CheckpointError: on all ranks, if the previous save failed (this one still runs) or if
                this save is synchronous and failed. Committed checkpoints stay intact.
        """
        earlier = self._finish()
        self._attempts += 1
        partial = self._directory / f"step-{step}.tmp-{self._attempts}"
        trainer = json.loads(json.dumps(state.get("trainer", {})))
        written = dcp.async_save(
            self._tensors(state),
            storage_writer=_CheckpointWriter(partial),
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
            raise CheckpointError("\n".join(str(error) for error in (earlier, own) if error))

    def wait(self) -> None:
        """Wait for the save in progress; call this before the process group is destroyed.

        Raises:
            CheckpointError: on all ranks, if the save failed.
        """
        failure = self._finish()
        if failure:
            raise failure

    def latest(self) -> int | None:
        """Return the newest committed step that this rank sees, verified or not."""
        return next(iter(committed_steps(self._directory)), None)

    def holds_only_weights(self) -> bool:
        """Return whether the newest checkpoint holds only a model, as an import writes it.

        All ranks get the same answer.
        """

        def found() -> bool:
            step = self.latest()
            if step is None:
                return False
            try:
                return not Manifest.read(self._directory / f"step-{step}").trainer
            except (OSError, ValueError):
                return False  # damaged: loading reports why

        return self._on_all_ranks(found)[0]

    def describe_fallback(self) -> str:
        """Say what a run can resume from after a failed save or step, as this rank sees it."""
        # At the next start, `_clean_up` restores an older checkpoint that was set aside.
        if self.latest() is not None or any(self._directory.glob("step-*.replaced")):
            return "the previous checkpoint is intact"
        return "there is no earlier checkpoint"

    def load(self, state: dict[str, Any]) -> int:
        """Load the newest intact checkpoint into `state` and return its step.

        Fills tensors in place, in any sharding; replaces `trainer`; leaves `rng` unchanged if a
        different number of ranks wrote the checkpoint. Ranks share the verification.

        Raises:
            NoCheckpointError: on all ranks, with one line per unusable checkpoint.
        """
        self.wait()
        found = self._on_all_ranks(lambda: committed_steps(self._directory))[0]
        lines = []
        for step in found:
            problem = self._load_step(step, state)
            if problem is None:
                return step
            lines.append(f"{self._directory / f'step-{step}'}: {problem}")
            if self._rank == 0 and step != found[-1]:
                self._report(f"{lines[-1]}; using the previous checkpoint instead")
        raise NoCheckpointError(*(lines or [f"{self._directory}: holds no checkpoint"]))

    def _load_step(self, step: int, state: dict[str, Any]) -> str | None:
        """Load one checkpoint, or return why it cannot be used."""
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
            extra = self._on_all_ranks(lambda: _read(folder, tensors))[0]
        except _Failed as error:
            return str(error)
        if extra and "model" in state:
            return f"holds {extra}, which this model does not have"
        if "trainer" in state:
            state["trainer"] = dict(manifest.trainer)
        return None

    def _tensors(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Select what DCP saves: no trainer numbers, and per-rank tensors under the rank's name."""
        tensors = {key: value for key, value in state.items() if key not in ("trainer", "rng")}
        return tensors | ({"rng": {f"rank-{self._rank}": state["rng"]}} if "rng" in state else {})

    def _finish(self) -> CheckpointError | None:
        """Wait for the save in progress and return its failure, if any."""
        if self._saving is not None:
            self._saving.join()
        failure, self._saving, self._failure = self._failure, None, None
        return failure

    def _commit(self, step: int, partial: Path, written: Any, trainer: dict[str, Any]) -> None:
        """Wait for DCP, collect checksums, and let rank 0 rename the folder. Runs in a thread."""

        def own_files() -> dict[str, dict[str, int]]:
            written.result()
            paths = [*partial.glob(f"__{self._rank}_*")]
            if self._rank == 0:
                paths.append(partial / METADATA)
            return {path.name: asdict(checksum(path)) for path in paths}

        try:
            parts = self._on_all_ranks(own_files)
            files = {name: FileEntry(**e) for part in parts for name, e in part.items()}
            manifest = Manifest(step, self._workers, torch.__version__, files, trainer)
            self._on_rank_0(lambda: self._publish(manifest, partial))
        except Exception as error:  # including a lost peer: the main thread must learn of it
            # Machines may not share the disk, so every rank removes what it can.
            shutil.rmtree(partial, ignore_errors=True)
            reason = error if isinstance(error, _Failed) else self._reason(error)
            self._failure = CheckpointError(
                f"{self._directory / f'step-{step}'}: the checkpoint of step {step} was not saved "
                f"({reason}); {self.describe_fallback()}"
            )

    def _publish(self, manifest: Manifest, partial: Path) -> None:
        """Write the manifest, give `partial` its final name, and remove superseded checkpoints."""
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
        # Later steps predate a fallback to an earlier checkpoint: neither count nor remove them.
        steps = [step for step in committed_steps(self._directory) if step <= manifest.step]
        for step in steps[self._keep :]:
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
        """Run `action` on rank 0. Raise `_Failed` on all ranks if it fails."""
        self._on_all_ranks(lambda: action() if self._rank == 0 else None)

    def _on_all_ranks(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank and return the results in rank order (JSON-serialisable).

        Raises:
            _Failed: on all ranks, if the action failed on any.
        """
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
        """Describe `error` and its rank in one line; DCP gives every rank the errors of all."""
        rank = self._rank
        if isinstance(error, CheckpointException) and error.failures:
            rank, (error, _) = min(error.failures.items())
        return f"rank {rank}: {_one_line(error)}" if self._workers > 1 else _one_line(error)


def checkpoints_of(path: str | os.PathLike[str]) -> list[Path]:
    """Return the committed checkpoints of a checkpoints folder or a run, newest first.

    Any other folder is returned itself, unread.

    Raises:
        NoCheckpointError: a run or a checkpoints folder that holds no checkpoint.
    """
    folder = Path(path)
    if (folder / "checkpoints").is_dir():
        folder = folder / "checkpoints"
    found = [folder / f"step-{step}" for step in committed_steps(folder)]
    if not found and (folder.name == "checkpoints" or (folder / "resolved.yaml").is_file()):
        raise NoCheckpointError(f"{folder}: holds no checkpoint")
    return found or [folder]


def load_model_state(
    path: str | os.PathLike[str], report: Callable[[str], None] | None = None
) -> tuple[int, dict[str, Tensor]]:
    """Read the step and the whole model of a checkpoint in this process alone.

    Returns CPU tensors by parameter name.

    Args:
        path: a `step-N` folder, or a checkpoints folder or run for its newest intact checkpoint.
        report: receives the reason why a checkpoint is skipped; logs by default.

    Raises:
        NoCheckpointError: there is no checkpoint, or none is intact.
    """
    candidates = checkpoints_of(path)
    report = report or logging.getLogger(__name__).warning
    problems = []
    for candidate in candidates:
        found = _verify(candidate, 0, 1)
        try:
            if not found:
                return Manifest.read(candidate).step, _read_model(candidate)
        except ForeignFileError as error:
            found = [str(error)]
        problems.append(f"{candidate}: {'; '.join(found)}")
        if candidate != candidates[-1]:
            report(f"{problems[-1]}; using the previous checkpoint instead")
    raise NoCheckpointError(*problems)


def write_model_state(
    directory: str | os.PathLike[str], step: int, model: Mapping[str, Tensor]
) -> Path:
    """Write a checkpoint that holds only a model, without other processes; return its folder.

    Raises:
        CheckpointError: it cannot be written.
    """
    Checkpointer(directory, keep=2**31).save(step, {"model": dict(model)}, asynchronous=False)
    return Path(directory) / f"step-{step}"


class _Failed(Exception):
    """An action of `Checkpointer._on_all_ranks` failed on some rank; all ranks raise this."""


class _CheckpointWriter(dcp.FileSystemWriter):
    """DCP's writer, except that a full disk raises OSError.

    torch.save would report an unexpected file position.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            raise OSError(cause.errno, cause.strerror) from error


def _read(
    folder: Path, tensors: dict[str, Any], reader: CheckpointReader | None = None
) -> str | None:
    """Fill this rank's part of `tensors`; return a stored model tensor they lack, or None.

    Every rank reads its part by itself: in DCP's collective load, ranks exchange pickles.

    Raises:
        ForeignFileError: a file holds data that DCP does not write.
        Exception: as raised by DCP, for example for a tensor of a different size.
    """
    reader, planner = reader or CheckpointReader(folder), CheckpointPlanner()
    _silence_single_process_warning()
    try:
        dcp.load(tensors, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:
        if not error.failures:
            raise
        raise min(error.failures.items())[1][0] from error
    stored = tensors_of(reader.metadata, "model.")
    return next((name for name in stored if name not in planner.state_dict), None)


def _read_model(folder: Path) -> dict[str, Tensor]:
    """Read the model of a checkpoint into the memory of this process, by parameter name.

    Raises:
        ForeignFileError: a file holds data that DCP does not write.
    """
    reader = CheckpointReader(folder)
    found = tensors_of(reader.metadata, "model.").items()
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in found}
    try:
        _read(folder, tensors, reader)
    except (OSError, ForeignFileError):
        raise
    except Exception as error:
        raise ForeignFileError(_one_line(error)) from error
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


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
    """Silence DCP's warning, also from its own thread, that it runs without a process group."""
    warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")


def _remove(folder: Path) -> None:
    """Remove a folder so that a crash never leaves a damaged checkpoint under its name."""
    leftover = folder.with_name(f"{folder.name}.tmp-removed")
    # A folder that cannot be removed costs space, not the checkpoint that was just committed.
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
