"""Profiles of a training that goes on: every N-th step is recorded as it is."""

from __future__ import annotations

import statistics
from datetime import timedelta

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.parallel.context_attention import ContextAttention
from mtrain_cli.profiling.leave import Leaving
from mtrain_cli.profiling.measure import TRAINING, Bench, Case, Plan
from mtrain_cli.training.batch import Batch
from mtrain_cli.training.trainer import Trainer

FOLDER = "profile"


class TrainingProfile:
    """Called alike by all workers, around every step. Files lie in ``profile/`` of the run, and go on with what an earlier attempt left."""

    def __init__(self, trainer: Trainer, run_dir: RunDir) -> None:
        config = trainer.config
        self._trainer = trainer
        self._bench = Bench(trainer.environment, timedelta(seconds=config.topology.timeout_s))
        label = f"{config.sparsity.pattern} {config.topology.layout} {trainer.choices.exchange.label}"
        self._case = Case(0, label, config, trainer.choices, trainer.exchange)
        plan = Plan(TRAINING, [(self._case.label, config)], (config.train.steps - trainer.step) // config.profile.every)
        self._leaving = Leaving(run_dir, plan, self._bench, [self._case], run_dir.path / FOLDER)
        self._seen: list[tuple[list[SequenceMask], ContextAttention]] = []
        self._plain: list[float] = []
        self._recorded: list[float] = []

    @property
    def due(self) -> bool:
        """Whether the step to come is recorded."""
        return (self._trainer.step + 1) % self._trainer.config.profile.every == 0

    def before_step(self) -> None:
        if self.due:
            self._seen.clear()
            self._trainer.observe = self._keep
            self._trainer.record(self._bench.collector.recorder)
            self._bench.collector.start()

    def _keep(self, batch: Batch) -> ContextAttention:
        kept = batch.attend.keeping()
        self._seen.append((batch.masks, kept))
        return kept

    def after_step(self, seconds: float) -> None:
        """seconds: of the whole step."""
        if self._trainer.recorder is None:
            self._plain.append(seconds)
            return
        self._trainer.observe = None
        self._trainer.record(None)
        estimated = [(masks, attend.index.estimated if attend.index is not None else None) for masks, attend in self._seen]
        self._seen.clear()
        self._leaving.recorded(self._case, self._trainer.step, estimated)
        self._leaving.sampled()
        self._recorded.append(seconds)

    def finish(self) -> str:
        """-> what was recorded, in words; nothing where nothing was."""
        steady = self._plain[1:]  # the first step compiles and connects
        if self._recorded and steady:
            # The first worker's: the others wait in a later step for what it writes.
            self._leaving.timed(self._case, *self._bench.everyone((statistics.median(steady), statistics.median(self._recorded)))[0])
        self._leaving.finish()
        if not self._recorded:
            return ""
        count = f"recorded {len(self._recorded)} step{'s' * (len(self._recorded) > 1)} in {self._leaving.folder}"
        if not steady:
            return count
        return f"{count}; they took {statistics.median(self._recorded) / statistics.median(steady) - 1:+.1%} against the others"
