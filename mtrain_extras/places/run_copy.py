"""Copy a run to `run.remote` while it trains.

A thread of the first process of each node sends what is complete on disk. It never holds training
up: a place that fails is tried again, then left with a warning until the next checkpoint. Each node
sends the files that its ranks wrote, then a mark with the hash of their manifest. The first node
sends the manifest, after the marks of all others. A mark says which attempt the files are of, since
a run that falls back trains the same steps again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import re
import shutil
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain_cli.config import documents
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch.job import find_word, leave_word
from mtrain_cli.launch.manifest import NAME as MANIFEST
from mtrain_cli.launch.manifest import (
    Manifest,
    ManifestError,
    committed_steps,
    is_kept,
    manifest_file,
)
from mtrain_cli.training.callback import Callback, FinishedStep
from mtrain_extras.places.files import why
from mtrain_extras.places.run_place import ID, PlaceError, RunPlace, small_files, steps

if TYPE_CHECKING:
    from mtrain_cli.launch.run_dir import RunDir
    from mtrain_cli.training.trainer import Trainer

_POLL_S = 1.0
_SMALL_FILES_S = 60.0  # from one look at metrics.jsonl and the like to the next
_LATE_S = 60.0  # for a checkpoint to be seen on other nodes
_OTHER_NODES_S = 600.0  # to wait for the files of other nodes
_FAILED_NODE_S = 5.0  # to wait for a node that says it failed, and may be about to try again
_QUIET_S = 5.0  # to wait without a line
END_S = 1800.0  # to wait for the last checkpoint when training ends
_END_AFTER_FAILURE_S = 120.0
_END_AFTER_ERROR_S = 30.0
_START_S = 30.0
_ANSWER_S = 10.0  # for a small file, when training ends; the pauses of `retried` take 9 s at most
_MARK = re.compile(r"node-(\d{1,5})-(\d{1,5})")  # first and last rank of a node
_FILE_OF_RANK = re.compile(r"__(\d+)_.*")
_NONE = (-1, 0)


class RunCopy(Callback):
    """Sends checkpoints, metrics, settings, evaluations and the report page of one run."""

    def __init__(self, trainer: Trainer, run_dir: RunDir, message: Callable[..., None]) -> None:
        """Raise ConfigError if a new run cannot be copied: the place fails, or has another run."""
        environment = trainer.environment
        remote = trainer.config.run.remote
        assert remote is not None
        self._subject, self._folder = f"run.remote={remote}", run_dir.path
        self._place = RunPlace(remote, run_dir.path)
        self._message, self._lines = message, queue.SimpleQueue[tuple[str, bool]]()
        self._first = environment.rank == 0
        self._ranks = range(environment.rank, environment.rank + environment.local_workers)
        self._mark = f"node-{self._ranks[0]}-{self._ranks[-1]}"
        self._sent_files: dict[str, tuple[int, int]] = {}
        self._looked = 0.0  # when the small files were looked at
        # Step and time of the newest checkpoint that is there, and of the one whose attempt failed.
        self._sent, self._tried = _NONE, (-2, 0)
        # Those that stay for good, and are there. A store that is slow gets them after a newer one.
        self._keep_every, self._kept = trainer.config.train.keep_every, set[tuple[int, int]]()
        # The steps of all checkpoints that were here, from before training may remove some.
        self._seen = set(committed_steps(run_dir.path / "checkpoints"))
        self._failing = False  # whether the last attempt failed
        self._begun_step = -1  # the last one whose save has begun
        self._links = run_dir.path / f"uploading-{environment.rank}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="run.remote", daemon=True)
        if self._first and trainer.step == 0:
            self._claim_at_start()

    def before_training(self) -> None:
        self._thread.start()

    def after_step(self, step: FinishedStep | None = None) -> None:  # noqa: ARG002 - a hook
        with contextlib.suppress(queue.Empty):
            while True:
                line, is_warning = self._lines.get_nowait()
                self._message(line, warning=is_warning)

    def on_checkpoint(self, step: int) -> None:
        self._begun_step = step

    def on_error(self, error: Exception) -> None:  # noqa: ARG002 - a hook
        self._end(_END_AFTER_ERROR_S)

    def close(self) -> None:
        # A store that has just failed is not worth a long wait.
        self._end(min(END_S, _END_AFTER_FAILURE_S) if self._failing else END_S)

    def _end(self, patience: float) -> None:
        """Let the thread send what is left for ``patience`` seconds, while the place answers."""
        self._ended.set()
        until, problem = time.monotonic() + patience, ""
        if self._thread.ident is not None:
            self._thread.join(quiet := min(patience, _QUIET_S))
            if self._thread.is_alive() and quiet < patience:
                self._say(f"waits for the last files, at most {patience - quiet:g} seconds")
                self.after_step()
            while self._thread.is_alive() and not problem:
                # Its package may try for minutes, and a large file may be on its way for longer.
                # Of a slow store, one small file may come too late, but not two in a row.
                problem = self._place.silence(_ANSWER_S) and self._place.silence(_ANSWER_S)
                left = until - time.monotonic()
                self._thread.join(0 if problem else min(_QUIET_S, max(0.0, left)))
                if left <= 0:
                    problem = problem or f"not complete after {patience:g} seconds"
        if self._thread.is_alive():
            self._say(f"failed ({problem}); it has {self._last_sent}", warning=True)
            shutil.rmtree(self._links, ignore_errors=True)  # the thread ends with the process
        self.after_step()

    @property
    def _last_sent(self) -> str:
        return "no checkpoint" if self._sent == _NONE else f"step {self._sent[0]}"

    def _say(self, line: str, *, warning: bool = False) -> None:
        self._lines.put((f"{self._subject}: {line}", warning))

    def _claim_at_start(self) -> None:
        """Claim the place in limited time, since the other workers wait. May raise ConfigError."""
        problems: list[Exception] = []

        def claim() -> None:
            try:
                self._claim()
            except Exception as error:  # the other thread raises it
                problems.append(error)

        thread = threading.Thread(target=claim, daemon=True)
        thread.start()
        thread.join(_START_S)
        if thread.is_alive():
            raise ConfigError(f"{self._subject}: does not answer for {_START_S:g} seconds")
        for error in problems:
            if isinstance(error, ConfigError):
                raise error
            raise ConfigError(f"{self._subject}: cannot be used ({why(error)})") from error

    def _claim(self) -> None:
        """Make the place that of this run. Raise ConfigError if it is another run's."""
        own = self._folder / ID
        if not own.is_file():
            documents.replace_text(own, f"{uuid.uuid4().hex}\n")
        theirs = self._place.read(ID)
        if theirs is not None and theirs != own.read_bytes():
            raise ConfigError(
                f"{self._subject}: {self._place.url} has another run; resume that one with "
                "--resume auto, or choose another run.name"
            )
        if theirs is None:
            self._place.write(ID, own.read_bytes())

    def _follow(self) -> None:
        shutil.rmtree(self._links, ignore_errors=True)  # of a run that was killed
        ended = False
        while not ended:
            ended = self._ended.wait(_POLL_S)
            try:
                self._copy(ended)
            except ConfigError as error:
                self._lines.put((f"{error}; the run is not copied", True))
                return
            except Exception as error:  # a copy must never end a training
                self._failing = True
                when = "" if ended else "; tried again with the next checkpoint"
                self._say(f"failed ({why(error)}); it has {self._last_sent}{when}", warning=True)
        if self._first and self._sent != _NONE:
            self._say(f"{self._place.url} has the checkpoint of step {self._sent[0]}")

    def _newest(self) -> tuple[int, int]:
        """Return step and time of the newest checkpoint here. One that is trained again is new."""
        return next(self._here(), _NONE)

    def _here(self) -> Iterator[tuple[int, int]]:
        """Yield step and time of the checkpoints here, newest first."""
        folder = self._folder / "checkpoints"
        here = committed_steps(folder)
        self._seen.update(here)
        for step in here:
            # A run that fell back to an earlier checkpoint leaves later ones, which do not count.
            if self._begun_step < 0 or step <= self._begun_step:
                with contextlib.suppress(FileNotFoundError):
                    yield step, manifest_file(folder, step).stat().st_mtime_ns

    def _copy(self, ended: bool) -> None:
        newest, until = self._newest(), time.monotonic() + _LATE_S
        while (
            ended and not self._first and newest[0] < self._begun_step and time.monotonic() < until
        ):
            time.sleep(_POLL_S)  # a shared disk may show the files of another node later
            newest = self._newest()
        is_new = newest not in (_NONE, self._sent) and (ended or newest != self._tried)
        is_due = time.monotonic() - self._looked > _SMALL_FILES_S and newest != self._tried
        if not (is_new or is_due or ended):
            return
        self._tried = newest
        if self._first:
            self._claim()  # each time: a run that starts again may have taken the place
            self._send_small_files()
        is_sent = is_new and self._send_checkpoint(newest)
        if is_sent:
            self._sent = newest
        if self._first and self._sent != _NONE and (is_sent or ended):  # training may remove later
            self._remove_superseded(self._sent[0])
        for kept in [one for one in self._here() if is_kept(one[0], self._keep_every)]:
            if kept in {*self._kept, self._sent} or self._send_checkpoint(kept):
                self._kept.add(kept)
        if ended and self._first:
            self._write_page()  # last, since the machine may be taken away
        self._tried, self._failing = (-2, 0), False

    def _send_small_files(self) -> None:
        self._looked = time.monotonic()
        for name, facts in small_files(self._folder).items():
            if self._sent_files.get(name) != facts:
                with contextlib.suppress(FileNotFoundError):
                    self._place.put(self._folder / name, name)
                    self._sent_files[name] = facts

    def _send_checkpoint(self, chosen: tuple[int, int]) -> bool:
        """Send a checkpoint, and return whether it is there. False if a newer one replaces it.

        The first node sends the metrics up to its step before it.
        """
        if self._first:
            self._send_small_files()
        step = chosen[0]
        folder, prefix = self._folder / "checkpoints" / f"step-{step}", f"checkpoints/step-{step}/"
        try:
            manifest = Manifest.read(folder)
            content = (folder / MANIFEST).read_bytes()
            held = self._hold(folder, [n for n in manifest.files if self._is_own(n)])
            if (folder / MANIFEST).read_bytes() != content:
                return False  # the links may be to files of either
        except (ManifestError, FileNotFoundError):
            return False  # a newer one has replaced it
        try:
            if self._place.read(prefix + MANIFEST) != content:
                mark = hashlib.sha256(content).hexdigest().encode()
                with self._telling_first(manifest, mark):
                    self._send_files(manifest, mark, held, prefix)
                if self._first:
                    if not self._wait_for_nodes(manifest, mark, prefix):
                        return False
                    self._place.write(prefix + MANIFEST, content)
            return True
        finally:
            shutil.rmtree(self._links, ignore_errors=True)

    def _send_files(self, manifest: Manifest, mark: bytes, held: Path, prefix: str) -> None:
        """Send the files of this node, then its mark. Nothing if they are there with this mark."""
        there = self._place.files()
        own = prefix + self._mark
        is_there = own in there and self._place.read(own) == mark
        # A manifest of an earlier attempt. The first node writes this one after the marks of all.
        if prefix + MANIFEST in there and (self._first or not is_there):
            self._place.remove(prefix + MANIFEST)
        if is_there:
            return
        for name in there:  # marks of earlier attempts, which may have had other nodes
            marked = _marked(name, prefix)
            if set(marked) & set(self._ranks):
                self._place.remove(name)
        for name, entry in manifest.files.items():
            # A file of this size from before a failure may be another one, so it is sent again.
            if self._is_own(name):
                self._place.put(held / name, prefix + name)
                if (held / name).stat().st_size != entry.bytes:
                    raise PlaceError(f"{held / name} has changed")
        if len(self._ranks) < manifest.workers:
            self._place.write(own, mark)

    @contextlib.contextmanager
    def _telling_first(self, manifest: Manifest, mark: bytes) -> Iterator[None]:
        """Tell the first node if the files of this one do not come, so that it need not wait."""
        if self._first or len(self._ranks) == manifest.workers:
            yield
            return
        leave_word(_word(mark), "")
        try:
            yield
        except Exception as error:
            leave_word(
                _word(mark), f"rank {self._ranks[0]} on {socket.gethostname()}: {why(error)}"
            )
            raise

    def _is_own(self, name: str) -> bool:
        rank = _rank_of(name)
        return rank in self._ranks or (self._first and rank is None)

    def _hold(self, folder: Path, names: list[str]) -> Path:
        """Link files, so that they stay until they are sent, and return the folder of the links."""
        shutil.rmtree(self._links, ignore_errors=True)
        self._links.mkdir()
        try:
            for name in names:
                os.link(folder / name, self._links / name)
        except FileNotFoundError:
            raise
        except OSError:  # a file system without hard links
            return folder
        return self._links

    def _wait_for_nodes(self, manifest: Manifest, mark: bytes, prefix: str) -> bool:
        """Wait until all files of a checkpoint are there, each from a node with this mark.

        Return False if a node sends a newer one instead. Raise PlaceError if some do not come.
        """
        arrived: set[int | None] = {None, *self._ranks}
        until = time.monotonic() + _OTHER_NODES_S
        failed = ""
        while True:
            there = self._place.files()
            for name in there:
                marked = _marked(name, prefix)
                if not arrived.issuperset(marked) and self._place.read(name) == mark:
                    arrived.update(marked)
            lacking = [
                name
                for name, entry in manifest.files.items()
                if there.get(prefix + name) != entry.bytes or _rank_of(name) not in arrived
            ]
            if not lacking:
                return True
            if self._is_left_out(manifest.step, there, arrived):
                return False
            if time.monotonic() > until or all(map(self._is_own, lacking)):
                raise PlaceError(failed or f"{prefix}{lacking[0]} did not arrive")
            if self._ranks[-1] + 1 < manifest.workers and failed != (
                word := find_word(_word(mark))
            ):
                failed = word
                until = time.monotonic() + (_FAILED_NODE_S if word else _OTHER_NODES_S)
            time.sleep(_POLL_S)

    def _is_left_out(self, step: int, there: dict[str, int], arrived: set[int | None]) -> bool:
        """Return whether a node that is awaited has already sent a newer checkpoint."""
        if step >= self._newest()[0] or is_kept(step, self._keep_every):
            return False
        newer = (f"checkpoints/step-{s}/" for s in steps(there, complete=False) if s > step)
        return any(not arrived.issuperset(_marked(name, at)) for at in newer for name in there)

    def _remove_superseded(self, step: int) -> None:
        """Remove the checkpoints that this run has removed here, and older incomplete ones.

        Those that were never here stay: a run that was fetched has only its newest one here.
        """
        there = self._place.files()
        here = committed_steps(self._folder / "checkpoints")
        removed = self._seen.difference(here) if here else set()
        complete = set(steps(there))
        for old in steps(there, complete=False):
            # Other nodes may have sent theirs of one that stays, and this node does later.
            is_due = old in here and is_kept(old, self._keep_every)
            if old < step and not is_due and (old in removed or old not in complete):
                self._place.remove_checkpoint(old, there)

    def _write_page(self) -> None:
        """Write the report page beside the run's files. A run without a table has none."""
        from mtrain_cli.reporting import report_source
        from mtrain_cli.reporting.html import write_page

        try:
            with tempfile.TemporaryDirectory() as folder:
                page = write_page(
                    Path(folder, "report.html"), [report_source.open_source(self._folder)]
                )
                self._place.put(page, "report.html")
        except PlaceError:
            raise
        except Exception as error:  # a page is no reason to lose a checkpoint
            self._say(f"no report page ({why(error)})", warning=True)


def unclaim(remote: str, folder: Path) -> None:
    """Remove the files of a run without checkpoints from the place that it claimed, if any."""

    def remove() -> None:
        with contextlib.suppress(ConfigError, PlaceError, OSError):
            own = (folder / ID).read_bytes()
            place = RunPlace(remote, folder)
            if place.read(ID) == own and not steps(there := place.files(), complete=False):
                for name in sorted(there, key=lambda name: name == ID):
                    place.remove(name)
                place.remove_empty()

    thread = threading.Thread(target=remove, daemon=True)
    thread.start()
    thread.join(_ANSWER_S)


def _word(mark: bytes) -> str:
    """Return the key of the job's store at which a node says that it could not send files."""
    return f"run.remote/{mark.decode()}"


def _rank_of(name: str) -> int | None:
    """Return the rank that wrote a file of a checkpoint; None of .metadata, which is rank 0's."""
    found = _FILE_OF_RANK.fullmatch(name)
    return int(found[1]) if found else None


def _marked(name: str, prefix: str) -> range:
    """Return the ranks of which a file at the place is the mark. Empty if it is none."""
    found = _MARK.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
    return range(int(found[1]), int(found[2]) + 1) if found else range(0)
