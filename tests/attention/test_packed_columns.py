"""Packed columns are gathered by the index, and their gradients return to the same places only."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention.sparse_problems import make_problem

from mtrain_cli.attention.index import VerticalSlash
from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.packed_columns import (
    COLUMN_TILE,
    add_column_gradients,
    local_columns,
    pack_columns,
    whole_columns,
)
from mtrain_cli.parallel.exchange import Exchange, Plan
from mtrain_cli.parallel.layout import Layout, make_layout
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.parallel.program import Whole
from mtrain_cli.parallel.schedule import ScheduleOptions, make_schedule


@pytest.mark.parametrize("where", ["whole", "striped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_column_gradients_are_added_where_the_columns_came_from(where, dtype):
    p = make_problem(0, "both", seq=61, dim=8, documents=False, where=where)
    columns, slots = local_columns(p.tiles)
    packed = pack_columns(p.k, p.v, p.tiles)
    # Whole numbers sum exactly in both dtypes. Empty places hold NaN, which must not be used.
    parts = [torch.randint(-3, 4, (2, *t.shape)).float() for t in packed]
    for part in parts:
        part[:, slots < 0] = float("nan")
    got = [torch.randint(-3, 4, t.shape).to(dtype) for t in (p.k, p.v)]
    want = [t.clone() for t in got]
    add_column_gradients(*got, *parts, slots)
    keys = p.tiles.positions()[1].tolist()
    num_columns = 0
    for b, h, place in torch.cartesian_prod(*(torch.arange(n) for n in slots.shape)).tolist():
        if int(columns[b, h, place]) not in keys:
            assert slots[b, h, place] == -1
            continue
        num_columns += 1
        key = keys.index(int(columns[b, h, place]))
        for source, kept, target, part in zip((p.k, p.v), packed, want, parts, strict=True):
            assert torch.equal(kept[b, h, place], source[b, key, h // 2])
            target[b, key, h // 2] += part[:, b, h, place].sum(0).to(dtype)
    assert 0 < num_columns < slots.numel()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_columns_are_padded_to_whole_tiles_with_empty_places():
    p = make_problem(0, "columns", seq=61, dim=8, documents=False)
    given, empty = p.tiles.index.columns, p.tiles.index.blocks * p.tiles.index.block
    width = given.shape[-1]
    assert width % COLUMN_TILE
    padded = whole_columns(p.tiles.index)
    assert padded.shape[-1] == COLUMN_TILE
    assert padded[..., :width].equal(given)
    assert (padded[..., width:] == empty).all()
    assert (local_columns(p.tiles)[1][..., width:] == -1).all()


SEQ, BLOCK, WORLD, HEADS, WIDTH = 61, 4, 3, 4, 6


def index_of(layout: Layout, seed: int) -> VerticalSlash:
    """Different columns for every head; the last slot of each is empty."""
    blocks, rng = -(-layout.padded_seq // BLOCK), np.random.default_rng(seed)
    slashes = torch.from_numpy(rng.random((1, HEADS, blocks)) < 0.3)
    columns = np.full((1, HEADS, WIDTH), blocks * BLOCK)
    for head in range(HEADS):
        columns[0, head, :-1] = np.sort(rng.choice(SEQ, WIDTH - 1, replace=False))
    return VerticalSlash(BLOCK, blocks, slashes, torch.from_numpy(columns.astype(np.int32)))


@pytest.mark.parametrize("part", [(0, 1), (1, 2)], ids=["all heads", "second half of the heads"])
@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped"])
def test_every_rank_packs_its_columns_and_receives_their_gradients(name, part):
    layout = make_layout(name, WORLD, SEQ, BLOCK, unit=BLOCK)
    mask = SequenceMask.from_documents(np.repeat([0, 1], [25, SEQ - 25]), layout.padded_seq)
    schedule = make_schedule("ring", ScheduleOptions(WORLD, WORLD))
    heads = range(HEADS)[part[0] * HEADS // part[1] : (part[0] + 1) * HEADS // part[1]]
    exchanges = [
        Exchange(layout, ContextGroup(rank, tuple(range(WORLD))), schedule) for rank in range(WORLD)
    ]
    for exchange in exchanges:
        exchange.part = part
    request = IndexRequest(BLOCK, bitmap=False)
    works = [Plan.make(exchange, [mask], request).tiles for exchange in exchanges]
    # The second layer has another index under the same masks.
    for index in (index_of(layout, 1), index_of(layout, 2)):
        columns = index.columns[0, heads.start : heads.stop].long()
        # Kernels take whole tiles of columns; slots beyond the last column are empty.
        columns = torch.nn.functional.pad(
            columns, (0, whole_columns(index).shape[-1] - WIDTH), value=index.blocks * BLOCK
        )
        real = columns < SEQ
        packed, owners = torch.zeros(2, *columns.shape, 1), torch.zeros(columns.shape)
        for exchange, work in zip(exchanges, works, strict=True):
            narrowed = work.under(index)
            shared = exchange.columns_of(narrowed)
            assert shared is not None
            own = torch.from_numpy(layout.positions(exchange.group.rank))
            # Positions of the columns among this rank's keys.
            at = (own == columns[..., None]).long()
            assert torch.equal(
                shared.slots[0].long(), torch.where((at.sum(-1) > 0) & real, at.argmax(-1), -1)
            )
            k = own.float()[None, :, None, None]
            packed += shared.pack(k, -k)[:, 0]
            # Gradients of other ranks' columns are not added to these keys.
            dk, dv = torch.zeros(1, len(own), 1, 1), torch.zeros(1, len(own), 1, 1)
            shared.add_gradients(dk, dv, torch.ones(2, 1, *columns.shape, 1))
            assert torch.equal(
                dk.flatten().long(),
                (own[:, None, None] == columns.masked_fill(~real, -1)).sum((1, 2)),
            )
            owners += shared.slots[0] >= 0
            # This rank's queries against the whole sequence, under the index of these heads.
            assert shared.tiles is narrowed.for_pair(exchange.own, Whole(), part)
            assert shared.tiles.num_keys == layout.padded_seq
            whole = torch.zeros(len(heads), len(own), layout.padded_seq, dtype=torch.bool)
            for at_head, head in enumerate(heads):
                for row, query in enumerate(own.tolist()):
                    for key in index.columns[0, head, :-1].tolist():
                        away = query // BLOCK - key // BLOCK
                        allowed = query < SEQ and int(mask.first[query]) <= key <= query
                        whole[at_head, row, key] = allowed and not bool(
                            index.slashes[0, head, away]
                        )
            seen = shared.seen()[0]
            assert torch.equal(
                seen,
                whole.gather(
                    -1, columns.clamp(max=layout.padded_seq - 1)[:, None].expand(-1, len(own), -1)
                )
                & real[:, None],
            )
        assert torch.equal(owners > 0, real)
        assert owners.max() == 1
        assert torch.equal(packed[0, ..., 0], columns.where(real, torch.tensor(0)).float())
        assert torch.equal(packed[1], -packed[0])
