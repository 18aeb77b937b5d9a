"""The programs of rings: shards circulate, and each step computes one."""

from __future__ import annotations

from collections.abc import Sequence

from mtrain_cli.parallel.arrangements import DELTA, GRADIENTS, MESSAGE, PACK, PICK, RESULT, ZERO
from mtrain_cli.parallel.program import (
    COLUMNS,
    KEYS,
    NOTHING,
    QUERIES,
    WIDE_COLUMNS,
    AddColumns,
    ComputeColumns,
    Merge,
    Reduce,
    Size,
    high,
    low,
)
from mtrain_cli.parallel.program_builder import (
    ADDED,
    COPIED,
    KEYS_ADDED,
    KEYS_COPIED,
    ProgramBuilder,
    Steps,
)
from mtrain_cli.parallel.schedule import DKV, DQ, UNSCHEDULED, ScheduleStep, Transfer

# By payload of a gradient: the first word of its buffers, and the bytes that adding it moves.
_RETURNING = {DKV: ("dkv", 3 * high(KEYS)), DQ: ("dqueries", 3 * high(QUERIES))}


def ring_forward(b: ProgramBuilder, steps: Steps) -> None:
    """Circulate key shards; merge the attention over each shard into the output so far."""
    b.begin(0, steps[0])
    b.arrange(PACK, ("k", "v"), (f"kv {b.own}",), 2 * low(KEYS))
    if b.traits.columns:
        b.arrange(PICK, (f"kv {b.own}",), ("columns",), 2 * low(COLUMNS))
        b.sum_columns("columns", low(WIDE_COLUMNS))
    # The first merge moves nothing: its result becomes the output so far. The second merge converts
    # the output to float32.
    merged = {0: NOTHING, 1: ADDED + COPIED}
    for at, step in enumerate(steps):
        b.begin(at, step)
        _hops(b, step.post)
        b.wait(step.wait)
        keys, part = f"kv {b.shard(step.keys)}", f"part {at}"
        b.compute(step, ("q", keys), (part,))
        b.emit(Merge, (part,), ("total",), moves=merged.get(at, ADDED))
        if at == 0 and b.traits.columns:
            b.wait((UNSCHEDULED,))
            b.emit(ComputeColumns, ("q", "columns", "total"), ("total",))
        b.end_step(step, keys)
    b.arrange(RESULT, ("q", "total"), ("out", "lse"), COPIED)


def keys_backward(b: ProgramBuilder, steps: Steps) -> None:
    """Send key shards back to their owners.

    The gradient of a shard follows one step behind the shard. Each rank adds its own part to the
    gradient.
    """
    b.begin(0, steps[0])
    reads = _begin_backward(b, 2 * low(QUERIES) + high(QUERIES))
    for at, step in enumerate(steps):
        b.begin(at, step)
        _hops(b, step.post)
        b.wait(step.wait)
        shard, made = b.shard(step.keys), (f"dq {at}", f"dkeys {at}")
        total = f"dkv {shard}"
        b.take_sum(total)
        b.compute(step, (*reads, f"kv {shard}"), made)
        b.emit(Merge, made, ("dq_sum", total), begins=(total,), moves=ADDED + KEYS_COPIED)
        _exchange_gradients(b, step)
        b.end_step(step, f"kv {shard}")
    _end_backward(b, f"dkv {b.own}")


def queries_backward(b: ProgramBuilder, steps: Steps) -> None:
    """Keep the keys on their rank, and circulate query messages. The queries' gradients follow."""
    b.begin(0, steps[0])
    reads = _begin_backward(b, 6 * low(QUERIES) + high(QUERIES))  # includes the message
    placeholder = low(QUERIES) if b.traits.copies_parts else NOTHING
    b.arrange(MESSAGE, reads, (f"queries {b.own}",))
    b.arrange(ZERO, (f"kv {b.own}",), ("dkv sum",), timed=False)
    for at, step in enumerate(steps):
        b.begin(at, step)
        _hops(b, step.post)
        b.wait(step.wait)
        computed = [f"queries {b.shard(step.queries)}"] if step.queries else []
        if step.queries:
            total, made = f"dqueries {b.shard(step.queries)}", (f"dq {at}", f"dkeys {at}")
            b.take_sum(total)
            b.compute(step, (*computed, f"kv {b.own}"), made, placeholder)
            moves = COPIED + KEYS_ADDED
            b.emit(Merge, made, (total, "dkv sum"), begins=(total,), moves=moves)
        _exchange_gradients(b, step)
        b.end_step(step, *computed)
    b.emit(Reduce, (f"dqueries {b.own}",), ("dq_sum",))
    _end_backward(b, "dkv sum")


def _hops(b: ProgramBuilder, transfers: Sequence[Transfer]) -> None:
    """Send shards to the next rank, and receive other shards into pooled buffers."""
    for t in transfers:
        leaves, arrives = (f"{t.payload} {b.shard(s)}" for s in (t.sends, t.receives))
        b.pooled.add(arrives)
        b.post(t, (leaves,), (arrives,), b.payload(t))


def _exchange_gradients(b: ProgramBuilder, step: ScheduleStep) -> None:
    """Add the gradients that arrived, then send the gradients that this step completes."""
    for number in step.collect:
        post = b.in_flight[number]
        b.wait((number,))
        word, moves = _RETURNING[post.transfer.payload]
        total = f"{word} {b.shard(post.transfer.receives)}"
        b.emit(Reduce, post.writes, (total,), moves=moves)
    for t in step.send:
        word, _ = _RETURNING[t.payload]
        leaves = f"{word} {b.shard(t.sends)}"
        arrives = f"{word} {b.shard(t.receives)} by {t.number}"
        b.pooled |= {leaves, arrives}
        b.post(t, (leaves,), (arrives,), b.payload(t))


def _begin_backward(b: ProgramBuilder, moves: Size) -> tuple[str, ...]:
    """Begin a ring's backward pass: compute delta if needed, and start the sum of dq.

    If columns are gathered, compute their gradients first. Return the names of the buffers that
    a kernel reads in addition to the keys.
    """
    columns = b.traits.columns
    delta = ("delta",) if columns or not b.traits.needs_out else ()
    reads = ("q", "dout", "out", "lse", *delta)
    b.arrange(DELTA, reads[:3], (*delta, *(() if columns else ("dq_sum",))), moves)
    if columns:
        b.emit(ComputeColumns, (*reads, "columns"), ("dq_sum", "dcolumns"))
        b.sum_columns("dcolumns", high(WIDE_COLUMNS))
    return reads


def _end_backward(b: ProgramBuilder, gradient: str) -> None:
    """End a ring's backward pass: convert the sums of gradients to the compute dtype.

    If columns are gathered, add their gradients first.
    """
    b.pooled.add(gradient)
    if b.traits.columns:
        b.wait((UNSCHEDULED,))
        # Each rank adds only those columns that are among its own keys.
        moves = 3 * high(COLUMNS) / b.schedule.workers
        b.emit(AddColumns, ("dcolumns",), (gradient,), moves=moves)
    reads = ("q", "dq_sum", gradient)
    b.arrange(GRADIENTS, reads, ("dq", "dk", "dv"), COPIED + KEYS_COPIED)
