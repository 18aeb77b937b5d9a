"""Prices of expert-parallel degrees, and the degree that `auto` takes."""

from __future__ import annotations

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.launch.environment import ParallelDims
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.training import expert_traffic
from mtrain_cli.training.expert_traffic import ExpertPrice, ExpertRun, ExpertTraffic

MODEL = ("model=qwen3_30b_a3b", "model.num_layers=8", "topology.expert_parallel=auto")


def run(seq: str, workers: int, per_node: int, *words: str) -> ExpertRun:
    config = compose([*MODEL, f"seq={seq}", *words])
    dims = ParallelDims.of(workers, cp=workers)
    layout = make_layout("zigzag", workers, config.seq, 128)
    return ExpertRun(config, dims, layout, 2, per_node)


@pytest.mark.parametrize("seq", ["16k", "32k", "128k"])
def test_two_gpus_of_a_host_gather_the_weights(seq):
    """Measured on two H200s: steps of degree 2 took 0.984, 0.988 and 1.001 times as long."""
    assert run(seq, 2, 2).degree == 1
    one, two = (run(seq, 2, 2).price(degree).seconds for degree in (1, 2))
    assert 0.97 < two / one < 1.03


def test_with_few_tokens_two_gpus_of_a_host_send_rows():
    assert run("4k", 2, 2).degree == 2


@pytest.mark.parametrize(
    ("seq", "workers", "per_node", "degree"),
    [
        ("32k", 32, 8, 8),  # the weights of all experts would cross nodes
        ("8k", 16, 8, 8),
        ("8k", 16, 2, 2),  # a group stays in a node
        ("8k", 12, 6, 2),  # of 6 workers: groups of 4 would cross nodes
        ("1m", 16, 8, 1),  # attention takes much longer than weights
    ],
)
def test_between_nodes_rows_are_cheaper_than_weights(seq, workers, per_node, degree):
    assert run(seq, workers, per_node).degree == degree


def test_the_price_falls_with_the_wait_of_the_host(monkeypatch):
    before = run("8k", 2, 2).price(2)
    monkeypatch.setattr(expert_traffic, "HOST_WAIT_US", 0.0)
    after = run("8k", 2, 2).price(2)
    assert before.seconds - after.seconds == pytest.approx(2.5e-3)
    assert run("8k", 2, 2).price(1).seconds > after.seconds


@pytest.mark.parametrize(("second", "degree"), [(0.971, 1), (0.97, 1), (0.969, 2)])
def test_of_degrees_that_cost_nearly_as_much_the_smaller_is_taken(monkeypatch, second, degree):
    def priced(_, degree):
        return ExpertPrice(degree, {1: 1.0, 2: second}[degree], ExpertTraffic(0, 0))

    monkeypatch.setattr(ExpertRun, "price", priced)
    assert run("8k", 2, 2).cheapest().degree == degree


def test_a_named_cluster_gives_the_rates():
    slow = run("8k", 2, 2, "topology.cluster=a100_4x8")
    assert slow.price(2).seconds > run("8k", 2, 2).price(2).seconds


def test_a_dense_model_has_no_degree():
    config = compose(["model=qwen3b", "topology.expert_parallel=auto"])
    layout = make_layout("striped", 8, 4096, 128)
    assert ExpertRun(config, ParallelDims.of(8, cp=8), layout, 2, 8).degree == 1
