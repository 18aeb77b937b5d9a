"""Summaries of a rank's recorded steps, and a real step with experts."""

from __future__ import annotations

import json
from dataclasses import asdict

import gloo
from torch.profiler import ProfilerActivity, profile

from mtrain_cli.composition.compose import compose
from mtrain_cli.parallel import profiler_labels
from mtrain_cli.training.trainer import Trainer
from mtrain_extras.bench import step
from mtrain_extras.bench.step_breakdown import MessageTotals, StepBreakdown, find_parts

MOE = (
    *("model=tiny_moe", "model.num_layers=3", "model.moe.dense_layers=1", "seq=128"),
    *("topology.block_size=16", "train.dtype=float32", "train.activation_checkpoint=full"),
)


def test_unrecorded_step_times_are_medians():
    result = StepBreakdown(steps=2, step=10, parts={}, hidden=0, kinds=[])
    one = step._of_rank(0, step._RankSummary(result, [3.0, 1.0, 2.5], [2.0, 4.0], None))
    assert (one["plain_ms"], one["recorded_ms"]) == (2500, 3000)
    assert step._median([0.5, None, 0.2, 0.4]) == 0.4
    assert step._median([None]) is None


def test_messages_are_means_over_steps_and_ranks():
    def of_rank(*messages: MessageTotals) -> StepBreakdown:
        return StepBreakdown(2, 10, {}, 0, [], [*messages])

    gather = of_rank(MessageTotals("gather", "weights", 4, 8_000_000, 0, 2_000_000))
    more = MessageTotals("gather", "index", 2, 40_000_000, 0, 0)
    both = of_rank(MessageTotals("gather", "weights", 4, 4_000_000, 2_000_000, 0), more)
    assert StepBreakdown.of(asdict(both)) == both
    found = [list(row.values()) for row in step._sent([gather, both])]
    assert found == [["gather", "index", 0.5, 10, 0, 0], ["gather", "weights", 2, 3, 0.5, 0.5]]


def recorded(rank: int, world: int, words: tuple[str, ...], folder: str) -> StepBreakdown:
    """Return the breakdown of a training step of this worker."""
    trainer = Trainer(compose([*MOE, *words]), gloo.environment(rank, world, world))
    trainer.train_step(False)
    with (
        profile(activities=[ProfilerActivity.CPU]) as profiler,
        profiler_labels.label(profiler_labels.STEP),
    ):
        trainer.train_step(False)
    trainer.close()
    file = f"{folder}/{rank}.json"
    profiler.export_chrome_trace(file)
    with open(file, encoding="utf-8") as trace:
        return find_parts(json.load(trace)["traceEvents"], gpu=False)


def test_the_parts_of_a_step_with_experts_add_up(tmp_path):
    words = ("topology.expert_parallel=2",)
    for found in gloo.run(2, recorded, words, str(tmp_path)):
        assert found.parts["experts"] > 0
        assert sum(found.parts.values()) == found.step
