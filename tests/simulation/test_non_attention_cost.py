"""The work of a step without attention: the sizes of measurements."""

from __future__ import annotations

import dataclasses

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.cluster import load_cluster
from mtrain_cli.simulation.calibration import LOSS
from mtrain_cli.simulation.non_attention_cost import DEVICE_ROWS, NonAttentionCost
from mtrain_cli.simulation.scenario import plan_on


def test_a_tiled_layer_is_measured_at_its_tile_unless_a_tile_is_launch_bound():
    config = compose(["model=qwen3b", "seq=128k", "train.tile_mib=0"])
    cost = NonAttentionCost.of(plan_on(load_cluster("h200_1x8"), config, workers=4))
    layer, tokens = "forward", 32768
    assert cost.tokens == tokens
    for rows, size in ((tokens, tokens), (8192, 8192), (512, DEVICE_ROWS)):
        tiled = dataclasses.replace(cost, rows=rows)
        assert tiled.size(layer) == size
        assert tiled.size(LOSS) == tokens
