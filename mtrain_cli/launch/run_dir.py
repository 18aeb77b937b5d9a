"""The folder of a run: create, lock and reopen it, and undo both after a user's mistake."""

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
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import mtrain_cli
from mtrain_cli.config import documents, plugins, resolved_file
from mtrain_cli.config.documents import replacing
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.config.sizes import format_size
from mtrain_cli.launch.failures import RunError
from mtrain_cli.launch.job import current_job, decide_on_rank_zero
from mtrain_cli.launch.manifest import committed_steps, manifest_file
from mtrain_cli.launch.stop_request import remember
from mtrain_cli.printable import one_line

RUNS = Path("runs")
PLAN = "plan.json"  # a folder with this file has a measurement, and no run
LOCK = ".lock"
# The file of a learning study. The runs of a study are ``NAME/seed-N/run``. `COMMAND` is the key
# with the words of the command that started the study.
STUDY, RUN, COMMAND = "study.json", "run", "command"


class RunLock:
    """An exclusive lock on the folder of a run or of a part of a study, until the process ends."""

    def __init__(self, folder: Path, name: str = "", advice: str = "") -> None:
        """Take the lock of ``folder``. Raise ConfigError if another process holds it.

        name, advice: what the folder is and what the user can do, for the error; "" for a run.
        """
        path = folder / LOCK
        self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        for _ in range(4):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)  # `run_status.check_liveness` may hold the lock for a moment
            except OSError:  # some network file systems have no locks
                self.release()
                return
        else:
            holder = path.read_text(errors="replace").strip() or "another process"
            self.release()
            advice = advice or "Wait for that run, stop it, or choose another run.dir."
            raise ConfigError(f"{name or f'run.dir={folder}'}: in use by {holder}. {advice}")
        with contextlib.suppress(OSError):  # if the disk is full, the lock holds without this text
            os.truncate(self._file, 0)
            os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def beat(self) -> None:
        """Set the time stamp of the lock file to the current time of the disk."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.utime(self._file)

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class _Inside:
    """A property: the path of a file or folder in the run's folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDir, owner: type[RunDir] | None = None) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDir:
    """A run's folder and the paths of its files.

    The objects that `create` and `open` return hold the folder's lock; those of workers do not.
    """

    path: Path
    _lock: RunLock | None = field(default=None, repr=False, compare=False)
    _undo: Callable[[], bool] | None = field(default=None, repr=False, compare=False)

    resolved = _Inside("resolved.yaml")  # the configuration; a folder with this file is a run
    overrides = _Inside("overrides.txt")  # of the command line, one per line
    environment = _Inside("environment.json")  # command, machine, versions, revision at the start
    metrics = _Inside("metrics.jsonl")  # a JSON object for each step
    log = _Inside("log.txt")  # what the run printed to the terminal
    logs = _Inside("logs")  # output of the workers, ``rank-N.log``
    checkpoints = _Inside("checkpoints")  # folders ``step-N``
    definition = _Inside("transformers")  # config.json of a model of transformers
    stop_request = _Inside("stop_request")  # if it exists, save and stop after the current step
    save_requests = _Inside("save_requests")  # save and go on for each byte that this file grows
    state = _Inside("state.json")  # see `run_status`
    restarts = _Inside("restarts.jsonl")  # see `restart`
    rollbacks = _Inside("rollbacks.jsonl")  # see `rollbacks`
    stragglers = _Inside("stragglers.jsonl")  # see `mtrain_extras.watch.stragglers`

    @property
    def resume_command(self) -> str:
        """The command that resumes this run, or the study that trains it."""
        return study_command(self.path) or f"mtrain train --resume {shlex.quote(str(self.path))}"

    def last_step(self) -> int | None:
        """Return the step of the newest checkpoint, None without one. Does not check its files."""
        return next(iter(committed_steps(self.checkpoints)), None)

    def has_checkpoint(self) -> bool:
        """Return whether rank 0 sees a checkpoint. All ranks of a job call this."""
        return decide_on_rank_zero(lambda: str(self.last_step() is not None)) == str(True)

    def last_commit(self) -> int:
        """Return when the newest checkpoint was completed, in ns of the disk's clock, or 0."""
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
        """Renew the time stamp of the lock, if this object holds it. Other machines read it."""
        if self._lock is not None:
            self._lock.beat()

    def require_steps_left(self, steps: int) -> None:
        """Raise ConfigError and release the lock if the newest checkpoint is beyond ``steps``."""

        def check() -> str:
            if (done := self.last_step() or 0) <= steps:
                return ""
            self.release()
            problem = f"the run is already at step {done}. Give more than {done}."
            raise ConfigError(f"train.steps={steps}: {problem}")

        decide_on_rank_zero(check)

    def rewrite(self, config: Config, overrides: Sequence[str]) -> RunDir:
        """Replace another configuration of an opened run, and append to its overrides.

        `discard` of the result restores the files. Raises ConfigError if they cannot be written.
        """
        return _share_run(lambda: self._rewrite_here(config, overrides))

    def _rewrite_here(self, config: Config, overrides: Sequence[str]) -> RunDir:
        if config == resolved_file.load(self.resolved):  # not on other ranks, which may see the new
            return self
        changed = self.resolved, self.overrides
        with _as_config_error(self.path):
            files = [(f, f.read_bytes() if f.exists() else None) for f in changed]
            lines, commit = set(_whole_lines(self.metrics)), self.last_commit()

            def undo() -> bool:
                # A run that resumes cuts the lines of metrics.jsonl after its checkpoint, so their
                # number tells nothing. But a new last line shows that a step has run.
                if {*_whole_lines(self.metrics)[-1:]} <= lines and self.last_commit() <= commit:
                    for file, content in files:
                        # Ignore errors, so that the user sees the original mistake.
                        with contextlib.suppress(OSError):
                            if content is None:
                                file.unlink(missing_ok=True)
                            else:
                                with replacing(file) as draft:
                                    draft.write_bytes(content)
                return False

            try:
                resolved_file.save(config, self.resolved)
                with self.overrides.open("a") as file:
                    file.writelines(f"{line}\n" for line in overrides)
            except OSError:
                undo()
                raise
        return dataclasses.replace(self, _undo=undo)

    def discard(self) -> bool:
        """Undo `create` or `rewrite`, unless a step has run. Return whether the run is removed."""
        return self._undo is not None and self._undo()

    def release(self) -> None:
        """Release the lock, if this object has it. The end of the process also releases it."""
        if self._lock is not None:
            self._lock.release()


