"""The folder of a run: its files, and the lock that keeps other runs out."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import mtrain_cli
from mtrain_cli.config import compose, documents
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.config.sizes import format_size
from mtrain_cli.launch.job import current_job, decide_on_rank_zero
from mtrain_cli.launch.manifest import committed_steps, manifest_file

RUNS = Path("runs")
LOCK = ".lock"
PLAN = "plan.json"  # marks the folder of a measurement, not of a run
LOCK_ATTEMPTS = 3


@dataclass(frozen=True)
class RunDir:
    """A run's folder and the files in it.

    The process that created or opened it may hold its lock. Workers do not.
    """

    path: Path
    _lock: RunLock | None = field(default=None, repr=False, compare=False)
    _origin: str = field(default="opened", repr=False, compare=False)
    _latest_before: str | None = field(default=None, repr=False, compare=False)
    _new_parents: tuple[Path, ...] = field(
        default=(), repr=False, compare=False
    )  # Parent folders made for this one, the nearest first.
    _before_rewrite: _PreviousContent | None = field(default=None, repr=False, compare=False)

    @property
    def resolved(self) -> Path:
        """The complete configuration. Its existence marks the folder as a run."""
        return self.path / "resolved.yaml"

    @property
    def overrides(self) -> Path:
        """The overrides of the command line, one per line."""
        return self.path / "overrides.txt"

    @property
    def environment(self) -> Path:
        """Versions, devices and revision at the start of the run."""
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        """Metrics, one JSON object per step."""
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        """What the run printed on the terminal."""
        return self.path / "log.txt"

    @property
    def logs(self) -> Path:
        """Folder of the workers' output: ``rank-N.log``."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints ``step-N``."""
        return self.path / "checkpoints"

    @property
    def stop_request(self) -> Path:
        """File that asks the workers to save and stop after the current step, if it exists."""
        return self.path / "stop_request"

    @property
    def state(self) -> Path:
        """Current state of the run for `mtrain status`; see `launch.run_state`."""
        return self.path / "state.json"

    @property
    def restarts(self) -> Path:
        """The restarts of the run, one JSON object each; see `launch.restart`."""
        return self.path / "restarts.jsonl"

    @property
    def resume_command(self) -> str:
        """The command that resumes this run."""
        return f"mtrain train --resume {shlex.quote(str(self.path))}"

    def last_step(self) -> int | None:
        """Return the step of the newest complete checkpoint, without verifying its files."""
        return next(iter(committed_steps(self.checkpoints)), None)

    def last_commit(self) -> int:
        """Return when the latest checkpoint was committed, 0 without one.

        The time is in nanoseconds since the epoch, by the clock of the disk.
        """
        times = [0]
        for step in committed_steps(self.checkpoints):
            with contextlib.suppress(OSError):  # removed meanwhile in favour of newer ones
                times.append(manifest_file(self.checkpoints, step).stat().st_mtime_ns)
        return max(times)

    def beat(self) -> None:
        """Renew the lock's time stamp for processes on other machines, if this process holds it."""
        if self._lock is not None:
            self._lock.beat()

    def require_steps_left(self, steps: int) -> None:
        """Refuse to resume towards a step before the newest checkpoint, and release the lock.

        Asking for exactly that step is harmless.

        Raises:
            ConfigError: the newest checkpoint is later than ``steps``.
        """

        def check() -> str:
            done = self.last_step()
            if done is not None and done > steps:
                self.release()
                raise ConfigError(
                    f"train.steps={steps}: the run is already at step {done}. Give more than "
                    f"{done}."
                )
            return ""

        decide_on_rank_zero(check)

    def rewrite(self, config: Config, overrides: Sequence[str]) -> RunDir:
        """Replace the configuration of an opened run and append the overrides.

        Returns:
            The run, whose `discard` restores the previous files.

        Raises:
            ConfigError: the folder cannot be written. The previous files are intact.
        """
        rewritten: list[RunDir] = []

        def write() -> str:
            with _as_config_error(self.path):
                files = tuple(
                    (file, file.read_bytes() if file.exists() else None)
                    for file in (self.resolved, self.overrides)
                )
                before = _PreviousContent(
                    files, frozenset(map(hash, _whole_lines(self.metrics))), self.last_commit()
                )
                rewritten.append(dataclasses.replace(self, _before_rewrite=before))
                try:
                    compose.save(config, self.resolved)
                    with self.overrides.open("a") as file:
                        file.writelines(f"{line}\n" for line in overrides)
                except OSError:
                    rewritten[0].discard()
                    raise
            return ""

        decide_on_rank_zero(write)
        return rewritten[0] if rewritten else self

    def discard(self) -> bool:
        """Undo `create` or `rewrite`, so that a user's mistake leaves nothing behind.

        If a step has run since, a new run stays, and a rewritten one keeps its new configuration.

        Returns:
            Whether the folder is gone.
        """
        if self._before_rewrite is not None and not self._has_stepped_since(self._before_rewrite):
            for file, content in self._before_rewrite.files:
                _restore_file(file, content)
        began = any(self.checkpoints.glob("step-*")) or (
            self.metrics.exists() and self.metrics.stat().st_size
        )
        if self._origin == "opened" or began:
            return False
        _restore_latest(self.path, self._latest_before)
        if self._origin == "new folder":
            for _ in range(3):  # another thread may still write to it
                shutil.rmtree(self.path, ignore_errors=True)
            with contextlib.suppress(OSError):  # in use by now
                for parent in self._new_parents:
                    parent.rmdir()
        else:
            # The folder was empty except for the lock, which another process may wait for by now.
            written = (
                self.resolved,
                self.overrides,
                self.environment,
                self.metrics,
                self.log,
                self.state,
                self.restarts,
            )
            for file in (*written, self.stop_request):
                file.unlink(missing_ok=True)
            for folder in (self.logs, self.checkpoints):
                shutil.rmtree(folder, ignore_errors=True)
        return True

    def _has_stepped_since(self, before: _PreviousContent) -> bool:
        """Return whether a step has run since ``before``.

        A run that starts may cut off metrics after its checkpoint. So fewer lines are no step, but
        a different last line is.
        """
        last = _whole_lines(self.metrics)[-1:]
        return (
            any(hash(line) not in before.metrics for line in last)
            or self.last_commit() > before.commit
        )

    def release(self) -> None:
        """Release the lock if this process holds it. The end of the process does so too."""
        if self._lock is not None:
            self._lock.release()


