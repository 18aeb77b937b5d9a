"""The folder of one run: what the launcher writes before the first step, and the lock that keeps a second run out."""

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
from mtrain_cli.training.manifest import committed_steps, manifest_file

RUNS = Path("runs")
LOCK = ".lock"
PLAN = "plan.json"  # of a measurement, which no run has
LOCK_ATTEMPTS = 3  # at a lock that is taken


@dataclass(frozen=True)
class RunDir:
    """A run's folder and the files in it. The process that created or opened it may hold its lock; workers do not."""

    path: Path
    _lock: RunLock | None = field(default=None, repr=False, compare=False)
    _origin: str = field(default="opened", repr=False, compare=False)
    _latest_before: str | None = field(default=None, repr=False, compare=False)
    _new_parents: tuple[Path, ...] = field(
        default=(), repr=False, compare=False
    )  # made with the folder, the nearest first
    _before_rewrite: _PreviousContent | None = field(default=None, repr=False, compare=False)

    @property
    def resolved(self) -> Path:
        """The complete configuration; its existence marks the folder as a run."""
        return self.path / "resolved.yaml"

    @property
    def overrides(self) -> Path:
        """The overrides of the command line, one a line."""
        return self.path / "overrides.txt"

    @property
    def environment(self) -> Path:
        """Versions, devices and revision that the run was started with."""
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        """What the run showed on the terminal."""
        return self.path / "log.txt"

    @property
    def logs(self) -> Path:
        """Folder of the output of each worker: ``rank-N.log``."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        """Folder of ``step-N``."""
        return self.path / "checkpoints"

    @property
    def stop_request(self) -> Path:
        """A file whose existence asks the workers to save and stop at the next step."""
        return self.path / "stop_request"

    @property
    def state(self) -> Path:
        """Where the run stands now, for `mtrain status`; see `launch.run_state`."""
        return self.path / "state.json"

    @property
    def restarts(self) -> Path:
        """One JSON object for each time that the run lost a worker and began again; see `launch.restart`."""
        return self.path / "restarts.jsonl"

    @property
    def resume_command(self) -> str:
        """What a person types to go on with this run."""
        return f"mtrain train --resume {shlex.quote(str(self.path))}"

    def last_step(self) -> int | None:
        """Step of the newest complete checkpoint; its files are not verified."""
        return next(iter(committed_steps(self.checkpoints)), None)

    def last_commit(self) -> int:
        """When the latest checkpoint was committed, in nanoseconds since the epoch by the clock of its disk; 0 where there is none."""
        times = [0]
        for step in committed_steps(self.checkpoints):
            with contextlib.suppress(OSError):  # removed meanwhile, for newer ones
                times.append(manifest_file(self.checkpoints, step).stat().st_mtime_ns)
        return max(times)

    def beat(self) -> None:
        """Show whoever looks at the lock from another machine that its holder lives; nothing where this process does not hold it."""
        if self._lock is not None:
            self._lock.beat()

    def require_steps_left(self, steps: int) -> None:
        """Refuse to resume towards a step that lies behind, and let go of the lock; to ask for the very last one again is harmless.

        Raises:
            ConfigError: the newest checkpoint is of a later step than ``steps``.
        """

        def check() -> str:
            done = self.last_step()
            if done is not None and done > steps:
                self.release()
                raise ConfigError(
                    f"train.steps={steps}: the run is at step {done} already; give more than {done}"
                )
            return ""

        decide_on_rank_zero(check)

    def rewrite(self, config: Config, overrides: Sequence[str]) -> RunDir:
        """Replace the configuration of an opened run, for a resume with overrides; the overrides are appended to those before.

        Returns the run, whose `discard` puts back what was there.

        Raises:
            ConfigError: the folder cannot be written; what was there still is.
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
        """Take back what `create` or `rewrite` wrote: a user's mistake then leaves nothing behind. Returns whether the folder is gone.

        When a step has run since, a new run stays, and an opened one goes on under what that step ran under.
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
            for _ in range(3):  # another thread may write into it meanwhile
                shutil.rmtree(self.path, ignore_errors=True)
            with contextlib.suppress(OSError):  # one is in use by now
                for parent in self._new_parents:
                    parent.rmdir()
        else:
            # It was empty but for the lock, which another process may wait for by now.
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
        """A run that begins may cut metrics off behind its checkpoint: fewer lines are no step, another last one is."""
        last = _whole_lines(self.metrics)[-1:]
        return (
            any(hash(line) not in before.metrics for line in last)
            or self.last_commit() > before.commit
        )

    def release(self) -> None:
        """Let go of the lock, if this process holds it; the end of the process does so too."""
        if self._lock is not None:
            self._lock.release()


@dataclass(frozen=True)
class _PreviousContent:
    """An opened run as `rewrite` found it: contents of the files that it replaces, hashes of the lines of its metrics, `last_commit`."""

    files: tuple[tuple[Path, bytes | None], ...]
    metrics: frozenset[int]
    commit: int


class RunLock:
    """An exclusive lock on a run's folder, released by the kernel when its process ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        """Take the lock of ``folder``.

        Raises:
            ConfigError: another process holds it; the line names its pid and host.
        """
        path = folder / LOCK
        self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._take()
        except BlockingIOError:
            holder = path.read_text(errors="replace").strip() or "another process"
            self.release()
            raise ConfigError(
                f"run.dir={folder}: in use by {holder}; wait for that run, stop it, or choose another run.dir"
            ) from None
        except OSError:
            # Some network file systems cannot lock. Two runs in one folder are then the user's to avoid; that is no reason not to train.
            self.release()
            return
        # On a full disk the lock holds all the same.
        with contextlib.suppress(OSError):
            os.truncate(self._file, 0)
            os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def _take(self) -> None:
        assert self._file is not None
        for _ in range(LOCK_ATTEMPTS):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(0.05)  # someone may merely look (`launch.run_state`)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def beat(self) -> None:
        """Give the lock's file the time of its disk."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.utime(self._file)

    def release(self) -> None:
        """Let go of the lock; harmless when it is not held."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def create(config: Config, overrides: Sequence[str]) -> RunDir:
    """Make the folder of a new run with resolved.yaml, overrides.txt and environment.json in it, locked for this process.

    In a torchrun or srun job global rank 0 does so and the others learn the path from it, whatever ``run.dir=auto`` would give them.

    Raises:
        ConfigError: the folder holds a run or anything else already, is in use, or cannot be written.
    """
    created: list[RunDir] = []

    def make() -> str:
        created.append(_create_here(config, overrides))
        return str(created[0].path)

    path = decide_on_rank_zero(make)
    return created[0] if created else RunDir(Path(path))


def open(path: str | os.PathLike[str]) -> RunDir:
    """The folder of an earlier run, locked for this process, to resume it. ``path`` may be a name under ``runs/``, such as ``latest``.

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
    """The run that an earlier start of this very line began; not locked. None: there is none.

    A folder or name that ``config`` gives is the run's; without one it is the newest run of this torchrun or SLURM job. this_job: a run
    that another job began does not count.
    """

    def find() -> str:
        job = current_job()
        name = job.name if job else ""
        if config.run.dir == "auto" and config.run.name == "auto":
            found = sorted(
                RUNS.glob("*/resolved.yaml"), key=lambda file: file.stat().st_mtime, reverse=True
            )
        else:
            folder = (
                RUNS / config.run.name
                if config.run.dir == "auto"
                else Path(config.run.dir).expanduser()
            )
            found = [file for file in [folder.absolute() / "resolved.yaml"] if file.is_file()]
            if found and not this_job:
                return str(folder.absolute())
        mine = (
            file.parent.resolve() for file in found if name and _recorded_job(file.parent) == name
        )
        return str(next(mine, ""))

    path = decide_on_rank_zero(find)
    return RunDir(Path(path)) if path else None


