"""Shards and small values arrive from every rank of a group, in rank order."""

from __future__ import annotations

import time
from typing import Any

import gloo
import pytest
import torch
import torch.distributed as dist

from mtrain_cli.parallel.collectives import (
    all_gather,
    share,
    start_all_gather,
    start_all_to_all,
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


def rows_between(rank: int, world: int) -> tuple[list[int], list[int], list[int]]:
    """Exchange a row with each rank, then from rank a to rank b ``(2 * a + b) % 4`` rows, twice."""
    group = dist.group.WORLD
    assert group is not None
    equal = torch.empty(world, 1, dtype=torch.int64)
    leaving = (torch.arange(world) + 10 * rank)[:, None]
    start_all_to_all(equal, leaving, (), (), group, blocks=True).wait()
    send, receive = (
        [(2 * a + b) % 4 for a, b in pairs]
        for pairs in ([(rank, b) for b in range(world)], [(a, rank) for a in range(world)])
    )
    arrived, works = [], []
    for first in (0, 100):
        leaving = torch.repeat_interleave(torch.arange(world), torch.tensor(send))
        arrived.append(torch.empty(sum(receive), 1, dtype=torch.int64))
        rows = (leaving + 10 * rank + first)[:, None]
        time.sleep(0.2 * rank)  # what comes first has not all come
        works.append(start_all_to_all(arrived[-1], rows, receive, send, group))
    for work in works:
        work.wait()
    one, two, three = (tensor.flatten().tolist() for tensor in (equal, *arrived))
    return one, two, three


def test_rows_arrive_from_each_rank_in_order_and_ranks_may_send_each_other_none():
    for rank, (equal, first, second) in enumerate(gloo.run(4, rows_between)):
        assert equal == [10 * a + rank for a in range(4)]
        expected = [10 * a + rank for a in range(4) for _ in range((2 * a + rank) % 4)]
        assert first == expected
        assert second == [100 + row for row in expected]


def test_on_a_cpu_a_rank_receives_from_all_before_it_sends():
    """With gloo, directions of a connection would else take turns."""
    posted: list[tuple[str, int]] = []

    class Group:
        rank, size = staticmethod(lambda: 1), staticmethod(lambda: 3)

        def recv(self, _: object, peer: int, __: int) -> None:
            posted.append(("from", peer))

        def send(self, _: object, peer: int, __: int) -> None:
            posted.append(("to", peer))

    rows = torch.zeros(3, 2)
    start_all_to_all(torch.empty(3, 2), rows, (), (), Group())  # type: ignore[arg-type]
    assert posted == [("from", 0), ("from", 2), ("to", 2), ("to", 0)]
