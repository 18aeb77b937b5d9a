"""A step takes at least as long as its host needs to launch it."""

from __future__ import annotations

import dataclasses

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.cluster import load_cluster
from mtrain_cli.simulation import host_time
from mtrain_cli.simulation.host_time import host_ms
from mtrain_cli.simulation.predicted_step import PIPELINE
from mtrain_cli.simulation.scenario import (
    PairSource,
    PredictedScenario,
    Scenario,
    estimate_step,
    evaluate,
    plan_on,
)
from mtrain_cli.training.planning import make_plan

QWEN = ("model=qwen3b", "data.document_mask=false")
SPARSE = ("sparsity=vertical_slash", "sparsity.max_slashes=12", "sparsity.max_columns=512")
NOTHING_AGAIN = "train.activation_checkpoint=none"


def step(*words: str, workers: int = 2, bounds: bool = False) -> PredictedScenario:
    config, cluster = compose([*QWEN, *words]), load_cluster("h200_1x8")
    plan = plan_on(cluster, config, workers=workers, layout="striped", exchange="all_gather")
    scenario = Scenario(plan.config, PairSource.of(config).problem(config))
    return evaluate(cluster, scenario, plan, bounds=bounds)


@pytest.fixture
def without_host(monkeypatch):
    """The GPUs never wait for the host."""
    for name in host_time.CONSTANTS:
        free = dataclasses.replace(getattr(host_time, name), value=0.0, low=0.0, high=0.0)
        monkeypatch.setattr(host_time, name, free)


def host(*words: str, numbers: range = range(36), micro_batches: int = 1):
    return host_ms(compose([*QWEN, *words]), numbers, micro_batches)


@pytest.mark.parametrize(
    ("more", "seconds"), [((), 0.527), (("train.fp8=all", "train.keep_mlp=true"), 0.527)]
)
def test_a_step_of_few_tokens_takes_what_the_host_took(more, seconds):
    """Measured on two H200s with 8K tokens each and the settings of `train.memory=auto`.

    In fp8, a step took 0.518 s.
    """
    words = ("seq=16k", *SPARSE, NOTHING_AGAIN, "train.shard=gradients", *more)
    found = step(*words, bounds=True)
    assert found.step.seconds.value == pytest.approx(seconds)
    assert sum(found.step.parts.values()) == pytest.approx(seconds)
    assert found.step.seconds.low < seconds < found.step.seconds.high
    # The banner of a run and a dry run show the same.
    planned = make_plan(compose([*QWEN, *words, "topology=h200_1x8", "topology.workers=2"]))
    assert estimate_step(planned).seconds[0] == pytest.approx(seconds)


def test_only_the_host_differs_and_only_with_few_tokens(request):
    few, many = (step(f"seq={seq}", *SPARSE).step for seq in ("16k", "128k"))
    request.getfixturevalue("without_host")
    alone, same = (step(f"seq={seq}", *SPARSE).step for seq in ("16k", "128k"))
    assert many.parts == same.parts
    assert few.parts["host"] > 0.03 + alone.parts["host"]
    assert few.parts | {"host": 0.0} == alone.parts | {"host": 0.0}


def test_of_steps_that_wait_for_the_host_the_one_with_less_work_of_the_gpus_is_first():
    words = ("seq=16k", *SPARSE)
    kept, again = (
        step(*words, f"train.activation_checkpoint={how}").step for how in ("none", "selective")
    )
    assert kept.seconds.value == pytest.approx(again.seconds.value)
    assert min(again, kept, key=lambda found: found.order) is kept


@pytest.mark.parametrize(
    ("seq", "workers", "said"),
    [("16k", 2, "train.micro_batch or fewer GPUs use"), ("8k", 1, "train.micro_batch use")],
)
def test_a_note_says_what_helps_if_the_gpus_wait(seq, workers, said):
    words = (*SPARSE, NOTHING_AGAIN)
    few, many = (step(f"seq={n}", *words, workers=workers).remarks for n in (seq, "256k"))
    assert [said in note for note in few if "wait for the host" in note] == [True]
    assert not any("wait for the host" in note for note in many)


def test_what_the_host_does_in_a_layer():
    ms = {name: getattr(host_time, name).value for name in host_time.CONSTANTS}
    layer, sparse = ms["LAYER_MS"], ms["LAYER_MS"] + ms["SPARSE_MS"]
    assert host("sparsity=dense") == pytest.approx(ms["STEP_MS"] + 36 * layer)
    assert host("sparsity=dense", numbers=range(3), micro_batches=4) == pytest.approx(
        ms["STEP_MS"] + 4 * 3 * layer
    )
    assert host(*SPARSE) == pytest.approx(ms["STEP_MS"] + 36 * sparse)
    assert host(*SPARSE, "sparsity.dense_layers=10", numbers=range(20, 36)) == pytest.approx(
        ms["STEP_MS"] + 6 * sparse + 10 * layer
    )


def test_a_fixed_index_takes_the_host_as_long_as_none():
    assert host("sparsity=fixed") == host("sparsity=dense") < host(*SPARSE)


def test_experts_take_the_host_longer_than_an_mlp():
    words = ["model=qwen3_30b_a3b", NOTHING_AGAIN]
    dense, mixed = (host(*words, f"model.moe.dense_layers={n}", numbers=range(8)) for n in (8, 5))
    assert mixed - dense == pytest.approx(3 * host_time.EXPERTS_MS.value)


def test_a_stage_of_a_pipeline_waits_for_its_own_host(request):
    pipeline = ("topology.pipeline_parallel=2", "topology.stage_layers=[18,18]")
    words = ("seq=8k", "train.global_batch=8", "sparsity=dense", *pipeline)
    found = step(*words, workers=8).step
    assert sum(found.parts.values()) == pytest.approx(found.seconds.value)
    busy = found.seconds.value - found.parts[PIPELINE]
    assert busy == pytest.approx(1e-3 * host(*words, numbers=range(18), micro_batches=8))
    request.getfixturevalue("without_host")
    alone = step(*words, workers=8).step
    assert found.parts[PIPELINE] > alone.parts[PIPELINE]
    assert found.seconds.value > alone.seconds.value
