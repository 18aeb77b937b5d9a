"""The work of a step without attention: micro-batches and the sizes of measurements."""

from __future__ import annotations

import dataclasses

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.cluster import load_cluster
from mtrain_cli.simulation.calibration import LOSS
from mtrain_cli.simulation.non_attention_cost import DEVICE_ROWS, NonAttentionCost, rounds
from mtrain_cli.simulation.scenario import plan_on


@pytest.mark.parametrize("shard", ["full", "gradients", "optimizer"])
@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_rounds_cover_a_step_and_reduce_what_the_shards_need(shard, micro_batches):
    """`full` gathers weights in every pass; else the first micro-batch gathers them once."""
    found = rounds(shard, micro_batches)
    assert sum(one.times for one in found) == micro_batches
    gathers = sum(one.times * (one.forward + one.backward) for one in found)
    assert gathers == (2 * micro_batches if shard == "full" else 1)
    reduces = sum(one.times * one.reduced for one in found)
    assert reduces == (1 if shard == "optimizer" else micro_batches)
    assert found[-1].reduced


def test_a_tiled_layer_is_measured_at_its_tile_unless_a_tile_is_launch_bound():
    config = compose(["model=qwen3b", "seq=128k", "train.tile_mib=0"])
    cost = NonAttentionCost.of(plan_on(load_cluster("h200_1x8"), config, workers=4))
    layer, tokens = "forward", 32768
    assert cost.tokens == tokens
    for rows, size in ((tokens, tokens), (8192, 8192), (512, DEVICE_ROWS)):
        tiled = dataclasses.replace(cost, rows=rows)
        assert tiled.size(layer) == size
        assert tiled.size(LOSS) == tokens
