"""A recording holds every moment of a pass once, and every message with its bytes."""

from __future__ import annotations

import itertools
import time

import gloo
import pytest
import torch
import torch.distributed as dist
from parallel.ways import group_of, make_attention, qkv
from torch.utils.checkpoint import checkpoint

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.sdpa import SdpaKernel
from mtrain_cli.composition.compose import compose
from mtrain_cli.parallel.exchange import make_exchange
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.lowering import lower
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.parallel.program import ShardSizes
from mtrain_cli.parallel.recording import COMPUTING, NOTHING, Recorder, Span, with_gaps
from mtrain_cli.sparsity.fixed import FixedPattern
from mtrain_cli.sparsity.pattern import make_pattern

HEADS, KV_HEADS, HEAD_DIM, SEQ = 4, 2, 8, 96
WAYS = [
    ("ring", 1, {"context"}),
    ("hierarchical_ring", 1, {"inner", "outer"}),
    ("all_gather", 1, {"context"}),
    ("hierarchical_all_gather", 1, {"inner", "outer"}),
    ("ring", 2, {"context", "heads"}),
    ("all_gather", 2, {"context", "heads"}),
]


def recorded(
    rank: int, world: int, name: str, heads: int, sparse: bool
) -> tuple[list[Span], tuple[int, int]]:
    """Run layer 7 twice and record the second time. Also return the bytes of the schedule."""
    group = group_of(rank, world, per_node=2, heads=heads)
    layout = make_layout("zigzag", world, SEQ, 4, unit=4)
    exchange = make_exchange(name, layout, group)
    pattern = FixedPattern(block=4, slashes=4, columns=6, density=0.0, seed=0) if sparse else None
    attend = make_attention(
        exchange, SdpaKernel(), [SequenceMask.causal(SEQ, layout.padded_seq)], "cpu", pattern
    )
    q, k, v = qkv(layout.tokens_per_worker, HEADS, KV_HEADS, HEAD_DIM)
    recorder = Recorder(torch.device("cpu"))
    exchange.set_recorder(recorder)
    attend(q, k, v, 7).sum().backward()
    recorder.start()
    again = attend.for_next_batch()
    with recorder.iteration():
        again(q, k, v, 7).sum().backward()
    found = recorder.read()
    attend(q, k, v, 7).sum().backward()
    recorder.start()
    assert recorder.read() == [], "what is done outside of a recording is not in it"
    sizes = ShardSizes(layout.tokens_per_worker, HEADS, KV_HEADS, HEAD_DIM, 4)
    return found, tuple(
        lower(exchange.schedule, rank, backward=b).sent(sizes) for b in (False, True)
    )


