"""A plan holds every allowed pair once, and moves to a device in one copy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mtrain_cli.attention.device_copy import packed, unpacked
from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.parallel.exchange import Exchange, Plan, make_exchange, positions_of
from mtrain_cli.parallel.layout import Balanced, make_layout
from mtrain_cli.parallel.mesh import ContextGroup

SEQ, WORKERS, BLOCK = 93, 4, 4
REQUEST = IndexRequest(BLOCK, bitmap=True)


def exchange_of(name: str, layout_name: str, rank: int, chunks: int = 1) -> Exchange:
    """Return an exchange without communicators."""
    layout = make_layout(layout_name, WORKERS, SEQ, BLOCK, unit=BLOCK)
    return make_exchange(name, layout, ContextGroup(rank, tuple(range(WORKERS))), chunks=chunks)


def masks_of(padded: int) -> list[SequenceMask]:
    documents = np.sort(np.random.default_rng(0).integers(0, 6, SEQ - 2))
    return [SequenceMask.from_documents(documents, padded), SequenceMask.causal(SEQ, padded)]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize(("name", "chunks"), [("ring", 1), ("all_gather", 1), ("all_gather", 2)])
def test_the_plans_of_all_ranks_hold_every_allowed_pair_once(name, chunks, layout):
    padded = exchange_of(name, layout, 0).layout.padded_seq
    masks = masks_of(padded)
    counted = np.zeros((len(masks), padded, padded))
    plans = [Plan.make(exchange_of(name, layout, rank, chunks), masks) for rank in range(WORKERS)]
    for plan in plans:
        for op in plan.forward.computes:
            tiles = plan.tiles.tiles[op.queries, op.keys]
            rows, keys = (positions_of(plan.placement.inside, s) for s in (op.queries, op.keys))
            counted[:, rows[:, None], keys] += tiles.seen()[:, 0].numpy() / op.part[1]
    p, k = np.indices((padded, padded))
    for mask, pairs in zip(masks, counted, strict=True):
        allowed = (k <= p) & (k >= mask.first[p]) & (p < mask.length)
        assert (pairs == allowed).all()
    assert sum(plan.pairs for plan in plans) == plans[0].allowed_pairs == counted.sum()


@pytest.mark.parametrize("name", ["ring", "all_gather", "group_cast"])
def test_a_plan_follows_the_layout_of_its_batch(name):
    """Layouts of one shape: what the exchange was made with does not matter."""
    masks = masks_of(96)
    made, of_batch = (
        Balanced.of(np.random.default_rng(seed).permutation(12) % WORKERS, WORKERS, SEQ, 8)
        for seed in (1, 2)
    )
    for rank in range(WORKERS):
        group = ContextGroup(rank, tuple(range(WORKERS)))
        other = Plan.make(make_exchange(name, made, group), masks, REQUEST, layout=of_batch)
        wanted = Plan.make(make_exchange(name, of_batch, group), masks, REQUEST)
        assert other.placement.layout is of_batch
        assert other.pairs == wanted.pairs
        for got, want in zip(other.masked.shards, wanted.masked.shards, strict=True):
            assert np.array_equal(got, want)
        for op in other.forward.computes:
            pair = op.queries, op.keys
            assert other.tiles.tiles[pair].seen().equal(wanted.tiles.tiles[pair].seen())


def test_a_plan_shows_its_layout_and_steps():
    masks = masks_of(96)
    plan = Plan.make(exchange_of("ring", "striped", 1), masks, REQUEST)
    first, *rest = repr(plan).splitlines()
    assert first == "Plan of rank 1 of 4: ring, striped, 24 queries per sequence"
    steps = [line.split(": ") for line in rest]
    assert [name for name, _, _ in steps] == [f"step {step}" for step in range(WORKERS)]
    assert sum(int(pairs.split(" ")[0].replace(",", "")) for _, _, pairs in steps) == plan.pairs


def test_rectangles_of_dense_attention_are_found_with_the_plan():
    for request in (None, REQUEST):
        plan = Plan.make(exchange_of("ring", "zigzag", 2), masks_of(96), request)
        spans = [s for tiles in plan.tiles.tiles.values() for s in tiles.spans]
        assert all(("slices" in vars(s)) == (request is None) for s in spans)


@pytest.mark.parametrize(("keep", "early"), [(0.0, None), (0.5, 12), (1.0, 0)])
def test_early_queries_have_tiles_of_their_own(keep, early):
    plan = Plan.make(exchange_of("all_gather", "zigzag", 0), masks_of(96), REQUEST, keep=keep)
    assert plan.early == early
    assert (plan.early_tiles is None) == (not early)
    if plan.early_tiles is not None:
        (tiles,) = plan.early_tiles.tiles.values()
        assert tiles.num_queries == early


@pytest.mark.parametrize("request_", [None, REQUEST])
def test_one_buffer_carries_every_table(request_):
    plan = Plan.make(exchange_of("ring", "zigzag", 3), masks_of(96), request_, keep=0.5)
    parts = plan.tiles, plan.early_tiles, plan.masked
    host, buffer = packed(parts, pin=False)
    moved = unpacked(host, buffer, "cpu")
    tables = set()
    for old, staged, new in zip(*(list(found(p)) for p in (parts, host, moved)), strict=True):
        for tiles, other in ((old, staged), (old, new)):
            assert tiles is not other
            assert tiles.cache is not other.cache
            assert torch.equal(tiles.low, other.low)
            assert torch.equal(tiles.high, other.high)
            assert tiles.spans == other.spans
            if tiles.geometry is not None:
                assert same_tables(tiles.geometry, other.geometry)
                assert same_tables(tiles.geometry.tables, other.geometry.tables)
                tables.add(id(other.geometry.tables))
        assert staged.low.untyped_storage().data_ptr() == buffer.data_ptr()
    assert len(tables) == (0 if request_ is None else 2), "shared tables are copied once"
    if request_ is not None:
        assert torch.equal(moved[2].tables.per_block, plan.masked.tables.per_block)


def found(parts):
    tiles, early, _ = parts
    return [*tiles.tiles.values(), *early.tiles.values()]


def same_tables(one, other) -> bool:
    values = [(v, getattr(other, name)) for name, v in vars(one).items()]
    return all(torch.equal(a, b) for a, b in values if isinstance(a, torch.Tensor))
