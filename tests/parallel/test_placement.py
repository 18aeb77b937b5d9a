"""A placement says in which order an all-to-all of heads delivers tokens, and how to sort them."""

from __future__ import annotations

import pytest
import torch

from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.placement import Placement

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped"])
def test_the_order_sorts_the_tokens_of_the_ranks_that_share_heads(name):
    layout = make_layout(name, 6, 96, 4)
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
