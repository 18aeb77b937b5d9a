"""`mtrain profile imbalance`: real training steps; all cases compute the same batch in turn."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from mtrain_cli.config.schema import Config
from mtrain_cli.launch.environment import Environment
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.launch.stop_request import StopFlag
from mtrain_cli.profiling.measurement import (
    Bench,
    MeasurementCase,
    MeasurementPlan,
    MeasurementProgress,
)
from mtrain_cli.profiling.profile_writer import ProfileWriter
from mtrain_cli.training.batch import Batch, BatchMaker, PackedSample
from mtrain_cli.training.callback import Callback
from mtrain_cli.training.flops import attention_kept
from mtrain_cli.training.trainer import Trainer

MicroBatches = Sequence[Sequence[PackedSample]]


def run(config: Config, run_dir: RunDir, environment: Environment, resume: bool) -> bool:  # noqa: ARG001 - a measurement starts afresh
    """Train with the first case and sample all cases, on this worker.

    At each sampled step, every case computes the forward and backward pass of its batch from the
    same weights, hence under the same index, before the optimizer step.

    Returns:
        Whether it stopped before all samples were recorded.
    """
    bench = Bench(environment, timedelta(seconds=config.topology.timeout_s))
    plan = bench.gather(MeasurementPlan.load(run_dir) if environment.rank == 0 else None)[0]
    stop = StopFlag(run_dir, environment)
    with MeasurementProgress(
        environment.rank == 0 and not plan.quiet, plan.samples * len(plan.cases)
    ) as progress:
        progress.now("preparing")
        trainer = Trainer(plan.cases[0][1], environment)
        bench.adopt(trainer.choices, trainer.exchange.group)
        cases = [bench.case(number, label, case) for number, (label, case) in enumerate(plan.cases)]
        writer = ProfileWriter(run_dir, plan, bench, cases)
        rehearsal = _Rehearsal(bench, trainer, cases, writer, progress)
        trainer.callbacks.append(rehearsal)
        while writer.samples < plan.samples:
            sampled = trainer.step >= plan.warmup and (trainer.step - plan.warmup) % plan.every == 0
            progress.now(f"training step {trainer.step + 1}")
            rehearsal.due = sampled
            if trainer.train_step(stop.requested()).stop:
                break
    writer.finish()
    if not plan.quiet:
        writer.show()
    return writer.samples < plan.samples


class _Rehearsal(Callback):
    """Forward and backward of every case on the samples of one step, plain and recorded.

    due: whether the next step is sampled.
    """

    needs_samples = True

    def __init__(
        self,
        bench: Bench,
        trainer: Trainer,
        cases: Sequence[MeasurementCase],
        writer: ProfileWriter,
        progress: MeasurementProgress,
    ) -> None:
        self.bench, self.trainer, self.cases = bench, trainer, cases
        self.writer, self.progress = writer, progress
        mask = trainer.config.data.document_mask
        keep, offload = attention_kept(trainer.config.train), trainer.offload
        self._make = [
            BatchMaker(
                c.exchange,
                c.choices.kernel,
                bench.device,
                document_mask=mask,
                pattern=c.choices.pattern,
                keep=keep,
                offload=offload,
            )
            for c in cases
        ]
        self._warm = False
        self.due = False

    def on_samples(self, samples: MicroBatches) -> None:
        if self.due:
            self._sample(samples)

    def _sample(self, micro_batches: MicroBatches) -> None:
        if not self._warm:
            # Compile kernels, create connections and events.
            for case in self.cases:
                self.progress.now(f"{case.label}: warm-up")
                self._recorded(case, micro_batches, kept=False)
            self._warm = True
        sample = self.writer.samples
        # Rotate the order of cases, and of plain and recorded passes: none is always first.
        first = sample % len(self.cases)
        order = [*self.cases[first:], *self.cases[:first]]
        for case in order:
            self.progress.now(case.label)
            seconds = {}
            for recorded in (False, True) if sample % 2 == 0 else (True, False):
                seconds[recorded] = (
                    self._recorded(case, micro_batches)
                    if recorded
                    else self._once(case, micro_batches)[1]
                )
            self.writer.timed(case, seconds[False], seconds[True])
            self.progress.done()
        self.writer.sampled(self.trainer.step + 1, sample + 1)
        self.progress.sampled(sample + 1, self.writer.plan.samples)
        if sample == 0:
            # Save now, so that a killed run can be replayed.
            self.writer.save_indices()

    def _once(
        self, case: MeasurementCase, micro_batches: MicroBatches
    ) -> tuple[list[Batch], float]:
        """Run both passes once. Returns the batches, indices kept, and seconds on this worker."""
        trainer, bench = self.trainer, self.bench
        batches = [self._make[case.number](samples) for samples in micro_batches]
        attends = [batch.attend.with_kept_indices() for batch in batches]
        valid, _ = trainer.totals(batches)
        clock = bench.collector.recorder
        bench.synchronize()
        if trainer.recorder is not None:
            bench.collector.start()
        began = clock.now()
        trainer.forward_backward(batches, attends, valid)
        seconds = clock.seconds(began, clock.now())
        trainer.drop_gradients()
        self._estimated = [
            attend.index.estimated if attend.index is not None else None for attend in attends
        ]
        return batches, seconds

    def _recorded(
        self, case: MeasurementCase, micro_batches: MicroBatches, *, kept: bool = True
    ) -> float:
        recorder = self.bench.collector.recorder
        self.trainer.recorder = recorder
        case.exchange.set_recorder(recorder)
        batches, seconds = self._once(case, micro_batches)
        self.trainer.recorder = None
        case.exchange.set_recorder(None)
        if not kept:
            recorder.read()
            return seconds
        self.writer.recorded(
            case,
            self.trainer.step + 1,
            [(b.masks, indices) for b, indices in zip(batches, self._estimated, strict=True)],
        )
        return seconds
