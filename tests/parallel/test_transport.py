"""A lost peer is reported with its place in the exchange; other errors pass unchanged."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import gloo
import pytest
import torch
import torch.distributed as dist
from parallel.ways import group_of

from mtrain_cli.launch import progress_record
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.parallel.recording import MessageTag
from mtrain_cli.parallel.schedule import GROUP_CAST, Transfer
from mtrain_cli.parallel.transport import ExchangeError, Transport, explain_peer_loss

WHERE = "ring, layer 3, forward, step 2 of 4"


def test_a_lost_peer_is_reported_with_its_place():
    with (
        pytest.raises(
            ExchangeError,
            match=rf"^{WHERE}: kv from rank 1 did not arrive "
            r"\(Timed out waiting 6000ms for recv operation\)$",
        ),
        explain_peer_loss(WHERE, "waits for kv from rank 1", "kv from rank 1 did not arrive", 1),
    ):
        raise RuntimeError(
            "[/w/gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 6000ms for recv "
            "operation"
        )


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("Tensors must be contiguous")],
)
def test_other_errors_pass_unchanged(error):
    with (
        pytest.raises(type(error)) as caught,
        explain_peer_loss(WHERE, "posts kv", "kv could not be posted"),
    ):
        raise error
    assert caught.value is error


def test_the_record_of_a_failed_worker_keeps_where_it_waited(tmp_path, monkeypatch):
    monkeypatch.setattr(progress_record, "_record", None)
    progress_record.start_record(tmp_path / "where")
    with explain_peer_loss(WHERE, "waits for kv from rank 1", "", 1):
        found = progress_record.read_activity(tmp_path / "where")
        assert (found.doing, found.waits_for) == (f"{WHERE}: waits for kv from rank 1", 1)
    found = progress_record.read_activity(tmp_path / "where")
    assert (found.doing, found.waits_for) == (WHERE, None)
    with pytest.raises(ExchangeError), explain_peer_loss(WHERE, "waits for kv from rank 1", "", 1):
        raise RuntimeError("Connection closed by peer")
    assert progress_record.read_activity(tmp_path / "where").waits_for == 1


def transport_of(rank: int, heads: int) -> Transport:
    """Return the transport of a rank of eight, whose global ranks start at 8."""
    group = ContextGroup(rank, tuple(range(8, 16)), per_node=8, heads=heads)
    return Transport(group, "ring", "layer 3", "forward", 4)


def test_a_message_names_global_ranks_and_the_shards_of_ranks_that_share_heads():
    hop = Transfer(3, "p2p", "kv", "context", (4, 5), (2, 3), to=6, source=2)
    posted = 40  # bytes
    assert transport_of(4, 2)._message(hop, posted) == MessageTag(
        "context", "kv", shard=1, leaving=2, to=14, source=10, size=40, number=3
    )
    gather = Transfer(1, "all_gather", "kv", "context", (0,), (2, 4), peers=(0, 2, 4))
    assert transport_of(0, 2)._message(gather, posted) == MessageTag(
        "context", "kv", size=80, number=1, peers=(8, 10, 12)
    )


def test_the_tensor_that_a_collective_sends_is_kept_until_the_wait():
    transport = transport_of(0, 1)
    transport._transfers[1] = Transfer(1, "all_gather", "kv", "context", (0,), (1,), peers=(0, 1))
    transport._works[1] = [SimpleNamespace(wait=lambda: None)]  # type: ignore[list-item]
    transport._inputs[1] = torch.zeros(4)
    sent = weakref.ref(transport._inputs[1])
    transport.wait(0)
    assert sent() is not None
    transport.wait(1)
    assert sent() is None


def rows_of_two(rank: int, world: int) -> tuple[bool, list[float], bool]:
    """Send one row to this rank and 1 + rank rows to the other rank, without keeping them."""
    group = group_of(rank, world)
    transport = Transport(group, "group_cast", "layer 0", "forward", 1)
    sent = [1, 1 + rank] if rank == 0 else [1 + rank, 1]
    received = [1, 2] if rank == 0 else [1, 1]
    cast = Transfer(0, GROUP_CAST, "kv", "context", (rank,), (1 - rank,), peers=(0, 1))
    leaving, arrived = transport.start_rows(
        cast, lambda: torch.full((sum(sent), 3), float(rank)), 12, sent, received
    )
    # gloo keeps the rows itself. With NCCL, only the transport does.
    is_kept = transport._inputs.get(0) is leaving
    transport.wait(0)
    return is_kept, arrived[:, 0].tolist(), not transport._inputs


def test_rows_arrive_by_peer_and_are_kept_until_the_wait():
    assert gloo.run(2, rows_of_two) == [(True, [0.0, 1.0, 1.0], True), (True, [0.0, 1.0], True)]


def no_rows(rank: int, world: int) -> list[int]:
    """Send no rows. Return the numbers of the messages whose arrival was recorded."""
    arrived: list[int] = []
    recorder: Any = SimpleNamespace(
        recording=False, posted=lambda *_: None, watch=lambda *_: None, arrived=arrived.append
    )
    group = group_of(rank, world)
    transport = Transport(group, "group_cast", "layer 0", "forward", 1, recorder)
    cast = Transfer(3, GROUP_CAST, "kv", "context", (rank,), (1 - rank,), peers=(0, 1))
    transport.start_rows(cast, lambda: torch.zeros(0, 3), 12, [0, 0], [0, 0])
    transport.wait(3)
    transport.wait(3)
    return arrived


def test_a_cast_without_rows_is_recorded_once():
    assert gloo.run(2, no_rows) == [[3], [3]]


def posted_and_awaited(rank: int, world: int) -> tuple[list[str], list[str], float]:
    """Hop around a ring of two. Return what was posted, for whom the rank waited, and the value."""
    transport = Transport(group_of(rank, world), "ring", "layer 0", "forward", 1)
    hop = Transfer(0, "p2p", "kv", "context", (rank,), (1 - rank,), to=1 - rank, source=1 - rank)
    posted, awaited, start, note = [], [], dist.batch_isend_irecv, progress_record.note

    def watched(operations: list[dist.P2POp]) -> list[dist.Work]:
        posted.extend(operation.op.__name__ for operation in operations)
        return start(operations)

    def noted(doing: str, waits_for: int | None = None) -> None:
        awaited.extend([doing.split(": ")[-1]] if waits_for is not None else [])
        note(doing, waits_for)

    dist.batch_isend_irecv, progress_record.note = watched, noted
    arriving = torch.zeros(4)
    transport.start_hop(hop, torch.full((4,), float(rank)), arriving)
    transport.wait(0)
    return posted, awaited, float(arriving[0])


def test_a_hop_posts_the_receive_first():
    # gloo would else send in one direction at a time.
    for rank, (posted, awaited, value) in enumerate(gloo.run(2, posted_and_awaited)):
        assert posted == ["irecv", "isend"]
        other = 1 - rank
        assert awaited == [
            f"waits for kv from rank {other}",
            f"waits for rank {other} to take kv",
        ]
        assert value == other
