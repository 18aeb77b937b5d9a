"""A placement says in which order an all-to-all of heads delivers tokens, and how to sort them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mtrain_cli.parallel.layout import Balanced, Placement, make_layout

CPU = torch.device("cpu")


# Under a balanced layout, each group of ranks has an order of its own.
BALANCED = Balanced.of(np.array([0, 3, 1, 4, 2, 5, 2, 3, 1, 5, 0, 4]), 6, 96, 8)


@pytest.mark.parametrize("layout", [make_layout("zigzag", 6, 96, 4), BALANCED])
def test_the_order_sorts_the_tokens_of_the_ranks_that_share_heads(layout):
    placement = Placement(layout, heads=3)
    for shard in (1, 0, 1):  # the second shard again, after the first
        ranks = range(3 * shard, 3 * shard + 3)
        delivered = torch.cat([torch.from_numpy(layout.positions(rank)) for rank in ranks])
        order, inverse = placement.token_order(shard, CPU)
        sorted_tokens = delivered[order]
        assert sorted_tokens.tolist() == placement.inside.positions(shard).tolist()
        assert torch.equal(sorted_tokens[inverse], delivered)


def test_without_shared_heads_the_layout_stays():
    layout = make_layout("zigzag", 4, 64, 4)
    assert Placement(layout).inside is layout
