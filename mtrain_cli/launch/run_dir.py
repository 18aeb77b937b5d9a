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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import mtrain_cli
from mtrain_cli.config import documents, resolved_file
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.config.sizes import format_size
from mtrain_cli.launch.job import current_job, decide_on_rank_zero
from mtrain_cli.launch.manifest import committed_steps, manifest_file

RUNS = Path("runs")
LOCK = ".lock"
PLAN = "plan.json"  # marks the folder of a measurement, not of a run
LOCK_ATTEMPTS = 3


class _Inside:
    """The path of a file or folder in a run."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDir, owner: type[RunDir] | None = None) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDir:
    """A run's folder and the files in it.

    The process that created or opened it may hold its lock. Workers do not.

    resolved: the complete configuration. Its existence marks the folder as a run.
    overrides: the overrides of the command line, one per line.
    environment: versions, devices and revision at the start of the run.
    metrics: one JSON object per step.
    log: what the run printed on the terminal.
    logs: folder of the workers' output, ``rank-N.log``.
    checkpoints: folder of the checkpoints ``step-N``.
    stop_request: asks the workers to save and stop after the current step, if it exists.
    state: the current state for `mtrain status` (`launch.run_state`).
    restarts: the restarts of the run, one JSON object each (`launch.restart`).
    """

    path: Path
    _lock: RunLock | None = field(default=None, repr=False, compare=False)
    _created: _Creation | None = field(default=None, repr=False, compare=False)
    _before_rewrite: _PreviousContent | None = field(default=None, repr=False, compare=False)

    resolved = _Inside("resolved.yaml")
    overrides = _Inside("overrides.txt")
    environment = _Inside("environment.json")
    metrics = _Inside("metrics.jsonl")
    log = _Inside("log.txt")
    logs = _Inside("logs")
    checkpoints = _Inside("checkpoints")
    stop_request = _Inside("stop_request")
    state = _Inside("state.json")
    restarts = _Inside("restarts.jsonl")

    @property
    def resume_command(self) -> str:
        """The command that resumes this run."""
        return f"mtrain train --resume {shlex.quote(str(self.path))}"

    def last_step(self) -> int | None:
        """Return the step of the newest complete checkpoint, without verifying its files."""
        return next(iter(committed_steps(self.checkpoints)), None)

    def last_commit(self) -> int:
        """Return the time of the last checkpoint commit, in nanoseconds since the epoch, or 0.

        The time comes from the disk's clock.
        """
        times = [0]
        for step in committed_steps(self.checkpoints):
            with contextlib.suppress(OSError):  # a newer one has replaced it
                times.append(manifest_file(self.checkpoints, step).stat().st_mtime_ns)
        return max(times)

    def beat(self) -> None:
        """Renew the lock's time stamp, which other machines read. Do nothing without the lock."""
        if self._lock is not None:
            self._lock.beat()

    def require_steps_left(self, steps: int) -> None:
        """Check that the newest checkpoint is not later than ``steps``.

        Raises:
            ConfigError: it is later. The lock is released.
        """

        def check() -> str:
            done = self.last_step()
            if done is not None and done > steps:
                self.release()
                problem = f"the run is already at step {done}. Give more than {done}."
                raise ConfigError(f"train.steps={steps}: {problem}")
            return ""

        decide_on_rank_zero(check)

    def rewrite(self, config: Config, overrides: Sequence[str]) -> RunDir:
        """Replace the configuration of an opened run and append the overrides.

        Returns:
            The run, whose `discard` restores the previous files.

        Raises:
            ConfigError: the folder cannot be written. The previous files are intact.
        """

        def write() -> RunDir:
            with _as_config_error(self.path):
                files = {
                    file: file.read_bytes() if file.exists() else None
                    for file in (self.resolved, self.overrides)
                }
                metrics = frozenset(map(hash, _whole_lines(self.metrics)))
                before = _PreviousContent(files, metrics, self.last_commit())
                rewritten = dataclasses.replace(self, _before_rewrite=before)
                try:
                    resolved_file.save(config, self.resolved)
                    with self.overrides.open("a") as file:
                        file.writelines(f"{line}\n" for line in overrides)
                except OSError:
                    rewritten.discard()
                    raise
            return rewritten

        return _share_run(write)

    def discard(self) -> bool:
        """Undo `create` or `rewrite`, so that a user's mistake leaves nothing behind.

        If a step has run since, a new run stays, and a rewritten one keeps its new configuration.

        Returns:
            Whether the folder is gone.
        """
        before, created = self._before_rewrite, self._created
        if before is not None and not self._has_stepped_since(before):
            for file, content in before.files.items():
                _restore_file(file, content)
        if created is None or any(self.checkpoints.glob("step-*")):
            return False
        if self.metrics.exists() and self.metrics.stat().st_size:
            return False
        _restore_latest(self.path, created.latest_before)
        if created.is_new_folder:
            for _ in range(3):  # another thread may still write to it
                shutil.rmtree(self.path, ignore_errors=True)
            with contextlib.suppress(OSError):  # another run uses it by now
                for parent in created.new_parents:
                    parent.rmdir()
            return True
        # The folder held only the lock. That file stays, since another process may wait for it.
        for file in (self.resolved, self.overrides, self.environment, self.metrics):
            file.unlink(missing_ok=True)
        for file in (self.log, self.state, self.restarts, self.stop_request):
            file.unlink(missing_ok=True)
        for folder in (self.logs, self.checkpoints):
            shutil.rmtree(folder, ignore_errors=True)
        return True

    def _has_stepped_since(self, before: _PreviousContent) -> bool:
        """Return whether a step has run since ``before``.

        A starting run may cut off metrics after its checkpoint, so the number of lines proves
        nothing. A new last line proves a step.
        """
        last = {hash(line) for line in _whole_lines(self.metrics)[-1:]}
        return not last <= before.metrics or self.last_commit() > before.commit

    def release(self) -> None:
        """Release the lock if this process holds it. The kernel does so when the process ends."""
        if self._lock is not None:
            self._lock.release()


