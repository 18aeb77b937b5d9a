"""Gathered columns: each rank finds its own among its keys and computes its queries against all."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mtrain_cli.attention.index import VerticalSlash
from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.packed_columns import whole_columns
from mtrain_cli.parallel.exchange import Exchange
from mtrain_cli.parallel.layout import Layout, make_layout
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.parallel.plan import Plan
from mtrain_cli.parallel.program import Whole
from mtrain_cli.parallel.schedule import ScheduleOptions, make_schedule

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