@dataclass(frozen=True)
class _PreviousContent:
    """An opened run as `rewrite` found it.

    files: the files that it replaces, with their content, None for a missing file.
    metrics: hashes of the lines of metrics.jsonl.
    commit: `RunDir.last_commit`.
    """

    files: tuple[tuple[Path, bytes | None], ...]
    metrics: frozenset[int]
    commit: int


class RunLock:
    """An exclusive lock on a run's folder. The kernel releases it when its process ends."""

    def __init__(self, folder: Path) -> None:
        """Take the lock of ``folder``.

        Raises:
            ConfigError: another process holds it. The message gives its process id and host.
        """
        path = folder / LOCK
        self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._take()
        except BlockingIOError:
            holder = path.read_text(errors="replace").strip() or "another process"
            self.release()
            raise ConfigError(
                f"run.dir={folder}: in use by {holder}. Wait for that run, stop it, or choose "
                "another run.dir."
            ) from None
        except OSError:
            # Some network file systems have no locks. Train anyway: the user must avoid two runs in
            # one folder.
            self.release()
            return
        # On a full disk the lock still holds.
        with contextlib.suppress(OSError):
            os.truncate(self._file, 0)
            os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def _take(self) -> None:
        assert self._file is not None
        for _ in range(LOCK_ATTEMPTS):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(0.05)  # `launch.run_state` may hold it for a moment
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def beat(self) -> None:
        """Set the lock file's time stamp to the current time of its disk."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.utime(self._file)

    def release(self) -> None:
        """Release the lock. Harmless if it is not held."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def create(config: Config, overrides: Sequence[str]) -> RunDir:
    """Create and lock the folder of a new run and write its first files.

    They are resolved.yaml, overrides.txt and environment.json. In a torchrun or srun job, global
    rank 0 does so and the other ranks get the path from it, even if ``run.dir=auto`` would give
    them another one.

    Raises:
        ConfigError: the folder already holds a run or anything else, is in use, or cannot be
            written.
    """
    created: list[RunDir] = []

    def make() -> str:
        created.append(_create_here(config, overrides))
        return str(created[0].path)

    path = decide_on_rank_zero(make)
    return created[0] if created else RunDir(Path(path))


