"""Uneven loads take longer though the FLOP are the same, and so do chunks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.records import expert_loads, record_files
from mtrain_cli.simulation.calibration import HIGH, LOW, VALUE
from mtrain_cli.simulation.expert_cost import ComputeCost, ExpertLoads, LayerExperts, parse_loads
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


EXPERTS_MODEL = compose(["model=qwen3_30b_a3b"]).model


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 3.0])
def test_loads_add_up_and_no_expert_computes_a_token_twice(exponent):
    (pairs,) = ExpertLoads(exponent).pairs(1000, 128, 8)
    assert pairs.sum() == pytest.approx(8000)
    assert pairs.max() <= 1000
    assert list(pairs) == sorted(pairs, reverse=True)
    assert (pairs == pairs[0]).all() == (exponent == 0)


def busiest(loads: ExpertLoads, bound: str) -> float:
    (totals,) = loads.dealt(1000, 128, 8, 8, bound).sum(-1)
    assert totals.sum() == pytest.approx(8000)
    return totals.max() / totals.mean()


def test_popular_experts_are_dealt_evenly_at_random_or_to_one_worker():
    loads = ExpertLoads(1.0)
    low, value, high = (busiest(loads, bound) for bound in (LOW, VALUE, HIGH))
    assert 1 < low < 1.2 < value < 0.8 * high
    first = loads.pairs(1000, 128, 8)[0, :16].sum()
    assert high == pytest.approx(first / 1000)
    assert loads.busiest(128, 8, 8) == pytest.approx(value, rel=0.01)
    assert busiest(ExpertLoads(), HIGH) == 1.0, "equal loads need no deal"


def profile(folder, tokens_LE) -> None:
    """Write a profile of one step with the loads of one rank."""
    rows = np.zeros(tokens_LE.size, expert_loads.ROW)
    rows["layer"], rows["expert"] = (n.ravel() for n in np.indices(tokens_LE.shape))
    rows["tokens"] = tokens_LE.ravel()
    folder.mkdir()
    record_files.write_part(rows, folder, 0, expert_loads.LOAD_PARTS)
    record_files.join_parts(folder, expert_loads.LOAD_PARTS, expert_loads.LOADS)
    facts = expert_loads.expert_facts(EXPERTS_MODEL, 1)
    record_files.write_summary(folder, {"cases": [facts], "complete": True})


def test_loads_of_a_profile_are_those_of_each_expert(tmp_path):
    tokens = np.random.default_rng(0).integers(1, 100, (3, 128))
    profile(tmp_path / "run", tokens)
    loads = parse_loads(str(tmp_path / "run"), EXPERTS_MODEL)
    assert "3 layers and 1 steps" in loads.source
    share = tokens / tokens.sum(1, keepdims=True)
    np.testing.assert_allclose(loads.pairs(500, 128, 8), share * 4000, rtol=1e-5)
    for bound in (LOW, VALUE, HIGH):  # the workers of all experts are known
        found = loads.dealt(500, 128, 8, 4, bound)
        np.testing.assert_allclose(found, (share * 4000).reshape(3, 4, 32), rtol=1e-5)
    assert parse_loads("zipf:0.5", EXPERTS_MODEL).exponent == 0.5
    assert parse_loads(None, EXPERTS_MODEL) == ExpertLoads()


def test_a_profile_of_other_experts_is_refused(tmp_path):
    profile(tmp_path / "run", np.ones((2, 200), int))
    with pytest.raises(ConfigError, match=r"has loads of 200 experts, but model\.moe\.experts=128"):
        parse_loads(str(tmp_path / "run"), EXPERTS_MODEL)


@pytest.mark.parametrize("text", ["zipf:-1", "zipf:x", "zipf:9", "zipf:nan", "nowhere", ""])
def test_other_loads_are_refused(text):
    with pytest.raises(ConfigError, match=f"expert_loads={text}: .*zipf:X"):
        parse_loads(text, EXPERTS_MODEL)


def test_loads_need_experts():
    dense = replace(EXPERTS_MODEL, moe=replace(EXPERTS_MODEL.moe, experts=0))
    with pytest.raises(ConfigError, match=r"expert_loads=zipf:1: .* has no experts"):
        parse_loads("zipf:1", dense)
