"""Loads of experts keep their sum, and uneven loads take longer though the FLOP are the same."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.simulation.expert_cost import ExpertLoads, expert_work, parse_loads
from mtrain_cli.training.flops import EXPERTS_IN, EXPERTS_OUT, layer_shapes

QWEN = compose(["model=qwen3_30b_a3b"]).model


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 3.0])
def test_loads_add_up_and_no_expert_computes_a_token_twice(exponent):
    pairs = ExpertLoads(exponent).pairs(1000, 128, 8)
    assert pairs.sum() == pytest.approx(8000)
    assert pairs.max() <= 1000
    assert list(pairs) == sorted(pairs, reverse=True)
    assert (pairs == pairs[0]).all() == (exponent == 0)


def test_flop_are_those_of_the_chosen_experts_and_do_not_depend_on_loads():
    tokens = 4096
    shapes = layer_shapes(QWEN)
    chosen = sum(shapes[n][1] * shapes[n][2] for n in (EXPERTS_IN, EXPERTS_OUT)) * 8
    for loads in (ExpertLoads(), ExpertLoads(1.0)):
        forward, again, backward = expert_work(QWEN, tokens, 2, loads)
        flop = [sum(each.flop * each.times for each in w.products) for w in (forward, backward)]
        assert flop[0] == pytest.approx(2 * tokens * (chosen + 128 * 2048), rel=1e-3)
        assert flop[1] == pytest.approx(2 * flop[0], rel=1e-9)
        assert len(again.products) < len(forward.products)


def seconds(loads: ExpertLoads, tokens: int) -> float:
    """Return the time of the grouped products on a GPU of 700 TFLOP/s and 4 TB/s."""
    products = expert_work(QWEN, tokens, 2, loads)[0].products[1:]
    return sum(each.times * max(each.flop / 7e14, each.moved / 4e12) for each in products)


def test_uneven_loads_take_longer_where_experts_have_few_tokens():
    assert seconds(ExpertLoads(1.0), 4096) > 1.1 * seconds(ExpertLoads(), 4096)
    assert seconds(ExpertLoads(1.0), 2**20) < 1.01 * seconds(ExpertLoads(), 2**20)


def test_loads_of_a_run_have_its_largest_load(tmp_path):
    lines = [{"step": n, "expert_load_by_layer": [2.0, 4.0]} for n in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    loads = parse_loads(str(tmp_path), QWEN)
    assert loads.largest(128, 8) == pytest.approx(3.0, rel=1e-3)
    assert "3.00 times the mean" in loads.source
    assert parse_loads("zipf:0.5", QWEN).exponent == 0.5
    assert parse_loads(None, QWEN) == ExpertLoads()


@pytest.mark.parametrize("text", ["zipf:-1", "zipf:x", "zipf:9", "zipf:nan", "nowhere"])
def test_other_loads_are_refused(text):
    with pytest.raises(ConfigError, match=f"--expert-loads {text}: .*zipf:X"):
        parse_loads(text, QWEN)


def test_loads_need_experts():
    dense = replace(QWEN, moe=replace(QWEN.moe, experts=0))
    with pytest.raises(ConfigError, match=r"--expert-loads zipf:1: .* has no experts"):
        parse_loads("zipf:1", dense)
