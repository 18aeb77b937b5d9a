"""Trackers of experiments (TensorBoard, Weights & Biases, MLflow, trackio).

A thread of the first worker for each tracker reads the files of the run as they grow. So a tracker
that is slow, hangs or fails neither stops nor slows training, and is left with a warning.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mtrain_cli.config import documents, keys
from mtrain_cli.config.schema import Config
from mtrain_cli.records.metrics import METRICS_FILE
from mtrain_cli.training.callback import Callback, FinishedStep
from mtrain_cli.training.evaluation import EVALUATIONS_FILE

IDS = "trackers.json"  # of a run's folder: the ids by which trackers go on with it
_FILES = {METRICS_FILE: "train", EVALUATIONS_FILE: "held_out"}
_POLL = 1.0  # seconds between two readings
_PATIENCE = 30.0  # seconds to wait for a tracker when training ends


class Tracker(Protocol):
    """What a thread needs of a tracker."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


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
        path = self.folder / IDS
        known = documents.read_json(path) if path.is_file() else {}
        if is_new := not (isinstance(known, dict) and isinstance(known.get(tracker), str)):
            known = {**(known if isinstance(known, dict) else {}), tracker: make()}
            documents.replace_text(path, json.dumps(known) + "\n")
        return known[tracker], is_new


class _TensorBoard:
    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # It hides later steps of an earlier attempt.
        folder, hidden = str(run.folder / "tensorboard"), run.start_step + 1
        self._events = SummaryWriter(log_dir=folder, purge_step=hidden)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()

    def close(self) -> None:
        self._events.close()


class _Wandb:
    def __init__(self, run: TrackedRun) -> None:
        import wandb

        own, _ = run.id_of("wandb", lambda: secrets.token_hex(8))
        self._run = wandb.init(
            project=run.config.run.project, name=run.folder.name, id=own, resume="allow",
            config=run.settings, dir=str(run.folder), settings=wandb.Settings(console="off"),
        )  # fmt: skip
        # Steps that are trained again after a crash would go back in wandb's own step.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client, project = MlflowClient(), run.config.run.project
        known = self._client.get_experiment_by_name(project)
        experiment = known.experiment_id if known else self._client.create_experiment(project)

        def make() -> str:
            made = self._client.create_run(experiment, run_name=run.folder.name)
            return str(made.info.run_id)

        self._id, is_new = run.id_of("mlflow", make)
        params = [Param(name, str(value)) for name, value in run.settings.items() if is_new]
        for begin in range(0, len(params), 100):  # MLflow's most in one call
            self._client.log_batch(self._id, params=params[begin : begin + 100])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        rows = [Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=rows)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class _Trackio:
    def __init__(self, run: TrackedRun) -> None:
        import trackio

        own, _ = run.id_of("trackio", lambda: f"{run.folder.name}-{secrets.token_hex(4)}")
        self._run = trackio.init(
            run.config.run.project, own, config=run.settings, resume="allow", embed=False,
            auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


_TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": _TensorBoard, "wandb": _Wandb, "mlflow": _Mlflow, "trackio": _Trackio,
}  # fmt: skip


@dataclass(eq=False)
class _Follower(threading.Thread):
    """Gives a tracker the rows of a run's files. problem: why it was left; "" while it is not."""

    tracker: str
    run_: TrackedRun
    problem: str = ""
    _ended: threading.Event = field(default_factory=threading.Event)
    _offsets: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(name=self.tracker, daemon=True)
        self.start()

    def run(self) -> None:
        try:
            tracker = _TRACKERS[self.tracker](self.run_)
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
    """Follows the run with the trackers of ``run.loggers``, on the first worker."""

    def __init__(self, run: TrackedRun, warn: Callable[[str], None]) -> None:
        self._warn, self._told = warn, set[str]()
        self._followers = [_Follower(name, run) for name in run.config.run.loggers]

    def after_step(self, step: FinishedStep) -> None:  # noqa: ARG002 - a hook
        self._tell()

    def release(self) -> None:
        """Log the last rows, however training ended."""
        for follower in self._followers:
            follower.end()
        self._tell()

    def _tell(self) -> None:
        for follower in self._followers:
            if follower.problem and follower.tracker not in self._told:
                self._told.add(follower.tracker)
                self._warn(
                    f"run.loggers: {follower.tracker} is left ({follower.problem}); training goes "
                    f"on, and {METRICS_FILE} has all steps"
                )