@dataclass(frozen=True)
class _Creation:
    """How `create` found the folder.

    is_new_folder: `create` made it. Otherwise it was empty.
    new_parents: parent folders that `create` made, the nearest first.
    latest_before: target of the link ``latest``.
    """

    is_new_folder: bool
    new_parents: tuple[Path, ...]
    latest_before: str | None


@dataclass(frozen=True)
class _PreviousContent:
    """An opened run as `rewrite` found it.

    files: the files that it replaces, with their content, None for a missing file.
    metrics: hash of each line of metrics.jsonl.
    commit: `RunDir.last_commit`.
    """

    files: dict[Path, bytes | None]
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
            advice = "Wait for that run, stop it, or choose another run.dir."
            raise ConfigError(f"run.dir={folder}: in use by {holder}. {advice}") from None
        except OSError:
            # Some network file systems have no locks. Train without one: the user must avoid two
            # runs in one folder.
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

    They are resolved.yaml, overrides.txt and environment.json. In a torchrun or srun job only
    global rank 0 does this. The other ranks get the path from rank 0, because ``run.dir=auto`` may
    give each rank another one.

    Raises:
        ConfigError: the folder already holds a run or anything else, is in use, or cannot be
            written.
    """
    return _share_run(lambda: _create_here(config, overrides))


def open(path: str | os.PathLike[str]) -> RunDir:
    """Open and lock the folder of an earlier run to resume it.

    Args:
        path: the folder, or a name under ``runs/`` such as ``latest``.

    Raises:
        ConfigError: there is no run, its configuration cannot be read, or it is in use.
    """
    return _share_run(lambda: _open_here(Path(path).expanduser()))


def _share_run(action: Callable[[], RunDir]) -> RunDir:
    """Call ``action`` on rank 0 and return its run. Other ranks get the run without its lock."""
    runs: list[RunDir] = []

    def act() -> str:
        runs.append(action())
        return str(runs[0].path)

    path = decide_on_rank_zero(act)
    return runs[0] if runs else RunDir(Path(path))


def list_runs() -> list[RunDir]:
    """Return the runs in ``runs/``, the latest first."""
    files = [file for file in RUNS.glob("*/resolved.yaml") if not file.parent.is_symlink()]
    files.sort(key=lambda file: file.stat().st_mtime, reverse=True)
    return [RunDir(file.parent) for file in files]


def find_earlier_start(config: Config, this_job: bool) -> RunDir | None:
    """Return the run, without its lock, that an earlier start of this command created, or None.

    If ``config`` gives a folder or a name, that is the run. Otherwise it is the newest run of this
    torchrun or SLURM job.

    Args:
        this_job: ignore runs that another job created.
    """

    def find() -> str:
        job = current_job()
        if config.run.dir == "auto" and config.run.name == "auto":
            folders = [run.path for run in list_runs()]
        else:
            is_named = config.run.dir == "auto"
            folder = RUNS / config.run.name if is_named else Path(config.run.dir).expanduser()
            folders = [folder.absolute()] if (folder / "resolved.yaml").is_file() else []
            if folders and not this_job:
                return str(folders[0])
        name = job.name if job else ""
        mine = (folder.resolve() for folder in folders if name and _recorded_job(folder) == name)
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
    name, picks_folder = config.run.name, config.run.dir == "auto"
    if name == "auto":
        # The model may be named after a folder, whose name may hold any character.
        model = re.sub(r"[^\w.+=-]+", "-", config.model.name)
        name = f"{model}-{format_size(config.seq)}-{time.strftime('%Y%m%d-%H%M%S')}"
    wanted = RUNS / name if picks_folder else Path(config.run.dir).expanduser()
    with _as_config_error(wanted):
        parents = tuple(parent for parent in wanted.absolute().parents if not parent.exists())
        path, is_new = _make_folder(wanted, picks_folder and config.run.name == "auto")
        creation = _Creation(is_new, parents, _latest_target(path.absolute().parent))
        run = RunDir(path.absolute(), None, creation)
        # The lock stays in the folder of a discarded run.
        entries = sorted(entry.name for entry in path.iterdir() if entry.name != LOCK)
        if entries and not run.resolved.exists():
            shown = ", ".join(entries[:3]) + (" and more" if len(entries) > 3 else "")
            problem = f"is not empty and holds no run ({shown})"
            raise ConfigError(f"run.dir={path}: {problem}. Choose a new or an empty folder.")
        try:
            run = dataclasses.replace(run, _lock=RunLock(path))
            if run.resolved.exists():
                run.release()
                raise _occupied_error(path)
            run.overrides.write_text("".join(f"{line}\n" for line in overrides))
            run.environment.write_text(json.dumps(_environment_facts(), indent=2) + "\n")
            # Last, because its existence marks the folder as a run.
            chosen = path.name if picks_folder else name
            named = dataclasses.replace(config.run, name=chosen, dir=str(run.path))
            resolved_file.save(dataclasses.replace(config, run=named), run.resolved)
        except OSError:
            run.discard()
            run.release()
            raise
    if run.path.parent == RUNS.absolute():
        _point_latest(run.path.parent, run.path.name)
    return run


def _occupied_error(path: Path) -> ConfigError:
    """Return the error for a folder that already holds a run or a measurement."""
    if (path / PLAN).is_file():
        return ConfigError(
            f"run.dir={path}: already holds a measurement. Choose another run.name or run.dir."
        )
    return ConfigError(
        f"run.dir={path}: already holds a run. Resume it with --resume {shlex.quote(str(path))}, "
        "or choose another run.dir."
    )


def _make_folder(wanted: Path, must_be_new: bool) -> tuple[Path, bool]:
    """Make ``wanted``, or ``wanted-2`` and so on if it must be new.

    Returns:
        The folder, and whether it is new.
    """
    for attempt in range(1, 1000):
        path = wanted if attempt == 1 else wanted.with_name(f"{wanted.name}-{attempt}")
        try:
            path.mkdir(parents=True)
            return path, True
        except FileExistsError:
            if not path.is_dir():
                raise
            if not must_be_new:
                return path, False
    raise FileExistsError(f"a thousand folders like {wanted} exist")


def _open_here(path: Path) -> RunDir:
    if not path.exists() and (RUNS / path).is_dir():
        path = RUNS / path
    path, advice = path.resolve(), "Give the folder of a run, such as runs/latest."
    if not path.is_dir():
        raise ConfigError(f"--resume {path}: no such folder. {advice}")
    run = RunDir(path)
    if not run.resolved.is_file():
        problem = "holds no run (resolved.yaml is missing)"
        raise ConfigError(f"--resume {path}: {problem}. {advice}")
    resolved_file.load(run.resolved)
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
    """Restore a file's content atomically, or remove the file if ``content`` is None.

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


