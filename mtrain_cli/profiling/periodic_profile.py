"""Profiles of a training that goes on: every N-th step is recorded as it is."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.parallel.context_attention import ContextAttention
from mtrain_cli.profiling import records
from mtrain_cli.profiling.measurement import TRAINING, Bench, MeasurementCase, MeasurementPlan
from mtrain_cli.profiling.profile_writer import ProfileWriter
from mtrain_cli.training.batch import Batch
from mtrain_cli.training.trainer import Trainer

FOLDER = "profile"
# What makes rows of an earlier attempt rows of the same case.
_SAME = (
    "layout",
    "exchange",
    "pattern",
    "kernel",
    "model",
    "seq",
    "micro_batch",
    "workers",
    "cp",
    "per_node",
    "heads",
    "steps",
)


class TrainingProfile:
    """Called alike by all workers, around every step. Files lie in ``profile/`` of the run, a part for each recorded step, and go on with
    what an earlier attempt left. Dense first steps of a sparse run are a case of their own, and so is an attempt that is spread otherwise.

    What cannot be written costs the profile, not the training: ``problem`` says so once.
    """

    def __init__(self, trainer: Trainer, run_dir: RunDir) -> None:
        config, e = trainer.config, trainer.environment
        self._trainer = trainer
        self._bench = Bench(e, timedelta(seconds=config.topology.timeout_s))
        self._folder = run_dir.path / FOLDER
        self.problem: str | None = None
        cases = self._cases()
        earlier, samples = self._bench.everyone(self._left_behind() if e.rank == 0 else None)[0]
        kept, self._by_kind = _numbered(earlier, cases, trainer)
        self._samples = samples
        plan = MeasurementPlan(
            TRAINING,
            [(case.label, case.config) for case in cases],
            config.train.steps // config.profile.every,
        )
        self._seen: list[tuple[list[SequenceMask], ContextAttention]] = []
        self._plain: list[float] = []
        self._recorded: list[float] = []
        self._after: list[float] = []
        self._leaving: ProfileWriter | None = None
        try:
            self._leaving = ProfileWriter(
                run_dir, plan, self._bench, list(self._by_kind.values()), self._folder, kept
            )
        except OSError as error:
            self.problem = f"{self._folder}: cannot be written ({error.strerror or error}); steps are not recorded"
        # All or none: to collect is a matter of all workers.
        if not all(self._bench.everyone(self._leaving is not None)):
            self._leaving = None

    def _cases(self) -> list[MeasurementCase]:
        """The steps of this attempt, dense first ones apart."""
        trainer = self._trainer
        config, choices = trainer.config, trainer.choices

        def label(pattern: str) -> str:
            return f"{pattern} {config.layout} {choices.exchange.label}"

        cases = [
            MeasurementCase(0, label(config.sparsity.pattern), config, choices, trainer.exchange)
        ]
        if choices.dense_kernel is not None and trainer.step < (config.sparsity.dense_steps or 0):
            dense = replace(config, sparsity=replace(config.sparsity, pattern="dense"))
            found = replace(choices, kernel=choices.dense_kernel[0], pattern=None)
            cases.append(
                MeasurementCase(1, f"{label('dense')}, first steps", dense, found, trainer.exchange)
            )
        return cases

    def _left_behind(self) -> tuple[list[dict[str, Any]], int]:
        """Cases of earlier attempts and how many samples they left, without steps that this attempt takes again. What is no profile, or a
        damaged one, is put aside.
        """
        if not self._folder.exists():
            return [], 0
        try:
            summary = json.loads((self._folder / records.SUMMARY).read_text())
            if summary["schema"] == records.SCHEMA and all(
                name in case for case in summary["cases"] for name in _SAME
            ):
                return list(summary["cases"]), records.forget_parts(
                    self._folder, self._trainer.step
                )
        except (OSError, ValueError, KeyError, TypeError):
            pass
        aside = next(
            p for n in range(1, 1000) if not (p := self._folder.with_name(f"{FOLDER}-{n}")).exists()
        )
        try:
            self._folder.rename(aside)
        except OSError:
            return [], 0
        self.problem = (
            f"{self._folder}: held no profile that can be gone on with; it is now {aside.name}"
        )
        return [], 0

    @property
    def due(self) -> bool:
        """Whether the step to come is recorded."""
        return (
            self._leaving is not None
            and (self._trainer.step + 1) % self._trainer.config.profile.every == 0
        )

    def before_step(self) -> None:
        if self.due:
            self._seen.clear()
            self._trainer.observe = self._keep
            self._trainer.record(self._bench.collector.recorder)
            self._bench.collector.start()

    def _keep(self, batch: Batch) -> ContextAttention:
        kept = batch.attend.with_kept_indices()
        self._seen.append((batch.masks, kept))
        return kept

    def after_step(self, seconds: float) -> None:
        """seconds: of the whole step."""
        if self._trainer.recorder is None or self._leaving is None:
            self._plain.append(seconds)
            return
        began = time.perf_counter()
        self._trainer.observe = None
        self._trainer.record(None)
        estimated = [
            (masks, attend.index.estimated if attend.index is not None else None)
            for masks, attend in self._seen
        ]
        self._seen.clear()
        dense = self._trainer.choices.pattern is None or any(
            found is None for _, found in estimated
        )
        case = self._by_kind.get(dense) or next(iter(self._by_kind.values()))
        self._leaving.recorded(case, self._trainer.step, estimated)
        self._samples += 1
        try:
            self._leaving.sampled(self._trainer.step, self._samples)
        except OSError as error:
            self.problem = f"{self._folder}: step {self._trainer.step} was not written ({error.strerror or error}); training goes on"
        self._recorded.append(seconds)
        self._after.append(time.perf_counter() - began)

    def finish(self) -> str:
        """-> what was recorded, in words; nothing where nothing was."""
        if self._leaving is None:
            return ""
        steady = self._plain[1:]  # the first step compiles and connects
        if self._recorded and steady:
            # The first worker's: the others wait in a later step for what it writes.
            times = self._bench.everyone(
                (statistics.median(steady), statistics.median(self._recorded))
            )[0]
            self._leaving.timed(next(iter(self._by_kind.values())), *times)
        try:
            self._leaving.finish(analysed=False)
        except OSError as error:
            self.problem = f"{self._folder}: could not be completed ({error.strerror or error})"
        self.problem = self.problem or self._leaving.problem
        if not self._recorded:
            return ""
        count = f"recorded {len(self._recorded)} step{'s' * (len(self._recorded) > 1)} in {self._folder}"
        if not steady:
            return count
        more = statistics.median(self._recorded) / statistics.median(steady) - 1
        return f"{count}; each took {more:+.1%} against the others, and {statistics.median(self._after):.2f} s after it to collect and write"

    def complaint(self) -> str | None:
        """What went wrong since the last call."""
        problem, self.problem = self.problem, None
        return problem


def _numbered(
    earlier: list[dict[str, Any]], cases: list[MeasurementCase], trainer: Trainer
) -> tuple[list[dict[str, Any]], dict[bool, MeasurementCase]]:
    """-> entries of earlier cases that are not those of cases, and cases by whether they are dense, with numbers that fit the rows."""
    kept, found = list(earlier), {}
    for case in cases:
        facts = case.facts(trainer.environment)
        # Through JSON, as the others have gone.
        facts = json.loads(json.dumps(facts))
        same = [
            n
            for n, other in enumerate(earlier)
            if all(other[name] == facts[name] for name in _SAME)
        ]
        dense = case.choices.pattern is None
        if same:
            found[dense] = replace(case, number=same[-1], label=earlier[same[-1]]["label"])
        else:
            label = (
                f"{case.label}, from step {trainer.step + 1}"
                if any(o["label"] == case.label for o in kept)
                else case.label
            )
            found[dense] = replace(case, number=len(kept), label=label)
            kept.append(facts | {"label": label})
    return kept, found