def _recorded_job(folder: Path) -> str | None:
    try:
        found = documents.read_json(RunDir(folder).environment)
        return found.get("job") if isinstance(found, dict) else None
    except (OSError, ValueError):
        return None


def _create_here(config: Config, overrides: Sequence[str]) -> RunDir:
    name = config.run.name
    if name == "auto":
        model = re.sub(
            r"[^\w.+=-]+", "-", config.model.name
        )  # of a folder, which may hold anything
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
        if not new_folder and not run.resolved.exists() and (found := _entries(path)):
            some = ", ".join(found[:3]) + (" and more" if len(found) > 3 else "")
            raise ConfigError(
                f"run.dir={path}: is not empty and holds no run ({some}); choose a new or an empty folder"
            )
        try:
            run = dataclasses.replace(run, _lock=RunLock(path))
            if run.resolved.exists():
                run.release()
                if (path / PLAN).is_file():
                    raise ConfigError(
                        f"run.dir={path}: already holds a measurement; choose another run.name or run.dir"
                    )
                raise ConfigError(
                    f"run.dir={path}: already holds a run; continue it with --resume {shlex.quote(str(path))} or choose another run.dir"
                )
            run.overrides.write_text("".join(f"{line}\n" for line in overrides))
            run.environment.write_text(json.dumps(_environment_facts(), indent=2) + "\n")
            # Last, since its existence marks the folder as a run.
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
    """Make ``wanted``, or ``wanted-2`` and so on where it must be new; also tell whether it is new."""
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
            f"--resume {path}: no such folder; give the folder of a run, such as runs/latest"
        )
    run = RunDir(path)
    if not run.resolved.is_file():
        raise ConfigError(
            f"--resume {path}: holds no run (resolved.yaml is missing); give the folder of a run, such as runs/latest"
        )
    compose.load(run.resolved)
    with _as_config_error(path):
        lock = RunLock(path)
        run.stop_request.unlink(missing_ok=True)
    return RunDir(path, lock)


