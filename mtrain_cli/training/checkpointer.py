"""Checkpoints: written in the background by all ranks, committed by one rename, verified before use.

torch.distributed.checkpoint (DCP) writes and reads the tensors, so a checkpoint of any sharding loads into any other. What it does not give
is here: a commit that a crash cannot leave half done, checksums, a bound on how many stay, and a way to go on when the disk is full.

    checkpoints/step-50/            complete: DCP's files, .metadata, manifest.json
    checkpoints/step-60.tmp-1/      being written, or left by a crash: never read, removed at the next start
    checkpoints/step-50.replaced/   an older step-50 that is being replaced; comes back if the replacement never arrived
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
from mtrain_cli.parallel.collectives import share
from mtrain_cli.training.checkpoint_files import (
    CheckpointPlanner,
    CheckpointReader,
    ForeignFileError,
    tensors_of,
)
from mtrain_cli.training.manifest import (
    FileEntry,
    Manifest,
    ManifestError,
    checksum,
    committed_steps,
)

T = TypeVar("T")
# A rank with a slow disk keeps the others waiting in a collective.
GROUP_TIMEOUT = timedelta(hours=1)


class CheckpointError(RunError):
    """A checkpoint could not be saved or loaded. The text is for the user; after a failed save training may go on."""


class NoCheckpointError(ConfigError, CheckpointError):
    """Nothing to load: there is no checkpoint, or none that is as it was written; one line for each."""


class Checkpointer:
    """Saves to and loads from the folders ``step-N`` of one directory. Every method but `latest` is called by all ranks together."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int,
        process_group: dist.ProcessGroup | None = None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        """Remove what crashed saves left in ``directory``.

        Args:
            directory: made if missing; all ranks must see the same one.
            keep: newest checkpoints that stay, at least 1; the disk must hold one more while it is written.
            process_group: its ranks save together, through a gloo group of their own: a save under way must not meet other collectives.
                None for all ranks, or for this process alone where torch.distributed is not in use.
            report: shown on rank 0 what was wrong with a checkpoint that is passed over; a logger's warning by default.

        Raises:
            CheckpointError: the directory cannot be made or cleaned.
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
            self._on_all_ranks(lambda: self._clean_up() if self._rank == 0 else None)
        except _Failed as failed:
            raise CheckpointError(
                f"{self._directory}: cannot be used for checkpoints: {failed}"
            ) from failed

    def save(self, step: int, state: Mapping[str, Any], asynchronous: bool = True) -> None:
        """Save ``state`` as of ``step``, replacing an earlier checkpoint of that step.

        Tensors are copied to the CPU before this returns; writing goes on in the background unless ``asynchronous`` is false. At most one
        save is under way: this waits for the one before.

        Args:
            step: optimizer steps done.
            state: ``model`` and ``optimizer``, state dicts of DTensors or tensors; ``trainer``, a dictionary that JSON can hold, the same
                on all ranks; ``rng``, tensors of this rank alone. Each may be missing.

        Raises:
            CheckpointError: on all ranks, when the save before this one failed (this one is under way all the same) or, if not
                asynchronous, this one. What was committed before is intact.
        """
        earlier = self._finish()
        self._attempts += 1
        partial = self._directory / f"step-{step}.tmp-{self._attempts}"
        trainer = json.loads(json.dumps(state.get("trainer", {})))
        alone = self._group is None
        written = dcp.async_save(
            self._tensors(state),
            storage_writer=_CheckpointWriter(partial),
            process_group=self._group,
            no_dist=alone,
        )
        self._saving = threading.Thread(
            target=self._commit,
            args=(step, partial, written, trainer),
            name="checkpoint",
            daemon=True,
        )
        self._saving.start()
        own = None if asynchronous else self._finish()
        if earlier or own:
            raise CheckpointError("\n".join(str(error) for error in (earlier, own) if error))

    def wait(self) -> None:
        """Wait for the save that is under way; call before the process group goes.

        Raises:
            CheckpointError: on all ranks, when it failed.
        """
        failure = self._finish()
        if failure:
            raise failure

    def latest(self) -> int | None:
        """Step of the newest committed checkpoint that this rank sees, verified or not."""
        return next(iter(committed_steps(self._directory)), None)

    def holds_only_weights(self) -> bool:
        """Whether the newest checkpoint holds a model and nothing else, as an import leaves it; the same on all ranks."""

        def found() -> bool:
            step = self.latest()
            try:
                return (
                    step is not None and not Manifest.read(self._directory / f"step-{step}").trainer
                )
            except (OSError, ValueError):
                return False  # damaged: loading tells

        return self._on_all_ranks(found)[0]

    def describe_fallback(self) -> str:
        """What a user who just lost a step has to go on from, as this rank sees it."""
        # An older checkpoint of the same step, put aside for one that never arrived, comes back at the next start.
        if self.latest() is not None or any(self._directory.glob("step-*.replaced")):
            return "the checkpoint before it is intact"
        return "no checkpoint was written before"

    def load(self, state: dict[str, Any]) -> int:
        """Load the newest checkpoint whose files are all as they were written into ``state``, and return its step.

        Tensors are filled in place, in whatever sharding they have; ``trainer`` is replaced by what was saved; ``rng`` is left as it is
        when another number of ranks wrote the checkpoint. Ranks share the work of verifying.

        Raises:
            NoCheckpointError: on all ranks, with one line for each checkpoint that could not be used.
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
                self._report(f"{lines[-1]}; the checkpoint before it is used instead")
        raise NoCheckpointError(*(lines or [f"{self._directory}: holds no checkpoint"]))

    def _load_step(self, step: int, state: dict[str, Any]) -> str | None:
        """Load one checkpoint, or say why it cannot be used."""
        folder = self._directory / f"step-{step}"
        try:
            parts = self._on_all_ranks(lambda: _verify(folder, self._rank, self._workers))
            problems = list(dict.fromkeys(problem for part in parts for problem in part))
            if problems:
                return "; ".join(problems[:3]) + (
                    f" and {len(problems) - 3} more" if len(problems) > 3 else ""
                )
            manifest = Manifest.read(folder)
            if "optimizer" in state and not manifest.trainer:
                return "holds weights alone, no training to go on with; a new run begins with given ones by train.init_from=HF_FOLDER"
            tensors = self._tensors(
                state
                if manifest.workers == self._workers
                else {k: v for k, v in state.items() if k != "rng"}
            )
            extra = self._on_all_ranks(lambda: _read(folder, tensors))[0]
        except _Failed as error:
            return str(error)
        if extra and "model" in state:
            return f"holds {extra}, which this model does not have"
        if "trainer" in state:
            state["trainer"] = dict(manifest.trainer)
        return None

    def _tensors(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What DCP gets: the trainer's numbers go to the manifest, and what belongs to one rank is named after it."""
        tensors = {key: value for key, value in state.items() if key not in ("trainer", "rng")}
        return tensors | ({"rng": {f"rank-{self._rank}": state["rng"]}} if "rng" in state else {})

    def _finish(self) -> CheckpointError | None:
        """Wait for the save that is under way, and say whether it failed."""
        if self._saving is not None:
            self._saving.join()
        failure, self._saving, self._failure = self._failure, None, None
        return failure

    def _commit(self, step: int, partial: Path, written: Any, trainer: dict[str, Any]) -> None:
        """Wait for DCP, collect checksums, and rename on rank 0; the same on every rank up to who does it. Runs in its own thread."""

        def own_files() -> dict[str, dict[str, int]]:
            written.result()
            names = [
                *(path.name for path in partial.glob(f"__{self._rank}_*")),
                *([".metadata"] if self._rank == 0 else []),
            ]
            return {name: asdict(checksum(partial / name)) for name in names}

        try:
            files = {
                name: FileEntry(**entry)
                for part in self._on_all_ranks(own_files)
                for name, entry in part.items()
            }
            manifest = Manifest(step, self._workers, torch.__version__, files, trainer)
            self._on_all_ranks(lambda: self._publish(manifest, partial) if self._rank == 0 else None)
        except (
            Exception
        ) as error:  # also a peer that is gone: the main thread is to learn of it, not the terminal
            # Every rank removes what it can, since machines may not share the disk.
            shutil.rmtree(partial, ignore_errors=True)
            final, reason = (
                self._directory / f"step-{step}",
                error if isinstance(error, _Failed) else self._reason(error),
            )
            self._failure = CheckpointError(
                f"{final}: the checkpoint of step {step} was not saved ({reason}); {self.describe_fallback()}"
            )

    def _publish(self, manifest: Manifest, partial: Path) -> None:
        """Give ``partial`` its manifest and its final name, then remove what is no longer kept."""
        unseen = next((name for name in manifest.files if not (partial / name).is_file()), None)
        if unseen:
            raise OSError(
                errno.ENOENT,
                "rank 0 does not see another rank's file; all machines must share this disk",
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
        # Steps after this one are from before a fall back to an earlier checkpoint; they are neither kept in its place nor lost.
        for step in [step for step in committed_steps(self._directory) if step <= manifest.step][
            self._keep :
        ]:
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

    def _on_all_ranks(self, action: Callable[[], T]) -> list[T]:
        """Do ``action`` on every rank and return what each got, in rank order: something that JSON can hold.

        Raises:
            _Failed: on all ranks, when it failed on any.
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
        """One line about ``error``, with the rank it came from; DCP hands every rank the errors of all."""
        rank = self._rank
        if isinstance(error, CheckpointException) and error.failures:
            rank, (error, _) = min(error.failures.items())
        return f"rank {rank}: {_one_line(error)}" if self._workers > 1 else _one_line(error)


def checkpoints_of(path: str | os.PathLike[str]) -> list[Path]:
    """The committed checkpoints of a checkpoints folder or of a run, the newest first; of any other folder itself, unread.

    Raises:
        NoCheckpointError: it is a run or a checkpoints folder, and holds none.
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
    """Step and whole model of a checkpoint, as CPU tensors by parameter name, read by this process alone.

    Args:
        path: a ``step-N`` folder or, for the newest usable one, a checkpoints folder or a run.
        report: shown what was wrong with a checkpoint that is passed over; a logger's warning by default.

    Raises:
        NoCheckpointError: there is none, or it is not as it was written.
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
            report(f"{problems[-1]}; the checkpoint before it is used instead")
    raise NoCheckpointError(*problems)


def write_model_state(
    directory: str | os.PathLike[str], step: int, model: Mapping[str, Tensor]
) -> Path:
    """Write a checkpoint that holds a model alone, from this process alone, and return its folder.

    Raises:
        CheckpointError: it cannot be written.
    """
    Checkpointer(directory, keep=2**31).save(step, {"model": dict(model)}, asynchronous=False)
    return Path(directory) / f"step-{step}"


class _Failed(Exception):
    """An action of `Checkpointer._everywhere` failed on some rank; every rank raises this with the same text."""


class _CheckpointWriter(dcp.FileSystemWriter):
    """DCP's writer, but a full disk is an OSError: torch.save reports it as a file that ends in an unexpected place."""

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
    """Fill ``tensors``, or this rank's part of them, and return the first tensor of a model that they lack.

    Every rank reads its part by itself: DCP's ranks would send each other pickles.

    Raises:
        ForeignFileError: a file holds what DCP does not write.
        Exception: as DCP raises them, such as for a tensor of another size.
    """
    reader, planner = reader or CheckpointReader(folder), CheckpointPlanner()
    _silence_single_process_warning()
    try:
        dcp.load(tensors, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:
        if not error.failures:
            raise
        raise min(error.failures.items())[1][0] from error
    return next(
        (name for name in tensors_of(reader.metadata, "model.") if name not in planner.state_dict),
        None,
    )


def _read_model(folder: Path) -> dict[str, Tensor]:
    """The model of a checkpoint by name, in this process's memory.

    Raises:
        ForeignFileError: a file holds what DCP does not write.
    """
    reader = CheckpointReader(folder)
    found = tensors_of(reader.metadata, "model.").items()
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in found}
    try:
        _read(folder, tensors, reader)
    except OSError:
        raise
    except Exception as error:
        raise (
            error if isinstance(error, ForeignFileError) else ForeignFileError(_one_line(error))
        ) from error
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
    """Silence DCP's remark that it works without a process group, where that is meant. Its own thread makes the remark too."""
    warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")


def _remove(folder: Path) -> None:
    """Remove a folder such that a crash leaves it whole or as a leftover, not as a damaged checkpoint."""
    leftover = folder.with_name(f"{folder.name}.tmp-removed")
    # What cannot be removed costs space, not the checkpoint that was just committed.
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