def open(path: str | os.PathLike[str]) -> RunDir:
    """Open and lock the folder of an earlier run to resume it.

    Args:
        path: the folder, or a name under ``runs/`` such as ``latest``.

    Raises:
        ConfigError: there is no run, its configuration cannot be read, or it is in use.
    """
    opened: list[RunDir] = []

    def find() -> str:
        opened.append(_open_here(Path(path).expanduser()))
        return str(opened[0].path)

    found = decide_on_rank_zero(find)
    return opened[0] if opened else RunDir(Path(found))


def find_earlier_start(config: Config, this_job: bool) -> RunDir | None:
    """Return the run that an earlier start of this command created, not locked, or None.

    If ``config`` gives a folder or a name, that is the run. Otherwise it is the newest run of this
    torchrun or SLURM job.

    Args:
        this_job: ignore runs that another job created.
    """

    def find() -> str:
        job = current_job()
        name = job.name if job else ""
        if config.run.dir == "auto" and config.run.name == "auto":
            candidates = sorted(
                RUNS.glob("*/resolved.yaml"), key=lambda file: file.stat().st_mtime, reverse=True
            )
        else:
            folder = (
                RUNS / config.run.name
                if config.run.dir == "auto"
                else Path(config.run.dir).expanduser()
            )
            candidates = [file for file in [folder.absolute() / "resolved.yaml"] if file.is_file()]
            if candidates and not this_job:
                return str(folder.absolute())
        mine = (
            file.parent.resolve()
            for file in candidates
            if name and _recorded_job(file.parent) == name
        )
        return str(next(mine, ""))

    path = decide_on_rank_zero(find)
    return RunDir(Path(path)) if path else None


def _recorded_job(folder: Path) -> str | None:
    try:
        facts = documents.read_json(RunDir(folder).environment)
        return facts.get("job") if isinstance(facts, dict) else None
    except (OSError, ValueError):
        return None


def _create_here(config: Config, overrides: Sequence[str]) -> RunDir:
    name = config.run.name
    if name == "auto":
        # The model may be named after a folder, whose name may hold any character.
        model = re.sub(r"[^\w.+=-]+", "-", config.model.name)
        name = f"{model}-{format_size(config.seq)}-{time.strftime('%Y%m%d-%H%M%S')}"
    wanted = RUNS / name if config.run.dir == "auto" else Path(config.run.dir).expanduser()
    with _as_config_error(wanted):
        new_parents = tuple(parent for parent in wanted.absolute().parents if not parent.exists())
        path, new_folder = _make_folder(
            wanted, must_be_new=config.run.dir == "auto" and config.run.name == "auto"
        )
        run = RunDir(
            path.absolute(),
            None,
            "new folder" if new_folder else "new files",
            _new_parents=new_parents,
        )
        if not new_folder and not run.resolved.exists() and (entries := _entries(path)):
            shown = ", ".join(entries[:3]) + (" and more" if len(entries) > 3 else "")
            raise ConfigError(
                f"run.dir={path}: is not empty and holds no run ({shown}). Choose a new or an "
                "empty folder."
            )
        try:
            run = dataclasses.replace(run, _lock=RunLock(path))
            if run.resolved.exists():
                run.release()
                if (path / PLAN).is_file():
                    raise ConfigError(
                        f"run.dir={path}: already holds a measurement. Choose another run.name or "
                        "run.dir."
                    )
                raise ConfigError(
                    f"run.dir={path}: already holds a run. Resume it with --resume "
                    f"{shlex.quote(str(path))}, or choose another run.dir."
                )
            run.overrides.write_text("".join(f"{line}\n" for line in overrides))
            run.environment.write_text(json.dumps(_environment_facts(), indent=2) + "\n")
            # Last, because its existence marks the folder as a run.
            named = dataclasses.replace(
                config.run, name=path.name if config.run.dir == "auto" else name, dir=str(run.path)
            )
            compose.save(dataclasses.replace(config, run=named), run.resolved)
        except OSError:
            run.discard()
            run.release()
            raise
    if run.path.parent == RUNS.absolute():
        run = dataclasses.replace(run, _latest_before=_latest_target(run.path.parent))
        _point_latest(run.path.parent, run.path.name)
    return run


