"""Loads of experts keep their sum, and fall on workers as recorded or at random."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.records import expert_loads, record_files
from mtrain_cli.simulation.calibration import HIGH, LOW, VALUE
from mtrain_cli.simulation.expert_cost import ExpertLoads, parse_loads

QWEN = compose(["model=qwen3_30b_a3b"]).model


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
    expert_loads.write_loads(rows, folder, 0)
    expert_loads.join_loads(folder)
    facts = expert_loads.expert_facts(QWEN, 1)
    record_files.write_summary(folder, {"cases": [facts], "complete": True})


def test_loads_of_a_profile_are_those_of_each_expert(tmp_path):
    tokens = np.random.default_rng(0).integers(1, 100, (3, 128))
    profile(tmp_path / "run", tokens)
    loads = parse_loads(str(tmp_path / "run"), QWEN)
    assert "3 layers and 1 steps" in loads.source
    share = tokens / tokens.sum(1, keepdims=True)
    np.testing.assert_allclose(loads.pairs(500, 128, 8), share * 4000, rtol=1e-5)
    for bound in (LOW, VALUE, HIGH):  # the workers of all experts are known
        found = loads.dealt(500, 128, 8, 4, bound)
        np.testing.assert_allclose(found, (share * 4000).reshape(3, 4, 32), rtol=1e-5)
    assert parse_loads("zipf:0.5", QWEN).exponent == 0.5
    assert parse_loads(None, QWEN) == ExpertLoads()


def test_a_profile_of_other_experts_is_refused(tmp_path):
    profile(tmp_path / "run", np.ones((2, 200), int))
    with pytest.raises(ConfigError, match=r"has loads of 200 experts, but model\.moe\.experts=128"):
        parse_loads(str(tmp_path / "run"), QWEN)


@pytest.mark.parametrize("text", ["zipf:-1", "zipf:x", "zipf:9", "zipf:nan", "nowhere", ""])
def test_other_loads_are_refused(text):
    with pytest.raises(ConfigError, match=f"expert_loads={text}: .*zipf:X"):
        parse_loads(text, QWEN)


def test_loads_need_experts():
    dense = replace(QWEN, moe=replace(QWEN.moe, experts=0))
    with pytest.raises(ConfigError, match=r"expert_loads=zipf:1: .* has no experts"):
        parse_loads("zipf:1", dense)