def _latest_target(runs: Path) -> str | None:
    """Return the target of the link ``latest``, or None without such a link."""
    link = runs / "latest"
    return os.readlink(link) if link.is_symlink() else None


def _point_latest(runs: Path, target: str) -> None:
    partial = runs / f".latest-{os.getpid()}"
    # Train without the link if a folder has its name or the file system has no links.
    with contextlib.suppress(OSError):
        partial.symlink_to(target)
        os.replace(partial, runs / "latest")
    partial.unlink(missing_ok=True)


def _restore_latest(run: Path, before: str | None) -> None:
    """Point ``latest`` back to ``before`` if it still points to ``run``."""
    if _latest_target(run.parent) != run.name:
        return
    if before is not None and (run.parent / before).exists():
        _point_latest(run.parent, before)
    else:
        (run.parent / "latest").unlink(missing_ok=True)


@contextlib.contextmanager
def _as_config_error(path: Path) -> Iterator[None]:
    """Turn an OSError on the run's folder into a one-line ConfigError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        advice = "Choose a folder on a writable disk with free space."
        raise ConfigError(f"run.dir={path}: cannot write there ({reason}). {advice}") from error


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
    git = ("git", "-C", str(checkout))
    revision = _output_of(*git, "rev-parse", "HEAD")
    changes = _output_of(*git, "status", "--porcelain", "--untracked-files=no")
    return revision + "+changes" * bool(changes) if revision else None


def _output_of(*command: str) -> str:
    """Return what a tool prints, or nothing if it is missing, fails or hangs.

    Training does not depend on it.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
