"""The operations that cast rows of keys to the ranks that need them, and return their gradients."""

from __future__ import annotations

from mtrain_cli.parallel.arrangements import MergeRows, OwnRows, SplitRows
from mtrain_cli.parallel.buffers import Buffer, Kind
from mtrain_cli.parallel.operations import ReduceRows
from mtrain_cli.parallel.program import KEYS, RECEIVED, SENT, Post, as_made, high, low
from mtrain_cli.parallel.program_builder import ProgramBuilder
from mtrain_cli.parallel.schedule import ScheduleStep


def cast_keys(b: ProgramBuilder, at: int, step: ScheduleStep) -> Buffer:
    """Post the group casts of a step, and put the step's keys in order of position."""
    post_casts(b, step)
    own, keys, piece = b.kv, Kind.KEYS.at(at), b.piece(step.part)
    moves = 2 * b.cast_size(low) / piece[1]
    arrived = (post.writes[0] for post in wait_for_rows(b, step))
    b.emit(MergeRows, (own, *arrived), (keys,), moves, piece=piece)
    return keys


def post_casts(b: ProgramBuilder, step: ScheduleStep) -> None:
    first = 0  # the first cast of a part
    for at, t in enumerate(step.post):
        first = at if t.part != step.post[first].part else first
        own, piece = b.kv, b.piece(t.part)
        sources = (own, Kind.GATHERED.at(t.after)) if b.forwards(t) else (own,)
        writes = Kind.GATHERED.at(t.number), Kind.LEAVING.at(t.number)
        b.post(t, sources, writes, low(SENT[at - first]) / piece[1], piece, at - first)


def wait_for_rows(b: ProgramBuilder, step: ScheduleStep) -> tuple[Post, ...]:
    """Wait for the rows of a step. Return the casts that bring them."""
    b.wait(step.wait)
    last = b.posted[step.wait[-1]].transfer
    if b.forwards(last):
        assert last.after is not None
        b.wait((last.after,))
    return arrived_rows(b, step)


def arrived_rows(b: ProgramBuilder, step: ScheduleStep) -> tuple[Post, ...]:
    """Return the casts that bring the rows for which a step waits."""
    last = b.posted[step.wait[-1]]
    if not b.forwards(last.transfer):
        return (last,)
    assert last.transfer.after is not None
    return b.posted[last.transfer.after], last


def return_rows(b: ProgramBuilder, at: int, step: ScheduleStep, made: Buffer) -> Buffer:
    """Return the gradients of received rows to the rows' owners."""
    rows, parts = Kind.ROWS.at(at), b.piece(step.part)[1]
    moves = (b.cast_size(low) + b.cast_size(high)) / parts
    scratch = b.cast_size(as_made) / (2 * parts)
    b.emit(SplitRows, (made,), (rows,), moves, scratch=scratch)
    sources: tuple[Buffer, ...] = (rows,)
    for cast, t in zip(reversed(range(len(step.send))), step.send, strict=True):
        returned = Kind.RETURNED.at(t.number)
        b.post(t, sources, (returned,), high(RECEIVED[cast]) / parts, cast=cast)
        sources = rows, returned
    return Kind.OWN_ROWS.at(at)


def add_returned_rows(b: ProgramBuilder, at: int, step: ScheduleStep) -> None:
    """Add the gradients that other ranks returned to those of this rank's own rows."""
    post, rows = b.posted[step.send[-1].number], Kind.ROWS.at(at)
    parts = b.piece(step.part)[1]
    moves = 3 * high(SENT[post.cast]) / parts
    b.emit(ReduceRows, post.writes, (rows,), moves, cast=post.cast)
    b.emit(OwnRows, (rows,), (Kind.OWN_ROWS.at(at),), 2 * high(KEYS) / parts)
