"""Record every N-th step of a training run, without changing the run."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.model.decoder import Attend
from mtrain_cli.parallel.context_attention import ContextAttention
from mtrain_cli.profiling.measurement import TRAINING, Bench, MeasurementCase, MeasurementPlan
from mtrain_cli.profiling.profile_writer import ProfileWriter
from mtrain_cli.records import record_files
from mtrain_cli.training.batch import Batch
from mtrain_cli.training.callback import Callback, FinishedStep
from mtrain_cli.training.trainer import Trainer

FOLDER = "profile"
# Facts that must match for rows of an earlier attempt to belong to the same case.
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


class TrainingProfile(Callback):
    """Record every `profile.every`-th step of a training run.

    Files go to ``profile/`` of the run, one part per recorded step, after those of an earlier
    attempt. Dense first steps of a sparse run are a case of their own; so are the steps of an
    attempt with other workers, layout or exchange.

    A file that cannot be written stops the profile, not the training; a warning says so.
    """

    def __init__(self, trainer: Trainer, run_dir: RunDir, message: Callable[..., None]) -> None:
        """message: shows a line to the user; takes ``warning=True``."""
        config, e = trainer.config, trainer.environment
        self._trainer, self._message = trainer, message
        self._bench = Bench(e, timedelta(seconds=config.topology.timeout_s))
        self._folder = run_dir.path / FOLDER
        self.problem: str | None = None
        cases = self._cases()
        earlier, samples = self._bench.gather(self._earlier_attempts() if e.rank == 0 else None)[0]
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
        self._writer: ProfileWriter | None = None
        try:
            self._writer = ProfileWriter(
                run_dir, plan, self._bench, list(self._by_kind.values()), self._folder, kept
            )
        except OSError as error:
            self.problem = (
                f"{self._folder}: cannot be written ({error.strerror or error}); "
                "no steps are recorded"
            )
        # All or none: collecting needs every worker.
        if not all(self._bench.gather(self._writer is not None)):
            self._writer = None

    def _cases(self) -> list[MeasurementCase]:
        """Return the cases of this attempt: its steps, and dense first steps separately."""
        trainer = self._trainer
        config, choices = trainer.config, trainer.choices

        def label(pattern: str) -> str:
            return f"{pattern} {config.layout} {choices.exchange.label}"

        cases = [
            MeasurementCase(0, label(config.sparsity.pattern), config, choices, trainer.exchange)
        ]
        if choices.dense_kernel is not None and trainer.step < (config.sparsity.dense_steps or 0):
            dense = replace(config, sparsity=replace(config.sparsity, pattern="dense"))
            dense_choices = replace(choices, kernel=choices.dense_kernel[0], pattern=None)
            cases.append(
                MeasurementCase(
                    1, f"{label('dense')}, first steps", dense, dense_choices, trainer.exchange
                )
            )
        return cases

    def _earlier_attempts(self) -> tuple[list[dict[str, Any]], int]:
        """Return cases and number of samples of earlier attempts.

        Deletes samples of steps that this attempt repeats. Moves a folder aside that holds no
        profile, or a damaged one.
        """
        if not self._folder.exists():
            return [], 0
        try:
            summary = json.loads((self._folder / record_files.SUMMARY).read_text())
            if summary["schema"] == record_files.SCHEMA and all(
                name in case for case in summary["cases"] for name in _SAME
            ):
                return list(summary["cases"]), record_files.delete_parts_after(
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
        self.problem = f"{self._folder}: not a profile that can be continued; moved to {aside.name}"
        return [], 0

    @property
    def due(self) -> bool:
        """Whether the next step is recorded."""
        return (
            self._writer is not None
            and (self._trainer.step + 1) % self._trainer.config.profile.every == 0
        )

    def before_step(self) -> None:
        if self.due:
            self._seen.clear()
            self._trainer.record(self._bench.collector.recorder)
            self._bench.collector.start()

    def wrap_attention(self, batch: Batch, attend: Attend) -> Attend:
        """Keep the indices of a recorded step beyond its backward pass."""
        if self._trainer.recorder is None:
            return attend
        assert isinstance(attend, ContextAttention)
        kept = attend.with_kept_indices()
        self._seen.append((batch.masks, kept))
        return kept

    def after_step(self, step: FinishedStep) -> None:
        self._collect(step.metrics.seconds)
        self._warn()

    def _collect(self, seconds: float) -> None:
        """Collect and write the step if it was recorded; ``seconds`` is the whole step's time."""
        if self._trainer.recorder is None or self._writer is None:
            self._plain.append(seconds)
            return
        began = time.perf_counter()
        self._trainer.record(None)
        estimated = [
            (masks, attend.index.estimated if attend.index is not None else None)
            for masks, attend in self._seen
        ]
        self._seen.clear()
        dense = self._trainer.choices.pattern is None or any(
            index is None for _, index in estimated
        )
        case = self._by_kind.get(dense) or next(iter(self._by_kind.values()))
        self._writer.recorded(case, self._trainer.step, estimated)
        self._samples += 1
        try:
            self._writer.sampled(self._trainer.step, self._samples)
        except OSError as error:
            self.problem = (
                f"{self._folder}: step {self._trainer.step} was not written "
                f"({error.strerror or error}); training goes on"
            )
        self._recorded.append(seconds)
        self._after.append(time.perf_counter() - began)

    def close(self) -> None:
        summary = self._complete()
        if summary:
            self._message(summary)
        self._warn()

    def _complete(self) -> str:
        """Return a sentence on what was recorded; empty if nothing was."""
        if self._writer is None:
            return ""
        steady = self._plain[1:]  # the first step compiles and connects
        if self._recorded and steady:
            # Take the first worker's times: in a later step, the others wait until it has written.
            times = self._bench.gather(
                (statistics.median(steady), statistics.median(self._recorded))
            )[0]
            self._writer.timed(next(iter(self._by_kind.values())), *times)
        try:
            self._writer.finish(analysed=False)
        except OSError as error:
            self.problem = f"{self._folder}: could not be completed ({error.strerror or error})"
        self.problem = self.problem or self._writer.problem
        if not self._recorded:
            return ""
        plural = "s" if len(self._recorded) > 1 else ""
        count = f"recorded {len(self._recorded)} step{plural} in {self._folder}"
        if not steady:
            return count
        more = statistics.median(self._recorded) / statistics.median(steady) - 1
        return (
            f"{count}; each took {more:+.1%} longer than other steps, plus "
            f"{statistics.median(self._after):.2f} s to collect and write"
        )

    def _warn(self) -> None:
        """Show what went wrong since the last call."""
        problem, self.problem = self.problem, None
        if problem:
            self._message(problem, warning=True)


def _numbered(
    earlier: list[dict[str, Any]], cases: list[MeasurementCase], trainer: Trainer
) -> tuple[list[dict[str, Any]], dict[bool, MeasurementCase]]:
    """Number the cases so that they match the rows.

    Returns:
        The summary's entries (earlier cases, then new ones), and the cases by whether they are
        dense.
    """
    kept, numbered = list(earlier), {}
    for case in cases:
        facts = case.facts(trainer.environment)
        # Pass through JSON, as the earlier entries did.
        facts = json.loads(json.dumps(facts))
        same = [
            n
            for n, other in enumerate(earlier)
            if all(other[name] == facts[name] for name in _SAME)
        ]
        dense = case.choices.pattern is None
        if same:
            numbered[dense] = replace(case, number=same[-1], label=earlier[same[-1]]["label"])
        else:
            label = (
                f"{case.label}, from step {trainer.step + 1}"
                if any(o["label"] == case.label for o in kept)
                else case.label
            )
            numbered[dense] = replace(case, number=len(kept), label=label)
            kept.append(facts | {"label": label})
    return kept, numbered
