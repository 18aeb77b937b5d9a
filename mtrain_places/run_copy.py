"""Copy a run to `run.remote` while it trains.

A thread of the first process of each node sends what is complete on disk. It never holds training
up: a place that fails is tried again, then left with a warning until the next checkpoint. Each node
sends the files that its ranks wrote, and the first one the manifest, after all of them are there.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain_cli.config import documents
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch.manifest import NAME as MANIFEST
from mtrain_cli.launch.manifest import Manifest, ManifestError, committed_steps
from mtrain_cli.training.callback import Callback, FinishedStep
from mtrain_places.files import why
from mtrain_places.run_place import ID, PlaceError, RunPlace, small_files, steps

if TYPE_CHECKING:
    from mtrain_cli.launch.run_dir import RunDir
    from mtrain_cli.training.trainer import Trainer

_POLL_S = 1.0
_SMALL_FILES_S = 60.0  # from one look at metrics.jsonl and the like to the next
_LATE_S = 60.0  # for a checkpoint to be seen on other nodes
_OTHER_NODES_S = 600.0  # to wait for the files of other nodes
_QUIET_S = 5.0  # to wait without a line
END_S = 1800.0  # to wait for the last checkpoint when training ends
_END_AFTER_FAILURE_S = 120.0
_END_AFTER_ERROR_S = 30.0
_START_S = 30.0


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
        ranks = range(environment.rank, environment.rank + environment.local_workers)
        self._own = tuple(f"__{rank}_" for rank in ranks)
        self._sent_files: dict[str, tuple[int, int]] = {}
        self._looked = 0.0  # when the small files were looked at
        # The newest checkpoint that is there, and the one of the last attempt if that failed.
        self._sent_step, self._tried_step = -1, -2
        self._failing = False  # whether the last attempt failed
        self._begun_step = -1  # the last one whose save has begun
        self._has_id = False
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
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(quiet := min(patience, _QUIET_S))
            if self._thread.is_alive() and quiet < patience:
                self._say(f"waits for the last files, at most {patience - quiet:g} seconds")
                self.after_step()
                self._thread.join(patience - quiet)
        if self._thread.is_alive():
            self._say(f"is not complete after {patience:g} seconds, and is left", warning=True)
        self.after_step()

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
        self._has_id = True

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
                last = f"step {self._sent_step}" if self._sent_step >= 0 else "no checkpoint"
                when = "" if ended else "; tried again with the next checkpoint"
                self._say(f"failed ({why(error)}); it has {last}{when}", warning=True)
        if self._first and self._sent_step >= 0:
            self._say(f"{self._place.url} has the checkpoint of step {self._sent_step}")

    def _newest(self) -> int:
        return max(committed_steps(self._folder / "checkpoints"), default=-1)

    def _copy(self, ended: bool) -> None:
        newest, until = self._newest(), time.monotonic() + _LATE_S
        while ended and not self._first and newest < self._begun_step and time.monotonic() < until:
            time.sleep(_POLL_S)  # a shared disk may show the files of another node later
            newest = self._newest()
        is_new = newest > self._sent_step and (ended or newest != self._tried_step)
        is_due = time.monotonic() - self._looked > _SMALL_FILES_S and newest != self._tried_step
        if not (is_new or is_due or ended):
            return
        self._tried_step = newest
        if self._first:
            if not self._has_id:
                self._claim()
            self._send_small_files()
        if is_new:
            self._send_checkpoint(newest)
        if ended and self._first:
            self._write_page()  # last, since the machine may be taken away
        self._tried_step, self._failing = -2, False

    def _send_small_files(self) -> None:
        self._looked = time.monotonic()
        for name, facts in small_files(self._folder).items():
            if self._sent_files.get(name) != facts:
                with contextlib.suppress(FileNotFoundError):
                    self._place.put(self._folder / name, name)
                    self._sent_files[name] = facts

    def _send_checkpoint(self, step: int) -> None:
        folder, prefix = self._folder / "checkpoints" / f"step-{step}", f"checkpoints/step-{step}/"
        try:
            manifest = Manifest.read(folder)
            content = (folder / MANIFEST).read_bytes()
            held = self._hold(folder, [n for n in manifest.files if self._is_own(n)])
        except (ManifestError, FileNotFoundError):
            return  # a newer one has replaced it
        try:
            if self._place.read(prefix + MANIFEST) != content:
                self._send_files(step, manifest, held, prefix)
                if self._first:
                    self._wait_for_nodes(manifest, prefix)
                    self._place.write(prefix + MANIFEST, content)
            self._sent_step = step
            if self._first:
                self._remove_superseded(step)
        finally:
            shutil.rmtree(self._links, ignore_errors=True)

    def _send_files(self, step: int, manifest: Manifest, held: Path, prefix: str) -> None:
        there = self._place.files()
        if self._first and prefix + MANIFEST in there:  # the run trained this step again
            self._place.remove_checkpoint(step, there)
        for name, entry in manifest.files.items():
            # A file of this size from before a failure may be another one, so it is sent again.
            if self._is_own(name):
                self._place.put(held / name, prefix + name)
                if (held / name).stat().st_size != entry.bytes:
                    raise PlaceError(f"{held / name} has changed")

    def _is_own(self, name: str) -> bool:
        other = not name.startswith("__")  # .metadata
        return name.startswith(self._own) or (self._first and other)

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

    def _wait_for_nodes(self, manifest: Manifest, prefix: str) -> None:
        """Wait until all files of a checkpoint are there. Raise PlaceError if some do not come."""
        expected = {prefix + name: entry.bytes for name, entry in manifest.files.items()}
        until = time.monotonic() + _OTHER_NODES_S
        while True:
            there = self._place.files()
            lacking = [name for name, size in expected.items() if there.get(name) != size]
            if not lacking:
                return
            if time.monotonic() > until or all(self._is_own(Path(n).name) for n in lacking):
                raise PlaceError(f"{lacking[0]} did not arrive")
            time.sleep(_POLL_S)

    def _remove_superseded(self, step: int) -> None:
        """Remove the checkpoints that the run has removed here, and older incomplete ones."""
        there = self._place.files()
        kept = {step, *committed_steps(self._folder / "checkpoints")}
        complete = set(steps(there))
        for old in steps(there, complete=False):
            if old < step and (old not in kept or old not in complete):
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
