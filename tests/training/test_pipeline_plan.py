"""What a pipeline costs: idle time by the schedule, bytes by the messages."""

from __future__ import annotations

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.training.pipeline_plan import PipelinePlan
from mtrain_cli.training.planning import make_plan

WORDS = (
    "seq=4k", "model.num_layers=8", "model.hidden_size=64", "model.num_heads=4",
    "model.num_kv_heads=2", "model.vocab_size=264", "topology.device=cpu",
)  # fmt: skip


def plan(micro_batches: int, *words: str) -> PipelinePlan:
    config = compose([*WORDS, *words])
    return PipelinePlan.of(config, micro_batches, make_layout("striped", 2, 4096, 128), 2)


@pytest.mark.parametrize(
    ("words", "bubble"),
    [
        ((), 3 / 11),
        (("topology.schedule=gpipe",), 3 / 11),
        (("topology.virtual_stages=2",), 3 / 19),
    ],
)
def test_equal_stages_idle_as_the_formula_says(words, bubble, monkeypatch):
    monkeypatch.setattr("mtrain_cli.training.pipeline_plan.head_cost", lambda _: 0.0)
    found = plan(8, "topology.pipeline_parallel=4", *words)
    assert found.played.bubble == pytest.approx(bubble)
    assert sum(found.layers[1::4]) == 2
    assert f"stages idle {bubble:.0%} of the time" in found.describe()


def test_uneven_stages_idle_longer():
    words = "topology.pipeline_parallel=2", "topology.stage_layers=[6,2]"
    even, uneven = plan(4, words[0]), plan(4, *words)
    assert uneven.played.bubble > even.played.bubble + 0.1
    assert "of [6,2] layers; 1f1b, 4 micro-batches per step" in uneven.describe()
    # The head counts in the last stage only.
    given = plan(4, words[0], "topology.stage_layers=[4,4]").costs
    assert given[1] - given[0] == pytest.approx(2 * 264 * 64)


def test_a_message_holds_the_hidden_states_of_a_micro_batch():
    found = plan(4, "topology.pipeline_parallel=2", "train.micro_batch=2", "train.global_batch=8")
    assert found.hidden == 2 * 2048 * 64 * 2
    assert found.received == 2 * 4 * found.hidden
    assert plan(4, "topology.pipeline_parallel=2", "topology.virtual_stages=2").received == (
        2 * 2 * 4 * found.hidden // 2
    )
    cut = plan(4, "topology.pipeline_parallel=2", "topology.tensor_parallel=2")
    assert cut.hidden == 1024 * 64 * 2


def test_only_a_run_with_stages_has_a_pipeline():
    words = [*WORDS, "topology.workers=2", "train.global_batch=4"]
    assert make_plan(compose(words)).pipeline is None
    found = make_plan(compose([*words, "topology.pipeline_parallel=2"])).pipeline
    assert found is not None
    assert found.pipeline.micro_batches == 4
