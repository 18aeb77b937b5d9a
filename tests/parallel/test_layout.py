"""Layouts are bijections between positions and (rank, slot), ascending on ranks, for any length."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain_cli.parallel.layout import Balanced, Joined, Placement, make_layout

NAMES = ("contiguous", "zigzag", "striped")
named_layouts = st.builds(
    make_layout,
    st.sampled_from(NAMES),
    st.integers(1, 12),
    st.integers(1, 500),
    st.sampled_from([1, 4, 16]),
)


@st.composite
def balanced_layouts(draw):
    workers, chunk = draw(st.integers(1, 12)), draw(st.sampled_from([1, 4, 16]))
    owner = draw(st.permutations([*range(workers)] * draw(st.integers(1, 4))))
    seq = len(owner) * chunk - draw(st.integers(0, chunk - 1))
    return Balanced.of(np.array(owner), workers, seq, chunk)


@st.composite
def joined_layouts(draw):
    together, groups = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    seq = draw(st.integers(1, 500))
    return Joined.of(make_layout(draw(st.sampled_from(NAMES)), together * groups, seq, 4), together)


layouts = named_layouts | balanced_layouts()


@settings(max_examples=80, deadline=None)
@given(layouts)
def test_positions_are_a_bijection_and_ascend(layout):
    shards = [layout.positions(rank) for rank in range(layout.workers)]
    assert all(len(s) == layout.tokens_per_worker and (np.diff(s) > 0).all() for s in shards)
    assert sorted(np.concatenate(shards).tolist()) == list(range(layout.padded_seq))
    assert (
        layout.seq
        <= layout.padded_seq
        < layout.seq + layout.workers * 2 * layout.block_size + 2 * layout.workers
    )


@settings(max_examples=60, deadline=None)
@given(layouts | joined_layouts())
def test_shards_gather_into_sequence_order_and_back(layout):
    shards = torch.stack(
        [torch.from_numpy(layout.positions(rank)) for rank in range(layout.workers)]
    )
    shards = shards[:, None, :, None] + torch.tensor([0, 10_000])[:, None, None]
    sequence = layout.to_sequence(shards)
    assert sequence[0, :, 0].tolist() == list(range(layout.padded_seq))
    assert sequence[1, :, 0].tolist() == list(range(10_000, 10_000 + layout.padded_seq))
    assert torch.equal(layout.to_shards(sequence), shards)


def test_zigzag_and_striped_match_the_papers():
    assert make_layout("zigzag", 2, 8, 1).positions(0).tolist() == [0, 1, 6, 7]
    assert make_layout("striped", 2, 8, 2).positions(1).tolist() == [2, 3, 6, 7]


@pytest.mark.parametrize("name", ["zigzag", "striped"])
def test_causal_work_is_balanced(name):
    layout = make_layout(name, 8, 65536, 128)
    work = [int((layout.positions(rank) + 1).sum()) for rank in range(8)]
    assert max(work) / (sum(work) / 8) < 1.02
    contiguous = make_layout("contiguous", 8, 65536, 128)
    work = [int((contiguous.positions(rank) + 1).sum()) for rank in range(8)]
    assert max(work) / (sum(work) / 8) > 1.8


@pytest.mark.parametrize(("workers", "stripe"), [(4, 1), (4, 8), (4, 32), (8, 16), (3, 128)])
def test_stripes_inside_blocks_balance_every_mask_of_blocks(workers, stripe):
    """BurstEngine (3.4): each worker holds an equal part of every block of a static mask.

    Then all queries of a block, and so all workers, see the same number of keys. The stripe's size
    times the number of workers must divide the block.
    """
    block = 128 if workers != 3 else 384
    layout = make_layout("striped", workers, 16 * block, stripe)
    seen = np.random.default_rng(0).random((16, 16)) < 0.3
    pairs = []
    for rank in range(workers):
        blocks = layout.positions(rank) // block
        assert (np.bincount(blocks, minlength=16) == block // workers).all()
        pairs.append(int(seen[blocks].sum()) * block)
    assert len(set(pairs)) == 1


def test_an_unknown_layout_is_named_in_the_error():
    with pytest.raises(ValueError, match=r"layuot.*contiguous, zigzag, striped"):
        make_layout("layuot", 2, 8, 1)


CPU = torch.device("cpu")


# Under a balanced layout, each group of ranks has an order of its own.
BALANCED = Balanced.of(np.array([0, 3, 1, 4, 2, 5, 2, 3, 1, 5, 0, 4]), 6, 96, 8)


@pytest.mark.parametrize("layout", [make_layout("zigzag", 6, 96, 4), BALANCED])
def test_the_order_sorts_the_tokens_of_the_ranks_that_share_heads(layout):
    placement = Placement(layout, heads=3)
    for shard in (1, 0, 1):  # the second shard again, after the first
        ranks = range(3 * shard, 3 * shard + 3)
        delivered = torch.cat([torch.from_numpy(layout.positions(rank)) for rank in ranks])
        order, inverse = placement.token_order(shard, CPU)
        sorted_tokens = delivered[order]
        assert sorted_tokens.tolist() == placement.inside.positions(shard).tolist()
        assert torch.equal(sorted_tokens[inverse], delivered)


def test_without_shared_heads_the_layout_stays():
    layout = make_layout("zigzag", 4, 64, 4)
    assert Placement(layout).inside is layout
