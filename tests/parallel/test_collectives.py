"""Shards and small values arrive from every rank of a group, in rank order."""

from __future__ import annotations

from typing import Any

import gloo
import pytest
import torch
import torch.distributed as dist

from mtrain_cli.parallel.collectives import (
    all_gather,
    share,
    start_all_gather,
    start_reduce_scatter,
)

WORLD = 3
VALUES = [["é", None, 2.5], {}, "a longer text, " * 20]


def shard(rank: int) -> torch.Tensor:
    """[2, 3], numbers that no other rank has."""
    return torch.arange(6.0).view(2, 3) + 10 * rank


def exchanged(rank: int, world: int) -> dict[str, Any]:
    """Run all collectives in the whole group, and in a group without rank 0."""
    pair = dist.new_group([1, 2])
    found: dict[str, Any] = {}
    for name, group, peers in (("whole", None, [0, 1, 2]), ("pair", pair, [1, 2])):
        if rank not in peers:
            continue
        gathered = all_gather(shard(rank), len(peers), group)
        transposed, work = start_all_gather(shard(rank).t(), len(peers), group)
        work.wait()
        # Each rank sends a different shard to each peer.
        leaving = torch.stack([shard(rank) * (at + 1) for at in range(len(peers))])
        summed, work = start_reduce_scatter(leaving, group)
        work.wait()
        found[name] = gathered, transposed, summed, share(VALUES[rank], group)
    found["pairs"] = share((rank, world))
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return gloo.run(WORLD, exchanged)


@pytest.mark.parametrize(("name", "peers"), [("whole", [0, 1, 2]), ("pair", [1, 2])])
def test_every_rank_of_a_group_gets_all_shards_and_its_own_sum(results, name, peers):
    shards = torch.stack([shard(rank) for rank in peers])
    assert [name in found for found in results] == [rank in peers for rank in range(WORLD)]
    for at, rank in enumerate(peers):
        gathered, transposed, summed, values = results[rank][name]
        assert gathered.equal(shards)
        assert transposed.equal(shards.transpose(1, 2)), "the shard need not be contiguous"
        assert summed.equal(shards.sum(0) * (at + 1))
        assert values == [VALUES[peer] for peer in peers]


def test_tuples_arrive_as_lists(results):
    for found in results:
        assert found["pairs"] == [[rank, WORLD] for rank in range(WORLD)]
