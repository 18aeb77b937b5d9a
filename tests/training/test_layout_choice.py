"""``topology.layout=auto`` compares the costs of two layouts, and takes the cheaper one."""

from __future__ import annotations

import numpy as np
import pytest

from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.composition.compose import compose
from mtrain_cli.parallel.dispatch import RowPrices
from mtrain_cli.parallel.layout import Balanced, make_layout
from mtrain_cli.training import layout_choice
from mtrain_cli.training.layout_choice import choose_layout

SEQ = 16384
WINDOW = ("mask=sliding_window", "mask.window=512")


def chosen(*words: str, cp: int = 4, per_node: int = 4):
    config = compose([f"seq={SEQ}", "model=tiny", "data.document_mask=false", *words], plan=True)
    return choose_layout(config, cp, per_node)


def test_a_configured_layout_is_kept():
    for name in ("contiguous", "zigzag", "striped"):
        found = chosen(*WINDOW, f"topology.layout={name}")
        assert (found.layout.name, found.balancer, found.exchange) == (name, None, None)
    found = chosen("topology.layout=balanced")
    assert found.layout.name == "balanced"
    assert found.balancer is not None
    assert found.reason == "as configured"
    assert found.exchange == "group_cast"
    assert chosen("topology.layout=balanced", "topology.exchange=ring").exchange is None
    assert chosen("topology.layout=balanced", "sparsity=vertical_slash").exchange is None


@pytest.mark.parametrize(("per_node", "name"), [(4, "group_cast"), (2, "hierarchical_group_cast")])
def test_auto_balances_a_window_and_casts_its_rows(per_node, name):
    found = chosen(*WINDOW, per_node=per_node)
    assert isinstance(found.layout, Balanced)
    assert found.exchange == name
    assert found.balancer.per_node == per_node
    assert f"with balanced and {name}" in found.reason
    assert "zigzag and whole shards" in found.reason


@pytest.mark.parametrize(
    "words",
    [
        (),  # causal
        (*WINDOW, "topology.exchange=ring"),
        (*WINDOW, "topology.exchange=all_gather"),
        (*WINDOW, "sparsity=vertical_slash"),
        (*WINDOW, "topology.exchange=ulysses"),
    ],
)
def test_auto_keeps_its_layout_where_rows_cannot_be_saved(words):
    found = chosen(*words)
    assert found.layout.name in ("zigzag", "striped")
    assert (found.balancer, found.exchange, found.reason) == (None, None, "")


def test_auto_keeps_its_layout_where_the_balanced_one_costs_as_much():
    found = chosen("mask=prefix_lm", "mask.prefix=64", "topology.exchange=group_cast", "seq=512k")
    assert found.layout.name == "zigzag"
    assert "zigzag and group_cast" in found.reason


@pytest.mark.parametrize(("cost", "wins"), [(0.979, True), (0.98, False), (0.981, False)])
def test_the_balanced_layout_must_win_by_two_percent(monkeypatch, cost, wins):
    monkeypatch.setattr(layout_choice, "_static_costs", lambda *_, **__: (1.0, cost))
    assert (chosen(*WINDOW).balancer is not None) == wins


def test_auto_states_the_costs_of_both():
    """Counted by definition: the pairs of each rank, and a price for each row that it receives."""
    found = chosen(*WINDOW)
    mask = MaskRule.of(compose([f"seq={SEQ}", *WINDOW], plan=True)).undivided(SEQ, SEQ)
    low, high = mask.low[0], mask.high[0]
    price = RowPrices.on(None, 4, 2)

    def cost(layout, *, whole: bool) -> float:
        costs = []
        for rank in range(4):
            own = layout.positions(rank)
            rows = SEQ - len(own)
            if not whole:
                blocks = np.zeros(SEQ // 128, bool)
                for position in own:
                    blocks[low[position] // 128 : (high[position] - 1) // 128 + 1] = True
                blocks[own // 128] = False
                rows = 128 * int(blocks.sum())
            costs.append(int((high - low)[own].sum()) + price.inner * rows)
        return max(costs) / (mask.pairs / 4)

    zigzag = make_layout("zigzag", 4, SEQ, 128)
    now, balanced = cost(zigzag, whole=True), cost(found.layout, whole=False)
    assert f"costs {balanced:.2f} of its mean pairs" in found.reason
    assert found.reason.endswith(f"zigzag and whole shards {now:.2f}")
    assert balanced < 0.5 * now


@pytest.mark.parametrize("ulysses", [3, 8])
def test_a_wrong_number_of_ulysses_workers_is_left_to_the_exchange(ulysses):
    found = chosen("topology.layout=balanced", f"topology.ulysses={ulysses}")
    assert found.layout.name == "balanced"


def test_groups_of_workers_that_cross_nodes_are_left_to_the_exchange():
    """Two of nine workers of a node cannot share heads without a group across nodes."""
    words = ("topology.layout=balanced", "topology.ulysses=2", "seq=36k")
    assert chosen(*words, cp=18, per_node=9).balancer.heads == 1


def test_layers_with_different_masks_are_balanced_together():
    found = chosen(*WINDOW, "mask.full_every=2", "model.num_layers=4")
    assert found.balancer.layers == (2, 2)


def test_a_configured_chunk_is_that_of_the_balanced_layout():
    for layout in ("balanced", "auto"):
        words = (*WINDOW, f"topology.layout={layout}", "topology.balanced_chunk=1k")
        found = chosen(*words)
        assert (found.layout.name, found.layout.block_size) == ("balanced", 1024)
        assert found.balancer.chunk == 1024
    assert chosen(*WINDOW).layout.block_size == 512
