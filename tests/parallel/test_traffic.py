"""Counts of pairs and rows equal those of a dense mask and of messages sent block by block."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel.mask_samples import dense, local_mask, random_mask

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.config.cluster import Constant, load_cluster
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.traffic import (
    Rates,
    WantedRows,
    count_bits,
    count_traffic,
    from_bits,
    needs_of_chunks,
    to_bits,
)


def sent_one_by_one(kinds, owner, workers, per_node, block, layers):
    """Send what each rank holds of every block that a dense mask needs, one message at a time."""
    pairs = np.zeros(workers, np.int64)
    inner, outer = np.zeros((2, workers, workers), np.int64)
    for masks, count in zip(kinds, layers, strict=True):
        seen = [dense(mask) for mask in masks]
        np.add.at(pairs, owner, count * np.sum(seen, axis=(0, 2)))
        for at in range(0, len(owner), block):
            needing = {int(r) for one in seen for r in owner[one[:, at : at + block].any(1)]}
            for holder, held in np.transpose(np.unique(owner[at : at + block], return_counts=True)):
                rows = count * len(masks) * held
                for node in range(workers // per_node):
                    receivers = {r for r in needing if r // per_node == node}
                    sender = holder
                    if receivers and node != holder // per_node:
                        sender = node * per_node + holder % per_node
                        outer[holder, sender] += rows
                    for receiver in receivers - {int(sender)}:
                        inner[sender, receiver] += rows
    return pairs, inner, outer


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    workers=st.sampled_from([(1, 1), (3, 3), (4, 4), (4, 2), (6, 2), (6, 3), (4, 1)]),
    block=st.sampled_from([1, 4, 16]),
    sequences=st.lists(st.integers(1, 3), min_size=1, max_size=2),
    shared=st.booleans(),
)
def test_counts_equal_messages_sent_one_by_one(seed, workers, block, sequences, shared):
    """shared: whether ranks share blocks, and the last block is shorter."""
    rng = np.random.default_rng(seed)
    workers, per_node = workers
    padded = workers * block * int(rng.integers(1, 5))
    owner = np.repeat(rng.permutation(np.arange(padded // block) % workers), block)
    if shared:
        padded = max(1, padded - int(rng.integers(0, block)))
        owner = rng.integers(0, workers, padded)
    kinds = [
        [
            local_mask(rng, padded) if rng.random() < 0.5 else random_mask(rng, padded, 2)
            for _ in range(count)
        ]
        for count in sequences
    ]
    layers = rng.integers(1, 4, len(kinds)).tolist()
    shards = [np.flatnonzero(owner == r) for r in range(workers)]
    traffic = count_traffic(kinds, shards, per_node=per_node, block=block, layers=layers)
    pairs, inner, outer = sent_one_by_one(kinds, owner, workers, per_node, block, layers)
    assert traffic.pairs.tolist() == pairs.tolist()
    for moved, messages in ((traffic.inner, inner), (traffic.outer, outer)):
        assert moved.sent.tolist() == messages.sum(1).tolist()
        assert moved.received.tolist() == messages.sum(0).tolist()
    assert traffic.received.tolist() == (inner + outer).sum(0).tolist()
    cost = pairs + 3 * inner.sum(0) + 5 * outer.sum(0)
    assert traffic.cost(3, 5).tolist() == cost.tolist()


def test_a_causal_mask_moves_nearly_all_rows_if_striped_and_three_quarters_if_zigzag():
    mask = SequenceMask.causal(16384, 16384)

    def traffic(name: str):
        layout = make_layout(name, 8, 16384, 128)
        return count_traffic([[mask]], [layout.positions(rank) for rank in range(8)])

    striped, zigzag = traffic("striped"), traffic("zigzag")
    # Rank r needs all 120 + r + 1 blocks up to its last one, and holds 16 of them.
    assert striped.received.tolist() == [128 * (105 + rank) for rank in range(8)]
    assert zigzag.share_moved(16384) == 0.75
    assert zigzag.imbalance == 1
    assert striped.imbalance == pytest.approx(1.05, abs=0.01)


def test_needs_of_chunks_are_those_of_a_dense_mask(monkeypatch):
    rng = np.random.default_rng(0)
    kinds = [[random_mask(rng, 512, 3), local_mask(rng, 512)], [local_mask(rng, 512)]]
    seen = [np.any([dense(mask) for mask in masks], axis=0) for masks in kinds]
    expected = to_bits(np.stack([s.reshape(16, 32, 64, 8).any(axis=(1, 3)) for s in seen], axis=1))
    assert np.array_equal(needs_of_chunks(kinds, 32, 8), expected)
    monkeypatch.setattr("mtrain_cli.parallel.traffic._COUNTED_TOGETHER", 3 * 65)
    assert np.array_equal(needs_of_chunks(kinds, 32, 8), expected)


@pytest.mark.parametrize("blocks", [1, 64, 65, 200])
def test_bits_keep_and_count_the_flags(blocks):
    flags = np.random.default_rng(blocks).random((5, 2, blocks)) < 0.5
    assert np.array_equal(from_bits(to_bits(flags), blocks), flags)
    assert (
        count_bits(to_bits(flags), np.array([1, 7])).tolist() == (flags.sum(-1) @ [1, 7]).tolist()
    )


def test_nodes_of_different_sizes_are_refused():
    mask = SequenceMask.causal(60, 60)
    thirds = [np.arange(r * 20, r * 20 + 20) for r in range(3)]
    with pytest.raises(ValueError, match="does not divide 3 workers; allowed: 1, 3"):
        count_traffic([[mask]], thirds, per_node=2, block=20)


def test_a_mask_without_pairs_is_balanced():
    mask = SequenceMask.from_slices([], 8, 8)
    traffic = count_traffic([[mask]], [np.arange(4), np.arange(4, 8)], block=4)
    assert traffic.imbalance == 1.0
    assert traffic.share_moved(8) == 0.0


def test_the_rates_are_those_of_the_clusters_file():
    rates = Rates.on(load_cluster("h100_4x8"))
    assert rates.flops == pytest.approx(0.55 * 989e12)
    assert (rates.inner, rates.outer, rates.memory) == (322e9, 50e9, 3350e9)
    assert (rates.inner_latency, rates.outer_latency) == pytest.approx((79e-6, 90e-6))
    assert (rates.inner_share, rates.outer_share) == (0.06, 0.03)


def test_gpus_that_share_a_network_card_share_its_bandwidth():
    cluster = load_cluster("h100_4x8")
    shared = replace(cluster.outer, shared_by=Constant.of(4, "guess"))
    assert Rates.on(replace(cluster, outer=shared)).outer == 50e9 / 4


def test_one_node_keeps_the_usual_links_to_others():
    """A group of one node may be split into virtual nodes."""
    rates = Rates.on(load_cluster("h200_1x8"))
    assert rates.outer == Rates.on(None).outer
    assert rates.inner == 322e9


@pytest.mark.parametrize("rows", [2**24 - 2, 2**24 + 2])
def test_many_rows_are_counted_exactly(rows):
    needed, held = np.ones((2, 1, 2), bool), np.array([[rows, 1], [1, rows]])
    assert (WantedRows.of(needed, held, 2).of_ranks == rows + 1).all()
