"""Rows of several ranks: one clock; peer and late time of each wait."""

from __future__ import annotations

import time
from dataclasses import replace

import gloo
import numpy as np
import pytest
import torch.distributed as dist

from mtrain_cli.parallel.recording import NOTHING, MessageTag, Span
from mtrain_cli.profiling import record_collector
from mtrain_cli.profiling.record_collector import merge_ranks, own_rows
from mtrain_cli.records.record_files import ROW, WORDS
from mtrain_cli.simulation.work_counts import StepWork


def span(
    kind: str,
    start: float,
    end: float,
    message: MessageTag = NOTHING,
    step: int = 0,
    direction: str = "forward",
) -> Span:
    return Span(kind, 0, 0, direction, step, message, start, end - start)


def hop(to: int, source: int, number: int = 0, shard: int = 0, leaving: int = 0) -> MessageTag:
    return MessageTag("inner", "kv", shard, leaving, to, source, 100, number)


def waits(*ranks: list[Span], offsets: tuple[float, ...] = ()) -> list[tuple[int, float]]:
    """Return (peer, late seconds) of every wait."""
    tables = [
        own_rows(spans, rank, (offsets or (0.0,) * len(ranks))[rank], {}, (1.0, 1.0))
        for rank, spans in enumerate(ranks)
    ]
    rows = merge_ranks(tables)
    mine = rows[rows["phase"] == WORDS["phase"].index("wait")]
    return [(int(row["peer"]), round(float(row["late_us"]) / 1e6, 6)) for row in mine]


def moved(message: MessageTag, posted: float, ended: float) -> list[Span]:
    return [span("send", posted, ended, message), span("receive", posted, ended, message)]


def test_late_is_the_time_before_the_sender_posts():
    # A ring of three. Rank 1 waits from 2 to 9 for rank 0, which posts only at 6.
    zero, one, two = hop(1, 2), hop(2, 0), hop(0, 1)
    found = waits(
        [*moved(zero, 6, 9), span("wait", 8, 9, zero, 1)],
        [*moved(one, 1, 9), span("wait", 2, 9, one, 1)],
        [*moved(two, 1, 9), span("wait", 3, 5, two, 1)],
    )
    # Rank 0 waits for rank 2, which posted long before. Rank 2 waits for rank 1, but rank 0 posts
    # the receive of its message even later, at 6.
    assert found == [(2, 0.0), (0, 4.0), (0, 2.0)]


def test_messages_between_two_ranks_match_in_order():
    a, b = (hop(1, 1, 0), hop(1, 1, 1)), (hop(0, 0, 0), hop(0, 0, 1))
    found = waits(
        [
            *moved(a[0], 0, 3),
            *moved(a[1], 5, 8),
            span("wait", 1, 3, a[0], 1),
            span("wait", 6, 8, a[1], 2),
        ],
        [
            *moved(b[0], 2, 3),
            *moved(b[1], 4, 8),
            span("wait", 2, 3, b[0], 1),
            span("wait", 4, 8, b[1], 2),
        ],
    )
    assert found == [(1, 1.0), (1, 0.0), (0, 0.0), (0, 1.0)]


@pytest.mark.parametrize("other", [{"layer": 1}, {"micro": 1}, {"direction": "backward"}])
def test_messages_of_different_passes_do_not_match(other):
    zero, one = hop(1, 1), hop(0, 0)

    def later(spans: list[Span]) -> list[Span]:
        return [replace(s, start=s.start + 100, **other) for s in spans]

    # In the first pass, rank 0 arrives 3 s after rank 1; in the second, both at once; then vice
    # versa.
    late = [*moved(zero, 4, 9)], [*moved(one, 0, 9), span("wait", 1, 9, one)]
    prompt = [*moved(zero, 0, 9)], [*moved(one, 0, 9), span("wait", 1, 9, one)]
    assert waits(late[0] + later(prompt[0]), late[1] + later(prompt[1])) == [(0, 3.0), (0, 0.0)]
    assert waits(prompt[0] + later(late[0]), prompt[1] + later(late[1])) == [(0, 0.0), (0, 3.0)]


def test_a_collective_waits_for_the_last_rank():
    def gather(peers: tuple[int, ...]) -> MessageTag:
        return MessageTag("inner", "kv", number=0, peers=peers)

    left, right = gather((0, 1)), gather((2, 3))
    found = waits(
        *(
            [*moved(message, posted, 9), span("wait", 1, 9, message)]
            for message, posted in ((left, 0), (left, 3), (right, 6), (right, 1))
        )
    )
    # Two separate nodes. The last to arrive waits for no other rank.
    assert found == [(1, 2.0), (-1, 2.0), (-1, 5.0), (2, 5.0)]


