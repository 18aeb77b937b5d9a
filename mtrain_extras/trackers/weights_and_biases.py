"""Log a run to Weights & Biases."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

import wandb

from mtrain_extras.trackers.follower import TrackedRun, follower


class Wandb:
    def __init__(self, run: TrackedRun) -> None:
        own, _ = run.id_of("wandb", lambda: secrets.token_hex(8))
        self._run = wandb.init(
            project=run.config.run.project, name=run.folder.name, id=own, resume="allow",
            config=run.settings, dir=str(run.folder),
            settings=wandb.Settings(console="off", quiet=True, login_timeout=5),
        )  # fmt: skip
        self._run.config.update(run.settings, allow_val_change=True)  # of a resumed run
        # Steps that are trained again after a crash would go back in wandb's own step.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def keep(self, page: Path) -> None:
        report = wandb.Artifact(f"report-{self._run.id}", type="report")
        report.add_file(str(page))
        self._run.log_artifact(report)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


follow = follower("wandb", Wandb)
