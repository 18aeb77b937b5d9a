"""Uneven loads take longer though the FLOP are the same, and so do chunks."""

from __future__ import annotations

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.simulation.expert_cost import ComputeCost, LayerExperts
from mtrain_cli.simulation.router_loads import ExpertLoads
from mtrain_cli.step.program import EXPERTS_IN, EXPERTS_OUT
from mtrain_cli.training.flops import layer_shapes

QWEN = compose(["model=qwen3_30b_a3b"]).model


def test_flop_are_those_of_the_chosen_experts_and_do_not_depend_on_loads():
    tokens = 4096
    shapes = layer_shapes(QWEN)
    chosen = sum(shapes[n][1] * shapes[n][2] for n in (EXPERTS_IN, EXPERTS_OUT)) * 8
    for loads in (ExpertLoads(), ExpertLoads(1.0)):
        forward, again, backward = LayerExperts(QWEN, tokens, 2, loads).work()
        flop = [sum(each.flop * each.times for each in w.products) for w in (forward, backward)]
        router = 2 * tokens * 128 * 2048
        assert flop[0] == pytest.approx(2 * tokens * chosen + router, rel=1e-3)
        # In bfloat16, the router's gradient of logits has two terms.
        assert flop[1] == pytest.approx(2 * flop[0] + 2 * router, rel=1e-9)
        assert len(again.products) < len(forward.products)


def seconds(loads: ExpertLoads, tokens: int) -> float:
    """Return the time of the grouped products on a GPU of 700 TFLOP/s and 4 TB/s."""
    products = LayerExperts(QWEN, tokens, 2, loads).work()[0].products[1:]
    return sum(each.times * max(each.flop / 7e14, each.moved / 4e12) for each in products)


def test_uneven_loads_take_longer_where_experts_have_few_tokens():
    assert seconds(ExpertLoads(1.0), 4096) > 1.1 * seconds(ExpertLoads(), 4096)
    assert seconds(ExpertLoads(1.0), 2**20) < 1.01 * seconds(ExpertLoads(), 2**20)


def flop(work: ComputeCost) -> float:
    return sum(each.flop * each.times for each in work.products)


@pytest.mark.parametrize("loads", [ExpertLoads(), ExpertLoads(1.0)])
def test_a_worker_with_dealt_experts_computes_as_much_in_the_mean(loads):
    alone, dealt = (LayerExperts(QWEN, 4096, 2, loads, degree).work() for degree in (1, 8))
    for one, other in zip(alone, dealt, strict=True):
        assert flop(one) == pytest.approx(flop(other), rel=1e-3)
        # Each matrix is read by one worker only, so less memory is read.
        assert sum(p.moved * p.times for p in other.products) < 0.5 * sum(
            p.moved * p.times for p in one.products
        )


def test_each_chunk_reads_the_weights_again_and_adds_up_their_gradients():
    whole, chunked = (LayerExperts(QWEN, 4096, 2, ExpertLoads(), chunks=n).work() for n in (1, 4))
    assert flop(whole[0]) == pytest.approx(flop(chunked[0]), rel=1e-3)
    weights = 3 * 128 * 768 * 2048
    more = [
        sum(p.moved * p.times for p in other.products)
        - sum(p.moved * p.times for p in one.products)
        for one, other in zip(whole, chunked, strict=True)
    ]
    assert more[0] == pytest.approx(3 * 2 * weights, rel=1e-3)
    assert more[2] == pytest.approx(2 * more[0], rel=1e-3)
    assert chunked[2].moved - whole[2].moved == weights * (4 * (8 + 2 * 2) + 4 + 2)


def test_compiled_operations_move_fewer_bytes():
    fused, eager = (
        LayerExperts(QWEN, 4096, 2, ExpertLoads(), compile=compile).work()
        for compile in (True, False)
    )
    assert fused[0].moved < 0.7 * eager[0].moved
    assert fused[2].moved < 0.5 * eager[2].moved
    assert fused[0].products == eager[0].products
