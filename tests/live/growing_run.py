"""A run whose files grow as those of a real run do, without training."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from reporting.training_runs import evaluation, step

from mtrain_cli.composition.compose import compose
from mtrain_cli.launch import run_dir
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.launch.run_status import StateReporter
from mtrain_cli.training.evaluation import EVALUATIONS_FILE

STEPS = 40


class GrowingRun:
    """This process holds the run's lock until `end`, so the run is alive."""

    def __init__(self, folder: Path, name: str = "grows") -> None:
        words = [f"run.dir={folder / name}", "topology.device=cpu", f"train.steps={STEPS}"]
        self.run: RunDir = run_dir.create(compose(words), words)
        self._reporter: StateReporter | None = None
        self._done = 0

    def train(self, steps: int = 1, seconds: float = 1.0, held_out: bool = False) -> None:
        """Write the files of some steps.

        held_out: also write a held-out loss after them.
        """
        if self._reporter is None:
            self._reporter = StateReporter(
                self.run, launcher="mtrain", steps=STEPS, step=0, workers=("node7, CPU",)
            )
        for _ in range(steps):
            self._done += 1
            row = step(
                self._done,
                loss=5 - self._done / 20,
                tokens=512 * self._done,
                tokens_per_second_per_gpu=512 / seconds,
                seconds=seconds,
            )
            with self.run.metrics.open("a") as file:
                file.write(row.to_json() + "\n")
            self.log(f"step {self._done}/{STEPS}  loss {row.loss:.4f}")
            self._reporter.step(last=True, step=self._done, loss=row.loss, seconds=seconds)
        if held_out:
            with (self.run.path / EVALUATIONS_FILE).open("a") as file:
                measured = evaluation(self._done, 4 - self._done / 40)
                file.write(json.dumps(dataclasses.asdict(measured)) + "\n")

    def log(self, line: str) -> None:
        with self.run.log.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def end(self, phase: str = "finished") -> None:
        if self._reporter is not None:
            self._reporter.end(phase)
        self.run.release()
