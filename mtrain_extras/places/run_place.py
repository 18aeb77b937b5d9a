"""A run at a place: which files it has there, and how they are read and written.

s3://bucket/runs/night/                     run.remote=s3://bucket/runs, run.name=night
  remote.id, resolved.yaml, metrics.jsonl, ...
  checkpoints/step-40/manifest.json         written last: without it, a checkpoint is incomplete
  checkpoints/step-40/__0_0.distcp, ...
  checkpoints/step-40/node-8-15             says of which manifest the files of ranks 8 to 15 are
"""

from __future__ import annotations

import contextlib
import fnmatch
import random
import re
import threading
import time
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

from mtrain_cli.launch import run_dir
from mtrain_cli.launch.manifest import NAME as MANIFEST
from mtrain_extras.places.files import Place, is_below, open_place, why

T = TypeVar("T")
ID = "remote.id"
# The files of a run that its copy has, beside the checkpoints.
_PATTERNS = (
    "resolved.yaml", "overrides.txt", "environment.json", "metrics.jsonl", "evaluations.jsonl",
    "restarts.jsonl", "rollbacks.jsonl", "stragglers.jsonl", "log.txt", "*.id", "*.sent",
    "report.html",
)  # fmt: skip
_FOLDERS = ("evaluation", "tokenizer", "transformers")
_FILE = re.compile(r"checkpoints/step-(\d+)/([^/]+)")
TRIES, PAUSE_S = 4, 1.0  # of a request; the pause doubles, and differs between processes


class PlaceError(Exception):
    """A place failed in several tries. The message is one line."""


def retried(action: Callable[[], T]) -> T:
    """Return what an action returns, after trying it again with longer pauses.

    Raises FileNotFoundError at once, and PlaceError after the last try.
    """
    for number in range(TRIES):
        try:
            return action()
        except FileNotFoundError:
            raise
        except Exception as error:  # each file system raises errors of its own
            if number == TRIES - 1:
                raise PlaceError(why(error)) from error
            time.sleep(PAUSE_S * 2**number * random.uniform(0.75, 1.25))
    raise AssertionError


def name_of(folder: Path) -> str:
    """Return the name of a run at a place. Cells of a study have the name of the study before."""
    return "/".join(folder.parts[-3:]) if run_dir.study_command(folder) else folder.name


class RunPlace:
    """The copy of a run. Every method raises PlaceError if the place fails."""

    def __init__(self, remote: str, folder: Path) -> None:
        """remote: `run.remote`. folder: of the run here. Raises ConfigError for a wrong URL."""
        self.url = f"{remote.rstrip('/')}/{name_of(folder)}"
        self._subject = f"run.remote={remote}"
        self._place: Place = open_place(self._subject, self.url)

    @cached_property
    def _probed(self) -> Place:
        """The place by a client of its own: an upload may hold all connections of the other."""
        return open_place(self._subject, self.url, own_client=True)

    def files(self) -> dict[str, int]:
        """Return the size of each file by its path in the run. Empty without a run."""

        def find() -> dict[str, int]:
            try:
                return {name: int(e["size"]) for name, e in self._place.entries().items()}
            except FileNotFoundError:
                return {}

        return retried(find)

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, or None if it does not exist."""
        try:
            return retried(lambda: self._place.fs.cat_file(self._place.at(name)))
        except FileNotFoundError:
            return None

    def silence(self, seconds: float) -> str:
        """Return why no small file can be read within some seconds; "" if one can."""
        found = [f"no answer for {seconds:g} seconds"]

        def ask() -> None:
            try:
                retried(lambda: self._probed.fs.cat_file(self._probed.at(ID)))
                found.append("")
            except FileNotFoundError:
                found.append("")
            except PlaceError as error:
                found.append(str(error))

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(seconds)
        return found[-1]

    def put(self, file: Path, name: str) -> None:
        """Write a file. Raises FileNotFoundError if it is gone here."""
        try:
            retried(partial(self._place.put, file, name))
        except FileNotFoundError as error:
            if not file.exists():
                raise
            raise PlaceError(why(error)) from error

    def write(self, name: str, content: bytes) -> None:
        try:
            retried(partial(self._place.write, name, content))
        except FileNotFoundError as error:  # no such bucket
            raise PlaceError(why(error)) from error

    def get(self, name: str, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        retried(lambda: self._place.fs.get_file(self._place.at(name), str(file)))

    def remove(self, name: str) -> None:
        """Remove a file, which may be gone already."""
        with contextlib.suppress(FileNotFoundError):
            retried(partial(self._place.fs.rm_file, self._place.at(name)))

    def remove_checkpoint(self, step: int, files: dict[str, int]) -> None:
        """Remove the files of a checkpoint, its manifest first."""
        inside = [name for name in files if name.startswith(f"checkpoints/step-{step}/")]
        for name in sorted(inside, key=lambda name: not name.endswith(f"/{MANIFEST}")):
            self.remove(name)
            files.pop(name)
        self.remove_empty(f"checkpoints/step-{step}")

    def remove_empty(self, name: str = "") -> None:
        with contextlib.suppress(Exception):  # an empty folder does no harm
            self._place.remove_empty(name)


def steps(files: dict[str, int], *, complete: bool = True) -> list[int]:
    """Return the steps of the checkpoints at a place, newest first. complete: with a manifest."""
    found = [match for match in map(_FILE.fullmatch, files) if match]
    return sorted({int(m[1]) for m in found if not complete or m[2] == MANIFEST}, reverse=True)


def is_small_file(name: str) -> bool:
    """Return whether the copy of a run has this file, which is none of a checkpoint."""
    first, is_inside, rest = name.partition("/")
    if is_inside:
        return first in _FOLDERS and is_below(rest)
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _PATTERNS)


def small_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time stamp of each file of a run here that its copy has, by path."""
    found = {}
    for root in (folder, *(folder / name for name in _FOLDERS)):
        for path in sorted(root.iterdir() if root == folder else root.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if is_small_file(name) and path.is_file() and not path.is_symlink():
                facts = path.stat()
                found[name] = facts.st_size, facts.st_mtime_ns
    return found
