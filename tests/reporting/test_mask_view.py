"""The counts and the picture of a mask equal its dense table."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from attention.dense_problems import random_slices

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.config.mask_settings import MaskConfig
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.parallel.cast_rows import CastRows
from mtrain_cli.parallel.dispatch import Balancer, RowPrices
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.reporting.mask_view import LayoutShare, density, holders, share_of, views

WINDOW = MaskRule(False, MaskConfig.sliding(300))
CAUSAL = MaskRule(False)


@pytest.mark.parametrize("layout_name", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("seed", range(4))
def test_shares_of_workers(layout_name, seed):
    layout = make_layout(layout_name, 3, 50, 1)  # single tokens, so rows travel one by one
    padded = layout.padded_seq
    slices = random_slices(np.random.default_rng(seed), 50, 5)
    mask = SequenceMask.from_slices(slices, 50, padded)
    seen = mask.spans(np.arange(padded), np.arange(padded)).seen()
    share = share_of(mask, layout)
    pairs, received = [], []
    for rank in range(3):
        own = layout.positions(rank)
        pairs.append(seen[own].sum())
        received.append(np.delete(seen[own].any(0), own).sum())
    assert share.traffic.pairs.tolist() == pairs
    assert share.traffic.received.tolist() == received
    assert share.remote_share == pytest.approx(sum(received) / (50 * 2))
    assert share.imbalance == pytest.approx(max(pairs) / np.mean(pairs))
    wanted = (share.traffic.pairs + 250 * share.traffic.received) / np.mean(pairs)
    assert share.costs == pytest.approx(wanted.tolist())


def all_layouts(seq: int = 8192, workers: int = 4, **more) -> dict[str, LayoutShare]:
    (view,) = views([(WINDOW, 1)], seq, workers, **more)
    return {share.layout.name: share for share in view.shares}


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped", "balanced"])
def test_the_rows_that_travel_are_those_of_a_group_cast(name):
    share = all_layouts()[name]
    mask = WINDOW.undivided(8192, share.layout.padded_seq)
    casts = [CastRows.make(share.layout, [mask], r, [range(4)]).casts[0] for r in range(4)]
    assert share.traffic.sent.T.tolist() == [list(cast.received) for cast in casts]
    assert share.traffic.received.any()


def test_between_nodes_a_row_enters_a_node_once():
    mask = CAUSAL.undivided(8192, 8192)
    striped = make_layout("striped", 4, 8192, 128)
    flat, nodes = (share_of(mask, striped, per_node).traffic for per_node in (None, 2))
    assert not flat.outer.any()
    # Both ranks of a node need nearly the same rows of the other node. Each enters the node once.
    across = flat.sent[:2, 2:].sum() + flat.sent[2:, :2].sum()
    assert nodes.outer.sum() == pytest.approx(across / 2, rel=0.05)
    assert nodes.received.tolist() == pytest.approx(flat.received.tolist(), rel=0.05)


def test_the_balanced_layout_has_the_lowest_cost_over_all_kinds_of_layers():
    prices = RowPrices(250, 1500)
    kinds = [(WINDOW, 5), (CAUSAL, 1)]
    window, full = views(kinds, 64 * 1024, 4, prices=prices)
    assert (window.title, full.title) == (
        "sliding_window, window 300, 5 of 6 layers",
        "causal, 1 of 6 layers",
    )
    costs = {}
    for one, other in zip(window.shares, full.shares, strict=True):
        assert (holders(one.layout) == holders(other.layout)).all()
        both = 5 * one.traffic.cost(*prices) + other.traffic.cost(*prices)
        costs[one.layout.name] = both.max()
    assert costs["balanced"] == min(costs.values())
    assert costs["balanced"] < costs["contiguous"]
    owners = [
        Balancer(4, 64 * 1024, prices=prices, layers=layers).layout([[window.mask], [full.mask]])
        for layers in ((5, 1), (1, 5))
    ]
    assert owners[0] != owners[1]
    assert window.shares[-1].layout == owners[0]


def test_prices_and_nodes_change_the_cost():
    cheap, dear = (all_layouts(prices=RowPrices(n, n))["striped"] for n in (0, 1000))
    assert max(cheap.costs) == pytest.approx(cheap.imbalance)
    assert max(dear.costs) > 2
    near, far = (all_layouts(per_node=n, prices=RowPrices(10, 5000))["contiguous"] for n in (4, 1))
    assert max(far.costs) > max(near.costs)


def test_without_time_to_balance_the_other_layouts_remain(monkeypatch):
    assert len(all_layouts()) == 4
    monkeypatch.setattr("mtrain_cli.reporting.mask_view._MOST_CHUNKS", 8)
    assert set(all_layouts()) == {"contiguous", "zigzag", "striped"}


def test_what_cannot_be_counted_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"^topology\.gpus_per_node=3: must divide .* 4$"):
        views([(WINDOW, 1)], 8192, 4, per_node=3)
    monkeypatch.setattr("mtrain_cli.reporting.mask_view._MOST_COUNTED", 100)
    with pytest.raises(ConfigError, match=r"^seq=8192: with 4 workers, there are too many blocks"):
        views([(WINDOW, 1)], 8192, 4)


@pytest.mark.parametrize(("length", "cells"), [(60, 60), (60, 7), (5, 128)])
def test_the_density_of_cells(length, cells):
    slices = random_slices(np.random.default_rng(1), length, 5)
    mask = SequenceMask.from_slices(slices, length, length + 2)
    everywhere = np.arange(length)
    seen = mask.spans(everywhere, everywhere).seen()
    edges = np.unique(np.linspace(0, length, cells + 1).astype(int))
    wanted = [
        [seen[a:b, c:d].mean() for c, d in itertools.pairwise(edges)]
        for a, b in itertools.pairwise(edges)
    ]
    np.testing.assert_allclose(density(mask, cells), wanted)


def test_a_mask_without_pairs_has_no_imbalance():
    mask = SequenceMask.from_slices([], 8, 8)
    assert share_of(mask, make_layout("contiguous", 2, 8, 4)).imbalance == 1.0
    assert share_of(mask, make_layout("contiguous", 1, 8, 4)).remote_share == 0.0
