"""Record every N-th step of a training run, without changing the run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mtrain_cli.config.pattern_settings import DenseSettings
from mtrain_cli.config.schema import Config
from mtrain_cli.config.sizes import with_count
from mtrain_cli.launch.failures import not_written
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.model.decoder import Attend
from mtrain_cli.parallel.context_attention import ContextAttention
from mtrain_cli.profiling.measurement import TRAINING, Bench, MeasurementCase, MeasurementPlan
from mtrain_cli.profiling.profile_writer import ProfileWriter
from mtrain_cli.profiling.record_collector import estimated, expert_workers
from mtrain_cli.records import record_files
from mtrain_cli.records.expert_loads import FACT, LOAD_PARTS
from mtrain_cli.training.batch import Batch, MixedAttention
from mtrain_cli.training.callback import Callback, FinishedStep
from mtrain_cli.training.resolution import ResolvedRun
from mtrain_cli.training.router_batches import OwnLoads
from mtrain_cli.training.trainer import Trainer

FOLDER = "profile"
# A case of this attempt continues a case of an earlier attempt if these facts are equal.
_SAME = (
    *("layout", "exchange", "pattern", "kernel", "model", "seq", "micro_batch", "workers", "cp"),
    *("per_node", "heads", "steps"),
)
# These too, which not every case has.
_SAME_IF_ANY = ("layer_kinds", "dense_kernel", "tp", "pipeline", FACT)


class TrainingProfile(Callback):
    """Record every `profile.every`-th step of a training run in its folder ``profile/``.

    The dense first steps of a sparse run, and attempts with other workers, another layout or
    another exchange, are cases of their own. If a file cannot be written, the run continues.
    """

    def __init__(self, trainer: Trainer, run_dir: RunDir, message: Callable[..., None]) -> None:
        """message: shows a line to the user, as a warning with ``warning=True``."""
        config = trainer.config
        self._trainer, self._message = trainer, message
        self._bench = Bench(config, run_dir, trainer.environment)
        self._folder = run_dir.path / FOLDER
        self.problem: str | None = None
        cases = self._cases()
        earlier, self._samples = self._bench.share(self._earlier_attempts)
        kept, self._by_kind = _numbered(earlier, cases, trainer)
        plan = MeasurementPlan(
            TRAINING,
            [(case.label, case.config) for case in cases],
            config.train.steps // config.profile.every,
        )
        self._seen: list[ContextAttention | MixedAttention] = []
        self._plain: list[float] = []
        self._recorded: list[float] = []
        self._writer: ProfileWriter | None = None
        try:
            cases = list(self._by_kind.values())
            self._writer = ProfileWriter(plan, self._bench, cases, self._folder, kept)
        except OSError as error:
            self.problem = f"{not_written(error, self._folder)}; no steps are recorded"
        # Collecting needs every worker: all record, or none.
        if not all(self._bench.gather(self._writer is not None)):
            self._writer = None

    def _cases(self) -> list[MeasurementCase]:
        """Return the cases of this attempt: one for all steps, and one for dense first steps."""
        trainer = self._trainer
        config, choices = trainer.config, trainer.choices

        def case(number: int, config: Config, choices: ResolvedRun, what: str) -> MeasurementCase:
            label = (
                f"{config.sparsity.pattern} {choices.layout.name} {choices.exchange.label}{what}"
            )
            dealt = expert_workers(trainer)
            return MeasurementCase(number, label, config, choices, trainer.exchange, dealt)

        cases = [case(0, config, choices, "")]
        if choices.dense_kernel is not None and trainer.step < config.sparsity.dense_steps:
            dense = replace(config, sparsity=DenseSettings())
            dense_choices = replace(choices, kernel=choices.dense_kernel[0], pattern=None)
            cases.append(case(1, dense, dense_choices, ", first steps"))
        return cases

    def _earlier_attempts(self) -> tuple[list[dict[str, Any]], int]:
        """Return the summary's entries of earlier cases, and the number of their samples."""
        if not self._folder.exists():
            return [], 0
        try:
            summary = json.loads((self._folder / record_files.SUMMARY).read_text())
            if summary["schema"] == record_files.SCHEMA and all(
                name in case for case in summary["cases"] for name in _SAME
            ):
                return list(summary["cases"]), self._cut(self._trainer.step)
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

    def _cut(self, last: int) -> int:
        """Delete the samples after a step. Return the number of those that stay."""
        record_files.delete_parts_after(self._folder, last, LOAD_PARTS)
        return record_files.delete_parts_after(self._folder, last)

    def on_rollback(self, step: int) -> None:
        self._trainer.record(None)  # the step that failed may have been to be recorded
        self._seen.clear()
        if self._writer is not None:
            self._samples = self._bench.share(lambda: self._cut(step))

    @property
    def due(self) -> bool:
        """Whether the next step is recorded."""
        every = self._trainer.config.profile.every
        return self._writer is not None and (self._trainer.step + 1) % every == 0

    def before_step(self) -> None:
        if self.due:
            self._seen.clear()
            self._trainer.record(self._bench.collector.recorder)
            self._bench.collector.start()

    def wrap_attention(self, batch: Batch, attend: Attend) -> Attend:  # noqa: ARG002
        """In a recorded step, keep the indices after the backward pass."""
        if self._trainer.recorder is None:
            return attend
        assert isinstance(attend, ContextAttention | MixedAttention)
        kept = attend.with_kept_indices()
        self._seen.append(kept)
        return kept

    def after_step(self, step: FinishedStep) -> None:
        routing = step.result.routing
        self._collect(step.metrics.seconds, None if routing is None else routing.own)
        self._warn()

    def _collect(self, seconds: float, loads: OwnLoads | None) -> None:
        """If the step was recorded, collect and write its rows."""
        if self._trainer.recorder is None or self._writer is None:
            self._plain.append(seconds)
            return
        self._trainer.record(None)
        computed = [estimated(attend) for attend in self._seen]
        self._seen.clear()
        dense = any(batch.indices is None for batch in computed)
        dense = dense or self._trainer.choices.pattern is None
        case = self._by_kind.get(dense) or next(iter(self._by_kind.values()))
        self._writer.recorded(case, self._trainer.step, computed, loads)
        self._samples += 1
        try:
            self._writer.sampled(self._trainer.step, self._samples)
        except OSError as error:
            self.problem = (
                f"{not_written(error, self._folder)}, so the profile of step {self._trainer.step} "
                "is missing; the run continues"
            )
        self._recorded.append(seconds)

    def close(self) -> None:
        summary = self._complete()
        if summary:
            self._message(summary)
        self._warn()

    def _complete(self) -> str:
        if self._writer is None:
            return ""
        steady = self._plain[1:]  # The first step also compiles kernels and connects the ranks.
        if self._recorded and steady:
            # Use the first worker's times. The other workers wait in the next step while it writes.
            times = self._bench.share(
                lambda: (statistics.median(steady), statistics.median(self._recorded))
            )
            self._writer.timed(next(iter(self._by_kind.values())), *times)
        try:
            self._writer.finish(analysed=False)
        except OSError as error:
            self.problem = not_written(error, self._folder)
        self.problem = self.problem or self._writer.problem
        if not self._recorded:
            return ""
        return f"recorded {with_count(len(self._recorded), 'step')} in {self._folder}"

    def _warn(self) -> None:
        problem, self.problem = self.problem, None
        if problem:
            self._message(problem, warning=True)


def _numbered(
    earlier: list[dict[str, Any]], cases: list[MeasurementCase], trainer: Trainer
) -> tuple[list[dict[str, Any]], dict[bool, MeasurementCase]]:
    """Number the cases. A case that continues an earlier case keeps the earlier number."""
    kept, numbered = list(earlier), {}
    for case in cases:
        # A round trip through JSON makes the types equal to those of the earlier entries.
        facts = json.loads(json.dumps(case.facts(trainer.environment)))
        same = [
            n
            for n, other in enumerate(earlier)
            if all(other[name] == facts[name] for name in _SAME)
            and all(other.get(name) == facts.get(name) for name in _SAME_IF_ANY)
        ]
        if same:
            number, label = same[-1], earlier[same[-1]]["label"]
        else:
            number, label = len(kept), case.label
            if any(other["label"] == label for other in kept):
                label = f"{label}, from step {trainer.step + 1}"
            kept.append(facts | {"label": label})
        numbered[case.choices.pattern is None] = replace(case, number=number, label=label)
    return kept, numbered
