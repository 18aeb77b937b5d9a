"""Predictions of long rings from shorter ones, against the player of all workers and steps."""

from __future__ import annotations

import pytest
from slow_cases import mostly_slow

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.cluster import load_cluster
from mtrain_cli.parallel.program import Recompute
from mtrain_cli.simulation import long_rings, work_counts
from mtrain_cli.simulation.prediction import Prediction
from mtrain_cli.simulation.scenario import PairSource, Scenario, predict_attention_alone

DENSE, SPARSE = PairSource("dense"), PairSource("clustered", 0.05, 512)


def predicted(pairs, layout, exchange, workers, *words) -> Prediction:
    config = compose(["model=qwen3b", f"seq={workers * 1024}", *words, *pairs.sparsity()])
    return predict_attention_alone(
        load_cluster("h100_4x8", nodes=workers // 8),
        Scenario(config, pairs.problem(config)),
        layout,
        exchange,
        workers=workers,
        recompute=Recompute.EVERYTHING,
    )


def both(monkeypatch, shortest, *case) -> tuple[Prediction, Prediction]:
    """Return the prediction in which all workers are played, and that from shorter rings."""
    full = predicted(*case)
    monkeypatch.setattr(work_counts, "MOST_PLAYED", 1)
    monkeypatch.setattr(long_rings, "SHORTEST", shortest)
    short = predicted(*case)
    monkeypatch.undo()
    assert {layer.work["forward"].ring is None for layer in short.played} == {False}
    return full, short


def times(prediction: Prediction) -> list[float]:
    return [
        getattr(of.duration, bound)
        for of in prediction.passes.values()
        for bound in ("low", "value", "high")
    ]


EQUAL = [
    (layout, exchange, words)
    for layout in ("zigzag", "striped", "contiguous")
    for exchange in ("ring", "hierarchical_ring")
    for words in ([], ["topology.circulates=queries"], ["topology.prefetch=2"])
]


@mostly_slow(("layout", "exchange", "words"), EQUAL, keep=(0, 10))
def test_equal_work_takes_the_same_time(layout, exchange, words, monkeypatch):
    """Each rank that does all its steps has equal work in all but the step of its own keys."""
    for workers, shortest in ((64, 16), (256, 64)):
        full, short = both(monkeypatch, shortest, DENSE, layout, exchange, workers, *words)
        close = 1e-9 if (workers, words) != (64, ["topology.circulates=queries"]) else 1e-4
        assert times(short) == pytest.approx(times(full), rel=close)
        assert short.facts["density"] == full.facts["density"]
        for name, one in full.passes.items():
            other = short.passes[name]
            # A rank that ends early in the full player waits for the others.
            if layout == "zigzag":
                assert other.spent == pytest.approx(one.spent, rel=1e-9)
                assert other.carried == pytest.approx(one.carried, rel=1e-9)
                assert sum(other.exposed.values()) == pytest.approx(sum(one.exposed.values()))
            assert (other.work.step, other.work.total, other.work.critical) == pytest.approx(
                (one.work.step, one.work.total, one.work.critical)
            )


@mostly_slow(
    ("layout", "exchange", "over"),
    [
        ("striped", "hierarchical_ring", 0.002),
        ("striped", "ring", 0.002),
        ("zigzag", "ring", 0.06),
        ("zigzag", "hierarchical_ring", 0.06),
    ],
    keep=(0,),
)
def test_uneven_work_takes_about_the_time_of_the_slowest_ranks(layout, exchange, over, monkeypatch):
    """Of an index, ranks have about equal work in stripes; in zigzag, the bound is looser."""
    full, short = both(monkeypatch, 64, SPARSE, layout, exchange, 256)
    for found, real in zip(times(short), times(full), strict=True):
        assert -0.0002 < found / real - 1 < over
    for name, one in full.passes.items():
        other = short.passes[name].work
        assert (other.step, other.total) == pytest.approx((one.work.step, one.work.total), rel=0.01)
    assert short.facts["density"] == full.facts["density"]


def test_a_straggler_or_records_are_played_in_full(monkeypatch):
    monkeypatch.setattr(work_counts, "MOST_PLAYED", 1)
    case = DENSE, "zigzag", "ring", 64
    config = compose(["model=qwen3b", "seq=64k"])
    cluster = load_cluster("h100_4x8", nodes=8)
    for slow, rows in (({3: 1.5}, False), ({}, True)):
        scenario = Scenario(config, DENSE.problem(config), slow=slow)
        found = predict_attention_alone(cluster, scenario, *case[1:3], workers=64, rows=rows)
        assert {layer.work["forward"].ring is None for layer in found.played} == {True}
