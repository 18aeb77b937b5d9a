"""Log a run to trackio."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

import trackio

from mtrain_extras.trackers.follower import TrackedRun, follower


class Trackio:
    def __init__(self, run: TrackedRun) -> None:
        own, _ = run.id_of("trackio", lambda: f"{run.folder.name}-{secrets.token_hex(4)}")
        self._run = trackio.init(
            run.config.run.project, own, config=run.settings, resume="allow", embed=False,
            auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def keep(self, page: Path) -> None:
        self._run.log_artifact(page, name="report", type="report", overwrite=True)

    def close(self, _: bool) -> None:
        self._run.finish()


follow = follower("trackio", Trackio)
