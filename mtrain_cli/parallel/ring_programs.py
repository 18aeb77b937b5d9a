"""The programs of rings: shards circulate, and each step computes one."""

from __future__ import annotations

from collections.abc import Sequence

from mtrain_cli.parallel import buffers
from mtrain_cli.parallel.arrangements import (
    Delta,
    Gradients,
    Message,
    Pack,
    Pick,
    Result,
    TakeSum,
    Zero,
)
from mtrain_cli.parallel.buffers import Buffer, Kind
from mtrain_cli.parallel.operations import (
    AddColumns,
    ColumnsBackward,
    ColumnsForward,
    ComputeBackward,
    ComputeForward,
    ComputeMessage,
    MergeBackward,
    MergeForward,
    Reduce,
)
from mtrain_cli.parallel.program import (
    COLUMNS,
    KEYS,
    NOTHING,
    QUERIES,
    WIDE_COLUMNS,
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
from mtrain_cli.parallel.schedule import DKV, DQ, KV, UNSCHEDULED, ScheduleStep, Transfer
from mtrain_cli.parallel.schedule import QUERIES as QUERY_PAYLOAD

_CIRCULATING = {KV: Kind.KV, QUERY_PAYLOAD: Kind.QUERIES}
# By payload of a gradient: the kind of its buffers, and the bytes that adding it moves.
_RETURNING = {DKV: (Kind.DKV, 3 * high(KEYS)), DQ: (Kind.DQUERIES, 3 * high(QUERIES))}


def ring_forward(b: ProgramBuilder, steps: Steps) -> None:
    """Circulate key shards; merge the attention over each shard into the output so far."""
    b.begin(0, steps[0])
    b.emit(Pack, (buffers.K, buffers.V), (b.kv,), 2 * low(KEYS))
    if b.traits.columns:
        b.emit(Pick, (b.kv,), (buffers.COLUMNS,), 2 * low(COLUMNS))
        b.sum_columns(buffers.COLUMNS, low(WIDE_COLUMNS))
    # The first merge moves nothing: its result becomes the output so far. The second merge converts
    # the output to float32.
    merged = {0: NOTHING, 1: ADDED + COPIED}
    for at, step in enumerate(steps):
        b.begin(at, step)
        _hops(b, step.post)
        b.wait(step.wait)
        keys, part = Kind.KV.of(b.shard(step.keys)), Kind.PART.at(at)
        b.compute(ComputeForward, step, (buffers.Q, keys), (part,))
        b.emit(MergeForward, (part,), (buffers.TOTAL,), merged.get(at, ADDED))
        if at == 0 and b.traits.columns:
            b.wait((UNSCHEDULED,))
            b.emit(ColumnsForward, (buffers.Q, buffers.COLUMNS, buffers.TOTAL), (buffers.TOTAL,))
        b.end_step(step, keys)
    b.emit(Result, (buffers.Q, buffers.TOTAL), (buffers.OUT, buffers.LSE), COPIED)


def keys_backward(b: ProgramBuilder, steps: Steps) -> None:
    """Send key shards back to their owners."""
    b.begin(0, steps[0])
    reads = _begin_backward(b, 2 * low(QUERIES) + high(QUERIES))
    for at, step in enumerate(steps):
        b.begin(at, step)
        _hops(b, step.post)
        b.wait(step.wait)
        shard, made = b.shard(step.keys), (Kind.DQ.at(at), Kind.DKEYS.at(at))
        keys, total = Kind.KV.of(shard), Kind.DKV.of(shard)
        b.pooled.add(total)
        b.emit(TakeSum, (keys,), (total,))
        b.compute(ComputeBackward, step, (*reads, keys), made)
        moves = ADDED + KEYS_COPIED
        b.emit(MergeBackward, made, (buffers.DQ_SUM, total), moves, begins=(total,))
        _exchange_gradients(b, step)
        b.end_step(step, keys)
    _end_backward(b, Kind.DKV.of(b.own))


def queries_backward(b: ProgramBuilder, steps: Steps) -> None:
    """Keep the keys on their rank, and circulate query messages. The queries' gradients follow."""
    b.begin(0, steps[0])
    reads = _begin_backward(b, 6 * low(QUERIES) + high(QUERIES))  # includes the message
    placeholder = low(QUERIES) if b.traits.copies_parts else NOTHING
    b.emit(Message, reads, (Kind.QUERIES.of(b.own),))
    b.emit(Zero, (b.kv,), (buffers.DKV_SUM,))
    for at, step in enumerate(steps):
        b.begin(at, step)
        _hops(b, step.post)
        b.wait(step.wait)
        computed = [Kind.QUERIES.of(b.shard(step.queries))] if step.queries else []
        if step.queries:
            total = Kind.DQUERIES.of(b.shard(step.queries))
            made = Kind.DQ.at(at), Kind.DKEYS.at(at)
            b.pooled.add(total)
            b.emit(TakeSum, (buffers.Q,), (total,))
            b.compute(ComputeMessage, step, (*computed, b.kv), made, placeholder)
            moves = COPIED + KEYS_ADDED
            b.emit(MergeBackward, made, (total, buffers.DKV_SUM), moves, begins=(total,))
        _exchange_gradients(b, step)
        b.end_step(step, *computed)
    b.emit(Reduce, (Kind.DQUERIES.of(b.own),), (buffers.DQ_SUM,))
    _end_backward(b, buffers.DKV_SUM)


def _hops(b: ProgramBuilder, transfers: Sequence[Transfer]) -> None:
    for t in transfers:
        kind = _CIRCULATING[t.payload]
        leaves, arrives = kind.of(b.shard(t.sends)), kind.of(b.shard(t.receives))
        b.pooled.add(arrives)
        b.post(t, (leaves,), (arrives,), b.payload(t))


def _exchange_gradients(b: ProgramBuilder, step: ScheduleStep) -> None:
    """Add the gradients that arrived, then send the gradients that this step completes."""
    for number in step.collect:
        post = b.in_flight[number]
        b.wait((number,))
        kind, moves = _RETURNING[post.transfer.payload]
        total = kind.of(b.shard(post.transfer.receives))
        b.emit(Reduce, post.writes, (total,), moves)
    for t in step.send:
        kind, _ = _RETURNING[t.payload]
        leaves = kind.of(b.shard(t.sends))
        arrives = Buffer(kind, b.shard(t.receives), generation=t.number)
        b.pooled |= {leaves, arrives}
        b.post(t, (leaves,), (arrives,), b.payload(t))


def _begin_backward(b: ProgramBuilder, moves: Size) -> tuple[Buffer, ...]:
    """Begin a ring's backward pass: compute delta if needed, and start the sum of dq."""
    columns = b.traits.columns
    delta = (buffers.DELTA,) if columns or not b.traits.needs_out else ()
    reads = (buffers.Q, buffers.DOUT, buffers.OUT, buffers.LSE, *delta)
    b.emit(Delta, reads[:3], (*delta, *(() if columns else (buffers.DQ_SUM,))), moves)
    if columns:
        b.emit(ColumnsBackward, (*reads, buffers.COLUMNS), (buffers.DQ_SUM, buffers.DCOLUMNS))
        b.sum_columns(buffers.DCOLUMNS, high(WIDE_COLUMNS))
    return reads


def _end_backward(b: ProgramBuilder, gradient: Buffer) -> None:
    b.pooled.add(gradient)
    if b.traits.columns:
        b.wait((UNSCHEDULED,))
        # Each rank adds only those columns that are among its own keys.
        moves = 3 * high(COLUMNS) / b.schedule.workers
        b.emit(AddColumns, (buffers.DCOLUMNS,), (gradient,), moves)
    reads = (buffers.Q, buffers.DQ_SUM, gradient)
    b.emit(Gradients, reads, (buffers.DQ, buffers.DK, buffers.DV), COPIED + KEYS_COPIED)