def _make_folder(wanted: Path, must_be_new: bool) -> tuple[Path, bool]:
    """Make ``wanted``, or ``wanted-2`` and so on if it must be new.

    Returns:
        The folder, and whether it is new.
    """
    for attempt in range(1, 1000):
        path = wanted if attempt == 1 else wanted.with_name(f"{wanted.name}-{attempt}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not path.is_dir():
                raise
            if not must_be_new:
                return path, False
        else:
            return path, True
    raise FileExistsError(f"a thousand folders like {wanted} exist")


def _open_here(path: Path) -> RunDir:
    if not path.exists() and (RUNS / path).is_dir():
        path = RUNS / path
    path = path.resolve()
    if not path.is_dir():
        raise ConfigError(
            f"--resume {path}: no such folder. Give the folder of a run, such as runs/latest."
        )
    run = RunDir(path)
    if not run.resolved.is_file():
        raise ConfigError(
            f"--resume {path}: holds no run (resolved.yaml is missing). Give the folder of a run, "
            "such as runs/latest."
        )
    compose.load(run.resolved)
    with _as_config_error(path):
        lock = RunLock(path)
        run.stop_request.unlink(missing_ok=True)
    return RunDir(path, lock)


def _whole_lines(file: Path) -> list[bytes]:
    """Return the complete lines of a file, without one that a crash cut short."""
    try:
        return file.read_bytes().split(b"\n")[:-1]
    except OSError:
        return []


def _restore_file(file: Path, content: bytes | None) -> None:
    """Restore a file's content atomically, None for no file.

    Ignore errors: the user must see the original mistake instead.
    """
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    with contextlib.suppress(OSError):
        if content is None:
            file.unlink(missing_ok=True)
        elif file.read_bytes() != content:
            part.write_bytes(content)
            part.replace(file)
    part.unlink(missing_ok=True)


def _entries(folder: Path) -> list[str]:
    """Return the names in a folder, except the lock that a discarded run leaves there."""
    return sorted(entry.name for entry in folder.iterdir() if entry.name != LOCK)


def _latest_target(runs: Path) -> str | None:
    """Return the target of the link ``latest``, or None without such a link."""
    link = runs / "latest"
    return os.readlink(link) if link.is_symlink() else None


def _point_latest(runs: Path, target: str) -> None:
    partial = runs / f".latest-{os.getpid()}"
    # The link is a convenience. Train even if a folder has its name or the file system has no
    # links.
    with contextlib.suppress(OSError):
        partial.symlink_to(target)
        os.replace(partial, runs / "latest")
    partial.unlink(missing_ok=True)


def _restore_latest(run: Path, before: str | None) -> None:
    """Point ``latest`` to its target before ``run`` was made, unless a later run has moved it."""
    if _latest_target(run.parent) != run.name:
        return
    if before is not None and (run.parent / before).exists():
        _point_latest(run.parent, before)
    else:
        (run.parent / "latest").unlink(missing_ok=True)


@contextlib.contextmanager
def _as_config_error(path: Path):
    """Turn an OSError on the run's folder into a one-line ConfigError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"run.dir={path}: cannot write there ({reason}). Choose a folder on a writable disk "
            "with free space."
        ) from error


def _environment_facts() -> dict[str, object]:
    """Return what a reader needs to repeat the run."""
    versions = {"mtrain": mtrain_cli.__version__, "python": platform.python_version()}
    for package in ("torch", "numpy", "flash-attn-4"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    job = current_job()
    return {
        "command": ["mtrain", *sys.argv[1:]],
        "job": job.name if job else None,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu_cores": os.cpu_count(),
        "gpus": _output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines(),
        "versions": versions,
        "git_revision": _git_revision(),
    }


def _git_revision() -> str | None:
    """Return the commit of the checkout that mtrain runs from, or None for an installed wheel.

    Uncommitted work adds ``+changes``.
    """
    checkout = Path(mtrain_cli.__file__).resolve().parent.parent
    if not (checkout / ".git").exists():
        return None
    revision = _output_of("git", "-C", str(checkout), "rev-parse", "HEAD")
    changes = _output_of(
        "git", "-C", str(checkout), "status", "--porcelain", "--untracked-files=no"
    )
    return revision + "+changes" * bool(changes) if revision else None


def _output_of(*command: str) -> str:
    """Return what a tool prints, or nothing if it is missing, fails or hangs.

    Training does not depend on it.
    """
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