def test_rows_use_the_clock_of_the_first_rank():
    zero, one = hop(1, 1), hop(0, 0)
    # The second rank's clock is 100 s ahead.
    tables = [
        [*moved(zero, 4, 9), span("wait", 5, 9, zero)],
        [*moved(one, 102, 109), span("wait", 103, 109, one)],
    ]
    assert waits(*tables, offsets=(0.0, -100.0)) == [(1, 0.0), (0, 1.0)]
    rows = merge_ranks(
        [own_rows(spans, rank, -100.0 * rank, {}, (1.0, 1.0)) for rank, spans in enumerate(tables)]
    )
    assert sorted(set(rows["start_us"])) == pytest.approx(
        [0, 1e6, 2e6, 3e6]
    )  # from the earliest span


def test_rows_hold_messages_and_work():
    message = hop(1, 2, 0, shard=2, leaving=0)
    work = {
        (0, 0): {
            "forward": StepWork(
                "forward", np.array([[11, 22]]), np.array([[3, 4]]), np.array([5]), np.array([66])
            ),
            "backward": StepWork(
                "backward", np.array([[44, 55]]), np.array([[6, 7]]), np.array([5]), np.array([88])
            ),
        }
    }
    spans = [
        span("pass", 0, 9, step=-1),
        *moved(message, 0, 1),
        span("attention", 1, 2, step=0),
        span("columns", 2, 3, step=0),
        span("columns", 3, 4, step=1),
        span("attention", 4, 5, step=1),
        span("attention", 5, 6, step=1, direction="recompute"),
        span("attention", 6, 7, step=0, direction="backward"),
    ]
    rows = merge_ranks([own_rows(spans, 0, 0.0, work, (2.0, 5.0))])
    assert rows.dtype == ROW
    words = {name: [options[code] for code in rows[name]] for name, options in WORDS.items()}
    sent, received = rows[words["phase"].index("send")], rows[words["phase"].index("receive")]
    assert (sent["peer"], sent["shard"], sent["bytes"]) == (1, 0, 100)
    assert (received["peer"], received["shard"], received["bytes"]) == (2, 2, 100)
    computed = [i for i, phase in enumerate(words["phase"]) if phase in ("attention", "columns")]
    # Single columns count with their first kernel.
    assert [int(rows["pairs"][i]) for i in computed] == [11, 66, 0, 22, 22, 44]
    assert [int(rows["blocks"][i]) for i in computed] == [3, 0, 0, 4, 4, 6]
    assert [int(rows["columns"][i]) for i in computed] == [0, 5, 0, 0, 0, 0]
    assert [float(rows["flop"][i]) for i in computed] == [22, 132, 0, 44, 44, 220]


def aligned(rank: int, world: int) -> tuple[float, float, float]:
    """Align ranks as if on separate machines, with clocks 1000 s apart.

    Returns offset, uncertainty and the true offset.
    """
    real = time.perf_counter
    ahead = 1000.0 * rank
    record_collector._boot = lambda: f"machine {rank // 2}"
    ahead = 1000.0 * (rank // 2)
    record_collector.time.perf_counter = lambda: real() + ahead
    try:
        found = record_collector.align_clocks(
            rank, record_collector.boots_of_all(world, dist.group.WORLD), dist.group.WORLD
        )
    finally:
        record_collector.time.perf_counter = real
    return found.offset, found.uncertainty, -ahead


def test_clocks_of_other_machines_are_measured():
    found = gloo.run(3, aligned)
    assert found[0] == (0.0, 0.0, 0.0)
    assert found[1] == (0.0, 0.0, 0.0), "processes of one machine share its clock"
    offset, uncertainty, truth = found[2]
    assert 0 < uncertainty < 0.5
    assert abs(offset - truth) <= uncertainty


def test_a_wait_for_a_stage_is_late_until_its_pass_ends():
    """Rank 1 waits from 0 to 6 for the forward pass of rank 0, which ends at 5."""

    def passed(start: float, end: float, stage: int, direction: str) -> Span:
        return span("stage", start, end, NOTHING, stage, direction)

    def arrives(source: int, payload: str) -> MessageTag:
        return MessageTag("stage", payload, source=source, size=100)

    left = MessageTag("stage", "gradients", to=0, size=100)
    found = waits(
        [
            passed(1, 5, 0, "forward"),
            span("wait", 5, 13, arrives(1, "gradients"), 0, "backward"),
            passed(13, 14, 0, "backward"),
        ],
        [
            span("wait", 0, 6, arrives(0, "activations"), 1, "forward"),
            passed(6, 8, 1, "forward"),
            passed(8, 12, 1, "backward"),
            span("wait", 12, 13, left, 1, "backward"),
        ],
    )
    # The last wait is for a receiver, which never computes too long.
    assert found == [(1, 7.0), (0, 5.0), (0, 0.0)]
