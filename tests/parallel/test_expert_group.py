"""Rows travel between the workers that share experts."""

from __future__ import annotations

import gloo
import pytest
import torch

from mtrain_cli.launch.parallel_dims import ParallelDims
from mtrain_cli.parallel.expert_group import make_expert_group, make_expert_mesh


def exchanged(rank: int, world: int) -> tuple:
    dims = ParallelDims.of(world, cp=2, tp=1)
    group = make_expert_group(rank, dims, 2, torch.device("cpu"))
    assert group is not None
    assert make_expert_group(rank, dims, 1, torch.device("cpu")) is None
    counts = group.gather_counts(torch.tensor([rank, 10 + rank]))
    # Rank 0 of a group sends nothing, rank 1 sends one row to itself and two to rank 0.
    send = [[0, 0], [2, 1]][group.rank]
    receive = [[0, 2], [0, 1]][group.rank]
    rows = 100.0 * rank + torch.arange(2.0 * sum(send)).view(-1, 2)
    found = group.start(rows, send, receive).wait()
    into = torch.zeros(4, 2)
    group.start(rows, send, receive, into=into[1 : 1 + len(found)]).wait()
    assert into[1 : 1 + len(found)].tolist() == found.tolist()
    assert group.most([rank - group.rank, group.rank], rows.device) == [rank - group.rank, 1]
    mesh = make_expert_mesh(dims, 2, "cpu")
    return group.rank, counts.tolist(), found.tolist(), group.received[0], mesh.mesh.tolist()


def test_consecutive_workers_exchange_rows_in_rank_order():
    results = gloo.run(4, exchanged)
    for rank, (place, counts, found, received, mesh) in enumerate(results):
        first = rank - place
        assert place == rank % 2
        assert counts == [[first, 10 + first], [first + 1, 11 + first]]
        sent = 100.0 * (first + 1)
        rows = [[sent + 2 * n, sent + 2 * n + 1] for n in range(3)]
        assert found == (rows[:2] if place == 0 else rows[2:])
        assert received == (2 * 2 * 2 * 4 if place == 0 else 0), "own rows do not count"
        assert mesh == [[0, 1], [2, 3]]


def test_the_loss_of_a_worker_names_the_group():
    with pytest.raises(RuntimeError, match="rows from rank 1 did not arrive"):
        raise gloo.run(2, lost)[0]


def lost(rank: int, world: int) -> Exception | None:
    group = make_expert_group(rank, ParallelDims.of(world, cp=2), 2, torch.device("cpu"))
    assert group is not None
    try:
        with group.peer_errors():
            raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer")
    except RuntimeError as error:
        return RuntimeError(str(error)) if rank == 0 else None
    return None