@pytest.mark.parametrize("sparse", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(("name", "heads", "links"), WAYS)
def test_every_moment_of_a_pass_is_in_exactly_one_span(name, heads, links, sparse):
    for rank, (spans, sent) in enumerate(gloo.run(4, recorded, name, heads, sparse)):
        assert [s.kind for s in spans].count("iteration") == 1
        inside = [s for s in spans if s.kind != "iteration"]
        assert {s.layer for s in inside} == {7}
        for direction, bytes_sent in zip(("forward", "backward"), sent, strict=True):
            mine = [s for s in inside if s.direction == direction]
            if not sparse:
                # Zigzag: every pair of shards has work.
                computed = [s.step for s in mine if s.kind == "attention"]
                assert computed == list(range(4 // heads if "ring" in name else 1)), (
                    rank,
                    direction,
                )
            assert {s.message.link for s in mine if s.kind == "wait"} <= links | {"context"}
            (whole,) = (s for s in mine if s.kind == "pass")
            parts = sorted(
                (
                    s
                    for s in with_gaps(mine)
                    if s.kind in COMPUTING and s.kind != "gap" and s.seconds
                ),
                key=lambda s: s.start,
            )
            # Spans follow each other on one thread, from the start of the pass to its end.
            assert all(a.start + a.seconds <= b.start + 1e-7 for a, b in itertools.pairwise(parts))
            assert whole.start <= parts[0].start
            assert parts[-1].start + parts[-1].seconds <= whole.start + whole.seconds + 1e-7
            filled = sum(s.seconds for s in with_gaps(mine) if s.kind in COMPUTING)
            assert filled == pytest.approx(whole.seconds, abs=1e-7)
            if name == "ring" and heads == 1:
                neighbours = {
                    (s.message.source, s.message.to)
                    for s in mine
                    if s.kind == "receive" and s.message.payload == "kv"
                }
                away = 1 if direction == "forward" else -1
                assert neighbours == {((rank - away) % 4, (rank + away) % 4)}
            scheduled = [s for s in mine if s.kind == "send" and s.message.payload != "columns"]
            assert sum(s.message.size for s in scheduled) == bytes_sent
            # Each message is sent and received once, and under way at least until it is waited for.
            assert len(scheduled) == sum(
                s.kind == "receive" and s.message.payload != "columns" for s in mine
            )
            for wait in (s for s in mine if s.kind == "wait"):
                (message,) = (s for s in mine if s.kind == "receive" and s.message == wait.message)
                assert message.start <= wait.start
                assert message.start + message.seconds >= wait.start + wait.seconds - 1e-7
            assert any(s.kind == "columns" for s in mine) == (sparse and "ring" in name)
        assert {s.step for s in inside if s.kind == "index"} == ({-1} if sparse else set())


def test_a_second_forward_pass_is_recorded_as_recompute():
    group = ContextGroup()
    recorder = Recorder(torch.device("cpu"))
    layout = make_layout("striped", 1, SEQ, 4)
    exchange = make_exchange("all_gather", layout, group)
    attend = make_attention(
        exchange, SdpaKernel(), [SequenceMask.causal(SEQ, layout.padded_seq)], "cpu"
    )
    exchange.set_recorder(recorder)
    q, k, v = qkv(SEQ, HEADS, KV_HEADS, HEAD_DIM)
    recorder.start()
    for micro in range(2):
        recorder.micro_batch(micro)
        checkpoint(attend, q, k, v, 3, use_reentrant=False).sum().backward()
    passes = [(s.micro, s.layer, s.direction) for s in recorder.read() if s.kind == "pass"]
    # The backward pass of autograd begins with the second forward pass.
    assert passes == [(m, 3, d) for m in range(2) for d in ("forward", "recompute", "backward")]


def estimated(rank: int, world: int) -> list[Span]:
    """Rank 1 starts to estimate a layer's index 0.3 s after rank 0."""
    group = group_of(rank, world)
    layout = make_layout("striped", world, SEQ, 16, unit=16)
    exchange = make_exchange("ring", layout, group)
    pattern = make_pattern(
        compose(["sparsity=vertical_slash", "sparsity.block=16", "sparsity.last_q=16"]).sparsity, 0
    )
    attend = make_attention(
        exchange, SdpaKernel(), [SequenceMask.causal(SEQ, layout.padded_seq)], "cpu", pattern
    )
    q, k, v = (
        torch.randn(1, layout.tokens_per_worker, h, HEAD_DIM) for h in (HEADS, KV_HEADS, KV_HEADS)
    )
    recorder = Recorder(torch.device("cpu"))
    attend.for_next_batch()(q, k, v, 0)
    exchange.set_recorder(recorder)
    dist.barrier()
    recorder.start()
    time.sleep(0.3 * rank)
    attend.for_next_batch()(q, k, v, 0)
    return with_gaps(recorder.read())


def test_waiting_for_others_does_not_count_as_estimating_an_index():
    first, second = gloo.run(2, estimated)
    for spans, most, least in ((first, 0.6, 0.25), (second, 0.15, 0.0)):
        waited = sum(s.seconds for s in spans if s.kind == "wait" and s.message.payload == "index")
        assert least <= waited <= most
        assert sum(s.seconds for s in spans if s.kind == "index") < 0.15
        (whole,) = (s for s in spans if s.kind == "pass")
        assert sum(s.seconds for s in spans if s.kind in COMPUTING) == pytest.approx(
            whole.seconds, abs=1e-7
        )


def test_index_spans_are_split_around_waits():
    spans = [
        span("pass", 0, 10, -1),
        span("index", 1, 8, -1),
        span("wait", 2, 3, -1),
        span("wait", 5, 7, -1),
        span("wait", 8, 9, 0),
    ]
    found = sorted((s.start, s.start + s.seconds) for s in with_gaps(spans) if s.kind == "index")
    assert found == [(1, 2), (3, 5), (7, 8)]


def span(kind: str, start: float, end: float, step: int = 0) -> Span:
    return Span(kind, 0, 0, "forward", step, NOTHING, start, end - start)


def test_uncovered_time_is_a_gap_of_the_next_step():
    spans = [
        span("pass", 0, 20, -1),
        span("index", 1, 3, -1),
        span("attention", 4, 6, 0),
        span("merge", 7, 8, 0),
        span("wait", 8, 10, 1),
        span("attention", 13, 17, 1),
        span("receive", 2, 15, 0),  # overlaps with the others
    ]
    gaps = [(s.step, s.start, s.seconds) for s in with_gaps(spans) if s.kind == "gap"]
    assert gaps == [(-1, 0, 1), (0, 3, 1), (0, 6, 1), (1, 10, 3), (1, 17, 3)]


def test_an_empty_pass_is_a_gap():
    (gap,) = (s for s in with_gaps([span("pass", 2, 5, -1)]) if s.kind == "gap")
    assert (gap.step, gap.start, gap.seconds) == (-1, 2, 3)
