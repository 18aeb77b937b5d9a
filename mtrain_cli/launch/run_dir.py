"""The folder of a run: create it, open it again, and undo both after a user's mistake."""

from __future__ import annotations

import contextlib
import dataclasses
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path

import mtrain_cli
from mtrain_cli.config import documents, resolved_file
from mtrain_cli.config.atomic_files import replacing
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.config.sizes import format_size
from mtrain_cli.launch.job import current_job, decide_on_rank_zero
from mtrain_cli.launch.manifest import committed_steps, manifest_file
from mtrain_cli.launch.run_lock import LOCK, RunLock
from mtrain_cli.launch.study_folder import study_command

RUNS = Path("runs")
PLAN = "plan.json"  # a folder with this file has a measurement, and no run


class _Inside:
    """A property of `RunDir`: the path of a file or folder in the run's folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDir, owner: type[RunDir] | None = None) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDir:
    """A run's folder and the paths of its files.

    The objects that `create` and `open` return hold the folder's lock. The objects of workers do
    not hold the lock.

    resolved: the complete configuration. A folder with this file is a run.
    overrides: the overrides of the command line, one per line.
    environment: command, machine, versions and revision at the start of the run.
    metrics: a JSON object for each step.
    log: what the run printed to the terminal.
    logs: folder of the workers' output, ``rank-N.log``.
    checkpoints: folder of the checkpoints ``step-N``.
    stop_request: if this file exists, the workers save and stop after the current step.
    save_requests: the workers save and go on for each byte that this file grows.
    state: the current state of the run (`run_status`).
    restarts: a JSON object for each restart (`restart`).
    """

    path: Path
    _lock: RunLock | None = field(default=None, repr=False, compare=False)
    _undo: Callable[[], bool] | None = field(default=None, repr=False, compare=False)

    resolved = _Inside("resolved.yaml")
    overrides = _Inside("overrides.txt")
    environment = _Inside("environment.json")
    metrics = _Inside("metrics.jsonl")
    log = _Inside("log.txt")
    logs = _Inside("logs")
    checkpoints = _Inside("checkpoints")
    stop_request = _Inside("stop_request")
    save_requests = _Inside("save_requests")
    state = _Inside("state.json")
    restarts = _Inside("restarts.jsonl")

    @property
    def resume_command(self) -> str:
        """The command that resumes this run, or the study that trains it."""
        return study_command(self.path) or f"mtrain train --resume {shlex.quote(str(self.path))}"

    def last_step(self) -> int | None:
        """Return the step of the newest checkpoint, None without one. Does not check its files."""
        return next(iter(committed_steps(self.checkpoints)), None)

    def last_commit(self) -> int:
        """Return when the newest checkpoint was completed, in nanoseconds since the epoch.

        The time comes from the clock of the disk. Return 0 without a checkpoint.
        """
        times = [0]
        for step in committed_steps(self.checkpoints):
            with contextlib.suppress(OSError):  # it was deleted after a newer one was written
                times.append(manifest_file(self.checkpoints, step).stat().st_mtime_ns)
        return max(times)

    def forget_requests(self) -> None:
        """Remove the files that ask the workers to save or stop."""
        for file in (self.stop_request, self.save_requests):
            file.unlink(missing_ok=True)

    def beat(self) -> None:
        """Renew the lock's time stamp, which other machines read. Do nothing without the lock."""
        if self._lock is not None:
            self._lock.beat()

    def require_steps_left(self, steps: int) -> None:
        """Check that the newest checkpoint is not beyond ``steps``, the number of steps to do.

        Raises:
            ConfigError: the checkpoint is beyond ``steps``. The lock has been released.
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
        """Replace the configuration of an opened run, and append to its overrides.

        Returns:
            The run. Its method `discard` restores the previous files.

        Raises:
            ConfigError: the folder cannot be written. The previous files are unchanged.
        """

        def write() -> RunDir:
            with _as_config_error(self.path):
                files = {
                    file: file.read_bytes() if file.exists() else None
                    for file in (self.resolved, self.overrides)
                }
                lines = frozenset(map(hash, _whole_lines(self.metrics)))
                undo = partial(_undo_rewrite, self, files, lines, self.last_commit())
                try:
                    resolved_file.save(config, self.resolved)
                    with self.overrides.open("a") as file:
                        file.writelines(f"{line}\n" for line in overrides)
                except OSError:
                    undo()
                    raise
            return dataclasses.replace(self, _undo=undo)

        return _share_run(write)

    def discard(self) -> bool:
        """Undo `create` or `rewrite` after a user's mistake.

        Do nothing if a step has run since the call of `create` or `rewrite`.

        Returns:
            Whether the run was removed.
        """
        return self._undo is not None and self._undo()

    def release(self) -> None:
        """Release the lock, if this object has it. The end of the process also releases it."""
        if self._lock is not None:
            self._lock.release()


def _undo_create(
    run: RunDir, is_new_folder: bool, new_parents: Sequence[Path], latest_before: str | None
) -> bool:
    """Remove a run that `create` made, and return True, unless a step has run."""
    if any(run.checkpoints.glob("step-*")) or (run.metrics.exists() and run.metrics.stat().st_size):
        return False
    _restore_latest(run.path, latest_before)
    if is_new_folder:
        for _ in range(3):  # another thread may still write to the folder
            shutil.rmtree(run.path, ignore_errors=True)
        with contextlib.suppress(OSError):  # another run may use the parent by now
            for parent in new_parents:
                parent.rmdir()
        return True
    # Before `create` the folder was empty or had only the lock file. Another process may wait for
    # the lock, so leave the lock file.
    about = run.resolved, run.overrides, run.environment, run.metrics
    for file in (*about, run.log, run.state, run.restarts):
        file.unlink(missing_ok=True)
    run.forget_requests()
    for folder in (run.logs, run.checkpoints):
        shutil.rmtree(folder, ignore_errors=True)
    return True


def _undo_rewrite(
    run: RunDir, files: Mapping[Path, bytes | None], lines: frozenset[int], commit: int
) -> bool:
    """Restore the files that `RunDir.rewrite` changed, unless a step has run. Return False."""
    # The number of lines of metrics.jsonl does not tell whether a step has run: a run that resumes
    # cuts the lines after its checkpoint. But if the last line is a new one, a step has run.
    last_line = {hash(line) for line in _whole_lines(run.metrics)[-1:]}
    if last_line <= lines and run.last_commit() <= commit:
        for file, content in files.items():
            _restore_file(file, content)
    return False


def create(config: Config, overrides: Sequence[str]) -> RunDir:
    """Create and lock the folder of a new run.

    Write resolved.yaml, overrides.txt and environment.json to it. In a torchrun or srun job only
    global rank 0 creates the folder. The other ranks get its path from rank 0.

    Raises:
        ConfigError: the folder is not empty, is in use, or cannot be written.
    """
    return _share_run(lambda: _create_here(config, overrides))


def open(path: str | os.PathLike[str]) -> RunDir:
    """Open and lock the folder of an earlier run.

    In a torchrun or srun job only global rank 0 does this.

    Args:
        path: the folder, or its name in ``runs/``, such as ``latest``.

    Raises:
        ConfigError: the folder has no run, or the run is in use or its configuration cannot be
            read.
    """
    return _share_run(lambda: _open_here(Path(path).expanduser()))


def _share_run(action: Callable[[], RunDir]) -> RunDir:
    """Call ``action`` on rank 0 and return its run. On other ranks the run has no lock."""
    runs: list[RunDir] = []

    def act() -> str:
        runs.append(action())
        return str(runs[0].path)

    path = decide_on_rank_zero(act)
    return runs[0] if runs else RunDir(Path(path))


def list_runs() -> list[RunDir]:
    """Return the runs in the folder ``runs/``, latest first."""
    files = [file for file in RUNS.glob("*/resolved.yaml") if not file.parent.is_symlink()]
    files.sort(key=lambda file: file.stat().st_mtime, reverse=True)
    return [RunDir(file.parent) for file in files]


def find_earlier_start(config: Config, this_job: bool) -> RunDir | None:
    """Return the run that an earlier start of this command created, unlocked. None without a run.

    If ``config`` sets the folder or the name of the run, check only that run. Otherwise find the
    latest run of this torchrun or SLURM job.

    Args:
        this_job: whether to ignore a run that another job created.
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