def study_command(run: Path) -> str:
    """Return the command of the study to which a run belongs; "" for other runs.

    A sentence replaces words in the study's file that are no printable command of a study.
    """
    folder = next(iter(run.absolute().parents[2:3]), None)
    if folder is None or run.name != RUN:
        return ""
    try:
        words = documents.read_json(folder / STUDY)[COMMAND]
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return ""
    if words[:3] == ["mtrain", "study", "learning"] and all(map(str.isprintable, words)):
        return shlex.join(words)
    return "mtrain study learning, with the options it was started with"


def create(config: Config, overrides: Sequence[str]) -> RunDir:
    """Create and lock the folder of a new run, in a torchrun or srun job on rank 0 only.

    Raises ConfigError if the folder is not empty, is in use, or cannot be written.
    """
    return _share_run(lambda: create_here(config, overrides))


def open(path: str | os.PathLike[str]) -> RunDir:
    """Open and lock the folder of an earlier run; in a torchrun or srun job on rank 0 only.

    Raises ConfigError if the run is in use, or its configuration cannot be read.
    """
    return _share_run(lambda: _open_here(Path(path).expanduser()))


def _share_run(action: Callable[[], RunDir]) -> RunDir:
    """Call ``action`` on rank 0 and return its run. On other ranks the run has no lock."""
    runs: list[RunDir] = []

    def act() -> str:
        if current_job() is not None:  # else SIGTERM would leave a run that has not begun
            remember(signal.SIGTERM)  # `worker.run_in_job` answers it
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

    That is the run of the folder or name in ``config``, or else the latest of this job.
    this_job: whether to ignore a run that another job created.
    """

    def find() -> str:
        job, folder = current_job(), _given_folder(config)
        runs = list_runs() if folder is RUNS else [RunDir(folder.absolute())]
        runs = [run for run in runs if run.resolved.is_file()]
        if runs and folder is not RUNS and not this_job:
            return str(runs[0].path)
        if job is None or not job.name:
            return ""
        return next((str(r.path.resolve()) for r in runs if _recorded_job(r) == job.name), "")

    path = decide_on_rank_zero(find)
    return RunDir(Path(path)) if path else None


def _recorded_job(run: RunDir) -> str | None:
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        return documents.read_json(run.environment)["job"]
    return None


def _given_folder(config: Config) -> Path:
    """Return the folder that the settings name; ``runs/`` if they name none."""
    if config.run.dir != "auto":
        return Path(config.run.dir).expanduser()
    return RUNS if config.run.name == "auto" else RUNS / config.run.name


def create_here(config: Config, overrides: Sequence[str]) -> RunDir:
    """Create and lock the folder of a new run for this process alone, in a job or not."""
    folder, name = _given_folder(config), config.run.name
    if name == "auto":
        # A model that was loaded from a folder has the folder's name, with any characters.
        model = re.sub(r"[^\w.+=-]+", "-", config.model.name)
        name = f"{model}-{format_size(config.seq)}-{time.strftime('%Y%m%d-%H%M%S')}"
    wanted = folder / name if folder is RUNS else folder
    with _as_config_error(wanted):
        parents = tuple(parent for parent in wanted.absolute().parents if not parent.exists())
        path, is_new = _make_folder(wanted, folder is RUNS)
        run = RunDir(path.absolute())
        # A run that was discarded may have left its lock file.
        entries = sorted(entry.name for entry in path.iterdir() if entry.name != LOCK)
        if entries and not run.resolved.exists():
            shown = ", ".join(entries[:3]) + (" and more" if len(entries) > 3 else "")
            problem = f"is not empty and holds no run ({shown})"
            raise ConfigError(f"run.dir={path}: {problem}. Choose a new or an empty folder.")
        occupied = run.resolved.exists()

        def undo() -> bool:
            return _undo_create(run, is_new, parents, config)

        try:
            run = dataclasses.replace(run, _lock=RunLock(path), _undo=undo)
            if occupied := run.resolved.exists():  # another process may have held the lock
                run.release()
                raise _occupied_error(path, None if config.run.dir != "auto" else name)
            run.overrides.write_text("".join(f"{line}\n" for line in overrides))
            job = current_job()
            facts = environment_facts() | {"job": job.name if job else None}
            run.environment.write_text(json.dumps(facts, indent=2) + "\n")
            if config.model.is_foreign:  # to resume and export without the folder of the weights
                run.definition.mkdir()
                shutil.copy(Path(config.train.init_from or "", "config.json"), run.definition)
            # This is the last file, because a folder with this file is a run.
            name = path.name if config.run.dir == "auto" else name
            config = config.changed(run={"name": name, "dir": str(run.path)})
            resolved_file.save(config, run.resolved)
        except OSError:
            if not occupied:
                undo()
            run.release()
            raise
    if run.path.parent == RUNS.absolute():
        _point_latest(run.path.parent, run.path.name)
    return run


def _undo_create(
    run: RunDir, is_new_folder: bool, new_parents: Sequence[Path], config: Config
) -> bool:
    """Remove a run that `create` made, and return True, unless a step has run."""
    if any(run.checkpoints.glob("step-*")) or (run.metrics.exists() and run.metrics.stat().st_size):
        return False
    for places in plugins.places() if config.run.remote else ():
        places.unclaim(config, run.path)
    link, name = RUNS.absolute() / "latest", run.path.name
    with contextlib.suppress(OSError):  # the link is gone, or a run that ends just now
        if run.path.parent == link.parent and os.readlink(link) == name:
            others = [other.path.name for other in list_runs() if other.path.name != name]
            if others:
                _point_latest(link.parent, others[0])
            else:
                link.unlink()
    if is_new_folder:
        for _ in range(3):  # another thread may still write to the folder
            shutil.rmtree(run.path, ignore_errors=True)
        with contextlib.suppress(OSError):  # another run may use the parent by now
            for parent in new_parents:
                parent.rmdir()
        return True
    # The folder was empty before, or had only the lock file, for which another process may wait.
    for entry in run.path.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.name != LOCK:
            entry.unlink(missing_ok=True)
    return True


def environment_facts() -> dict[str, object]:
    """Return the facts that somebody needs to repeat the run, by name."""
    versions = {"python": platform.python_version(), **package_versions()}
    checkout, revision = Path(mtrain_cli.__file__).resolve().parent.parent, ""
    if (checkout / ".git").exists():
        describe = ("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes")
        revision = _output_of("git", "-C", str(checkout), *describe)
    return {
        "command": ["mtrain", *sys.argv[1:]],
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu_cores": os.cpu_count(),
        "gpus": _output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines(),
        "versions": versions,
        "git_revision": revision or None,
    }


def package_versions() -> dict[str, str]:
    """Return the versions of mtrain and of the packages that results depend on, by name."""
    versions = {"mtrain": mtrain_cli.__version__}
    for package in ("torch", "numpy", "flash-attn-4"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def _output_of(*command: str) -> str:
    """Return what a command prints, empty if the command is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _occupied_error(path: Path, name: str | None) -> ConfigError:
    """Return the error for a folder with a run. name: `run.name`, if it chose the folder."""
    if (path / PLAN).is_file():
        return ConfigError(
            f"run.dir={path}: already holds a measurement. Choose another run.name or run.dir."
        )
    key, where = ("run.dir", f"{path}:") if name is None else ("run.name", f"{name}: {path}")
    how = f"Resume it with --resume {shlex.quote(str(path))}"
    if not committed_steps(path / "checkpoints"):
        how = "It has no checkpoint. Begin it again with --resume auto"
    return ConfigError(f"{key}={where} already holds a run. {how}, or choose another {key}.")


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
    path = path.resolve()
    run = RunDir(path)
    resolved_file.load(run.resolved)
    folders = run.logs, run.checkpoints
    files = run.overrides, run.environment, run.metrics, run.log, run.state, run.restarts
    for place in (*files, run.rollbacks, *folders):
        if place.exists() and place.is_dir() != (place in folders):
            kind = "file" if place in folders else "folder"
            raise ConfigError(f"--resume {path}: {place.name} is a {kind}. Move it away.")
    with _as_config_error(path):
        lock = RunLock(path)
        run.forget_requests()
    return RunDir(path, lock)


