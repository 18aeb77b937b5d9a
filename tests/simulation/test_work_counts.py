"""Work counts equal what the kernels get, as integers, for every worker and step."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from attention.dense_problems import random_slices
from attention.sparse_problems import gated_index, start_index
from parallel.ways import Way
from simulation.counting import count_work
from slow_cases import mostly_slow

from mtrain_cli.attention.index import BlockBitmap, Index, StartBitmap, VerticalSlash
from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.mask_tables import MaskTables
from mtrain_cli.parallel.exchange import Exchange, Plan, ShardTiles, make_exchange, positions_of
from mtrain_cli.parallel.layout import Layout, make_layout
from mtrain_cli.parallel.lowering import Traits
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.parallel.program import Compute, Whole
from mtrain_cli.parallel.schedule import Schedule
from mtrain_cli.records.imbalance import imbalance
from mtrain_cli.simulation.work_counts import StepWork, WorkCounter, column_pairs

SEQ, HEADS, BLOCK = 61, 4, 4
LAYOUTS = ("contiguous", "zigzag", "striped")
INDICES = ("dense", "vertical_slash", "columns", "bitmap", "nothing")
WAYS = (
    Way("all_gather"),
    Way("all_gather", chunks=2),
    Way("hierarchical_all_gather", per_node=2, chunks=2),
    Way("group_cast", chunks=2, stages=1),
    Way("group_cast", heads=2, stages=1),
    Way("hierarchical_group_cast", per_node=2, stages=2),
    Way("ring"),
    Way("ring", prefetch=2, shared_columns=False),
    Way("ring", circulates="queries"),
    Way("hierarchical_ring", per_node=2),
    Way("hierarchical_ring", per_node=3, prefetch=2, shared_columns=False),
    Way("hierarchical_ring", per_node=2, circulates="queries"),
    Way("hierarchical_ring", per_node=2, circulates="queries", shared_columns=False),
    Way("all_gather", heads=2),
    Way("ring", heads=2),
    Way("all_gather", heads=4),
    Way("hierarchical_ring", heads=2, per_node=2, circulates="queries"),
)


def exchange_of(way: Way, layout: Layout, rank: int) -> Exchange:
    """The exchange of one rank. It needs no communicators to make its tiles."""
    ranks, per_node = tuple(range(layout.workers)), min(way.per_node, layout.workers)
    group = ContextGroup(rank, ranks, per_node)
    if way.heads > 1:
        groups = layout.workers // way.heads
        inner = ContextGroup(
            rank // way.heads,
            ranks[rank % way.heads :: way.heads],
            min(max(1, per_node // way.heads), groups),
        )
        group = replace(group, heads=way.heads, exchange=inner)
    return make_exchange(way.exchange, layout, group, **way.options)


def masks_of(kind: str, padded: int, seq: int = SEQ, batch: int = 3) -> list[SequenceMask]:
    """Several sequences, two of which have the same mask."""
    rng = np.random.default_rng(7)
    if kind == "causal":
        return [SequenceMask.causal(n, padded) for n in (seq, seq - 9, seq)][:batch]
    if kind == "slices":
        return [
            SequenceMask.from_slices(random_slices(rng, n, 7), n, padded)
            for n in (seq, seq - 9, seq)
        ][:batch]
    if kind == "window":
        near = np.maximum(np.arange(padded) - 8, 0)
        documents = masks_of("documents", padded, seq, batch)
        return [m.intersect(SequenceMask.from_first(near, m.length)) for m in documents]
    return [
        SequenceMask.from_documents(np.sort(rng.integers(0, 5, seq - 5 * (b == 1))), padded)
        for b in range(batch)
    ]


def index_of(
    kind: str, layout: Layout, block: int = BLOCK, heads: int = HEADS, batch: int = 3
) -> Index | None:
    """One head has nothing chosen; some columns lie in the padding, some slots are unused."""
    blocks = -(-layout.padded_seq // block)
    rng = np.random.default_rng(len(kind))
    slashes = torch.from_numpy(
        rng.random((batch, heads, blocks)) < (0 if kind in ("columns", "nothing") else 0.4)
    )
    columns = np.full((batch, heads, 15), blocks * block)
    for b, h in product(range(batch), range(heads)):
        n = 0 if kind == "nothing" or (b, h) == (0, 1) else 5 + 2 * h
        columns[b, h, :n] = np.sort(rng.choice(layout.padded_seq, n, replace=False))
    slashes[0, 1] = False
    if kind == "dense":
        return None
    if kind == "gated":
        return gated_index(rng, batch, heads, layout.padded_seq, block, 2 * block)
    if kind == "starts":
        return start_index(rng, batch, heads, layout.padded_seq, block)
    if kind == "bitmap":
        return BlockBitmap.whole(
            block, torch.from_numpy(rng.random((batch, heads, blocks, blocks)) < 0.3).tril()
        )
    return VerticalSlash(block, blocks, slashes, torch.from_numpy(columns.astype(np.int32)))


def of_executor(
    exchange: Exchange, masks: list[SequenceMask], index: Index | None, block: int | None
) -> dict[str, list]:
    """By pass: (pairs, blocks) of each step, and last (columns, column pairs), from the tiles."""
    request = None if index is None else IndexRequest(index.block, bitmap=False)
    work = Plan.make(exchange, masks, request).tiles.under(index)
    columns = (0, 0)
    apart = exchange.gathers_columns and isinstance(index, VerticalSlash)
    if apart:
        tiles = work.for_pair(exchange.own, Whole(), exchange.part)
        without = work.for_pair(exchange.own, Whole(), exchange.part, columns=False)
        lengths = torch.tensor([mask.length for mask in masks])[:, None, None]
        columns = (
            int((tiles.index.columns < lengths).sum()),
            int(tiles.seen().sum() - without.seen().sum()),
        )
    found = {}
    for direction, backward in (("forward", False), ("backward", True)):
        program = exchange.program(backward=backward, traits=Traits(columns=apart))
        values = [(0, 0)] * program.steps
        for op in program.computes:
            seen = work.for_pair(op.queries, op.keys, op.part, columns=op.with_columns).seen()
            of_blocks = (
                work.for_pair(op.queries, op.keys, op.part, columns=False).seen()
                if index is not None
                else seen
            )
            heads = 1 if index is not None else HEADS // op.part[1]
            values[op.step] = (
                heads * int(seen.sum()),
                heads * _touched(of_blocks, work, op, block) if block else 0,
            )
        found[direction] = [*values, columns]
    return found


def _touched(seen: torch.Tensor, work: ShardTiles, op: Compute, block: int) -> int:
    """Count the pairs of blocks with at least one pair."""
    layout = work.placement.inside
    at = (positions_of(layout, shards, work.rows) // block for shards in (op.queries, op.keys))
    rows, columns = (
        torch.nn.functional.one_hot(torch.from_numpy(n), layout.padded_seq).float() for n in at
    )
    return int((torch.einsum("bhqk,qi,kj->bhij", seen.float(), rows, columns) > 0).sum())


def as_rows(work: StepWork, row: int) -> list:
    return [
        *zip(work.pairs[row].tolist(), work.blocks[row].tolist(), strict=True),
        (int(work.columns[row]), int(work.column_pairs[row])),
    ]


def fits(way: Way, workers: int) -> bool:
    if workers == 1:
        return way.heads == 1 and way.per_node == 8
    return way.fits(workers, 4)


def check(
    way: Way,
    workers: int,
    layout_name: str,
    masks_kind: str,
    index_kind: str,
    unit: int = BLOCK,
    stripe: int = BLOCK,
) -> Schedule:
    layout = make_layout(layout_name, workers, SEQ, stripe, unit=unit)
    masks = masks_of(masks_kind, layout.padded_seq)
    index = index_of(index_kind, layout)
    exchanges = [exchange_of(way, layout, rank) for rank in range(workers)]
    schedule = exchanges[0].schedule
    counter = WorkCounter.make(
        schedule, layout, masks, HEADS, index and BLOCK, shared_columns=way.shared_columns
    )
    block = counter.block if counter.block_owner is not None else None
    everyone = counter.count(index)
    for rank, exchange in enumerate(exchanges):
        expected = of_executor(exchange, masks, index, block)
        alone = counter.count(index, rank)
        for direction, values in expected.items():
            assert as_rows(everyone[direction], rank) == values, (rank, direction)
            assert as_rows(alone[direction], 0) == values, (rank, direction)
    return schedule


CASES = [
    (way, workers, layout, masks, index)
    for way, workers, layout, masks, index in product(
        WAYS, (1, 2, 3, 4, 6), LAYOUTS, ("causal", "documents", "window", "slices"), INDICES
    )
    if fits(way, workers) and (masks != "slices" or index == "dense")
]


@pytest.mark.parametrize(
    ("way", "workers"), sorted({(c[0], c[1]) for c in CASES}, key=str), ids=str
)
def test_every_step_counts_what_its_kernel_gets(way, workers):
    """Each way and number of workers with a few layouts, masks and indices; all occur together."""
    mine = [case for case in CASES if case[:2] == (way, workers)]
    rng = np.random.default_rng(workers + WAYS.index(way))
    for case in rng.permutation(len(mine))[:4]:
        check(*mine[case])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "workers"), sorted({(c[0], c[1]) for c in CASES if c[1] in (2, 4)}, key=str), ids=str
)
def test_every_combination_counts_what_its_kernel_gets(way, workers):
    for case in (case for case in CASES if case[:2] == (way, workers)):
        check(*case)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("index", ["vertical_slash", "bitmap", "dense"])
def test_stripes_of_several_blocks_of_an_index(layout, index):
    check(Way("ring", shared_columns=False), 3, layout, "documents", index, stripe=2 * BLOCK)
    check(Way("ring", heads=2), 4, layout, "causal", index, stripe=2 * BLOCK)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_workers_of_a_block_or_two(layout):
    check(Way("ring", per_node=12), 12, layout, "documents", "vertical_slash")


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_dense_shards_need_not_be_whole_blocks(layout):
    kinds = "causal", "documents", "window", "slices"
    for masks, way in product(kinds, (Way("ring"), Way("all_gather", heads=2))):
        check(way, 4, layout, masks, "dense", unit=1, stripe=16)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("masks", ["window", "slices"])
def test_other_masks_count_what_kernels_get(layout, masks):
    check(Way("ring"), 3, layout, masks, "dense")
    check(Way("all_gather", heads=2), 4, layout, masks, "dense")
    if masks == "window":
        for index in ("vertical_slash", "columns", "bitmap"):
            check(Way("ring"), 3, layout, masks, index)
            check(Way("all_gather"), 2, layout, masks, index)


def options(way: Way, layout: Layout) -> Schedule:
    return exchange_of(way, layout, 0).schedule


@mostly_slow(
    "kind",
    [
        "vertical_slash", "bitmap",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("starts", "gated")),
    ], keep=(0,),
)  # fmt: skip
def test_totals_equal_those_of_the_index_in_every_layout(kind):
    """All are padded to one length, so that they share one index."""
    seq, heads, block = 24 * 16 * 4, 4, 16
    for masks_kind in ("causal", "documents", "window"):
        for name, workers, way in product(LAYOUTS, (1, 4, 6), WAYS):
            if not fits(way, workers):
                continue
            layout = make_layout(name, workers, seq, block, unit=block)
            assert layout.padded_seq == seq
            masks = masks_of(masks_kind, seq, seq - 5)
            index = index_of(kind, layout, block, heads)
            assert index is not None
            counts = index.counts(MaskTables.make(masks, block, bitmap=kind != "vertical_slash"))
            for work in count_work(
                options(way, layout),
                layout,
                masks,
                index,
                heads=heads,
                shared_columns=way.shared_columns,
            ).values():
                assert work.total_pairs.sum() == counts.pairs.sum()
                assert work.blocks.sum() == counts.blocks.sum()
                assert work.column_pairs.sum() in (0, counts.column_pairs.sum())
                if way.shared_columns and "ring" in way.exchange and workers > way.heads:
                    assert work.columns.sum() * way.heads == workers * counts.columns.sum()
                    assert work.column_pairs.sum() == counts.column_pairs.sum()


@pytest.mark.parametrize("kind", ["gated", "starts"])
@pytest.mark.parametrize("masks_kind", ["causal", "documents"])
def test_pairs_that_gates_hide_complete_the_chosen_blocks(masks_kind, kind):
    layout = make_layout("striped", 3, SEQ, BLOCK, unit=BLOCK)
    masks, gated = masks_of(masks_kind, layout.padded_seq), index_of(kind, layout)
    gated = gated.per_head() if isinstance(gated, StartBitmap) else gated
    assert isinstance(gated, BlockBitmap)
    works = [
        count_work(options(Way("ring"), layout), layout, masks, index, heads=HEADS)["backward"]
        for index in (gated, BlockBitmap.whole(BLOCK, gated.bits))
    ]
    assert np.array_equal(works[0].pairs + works[0].hidden, works[1].pairs)
    assert (works[0].hidden > 0).all()
    assert not works[1].hidden.any()


def test_dense_causal_degrees_have_their_known_values():
    """Zigzag: all workers equal. Contiguous: worker r of n computes (2 r + 1) / n of the mean."""
    seq, workers = 1 << 13, 8
    for name, largest in (("zigzag", 1.0), ("contiguous", (2 * workers - 1) / workers)):
        layout = make_layout(name, workers, seq, 128)
        work = count_work(
            options(Way("ring"), layout), layout, [SequenceMask.causal(seq, seq)], None, heads=1
        )["forward"]
        assert imbalance(work.pairs).total == pytest.approx(largest, abs=1e-3)
    assert work.pairs.sum() == seq * (seq + 1) // 2


def test_a_bitmap_may_hold_the_rows_of_one_worker():
    layout = make_layout("striped", 3, SEQ, BLOCK, unit=BLOCK)
    masks, whole = masks_of("documents", layout.padded_seq), index_of("bitmap", layout)
    assert isinstance(whole, BlockBitmap)
    counter = WorkCounter.make(options(Way("ring"), layout), layout, masks, HEADS, BLOCK)
    foreign = WorkCounter.make(
        options(Way("ring", circulates="queries"), layout), layout, masks, HEADS, BLOCK
    )
    for rank in range(3):
        rows = torch.arange(rank, whole.blocks, 3, dtype=torch.int32)
        mine = BlockBitmap(BLOCK, whole.blocks, whole.bits[:, :, rows.long()], rows)
        for direction, work in counter.count(mine, rank).items():
            assert as_rows(work, 0) == as_rows(counter.count(whole)[direction], rank)
        with pytest.raises(ValueError, match=r"holds 6 of 18 query blocks, and 12 more are needed"):
            counter.count(mine)
        with pytest.raises(ValueError, match="12 more are needed"):
            foreign.count(mine, rank)


def test_many_heads_of_a_bitmap_do_not_overflow():
    layout = make_layout("striped", 2, 64, 16, unit=16)
    bits = torch.ones(5, 64, 4, 4, dtype=torch.bool).tril()
    masks = [SequenceMask.causal(64, 64)] * 5
    work = count_work(
        options(Way("ring"), layout), layout, masks, BlockBitmap.whole(16, bits), heads=64
    )["forward"]
    assert work.pairs.sum() == 5 * 64 * (64 * 65 // 2)


def test_invalid_combinations_are_refused():
    layout = make_layout("contiguous", 3, SEQ, BLOCK)
    schedule = options(Way("ring"), layout)
    masks = [SequenceMask.causal(SEQ, layout.padded_seq)]
    index = index_of("vertical_slash", layout, batch=1)
    with pytest.raises(ValueError, match="does not hold whole blocks of 4"):
        count_work(schedule, layout, masks, index, heads=HEADS)
    aligned = make_layout("contiguous", 3, SEQ, BLOCK, unit=BLOCK)
    masks = [SequenceMask.causal(SEQ, aligned.padded_seq)]
    with pytest.raises(ValueError, match=r"An index of 16 blocks of 4 .* does not fit 18 blocks"):
        count_work(schedule, aligned, masks, index, heads=HEADS)
    with pytest.raises(ValueError, match="Masks of "):
        count_work(schedule, layout, masks, None, heads=HEADS)
    with pytest.raises(ValueError, match="A layout for 3 workers does not fit a schedule for 2"):
        count_work(
            options(Way("ring"), make_layout("contiguous", 2, SEQ, BLOCK)),
            layout,
            masks,
            None,
            heads=HEADS,
        )
    shared = make_layout("contiguous", 2, SEQ, BLOCK)
    with pytest.raises(ValueError, match="3 heads cannot be cut into 2 equal parts"):
        count_work(
            options(Way("all_gather", heads=2), shared),
            shared,
            [SequenceMask.causal(SEQ, shared.padded_seq)],
            None,
            heads=3,
        )


def test_a_sequence_of_padding_has_no_work():
    layout = make_layout("striped", 2, 32, 16, unit=16)
    masks = [SequenceMask.causal(0, 32)]
    for kind in ("vertical_slash", "bitmap", "dense"):
        work = count_work(
            options(Way("ring"), layout),
            layout,
            masks,
            index_of(kind, layout, 16, batch=1),
            heads=HEADS,
        )["forward"]
        assert [
            int(t.sum()) for t in (work.pairs, work.blocks, work.columns, work.column_pairs)
        ] == [0] * 4


LENGTH, TILE, GROUPS, ROWS = 58, 4, 3, 2  # the last block of 16 holds padding
BLOCKS = 16
OWNERS = {
    "contiguous": np.arange(BLOCKS) * GROUPS // BLOCKS,
    "striped": np.arange(BLOCKS) % GROUPS,
    "zigzag": np.minimum(np.arange(BLOCKS), np.arange(BLOCKS)[::-1]) % GROUPS,
    "random": np.random.default_rng(2).integers(0, GROUPS, BLOCKS),
}


def by_definition(mask: SequenceMask, owner, slashes, columns) -> np.ndarray:
    """Count, one by one, the queries that see a column in a block that no slash covers."""
    pairs = np.zeros((GROUPS, GROUPS), int)
    for row in range(ROWS):
        for key in columns[row][columns[row] < LENGTH]:
            for query in range(LENGTH):
                seen = mask.low[0, query] <= key < mask.high[0, query]
                if seen and not slashes[row, query // TILE - key // TILE]:
                    pairs[owner[query // TILE], owner[key // TILE]] += 1
    return pairs


@pytest.mark.parametrize("layout", OWNERS)
def test_pairs_of_columns_equal_their_definition(layout):
    rng, owner = np.random.default_rng(4), OWNERS[layout]
    documents = np.repeat([0, 1, 2], [9, 30, LENGTH - 39])
    start = np.maximum(np.arange(BLOCKS * TILE) - 17, 0)
    packed = SequenceMask.from_documents(documents, BLOCKS * TILE)
    columns = np.stack([rng.permutation(LENGTH + 3)[:20] for _ in range(ROWS)]).astype(np.int32)
    for mask in (packed, SequenceMask.from_first(start, LENGTH)):
        of = mask.last()[:LENGTH], TILE, owner
        for share in (0.0, 0.4, 1.0):
            slashes = rng.random((ROWS, BLOCKS)) < share
            expected = by_definition(mask, owner, slashes, columns)
            number, pairs = column_pairs(*of, owner, slashes, columns)
            assert number == (columns < LENGTH).sum()
            assert np.array_equal(pairs, expected)
            _, sums = column_pairs(*of, 0 * owner, slashes, columns)
            assert np.array_equal(sums[:, 0], expected.sum(1))


def test_padding_alone_has_no_columns():
    owner, padding = OWNERS["striped"], np.full((ROWS, 4), LENGTH, np.int32)
    last = SequenceMask.causal(LENGTH, BLOCKS * TILE).last()[:LENGTH]
    number, pairs = column_pairs(last, TILE, owner, owner, np.zeros((ROWS, BLOCKS), bool), padding)
    assert (number, pairs.tolist()) == (0, [[0] * GROUPS] * GROUPS)
