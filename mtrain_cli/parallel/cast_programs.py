"""The operations that cast rows of keys to the ranks that need them, and return their gradients."""

from __future__ import annotations

from mtrain_cli.parallel.arrangements import MERGE_ROWS, OWN_ROWS, SPLIT_ROWS
from mtrain_cli.parallel.program import KEYS, RECEIVED, SENT, Reduce, as_made, high, low
from mtrain_cli.parallel.program_builder import ProgramBuilder
from mtrain_cli.parallel.schedule import ScheduleStep


def cast_keys(b: ProgramBuilder, at: int, step: ScheduleStep) -> str:
    """Post the group casts of a step, and put the step's keys in order of position.

    Return the name of the buffer with the ordered keys.
    """
    post_casts(b, step)
    own, keys, piece = f"kv {b.own}", f"keys {at}", b.piece(step.part)
    moves = 2 * b.cast_size(low) / piece[1]
    b.arrange(MERGE_ROWS, (own, *wait_for_rows(b, step)), (keys,), moves, piece=piece)
    return keys


def post_casts(b: ProgramBuilder, step: ScheduleStep) -> None:
    """Post the group casts of a step, whose rows leave from a copy."""
    first = 0  # the first cast of a part
    for at, t in enumerate(step.post):
        first = at if t.part != step.post[first].part else first
        own, piece = f"kv {b.own}", b.piece(t.part)
        sources = (own, f"gathered {t.after}") if b.forwards(t) else (own,)
        writes = f"gathered {t.number}", f"leaving {t.number}"
        b.post(t, sources, writes, low(SENT[at - first]) / piece[1], piece, at - first)


def wait_for_rows(b: ProgramBuilder, step: ScheduleStep) -> tuple[str, ...]:
    """Wait for the rows of a step. Return the names of their buffers."""
    b.wait(step.wait)
    last = b.posted[step.wait[-1]].transfer
    if b.forwards(last):
        assert last.after is not None
        b.wait((last.after,))
    return arrived_rows(b, step)


def arrived_rows(b: ProgramBuilder, step: ScheduleStep) -> tuple[str, ...]:
    """Return the names of the buffers with the rows for which a step waits."""
    last = b.posted[step.wait[-1]].transfer
    name = f"gathered {last.number}"
    return (f"gathered {last.after}", name) if b.forwards(last) else (name,)


def return_rows(b: ProgramBuilder, at: int, step: ScheduleStep, made: str) -> str:
    """Return the gradients of received rows to the rows' owners.

    Return the name of the buffer with the sum for this rank's own rows, which
    `add_returned_rows` makes.

    made: name of the buffer with the dk and dv that the kernel returned.
    """
    rows, parts = f"rows {at}", b.piece(step.part)[1]
    moves = (b.cast_size(low) + b.cast_size(high)) / parts
    scratch = b.cast_size(as_made) / (2 * parts)
    b.arrange(SPLIT_ROWS, (made,), (rows,), moves, scratch=scratch)
    sources: tuple[str, ...] = (rows,)
    for cast, t in zip(reversed(range(len(step.send))), step.send, strict=True):
        returned = f"returned {t.number}"
        b.post(t, sources, (returned,), high(RECEIVED[cast]) / parts, cast=cast)
        sources = rows, returned
    return f"own rows {at}"


def add_returned_rows(b: ProgramBuilder, at: int, step: ScheduleStep) -> None:
    """Add the gradients that other ranks returned to those of this rank's own rows."""
    post, rows = b.posted[step.send[-1].number], f"rows {at}"
    parts = b.piece(step.part)[1]
    moves = 3 * high(SENT[post.cast]) / parts
    b.emit(Reduce, post.writes, (rows,), moves=moves, cast=post.cast)
    b.arrange(OWN_ROWS, (rows,), (f"own rows {at}",), 2 * high(KEYS) / parts)