def _whole_lines(file: Path) -> list[bytes]:
    """Without one that a crash cut short; none where there is no file."""
    try:
        return file.read_bytes().split(b"\n")[:-1]
    except OSError:
        return []


def _restore_file(file: Path, content: bytes | None) -> None:
    """Give a file the content that it had, None for no file, in one move; what fails here is not what the user is to hear of."""
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    with contextlib.suppress(OSError):
        if content is None:
            file.unlink(missing_ok=True)
        elif file.read_bytes() != content:
            part.write_bytes(content)
            part.replace(file)
    part.unlink(missing_ok=True)


def _entries(folder: Path) -> list[str]:
    """What is in a folder, but for the lock that a discarded run leaves there."""
    return sorted(entry.name for entry in folder.iterdir() if entry.name != LOCK)


def _latest_target(runs: Path) -> str | None:
    """Where the link ``latest`` points; None where there is no such link."""
    link = runs / "latest"
    return os.readlink(link) if link.is_symlink() else None


def _point_latest(runs: Path, target: str) -> None:
    partial = runs / f".latest-{os.getpid()}"
    # A convenience: a folder of that name, or a file system without links, is no reason not to train.
    with contextlib.suppress(OSError):
        partial.symlink_to(target)
        os.replace(partial, runs / "latest")
    partial.unlink(missing_ok=True)


def _restore_latest(run: Path, before: str | None) -> None:
    """Have ``latest`` point where it did before ``run`` was made, unless a later run has moved it since."""
    if _latest_target(run.parent) != run.name:
        return
    if before is not None and (run.parent / before).exists():
        _point_latest(run.parent, before)
    else:
        (run.parent / "latest").unlink(missing_ok=True)


@contextlib.contextmanager
def _as_config_error(path: Path):
    """Turn an OSError on the run's folder into one line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"run.dir={path}: cannot write there ({reason}); choose a folder on a writable disk with free space"
        ) from error


def _environment_facts() -> dict[str, object]:
    """What a reader of the run needs in order to repeat it."""
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
    """Commit of the checkout that mtrain runs from, with ``+changes`` for uncommitted work; None for an installed wheel."""
    checkout = Path(mtrain_cli.__file__).resolve().parent.parent
    if not (checkout / ".git").exists():
        return None
    revision = _output_of("git", "-C", str(checkout), "rev-parse", "HEAD")
    changes = _output_of(
        "git", "-C", str(checkout), "status", "--porcelain", "--untracked-files=no"
    )
    return revision + "+changes" * bool(changes) if revision else None


def _output_of(*command: str) -> str:
    """What a tool prints, or nothing where it is missing, fails or hangs: the facts that it gives are no condition for training."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