def require_folder(config: Config) -> None:
    """Check that no file is in the place of a new run's folder, or of a folder above it.

    Raises:
        ConfigError: there is one.
    """
    key, folder = f"run.dir={config.run.dir}", Path(config.run.dir).expanduser()
    if config.run.dir == "auto":
        name = config.run.name
        key, folder = f"run.name={name}", RUNS if name == "auto" else RUNS / name
    with _as_config_error(folder):
        for place in (folder, *folder.parents):
            if place.exists() and not place.is_dir():
                what = "is" if key == f"run.dir={place}" else f"{place} is"
                other = "run.name" if place == RUNS / config.run.name else "run.dir"
                raise ConfigError(f"{key}: {what} a file. Choose another {other}.")


def free_disk(config: Config) -> int | None:
    """Return the free bytes of the disk of a new run's folder; None if they are unknown."""
    folder = RUNS if config.run.dir == "auto" else Path(config.run.dir).expanduser()
    with contextlib.suppress(OSError, StopIteration):
        place = next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
        return shutil.disk_usage(place).free
    return None


def _create_here(config: Config, overrides: Sequence[str]) -> RunDir:
    require_folder(config)
    name, picks_folder = config.run.name, config.run.dir == "auto"
    if name == "auto":
        # A model that was loaded from a folder has the folder's name, with any characters.
        model = re.sub(r"[^\w.+=-]+", "-", config.model.name)
        name = f"{model}-{format_size(config.seq)}-{time.strftime('%Y%m%d-%H%M%S')}"
    wanted = RUNS / name if picks_folder else Path(config.run.dir).expanduser()
    with _as_config_error(wanted):
        parents = tuple(parent for parent in wanted.absolute().parents if not parent.exists())
        path, is_new = _make_folder(wanted, picks_folder and config.run.name == "auto")
        run = RunDir(path.absolute())
        undo = partial(_undo_create, run, is_new, parents, _latest_target(run.path.parent))
        # A run that was discarded may have left its lock file.
        entries = sorted(entry.name for entry in path.iterdir() if entry.name != LOCK)
        if entries and not run.resolved.exists():
            shown = ", ".join(entries[:3]) + (" and more" if len(entries) > 3 else "")
            problem = f"is not empty and holds no run ({shown})"
            raise ConfigError(f"run.dir={path}: {problem}. Choose a new or an empty folder.")
        try:
            run = dataclasses.replace(run, _lock=RunLock(path), _undo=undo)
            if run.resolved.exists():
                run.release()
                raise _occupied_error(path, name if picks_folder else None)
            run.overrides.write_text("".join(f"{line}\n" for line in overrides))
            run.environment.write_text(json.dumps(_environment_facts(), indent=2) + "\n")
            # This is the last file, because a folder with this file is a run.
            chosen = path.name if picks_folder else name
            config = config.changed(run={"name": chosen, "dir": str(run.path)})
            resolved_file.save(config, run.resolved)
        except OSError:
            undo()
            run.release()
            raise
    if run.path.parent == RUNS.absolute():
        _point_latest(run.path.parent, run.path.name)
    return run


