"""Give the rows of a run to trackers of experiments, which are entry points of packages.

A thread of the first worker for each tracker reads the files of the run as they grow. So a tracker
that is slow, hangs or fails neither stops nor slows training, and is left with a warning.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain_cli.config import documents, keys
from mtrain_cli.config.schema import Config
from mtrain_cli.records.metrics import METRICS_FILE
from mtrain_cli.training.callback import Callback, FinishedStep
from mtrain_cli.training.evaluation import EVALUATIONS_FILE

if TYPE_CHECKING:
    from mtrain_cli.launch.run_dir import RunDir
    from mtrain_cli.training.trainer import Trainer

_FILES = {METRICS_FILE: "train", EVALUATIONS_FILE: "held_out"}
_POLL = 1.0  # seconds between two readings
_PATIENCE = 30.0  # seconds to wait for a tracker when training ends


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers see it. start_step: the step from which it resumes, or 0."""

    config: Config
    folder: Path
    start_step: int

    @property
    def settings(self) -> dict[str, Any]:
        return keys.values(self.config)

    def id_of(self, tracker: str, make: Callable[[], str]) -> tuple[str, bool]:
        """Return the id by which a tracker knows the run, and whether it is new."""
        path = self.folder / f"{tracker}.id"
        if is_new := not path.is_file():
            documents.replace_text(path, f"{make()}\n")
        return path.read_text(encoding="utf-8").strip(), is_new


OpenTracker = Callable[[TrackedRun], Any]
"""Makes an object with ``log(step, {name: number})`` and ``close()``."""


@dataclass(eq=False)
class _Follower(threading.Thread):
    """Gives a tracker the rows of a run's files. problem: why it was left; "" while it is not."""

    tracker: str
    open: OpenTracker
    run_: TrackedRun
    problem: str = ""
    _ended: threading.Event = field(default_factory=threading.Event)
    _offsets: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(name=self.tracker, daemon=True)
        self.start()

    def run(self) -> None:
        try:
            tracker = self.open(self.run_)
            ended = False
            while not ended:
                ended = self._ended.wait(_POLL)
                for step, values in self._rows():
                    tracker.log(step, values)
            tracker.close()
        except BaseException as error:  # a tracker must never end a training
            self.problem = f"{type(error).__name__}: {error}"

    def end(self) -> None:
        """Log what is left, and close the tracker."""
        self._ended.set()
        self.join(_PATIENCE)
        if self.is_alive():
            self.problem = f"did not answer for {_PATIENCE:g} seconds"

    def _rows(self) -> Iterator[tuple[int, dict[str, float]]]:
        for name, prefix in _FILES.items():
            path = self.run_.folder / name
            if not path.is_file():
                continue
            with path.open("rb") as file:
                file.seek(self._offsets.get(name, 0))
                *lines, rest = file.read().split(b"\n")
                self._offsets[name] = file.tell() - len(rest)
            for row in map(json.loads, lines):
                step = row.pop("step")
                numbers = {f"{prefix}/{k}": v for k, v in row.items() if documents.is_number(v)}
                if step > self.run_.start_step or (step == 0 == self.run_.start_step):
                    yield step, numbers


class Trackers(Callback):
    """Follows the run with trackers by name, on the first worker."""

    def __init__(
        self,
        trackers: Mapping[str, OpenTracker],
        trainer: Trainer,
        run_dir: RunDir,
        message: Callable[..., None],
    ) -> None:
        self._trackers = trackers if trainer.environment.rank == 0 else {}
        self._run = TrackedRun(trainer.config, run_dir.path, trainer.step)
        self._message, self._told = message, set[str]()
        self._followers: list[_Follower] = []

    def before_training(self) -> None:
        # By now, the files of the run have no rows of later steps any more.
        self._followers = [_Follower(*item, self._run) for item in self._trackers.items()]

    def after_step(self, step: FinishedStep | None = None) -> None:  # noqa: ARG002 - a hook
        for follower in self._followers:
            if follower.problem and follower.tracker not in self._told:
                self._told.add(follower.tracker)
                name, why = follower.tracker, follower.problem
                line = f"run.loggers: {name} is left ({why}); training goes on, and {METRICS_FILE} "
                self._message(f"{line}has all steps", warning=True)

    def on_error(self, error: Exception) -> None:  # noqa: ARG002 - a hook
        self.close()

    def close(self) -> None:
        for follower in self._followers:
            follower.end()
        self.after_step()
