"""The rows of group casts, played without processes: each needed row arrives once."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from attention.dense_problems import random_slices

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.parallel import cast_rows
from mtrain_cli.parallel.cast_rows import (
    CastRows,
    cast_shares,
    largest_shares,
    row_block,
    whole_shares,
)
from mtrain_cli.parallel.layout import Balanced, Joined, Layout, make_layout
from mtrain_cli.parallel.lowering import lower
from mtrain_cli.parallel.program import Program
from mtrain_cli.parallel.schedule import GROUP_CAST, ScheduleOptions, make_schedule

SEQ = 1000


def batches(padded: int) -> dict[str, list[SequenceMask]]:
    rng = np.random.default_rng(3)
    documents = [np.sort(rng.integers(0, n, SEQ)) for n in (40, 3)]
    near = SequenceMask.from_first(np.maximum(np.arange(padded) - 20, 0), SEQ)
    return {
        "causal": [SequenceMask.causal(SEQ, padded)],
        "documents": [SequenceMask.from_documents(documents[0], padded)],
        "window": [near.intersect(SequenceMask.from_documents(documents[0], padded))],
        "slices": [SequenceMask.from_slices(random_slices(rng, SEQ, 4), SEQ, padded)],
        "two sequences": [SequenceMask.from_documents(ids, padded) for ids in documents],
    }


KINDS = [
    ("flat", 0),
    ("flat", 2),
    ("hierarchical", 0),
    ("hierarchical", 3),
]  # 1 to 5 casts
CASES = [
    (layout, options, heads)
    for layout, options, heads in product(
        ("contiguous", "zigzag", "striped", "balanced"),
        ((1, 8), (2, 2), (3, 8), (4, 2), (6, 3), (8, 2)),
        (1, 2),
    )
    if options[0] % heads == 0 and (options[1] % heads == 0 or heads % options[1] == 0)
]


def layout_of(name: str, workers: int) -> Layout:
    if name != "balanced":
        return make_layout(name, workers, SEQ, 16)
    chunks = -(-SEQ // (16 * workers)) * workers
    owner = np.random.default_rng(workers).permutation(np.arange(chunks) % workers)
    return Balanced.of(owner, workers, SEQ, 16)


def plans(
    name: str,
    layout: Layout,
    options: tuple[int, int],
    heads: int,
    masks: list[SequenceMask],
    stages: int = 0,
) -> tuple[Layout, list[tuple[tuple[int, ...], ...]], list[CastRows]]:
    """The layout of the exchange, and for each of its ranks the peers and the rows."""
    workers, per_node = options
    exchange = "hierarchical_group_cast" if name == "hierarchical" else "group_cast"
    sizes = {"heads": heads, "stages": stages, "stages_backward": stages}
    schedule = make_schedule(exchange, ScheduleOptions(workers, per_node, **sizes))
    inside = layout if heads == 1 else Joined.of(layout, heads)
    peers = [peers_of(lower(schedule, rank)) for rank in range(0, workers, heads)]
    rows = [CastRows.make(inside, masks, r, schedule, 16)[0] for r in range(len(peers))]
    return inside, peers, rows


def peers_of(program: Program) -> tuple[tuple[int, ...], ...]:
    """Return the peers of each group cast, as groups of ranks that share heads."""
    casts = (post for post in program.posts if post.transfer.kind == GROUP_CAST)
    sharing = program.sharing
    return tuple(tuple(r // sharing for r in post.transfer.peers) for post in casts)


def seen_by(layout: Layout, rank: int, masks: list[SequenceMask]) -> set[int]:
    """The positions that the queries of a rank see, by the definition of the masks."""
    return {
        key
        for mask in masks
        for query in layout.positions(rank)
        if query < mask.length
        for low, high in zip(mask.low[:, query], mask.high[:, query], strict=True)
        for key in range(low, high)
    }


def deliver(
    layout: Layout, peers: list[tuple[tuple[int, ...], ...]], rows: list[CastRows]
) -> list[list[int]]:
    """Run the casts of all ranks on positions. Return the pool of each rank."""
    pools = [list(layout.positions(rank)) for rank in range(layout.workers)]
    for at in range(len(rows[0].casts)):
        arriving = []
        for rank in range(layout.workers):
            cast, mine = rows[rank].casts[at], []
            for place, peer in enumerate(peers[rank][at]):
                theirs = rows[peer].casts[at]
                to_me = peers[peer][at].index(rank)
                leaving = theirs.leaving.split(theirs.sent)[to_me].tolist()
                assert len(leaving) == cast.received[place], "both ends agree on the number of rows"
                assert max(leaving, default=0) < len(pools[peer]), "the peer has these rows"
                mine += [pools[peer][number] for number in leaving]
            arriving.append(mine)
        for pool, mine in zip(pools, arriving, strict=True):
            pool += mine
    return pools


def check(layout, peers, rows, masks) -> None:
    pools = deliver(layout, peers, rows)
    for rank, (pool, of) in enumerate(zip(pools, rows, strict=True)):
        assert len(set(pool)) == len(pool), "no row arrives twice"
        np.testing.assert_array_equal(of.keys.positions, np.sort(pool))
        np.testing.assert_array_equal(of.keys.positions[of.keys.places], pool)
        wanted = seen_by(layout, rank, masks)
        assert wanted <= set(pool), "every row that a query sees arrives"
        blocks = {key // 16 for key in wanted}
        # A rank of a hierarchical cast also forwards rows to the other ranks of its node.
        mates = peers[rank][-1] if len(of.casts) > 1 else ()
        for mate in mates:
            blocks |= {key // 16 for key in seen_by(layout, mate, masks)}
        own = len(layout.positions(rank))
        assert {key // 16 for key in pool[own:]} <= blocks, "no other block arrives"


@pytest.mark.parametrize(
    ("name", "stages"), [("flat", 0), ("flat", 2), ("hierarchical", 0), ("hierarchical", 4)]
)
@pytest.mark.parametrize("batch", ["causal", "documents", "two sequences"])
def test_each_needed_row_arrives_once(name, stages, batch):
    for layout_name, options, heads in CASES:
        layout = layout_of(layout_name, options[0])
        masks = batches(layout.padded_seq)[batch]
        check(*plans(name, layout, options, heads, masks, stages), masks)


@pytest.mark.parametrize(
    ("name", "stages", "casts"),
    [("flat", 1, 1), ("flat", 3, 3), ("hierarchical", 1, 2), ("hierarchical", 2, 3)],
)
def test_stages_divide_the_received_rows(name, stages, casts):
    layout = make_layout("zigzag", 8, SEQ, 16)
    masks = batches(layout.padded_seq)["documents"]
    inside, peers, rows = plans(name, layout, (8, 4), 1, masks, stages)
    for rank, (of, pool) in enumerate(zip(rows, deliver(inside, peers, rows), strict=True)):
        assert len(of.casts) == casts
        received = []
        for stage, keys in enumerate(of.stages, 1):
            arrived = np.concatenate([pool[of.arriving(cast)] for cast in keys.casts])
            np.testing.assert_array_equal(keys.positions[keys.places], arrived)
            assert of.of_stage(stage) is keys
            received.append(set(arrived))
        assert set.union(*received) == set(pool[of.own :])
        assert sum(map(len, received)) == len(pool) - of.own
        if (name, stages) == ("hierarchical", 2):
            node = range(rank - rank % 4, rank - rank % 4 + 4)
            held = {p for mate in node for p in layout.positions(mate).tolist()}
            assert received[0] <= held, "stage 1 has rows of the node only"
            assert not received[1] & held


def test_a_row_crosses_to_each_other_node_at_most_once():
    layout = make_layout("zigzag", 8, SEQ, 16)
    masks = batches(layout.padded_seq)["documents"]
    _, peers, rows = plans("hierarchical", layout, (8, 4), 1, masks)
    entered: list[set[int]] = [set(), set()]
    for rank, of in enumerate(rows):
        assert peers[rank][0] == (rank % 4, rank % 4 + 4), "the first cast crosses nodes"
        cast, own = of.casts[0], layout.positions(rank)
        crossing = own[cast.leaving]
        other = entered[1 - rank // 4]
        assert not other & set(crossing)
        other |= set(crossing)
    for node, crossed in enumerate(entered):
        mine = range(4 * node, 4 * node + 4)
        held = set(np.concatenate([layout.positions(r) for r in mine]))
        needed = set().union(*(seen_by(layout, r, masks) for r in mine)) - held
        assert needed <= crossed, "every row that a node needs crosses"


@pytest.mark.parametrize("layout_name", ["zigzag", "balanced"])
@pytest.mark.parametrize(("name", "stages"), KINDS)
def test_gradients_of_a_row_are_added_for_each_rank_that_received_it(name, stages, layout_name):
    """Also if they return over a rank that forwarded the row."""
    layout = layout_of(layout_name, 4)
    masks = batches(layout.padded_seq)["documents"]
    inside, peers, rows = plans(name, layout, (4, 2), 1, masks, stages)
    pools = deliver(inside, peers, rows)
    totals = []
    for of in rows:
        ones = torch.ones(1, len(of.keys.positions), 1, 1)
        totals.append(of.split(ones, 2 * ones, torch.float64))
        assert totals[-1].dtype == torch.float64
    for at in reversed(range(len(rows[0].casts))):
        returned = {}
        for rank, of in enumerate(rows):
            parts = totals[rank][of.arriving(at)].split(of.casts[at].received)
            returned |= {(rank, to): part for to, part in zip(peers[rank][at], parts, strict=True)}
        for rank, of in enumerate(rows):
            parts = [returned[peer, rank] for peer in peers[rank][at]]
            of.add_returned(at, totals[rank], torch.cat(parts))
    for rank, (of, total) in enumerate(zip(rows, totals, strict=True)):
        holders = [sum(p in pool for pool in pools) for p in inside.positions(rank).tolist()]
        assert max(holders) > 1
        np.testing.assert_array_equal(total[: of.own, 0].flatten(), holders)
        np.testing.assert_array_equal(total[: of.own, 1].flatten(), 2 * np.array(holders))


def test_merging_restores_the_order_of_the_sequence():
    layout = make_layout("striped", 4, SEQ, 16)
    masks = batches(layout.padded_seq)["documents"]
    inside, peers, rows = plans("hierarchical", layout, (4, 2), 1, masks)
    pools = deliver(inside, peers, rows)
    of, pool = rows[3], torch.tensor(pools[3])
    numbers = torch.stack([pool, pool + 0.5])[:, None, :, None, None].double()
    own, first, second = numbers.split([of.own, *(sum(cast.received) for cast in of.casts)], 2)
    arrived = [part.movedim(2, 0) for part in (first, second)]
    k, v = of.merged(own, arrived)
    np.testing.assert_array_equal(k.flatten(), of.keys.positions)
    np.testing.assert_array_equal(v.flatten(), of.keys.positions + 0.5)
    picked = of.picked(1, own, arrived[:1])
    np.testing.assert_array_equal(picked[:, 0].flatten(), pool[of.casts[1].leaving])


def test_documents_move_fewer_rows_than_whole_shards():
    layout = make_layout("contiguous", 4, 8192, 16)
    schedule = make_schedule("group_cast", ScheduleOptions(4, 4))

    def shares(ids: np.ndarray) -> tuple:
        return largest_shares(schedule, layout, [SequenceMask.from_documents(ids, 8192)])

    assert shares(np.arange(8192) // 512) == ((0, 0),)
    assert shares(np.zeros(8192)) == ((3, 3),)
    assert shares((np.arange(8192) + 256) // 512) == ((Fraction(1, 8), Fraction(1, 8)),)


@pytest.mark.parametrize(
    ("name", "stages"), [("flat", 0), ("flat", 2), ("hierarchical", 0), ("hierarchical", 4)]
)
def test_the_largest_shares_are_those_of_the_ranks(name, stages):
    exchange = "hierarchical_group_cast" if name == "hierarchical" else "group_cast"
    for layout_name, options, heads in CASES:
        layout = layout_of(layout_name, options[0])
        sizes = {"heads": heads, "stages": stages, "stages_backward": stages}
        schedule = make_schedule(exchange, ScheduleOptions(*options, **sizes))
        for masks in batches(layout.padded_seq).values():
            _, _, rows = plans(name, layout, options, heads, masks, stages)
            shares = np.array([of.shares for of in rows])
            expected = shares.max(0) if shares.size else ()
            np.testing.assert_array_equal(
                np.array(largest_shares(schedule, layout, masks, 16)), np.array(expected)
            )


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(
    ("name", "stages"), [("flat", 0), ("flat", 2), ("hierarchical", 0), ("hierarchical", 2)]
)
def test_the_rows_that_cross_are_those_of_the_busiest_network_card(name, stages, heads):
    exchange = "hierarchical_group_cast" if name == "hierarchical" else "group_cast"
    for workers, per_node in ((4, 2), (6, 3), (8, 4)) if heads == 1 else ((4, 1), (8, 4), (8, 2)):
        stages_of = {"stages": stages, "stages_backward": stages}
        options = ScheduleOptions(workers, per_node, heads=heads, **stages_of)
        layout, schedule = layout_of("contiguous", workers), make_schedule(exchange, options)
        for masks in batches(layout.padded_seq).values():
            inside, peers, rows = plans(name, layout, (workers, per_node), heads, masks, stages)
            # Leaving and reaching.
            crossing = np.zeros((2, workers, len(rows[0].casts)))
            for rank, number in product(range(workers), range(len(rows[0].casts))):
                group, place = divmod(rank, heads)
                cast = rows[group].casts[number]
                for peer, sent in zip(peers[group][number], cast.sent, strict=True):
                    nodes = rank // per_node, (peer * heads + place) // per_node
                    if nodes[0] != nodes[1]:
                        crossing[0, rank, number] += sent
                        crossing[1, peer * heads + place, number] += sent
            _, shares = cast_shares(schedule, layout, masks, per_node, 16)
            found = np.array(shares, np.float64)
            for sharing in (n for n in range(1, per_node + 1) if per_node % n == 0):
                of_cards = crossing.reshape(2, workers // sharing, sharing, -1).sum(2)
                expected = of_cards.max((0, 1)) / inside.tokens_per_worker
                np.testing.assert_allclose(found[:, sharing - 1], expected)


def test_an_index_moves_whole_blocks():
    layout = make_layout("striped", 4, SEQ, 32, unit=32)
    masks = batches(layout.padded_seq)["documents"]
    for rank in range(4):
        schedule = make_schedule("group_cast", ScheduleOptions(4, 4))
        of, _ = CastRows.make(layout, masks, rank, schedule, 32)
        starts = of.keys.positions[::32]
        assert (starts % 32 == 0).all()
        np.testing.assert_array_equal(
            of.keys.positions,
            (starts[:, None] + np.arange(32)).reshape(-1)[: len(of.keys.positions)],
        )


@pytest.mark.parametrize(
    ("exchange", "options", "expected"),
    [
        ("all_gather", ScheduleOptions(4, 4), ()),
        ("group_cast", ScheduleOptions(1, 1), ()),
        ("group_cast", ScheduleOptions(4, 4), ((3, 3),)),
        ("group_cast", ScheduleOptions(4, 4, heads=2), ((1, 1),)),
        ("hierarchical_group_cast", ScheduleOptions(6, 3), ((1, 1), (4, 4))),
        (
            "hierarchical_group_cast",
            ScheduleOptions(6, 3, stages=2, stages_backward=0),
            ((2, 2), (1, 1), (2, 2), (1, 1), (4, 4)),
        ),
        ("group_cast", ScheduleOptions(6, 6, stages=2, stages_backward=2), ((2, 2), (3, 3))),
    ],
)
def test_whole_shards_bound_the_rows_of_any_mask(exchange, options, expected, monkeypatch):
    schedule = make_schedule(exchange, options)
    assert whole_shares(schedule) == expected
    layout = make_layout("contiguous", options.workers, 8192, 16)
    causal = [SequenceMask.causal(8192, layout.padded_seq)]
    counted = largest_shares(schedule, layout, causal)
    assert all(c <= w for c, w in zip(np.ravel(counted), np.ravel(expected), strict=True))
    monkeypatch.setattr(cast_rows, "_MOST_COUNTED", 1)
    assert largest_shares(schedule, layout, causal) == expected


@pytest.mark.parametrize(
    ("tokens", "rows"), [(10, 1), (64, 4), (1000, 32), (2048, 128), (8192, 128)]
)
def test_short_shards_have_sixteen_blocks_of_rows(tokens, rows):
    layout = make_layout("contiguous", 4, 4 * tokens, 1)
    assert layout.tokens_per_worker == tokens
    assert row_block(layout) == rows
    assert row_block(layout, block=64) == 64
