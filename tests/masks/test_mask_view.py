"""The counts and the picture of a mask equal its dense table."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from attention.dense_problems import random_slices

from mtrain_cli.attention.mask import SequenceMask, SliceKind
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.attention.named_masks import SlidingWindow
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.parallel.cast_rows import CastRows
from mtrain_cli.parallel.dispatch import RowPrices
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.schedule import ScheduleOptions, make_schedule
from mtrain_cli.training.layout_choice import make_balancer
from mtrain_extras.masks.page import LayoutShare, MaskView, density, holders, share_of, views

WINDOW = MaskRule(False, SlidingWindow(300))
WINDOW_WORDS = ("mask=sliding_window", "mask.window=300")


def views_of(*words: str, workers: int = 4, per_node: int | None = None) -> list[MaskView]:
    return views(compose(list(words), plan=True), workers, per_node)


def all_layouts(*words: str, **more) -> dict[str, LayoutShare]:
    (view,) = views_of(*WINDOW_WORDS, *(words or ("seq=8k",)), **more)
    return {share.layout.name: share for share in view.shares}


@pytest.mark.parametrize("layout_name", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("seed", range(4))
def test_shares_of_workers(layout_name, seed):
    layout = make_layout(layout_name, 3, 50, 4)
    padded = layout.padded_seq
    slices = random_slices(np.random.default_rng(seed), 50, 5)
    mask = SequenceMask.from_slices(slices, 50, padded)
    seen = mask.spans(np.arange(padded), np.arange(padded)).seen()
    share = share_of(mask, layout)
    moved = []
    for rank in range(3):
        own = layout.positions(rank)
        assert share.traffic.pairs[rank] == seen[own].sum()
        assert share.slices[rank] == len(mask.spans(own, np.arange(padded)).slices)
        schedule = make_schedule("group_cast", ScheduleOptions(3, 3))
        rows, _ = CastRows.make(layout, [mask], rank, schedule)
        moved.append(sum(rows.casts[0].received))
    assert share.traffic.received.tolist() == moved
    assert share.remote == pytest.approx(np.mean(moved) / (2 * layout.tokens_per_worker))
    wanted = (share.traffic.pairs + 250 * share.traffic.received) / share.traffic.pairs.mean()
    assert share.costs == pytest.approx(wanted.tolist())


def test_an_index_moves_whole_blocks():
    """A query of rank 1 sees one key of rank 0."""
    layout = make_layout("contiguous", 2, 512, 4)
    mask = SequenceMask.from_slices([(256, 257, 255, 257, SliceKind.FULL)], 512, 512)
    # Dense attention moves a 16th of a shard, or less.
    assert share_of(mask, layout).traffic.received.tolist() == [0, 16]
    assert share_of(mask, layout, 64).traffic.received.tolist() == [0, 64]
    assert share_of(mask, layout, 64).remote == 64 / 512


def test_between_nodes_the_rows_are_those_of_a_hierarchical_group_cast():
    share = all_layouts(per_node=2)["striped"]
    mask = WINDOW.undivided(8192, 8192)
    wanted = np.zeros(4, int)
    for rank in range(4):
        schedule = make_schedule("hierarchical_group_cast", ScheduleOptions(4, 2))
        for cast in CastRows.make(share.layout, [mask], rank, schedule)[0].casts:
            wanted[rank] += sum(cast.received)
    assert share.traffic.received.tolist() == wanted.tolist()
    assert share.traffic.outer.received.any()


def test_kinds_of_layers_share_the_balanced_layout_of_all():
    words = [*WINDOW_WORDS, "mask.full_every=6", "model.num_layers=6", "seq=64k"]
    window, full = views_of(*words)
    assert window.title.startswith("sliding_window, window 300, ")
    assert window.title.endswith(", 5 of 6 layers")
    assert full.title == "causal, 1 of 6 layers"
    assert full.mask.plain
    costs = {}
    for one, other in zip(window.shares, full.shares, strict=True):
        assert (holders(one.layout) == holders(other.layout)).all()
        both = 5 * one.traffic.cost(*one.prices) + other.traffic.cost(*one.prices)
        costs[one.layout.name] = both.max()
    assert costs["balanced"] == min(costs.values())
    assert costs["balanced"] < costs["contiguous"]


def test_prices_are_those_of_the_balancer():
    words = [*WINDOW_WORDS, "model=qwen3b", "seq=8k"]
    balancer = make_balancer(compose(words, plan=True), 4, 4)
    (view,) = views_of(*words)
    assert {share.prices for share in view.shares} == {balancer.prices} == {RowPrices(253, 1511)}
    cheap, dear = (
        max(share_of(view.mask, view.shares[2].layout, prices=RowPrices(n, n)).costs)
        for n in (0, 1000)
    )
    assert cheap == pytest.approx(view.shares[2].traffic.imbalance)
    assert dear > 2 * cheap


def test_ulysses_does_not_change_the_rows():
    wanted = {name: share.traffic.received.tolist() for name, share in all_layouts().items()}
    found = all_layouts("seq=8k", "topology.ulysses=2")
    assert {name: share.traffic.received.tolist() for name, share in found.items()} == wanted


def test_without_time_to_balance_the_other_layouts_remain(monkeypatch):
    assert len(all_layouts()) == 4
    monkeypatch.setattr("mtrain_extras.masks.page.MOST_CHUNKS", 8)
    assert set(all_layouts()) == {"contiguous", "zigzag", "striped"}


def test_a_configured_chunk_is_that_of_the_balanced_layout():
    words = ("seq=8k", "topology.balanced_chunk=1k", "topology.layout=balanced")
    assert all_layouts(*words)["balanced"].layout.block_size == 1024
    with pytest.raises(ConfigError, match=r"^topology\.balanced_chunk=1024: "):
        all_layouts(*words, workers=16)


def test_what_cannot_be_counted_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"^topology\.gpus_per_node=3: must divide .* 4$"):
        all_layouts(per_node=3)
    monkeypatch.setattr("mtrain_cli.parallel.cast_rows._MOST_COUNTED", 100)
    with pytest.raises(ConfigError, match=r"^seq=8192: with 4 workers, there are too many rows"):
        all_layouts()


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


def test_a_mask_without_pairs_costs_nothing():
    mask = SequenceMask.from_slices([], 8, 8)
    two, one = (share_of(mask, make_layout("contiguous", n, 8, 4)) for n in (2, 1))
    assert two.traffic.imbalance == 1.0
    assert two.costs == [0, 0]
    assert one.remote == 0.0