def _whole_lines(file: Path) -> list[bytes]:
    """Return the complete lines of a file. After a crash, the last line may be incomplete."""
    with contextlib.suppress(OSError):
        return file.read_bytes().split(b"\n")[:-1]
    return []


def _point_latest(runs: Path, target: str) -> None:
    # If a folder is called ``latest``, or the file system has no links, the run has no link.
    with contextlib.suppress(OSError), replacing(runs / "latest") as draft:
        draft.symlink_to(target)


@contextlib.contextmanager
def _as_config_error(path: Path) -> Iterator[None]:
    """Raise a ConfigError with one line in place of an OSError about the run's folder."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        advice = "Choose a folder on a writable disk with free space."
        raise ConfigError(f"run.dir={path}: cannot write there ({reason}). {advice}") from error


RESOLVED = "resolved.yaml"


class CheckpointError(RunError):
    """A checkpoint could not be saved or loaded. Training may continue after a failed save."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(map(one_line, problems)))


class NoCheckpointError(ConfigError, CheckpointError):
    """There is no intact checkpoint. The message has one line per damaged checkpoint."""


class NotARunError(ConfigError):
    """A path names neither a run nor a checkpoint of a run."""


def checkpoints_of(path: str | os.PathLike[str]) -> list[Path]:
    """Return the checkpoints of a run or of a checkpoints folder, newest first; else the folder.

    Raises NoCheckpointError if the run or checkpoints folder holds none.
    """
    folder = Path(path)
    if (folder / "checkpoints").is_dir():
        folder = folder / "checkpoints"
    checkpoints = [folder / f"step-{step}" for step in committed_steps(folder)]
    if not checkpoints and (folder.name == "checkpoints" or (folder / RESOLVED).is_file()):
        raise NoCheckpointError(f"{folder}: holds no checkpoint")
    return checkpoints or [folder]


def find_source(source: Path) -> Path:
    """Return the folder that `source` of `export_checkpoint` names, without verifying checkpoints.

    Raises NotARunError without such a run, and NoCheckpointError without such a checkpoint.
    """
    if not source.exists() and (RUNS / source).is_dir():
        source = RUNS / source
    run = run_of(source)
    in_run = source.resolve() in (run, run / "checkpoints")
    if not source.exists() or not (in_run or source.resolve().name.startswith("step-")):
        names = [f"step-{step}" for step in reversed(committed_steps(run / "checkpoints"))]
        held = f"the run has {', '.join(names) or 'none'}"
        raise NoCheckpointError(f"{source}: no such checkpoint; {held}")
    checkpoints_of(source)
    return source


def run_of(source: Path) -> Path:
    """Return the run of a run's folder, checkpoints folder or checkpoint, or raise NotARunError."""
    resolved = source.resolve()
    for folder in (resolved, resolved.parent, resolved.parent.parent):
        if (folder / RESOLVED).is_file():
            return folder
    raise NotARunError(
        f"{source}: not a run or a run's checkpoint (no {RESOLVED} in this folder or above it). "
        "Give a run, such as runs/latest."
    )
