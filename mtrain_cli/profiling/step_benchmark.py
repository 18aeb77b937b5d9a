"""`mtrain profile imbalance`: train, and record every case on the batches of some steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.profiling.measurement import (
    Bench,
    MeasurementCase,
    MeasurementPlan,
    MeasurementProgress,
    entry_point,
    rotated,
)
from mtrain_cli.profiling.profile_writer import ProfileWriter
from mtrain_cli.profiling.record_collector import Estimated, estimated, expert_workers
from mtrain_cli.training.batch import Batches, Layouts, PackedSample, attention_setups
from mtrain_cli.training.callback import Callback
from mtrain_cli.training.flops import attention_kept
from mtrain_cli.training.router_batches import OwnLoads, RouterBatches
from mtrain_cli.training.trainer import Trainer

MicroBatches = Sequence[Sequence[PackedSample]]


@entry_point(MeasurementPlan)
def run(bench: Bench, plan: MeasurementPlan) -> bool:
    """Train with the first case and sample all cases, on this worker.

    At each sampled step, every case computes the forward and backward pass of the batch before the
    optimizer step. All cases have the same weights, so they estimate the same index.

    Returns:
        Whether the measurement ended before all samples were recorded.
    """
    with MeasurementProgress(bench, plan, plan.samples * len(plan.cases)) as progress:
        progress.now("preparing")
        trainer = Trainer(plan.cases[0][1], bench.environment)
        bench.adopt(trainer.choices, trainer.exchange.group)
        dealt = expert_workers(trainer)
        cases = [replace(case, expert_parallel=dealt) for case in bench.cases(plan)]
        writer = ProfileWriter(plan, bench, cases)
        rehearsal = _Rehearsal(bench, trainer, writer, progress)
        trainer.callbacks.append(rehearsal)
        while writer.samples < plan.samples:
            progress.now(f"training step {trainer.step + 1}")
            after = trainer.step - plan.warmup
            rehearsal.due = after >= 0 and after % plan.every == 0
            if trainer.train_step(bench.stop.requested()).stop:
                break
    writer.finish()
    if not plan.quiet:
        writer.show()
    return writer.samples < plan.samples


class _Rehearsal(Callback):
    """Runs every case on the sequences of a training step, without and with recording."""

    needs_samples = True

    def __init__(
        self, bench: Bench, trainer: Trainer, writer: ProfileWriter, progress: MeasurementProgress
    ) -> None:
        self.bench, self.trainer, self.writer, self.progress = bench, trainer, writer, progress
        self._make = [
            Batches(
                Layouts(case.exchange, case.choices.balancer),
                attention_setups(
                    case.config,
                    case.choices,
                    mask=MaskRule.of(trainer.config),
                    keep=attention_kept(trainer.config.train),
                ),
                bench.device,
                layers=trainer.config.model.num_layers,
                offload=trainer.offload,
                tensor=trainer.tensor,
                router=RouterBatches.make(trainer.config, case.exchange.group, trainer.tensor),
            )
            for case in writer.cases
        ]
        self._warm = False
        self.due = False

    def on_samples(self, samples: MicroBatches) -> None:
        if self.due:
            self._sample(samples)

    def _sample(self, micro_batches: MicroBatches) -> None:
        writer, progress = self.writer, self.progress
        if not self._warm:
            # Compile kernels; create connections and events.
            for case in writer.cases:
                progress.now(f"{case.label}: warm-up")
                self._compute(case, micro_batches, recorded=True)
                self.bench.collector.recorder.read()
            self._warm = True
        sample = writer.samples
        for case in rotated(writer.cases, sample):
            progress.now(case.label)
            seconds = {}
            for recorded in rotated((False, True), sample):
                passed = self._compute(case, micro_batches, recorded=recorded)
                computed, loads, seconds[recorded] = passed
                if recorded:
                    writer.recorded(case, self.trainer.step + 1, computed, loads)
            writer.timed(case, seconds[False], seconds[True])
            progress.done()
        writer.sampled(self.trainer.step + 1, sample + 1)
        progress.sampled(sample + 1, writer.plan.samples)
        if sample == 0:
            # Save the indices now, so that `simulate` can replay them even if the run is killed.
            writer.save_indices()

    def _compute(
        self, case: MeasurementCase, micro_batches: MicroBatches, *, recorded: bool
    ) -> tuple[list[Estimated], OwnLoads | None, float]:
        """Run both passes of a case. Return masks and indices, loads of experts, and seconds."""
        trainer, bench = self.trainer, self.bench
        recorder = bench.collector.recorder
        trainer.record(recorder if recorded else None, case.exchange)
        batches = [self._make[case.number](samples) for samples in micro_batches]
        attends = [batch.attention.with_kept_indices() for batch in batches]
        valid, _ = trainer.run_step.totals(batches)
        bench.synchronize()
        if recorded:
            bench.collector.start()
        began = recorder.now()
        trainer.run_step.forward_backward(batches, attends, valid)
        seconds = recorder.seconds(began, recorder.now())
        trainer.states.drop_gradients()
        trainer.record(None, case.exchange)
        computed = [estimated(attend) for attend in attends]
        loads = OwnLoads.of([b.routing for b in batches if b.routing is not None])
        return computed, loads, seconds