def _environment_facts() -> dict[str, object]:
    """Return the facts that somebody needs to repeat the run, by name."""
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
    """Return the commit of mtrain's git checkout, with ``+changes`` if files have changed."""
    checkout = Path(mtrain_cli.__file__).resolve().parent.parent
    if not (checkout / ".git").exists():
        return None
    git = ("git", "-C", str(checkout))
    revision = _output_of(*git, "rev-parse", "HEAD")
    changes = _output_of(*git, "status", "--porcelain", "--untracked-files=no")
    return revision + "+changes" * bool(changes) if revision else None


def _output_of(*command: str) -> str:
    """Return what a command prints, empty if the command is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _occupied_error(path: Path, name: str | None = None) -> ConfigError:
    """Return the error for a folder with a run. name: that of `run.name`, if it is the folder's."""
    if (path / PLAN).is_file():
        return ConfigError(
            f"run.dir={path}: already holds a measurement. Choose another run.name or run.dir."
        )
    key, holds = f"run.dir={path}", "already holds a run"
    if name is not None:
        key, holds = f"run.name={name}", f"{path} {holds}"
    return ConfigError(
        f"{key}: {holds}. Resume it with --resume {shlex.quote(str(path))}, "
        f"or choose another {key.partition('=')[0]}."
    )


def _make_folder(wanted: Path, must_be_new: bool) -> tuple[Path, bool]:
    """Make a folder; ``wanted-2`` and so on if it must be new. Return it, and whether it is new."""
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
    for file in (run.overrides, run.environment, run.metrics, run.log, run.state, run.restarts):
        if file.is_dir():
            raise ConfigError(f"--resume {path}: {file.name} is a folder. Move it away.")
    for folder in (run.logs, run.checkpoints):
        if folder.is_file():
            raise ConfigError(f"--resume {path}: {folder.name} is a file. Move it away.")
    with _as_config_error(path):
        lock = RunLock(path)
        run.forget_requests()
    return RunDir(path, lock)


def _whole_lines(file: Path) -> list[bytes]:
    """Return the complete lines of a file. After a crash, the last line may be incomplete."""
    try:
        return file.read_bytes().split(b"\n")[:-1]
    except OSError:
        return []


def _restore_file(file: Path, content: bytes | None) -> None:
    """Restore a file, or remove it. Ignore errors, so that the user sees the original mistake."""
    with contextlib.suppress(OSError):
        if content is None:
            file.unlink(missing_ok=True)
        elif file.read_bytes() != content:
            with replacing(file) as draft:
                draft.write_bytes(content)


def _latest_target(runs: Path) -> str | None:
    """Return the target of the link ``latest`` in ``runs``, None without such a link."""
    link = runs / "latest"
    return os.readlink(link) if link.is_symlink() else None


def _point_latest(runs: Path, target: str) -> None:
    # If a folder is called ``latest``, or the file system has no links, the run has no link.
    with contextlib.suppress(OSError), replacing(runs / "latest") as draft:
        draft.symlink_to(target)


def _restore_latest(run: Path, before: str | None) -> None:
    """Point ``latest`` to ``before`` again, if it still points to ``run``."""
    if _latest_target(run.parent) != run.name:
        return
    if before is not None and (run.parent / before).exists():
        _point_latest(run.parent, before)
    else:
        (run.parent / "latest").unlink(missing_ok=True)


@contextlib.contextmanager
def _as_config_error(path: Path) -> Iterator[None]:
    """Raise a ConfigError with one line in place of an OSError about the run's folder."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        advice = "Choose a folder on a writable disk with free space."
        raise ConfigError(f"run.dir={path}: cannot write there ({reason}). {advice}") from error
