"""The tokens of ranks that share heads come into the order of the sequence, and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.placement import Placement

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["zigzag", "striped"])
def test_tokens_of_ranks_that_share_heads_are_sorted_and_return(name):
    layout = make_layout(name, 6, 96, 4)
    placement = Placement(layout, heads=3)
    for shard in (0, 1):
        delivered = np.concatenate([layout.positions(3 * shard + rank) for rank in range(3)])
        order, inverse = placement.token_order(shard, CPU)
        ordered = delivered[order]
        assert (np.diff(delivered) < 0).any()
        np.testing.assert_array_equal(ordered, placement.inside.positions(shard))
        np.testing.assert_array_equal(ordered[inverse], delivered)
        assert placement.token_order(shard, CPU)[0] is order
