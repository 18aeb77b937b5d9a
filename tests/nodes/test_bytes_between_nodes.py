"""The bytes on the links between nodes are those of the plan, for each exchange."""

from __future__ import annotations

import numpy as np
import pytest

from nodes import bytes_table, planned_links

pytestmark = pytest.mark.timeout(200)
# Headers of Ethernet, IP, TCP and gloo, and sums of single numbers, such as the loss.
MOST_ABOVE = 0.02


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "per_node"), bytes_table.SHAPES)
@pytest.mark.parametrize("exchange", bytes_table.EXCHANGES)
def test_the_kernel_counts_the_planned_bytes_and_the_losses_are_those_of_one_process(
    exchange, nodes, per_node, text, alone, tmp_path
):
    counted = bytes_table.count(exchange, nodes, per_node, text, tmp_path)
    above = counted.links / counted.gloo.total - 1
    assert (above > 0).all()
    assert (above < MOST_ABOVE).all(), above
    assert bytes_table.largest_difference(counted.losses, alone) < 1e-6


def planned(exchange: str, text: str, *shape: int) -> np.ndarray:
    """Return what leaves each node and reaches it by the direct routes of attention."""
    words = bytes_table.settings(exchange, text)
    return np.array(planned_links.planned(words, *shape, gloo=False).attention)


@pytest.mark.parametrize(
    ("exchange", "share"), [("ring", 2 / 3), ("all_gather", 1 / 2), ("group_cast", 4 / 5)]
)
def test_a_hierarchical_exchange_sends_less_between_nodes(exchange, share, text):
    # In a ring of 2 x 2, each node sends 3 shards; in two rings of 2, each of its 2 shards once.
    shape = (4, 2) if exchange == "group_cast" else (2, 2)
    flat, hierarchical = (planned(kind + exchange, text, *shape) for kind in ("", "hierarchical_"))
    assert hierarchical.max() == pytest.approx(share * flat.max())
