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
    own, keys = f"kv {b.own}", f"keys {at}"
    for t in step.post:
        sources: tuple[str, ...] = (own,)
        cast = 0
        if b.forwards(t):
            sources, cast = (own, f"gathered {t.after}"), 1
        payload, arrives = low(SENT[cast]) / b.piece(t.part)[1], f"gathered {t.number}"
        # The rows leave from a copy.
        writes = arrives, f"leaving {t.number}"
        b.post(t, sources, writes, payload, b.piece(t.part), cast)
    b.wait(step.wait)
    last = b.posted[step.wait[-1]].transfer
    arrived: tuple[str, ...] = (f"gathered {last.number}",)
    if b.forwards(last):
        assert last.after is not None
        b.wait((last.after,))
        arrived = f"gathered {last.after}", *arrived
    piece = b.piece(step.part)
    moves = 2 * b.cast_size(low) / piece[1]
    b.arrange(MERGE_ROWS, (own, *arrived), (keys,), moves, piece=piece)
    return keys


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
