"""Replays: work does not depend on padding or workers; bytes are the schedule's; errors."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from simulation.counting import count_work
from simulation.recordings import BLOCK, HEADS, PADDED, SEQ, SETUP, bitmap, lines, masks, record

from mtrain_cli.attention.index import BlockBitmap, Index, VerticalSlash
from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.attention.mask_rule import FullLayers, MaskRule
from mtrain_cli.attention.mask_tables import MaskTables
from mtrain_cli.attention.named_masks import CAUSAL, SlidingWindow
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.parallel import cast_rows
from mtrain_cli.parallel.dispatch import Balancer, RowPrices
from mtrain_cli.parallel.exchange import Plan, make_exchange
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.parallel.schedule import ScheduleOptions, make_schedule
from mtrain_cli.records.index_file import load_indices, save_indices
from mtrain_cli.simulation.what_if import (
    InvalidSetup,
    ReplaySetup,
    degrees,
    make_case,
    replay,
    resized,
)

LAYOUTS = ("contiguous", "zigzag", "striped")
KINDS = (SlidingWindow(50), CAUSAL)


@pytest.mark.parametrize("make", [lines, bitmap])
@pytest.mark.parametrize("padded", [1008, PADDED, 1344, 2048])
def test_padding_does_not_change_the_work(make, padded):
    index: Index = make(1)
    fitted = resized(index, padded // BLOCK)
    other = [mask.repadded(padded) for mask in masks()]
    bitmaps = make is bitmap
    before, after = (
        i.counts(MaskTables.make(m, BLOCK, bitmap=bitmaps))
        for i, m in ((index, masks()), (fitted, other))
    )
    for name in ("pairs", "blocks", "columns", "column_pairs"):
        assert torch.equal(getattr(before, name), getattr(after, name)), name
    assert fitted.blocks * BLOCK == padded
    if not bitmaps:
        assert bool(
            (
                (fitted.columns < SEQ)
                | (fitted.columns == padded)
                | (fitted.columns < min(padded, PADDED))
            ).all()
        )


@pytest.mark.parametrize("pattern", ["vertical_slash", "moba", "dense"])
def test_work_is_conserved_and_every_worker_gets_its_share(tmp_path, pattern):
    recorded = load_indices(record(tmp_path, pattern))
    setups = [
        *setups_of(LAYOUTS, ("ring", "all_gather", "ulysses"), (1, 2, 4), 8),
        *setups_of(LAYOUTS, ("hierarchical_ring",), (6, 12), 2),
    ]
    totals = set()
    for found in replay(recorded, pattern, setups):
        assert found.layers == (0, 3, 5)
        assert found.padded_seq >= SEQ
        assert found.shares.shape == (found.setup.workers,)
        assert found.shares.sum() == pytest.approx(1)
        totals |= {int(of_pass.pairs.sum()) for of_pass in found.passes.values()}
    if pattern == "dense":
        expected = 3 * HEADS * sum(mask.pairs for mask in masks())
    else:
        work = MaskTables.make(masks(), BLOCK, bitmap=pattern == "moba")
        expected = sum(
            int(recorded.index(pattern, layer).counts(work).pairs.sum()) for layer in (0, 3, 5)
        )
    assert totals == {expected}


def setups_of(layouts, exchanges, workers, per_node):
    product = itertools.product(workers, layouts, exchanges)
    return [ReplaySetup(*names, count, per_node) for count, *names in product]


def test_replaying_the_recorded_setup_gives_the_recorded_work(tmp_path):
    recorded = load_indices(record(tmp_path, "vertical_slash"))
    (found,) = replay(
        recorded, "vertical_slash", [ReplaySetup("striped", "ring", 4, 4)], layers=[3]
    )
    layout, schedule = (
        make_layout("striped", 4, SEQ, BLOCK, unit=BLOCK),
        make_schedule("ring", ScheduleOptions(4, 4)),
    )
    for name, work in count_work(schedule, layout, masks(), lines(3), heads=HEADS).items():
        assert found.passes[name].pairs.tolist() == work.total_pairs.tolist()
        assert found.passes[name].degrees == degrees(work)


def test_sent_bytes_are_those_of_the_messages(tmp_path):
    recorded = load_indices(record(tmp_path, "vertical_slash", "moba"))
    ring, gather = setups_of(("striped",), ("ring", "all_gather"), (4,), 8)
    alone = ReplaySetup("striped", "ring", 1, 8)
    keys = (
        3 * (2 * PADDED // 4) * 2 * 2 * 32
    )  # three shards of two sequences: numbers of keys and values
    for pattern in ("vertical_slash", "moba"):
        by_ring, by_gather, nothing = (
            f.passes for f in replay(recorded, pattern, [ring, gather, alone])
        )
        assert (by_gather["forward"].sent, by_gather["backward"].sent) == (2 * keys, (2 + 4) * keys)
        columns = 0.0
        if pattern == "vertical_slash":
            columns = (
                2 * 3 / 4 * (2 * 2 * HEADS * 128 * 32)
            )  # an all-reduce of a tile of columns for every head
        assert (by_ring["forward"].sent, by_ring["backward"].sent) == (
            2 * (keys + columns),
            (2 + 4) * keys + 4 * columns,
        )
        assert (nothing["forward"].sent, nothing["backward"].sent) == (0, 0)


@pytest.mark.parametrize(
    ("setup", "about", "said"),
    [
        (
            ReplaySetup("striped", "ring", 63, 63),
            "workers",
            "1000 tokens in blocks of 16 are too few for 63 workers; allowed: 1 to 62",
        ),
        (
            ReplaySetup("striped", "ring", 12, 8),
            "per_node",
            "does not divide 12 workers; allowed: 1, 2, 3, 4, 6, 12",
        ),
    ],
)
def test_impossible_configurations_give_the_reason(tmp_path, setup, about, said):
    recorded = load_indices(record(tmp_path, "vertical_slash"))
    with pytest.raises(InvalidSetup) as error:
        replay(recorded, "vertical_slash", [setup])
    assert (error.value.about, error.value.value, error.value.reason) == (
        about,
        getattr(setup, about),
        said,
    )


def test_stripes_that_cut_blocks_are_refused(tmp_path):
    save_indices(
        tmp_path / "index.npz",
        replace(SETUP, block_size=8),
        masks(),
        [("vertical_slash", 0, lines(0))],
    )
    with pytest.raises(
        InvalidSetup, match="its stripes of 8 tokens, as recorded, do not hold whole blocks of 16"
    ):
        replay(
            load_indices(tmp_path / "index.npz"),
            "vertical_slash",
            [ReplaySetup("striped", "ring", 2, 8)],
        )


def test_a_partial_bitmap_and_wrong_heads_are_refused(tmp_path):
    whole, setup = bitmap(0), ReplaySetup("striped", "ring", 2, 8)
    part = BlockBitmap(BLOCK, whole.blocks, whole.bits[:, :, ::2], whole.rows[::2])
    save_indices(tmp_path / "index.npz", SETUP, masks(), [("moba", 0, part)])
    with pytest.raises(
        ConfigError, match="layer 0 of moba has 32 of 64 query blocks; a replay needs all of them"
    ):
        replay(load_indices(tmp_path / "index.npz"), "moba", [setup])
    save_indices(tmp_path / "index.npz", replace(SETUP, heads=8), masks(), [("moba", 0, whole)])
    with pytest.raises(ConfigError, match="layer 0 of moba is damaged"):
        replay(load_indices(tmp_path / "index.npz"), "moba", [setup])


def test_a_dense_layer_may_come_before_the_sparse_ones(tmp_path):
    full = FullLayers(masks(), frozenset({0}), 2)
    entries = [("vertical_slash", 0, None), ("vertical_slash", 1, lines(1))]
    save_indices(tmp_path / "index.npz", SETUP, masks(), entries, full)
    recorded, setup = load_indices(tmp_path / "index.npz"), ReplaySetup("contiguous", "ring", 3, 1)
    (both,), (dense,), (sparse,) = (
        replay(recorded, "vertical_slash", [setup], layers) for layers in (None, [0], [1])
    )
    for name, of_both in both.passes.items():
        pairs = dense.passes[name].pairs.sum(), sparse.passes[name].pairs.sum()
        assert of_both.pairs.sum() == sum(pairs)
        assert pairs[0] == HEADS * sum(mask.pairs for mask in masks()) > pairs[1]


@pytest.mark.parametrize("exchange", ["ring", "group_cast"])
@pytest.mark.parametrize("layout", ["zigzag", "balanced"])
def test_each_kind_of_layer_is_replayed_under_its_masks(tmp_path, layout, exchange):
    """The mean over layers is that of the kinds; a balanced layout is made for both kinds."""
    windows, causal = ([MaskRule(True, of).undivided(SEQ, PADDED)] for of in KINDS)
    full = FullLayers(causal, frozenset({2}), 3)
    save_indices(
        tmp_path / "index.npz", SETUP, windows, [("dense", n, None) for n in range(3)], full
    )
    setup = ReplaySetup(layout, exchange, 4, 4)
    recorded = load_indices(tmp_path / "index.npz")
    (whole,), (first,), (last,) = (
        replay(recorded, "dense", [setup], layers) for layers in (None, [0], [2])
    )
    for name, of_all in whole.passes.items():
        for_window, for_full = first.passes[name], last.passes[name]
        assert int(for_window.pairs.sum()) == HEADS * windows[0].pairs
        assert int(for_full.pairs.sum()) == HEADS * causal[0].pairs
        assert (of_all.pairs == 2 * for_window.pairs + for_full.pairs).all()
        assert of_all.sent == pytest.approx((2 * for_window.sent + for_full.sent) / 3)
        worker = (2 * for_window.degrees.worker + for_full.degrees.worker) / 3
        assert of_all.degrees.worker == pytest.approx(worker)
        assert (exchange == "group_cast") == (for_window.sent < for_full.sent)
    if layout == "balanced":
        prices = RowPrices.on(None, HEADS, 2)
        made = Balancer(4, SEQ, per_node=4, prices=prices, layers=(2, 1)).layout([windows, causal])
        held = [made.positions(rank) for rank in range(4)]
        tokens = [positions[positions < SEQ] for positions in held]
        assert last.passes["forward"].pairs.tolist() == [
            HEADS * int((positions + 1).sum()) for positions in tokens
        ]


@pytest.mark.parametrize("block", [None, 32])
@pytest.mark.parametrize("layout", [*LAYOUTS, "balanced"])
@pytest.mark.parametrize(("exchange", "per_node"), [("group", 4), ("hierarchical_group", 2)])
def test_the_rows_moved_are_those_of_the_plans(monkeypatch, exchange, per_node, layout, block):
    """An index moves its own blocks, which here are longer than those of dense attention."""
    index = request = None
    if block:
        blocks = PADDED // block
        slashes, none = torch.ones(2, HEADS, blocks, dtype=torch.bool), torch.empty(2, HEADS, 0)
        index, request = (
            VerticalSlash(block, blocks, slashes, none.int()),
            IndexRequest(block, False),
        )
    windows = [MaskRule(False, SlidingWindow(n)).undivided(SEQ, PADDED) for n in (40, 100)]
    setup = ReplaySetup(layout, f"{exchange}_cast", 4, per_node)
    counted: list[object] = []
    count = cast_rows.wanted_rows
    monkeypatch.setattr(cast_rows, "wanted_rows", lambda *of: (counted.append(of), count(*of))[1])
    case = make_case(replace(SETUP, block_size=32), windows, setup, index)
    assert len(counted) == 1, "it takes most of the time of a prediction"
    shares = []
    for rank in range(4):
        group = ContextGroup(rank, tuple(range(4)), per_node=per_node)
        run = make_exchange(case.choice.name, case.layout, group)
        plan = Plan.make(run, [w.repadded(case.layout.padded_seq) for w in windows], request)
        shares.append(plan.tiles.rows[0].shares)
    assert np.array_equal(np.array(case.sizes.casts), np.array(shares).max(0))
    assert 0 < max(received for _, received in case.sizes.casts) <= 3


def test_a_recorded_chunk_is_that_of_the_replayed_layout():
    setup = ReplaySetup("balanced", "group_cast", 2, 2)
    assert make_case(SETUP, masks(), setup, None).layout.block_size != 32
    recorded = replace(SETUP, chunk=32)
    assert make_case(recorded, masks(), setup, None).layout.block_size == 32
    chunks = -(-SEQ // 32)
    with pytest.raises(InvalidSetup, match=f"chunks of 32 are too few .*; allowed: 1 to {chunks}"):
        make_case(recorded, masks(), replace(setup, workers=chunks + 1, per_node=1), None)
    zigzag = replace(setup, layout="zigzag", workers=chunks + 1, per_node=1)
    make_case(recorded, masks(), zigzag, None)
