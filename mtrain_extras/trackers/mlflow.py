"""Log a run to MLflow, as a run of the experiment `run.project`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from mtrain_cli.config.schema import ConfigError
from mtrain_extras.trackers.follower import TrackedRun, follower


class Mlflow:
    def __init__(self, run: TrackedRun) -> None:
        project = run.config.run.project
        try:
            self._client = MlflowClient()
            known = self._client.get_experiment_by_name(project)
        except MlflowException as error:
            remedy = "set MLFLOW_TRACKING_URI to a server, or pip install mlflow for a local store"
            raise ConfigError(f"{remedy}: {str(error)[:100]}") from error
        experiment = known.experiment_id if known else self._client.create_experiment(project)

        def make() -> str:
            made = self._client.create_run(experiment, run_name=run.folder.name)
            return str(made.info.run_id)

        self._id, is_new = run.id_of("mlflow", make)
        self._client.update_run(self._id, status="RUNNING")
        about = self._client.get_run(self._id).data
        settings = {name: str(value) for name, value in run.settings.items()}
        # MLflow's parameters cannot change. Tags tell what a resumed run changed, and when.
        for name, value in settings.items():
            if not is_new and about.tags.get(name, about.params.get(name)) != value:
                self._client.set_tag(self._id, name, value)
                self._client.set_tag(self._id, f"{name} from step {run.start_step}", value)
        params = [Param(name, value) for name, value in settings.items() if is_new]
        for begin in range(0, len(params), 100):  # MLflow's most in one call
            self._client.log_batch(self._id, params=params[begin : begin + 100])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        rows = [Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=rows)

    def keep(self, page: Path) -> None:
        self._client.log_artifact(self._id, str(page))

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


follow = follower("mlflow", Mlflow)
