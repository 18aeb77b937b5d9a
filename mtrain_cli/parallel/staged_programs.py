"""The programs of group casts in stages: a rank's own keys need no transfer, received keys do.

Forward computes a rank's own keys while the casts travel, then the received keys, and merges the
outputs. Backward computes the received keys first. Their gradients travel home while the rank
computes its own keys (MagiAttention, section 4.3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mtrain_cli.parallel import buffers
from mtrain_cli.parallel.arrangements import (
    AddDq,
    Cut,
    Join,
    JoinOut,
    MergeStage,
    Own,
    OwnRows,
    Pack,
    ResultOfPart,
    SplitRows,
    Take,
    ZeroRows,
)
from mtrain_cli.parallel.buffers import Buffer, Kind
from mtrain_cli.parallel.cast_programs import arrived_rows, post_casts, wait_for_rows
from mtrain_cli.parallel.gather_programs import joined_size
from mtrain_cli.parallel.operations import ComputeBackward, ComputeForward, MergeForward, ReduceRows
from mtrain_cli.parallel.program import (
    KEYS,
    NOTHING,
    QUERIES,
    RECEIVED,
    SENT,
    STATS,
    Post,
    Size,
    Unit,
    as_made,
    high,
    low,
    total_size,
)
from mtrain_cli.parallel.program_builder import ADDED, COPIED, KEYS_ADDED, ProgramBuilder, Steps
from mtrain_cli.parallel.schedule import ScheduleStep


def staged_forward(b: ProgramBuilder, steps: Steps) -> None:
    """Merge the attention over the keys of each stage, one part of the heads after the other."""
    stages = b.schedule.stages
    b.begin(0, steps[0])
    b.emit(Pack, (buffers.K, buffers.V), (b.kv,), 2 * low(KEYS))
    results = []
    for at, step in enumerate(steps):
        b.begin(at, step)
        post_casts(b, step)
        piece, keys, part = b.piece(step.part), _keys(b, at, step), Kind.PART.at(at)
        b.compute(ComputeForward, step, (buffers.Q, keys), (part,))
        total, parts = Kind.TOTAL.at(piece[0]), piece[1]
        b.sized[total] = (high(QUERIES) + high(STATS)) / parts
        # As in a ring, the first merge moves nothing, and the second converts the output.
        moves = {0: NOTHING, 1: ADDED + COPIED}.get(at % stages, ADDED)
        b.emit(MergeForward, (part,), (total,), moves / parts)
        if at % stages == stages - 1:
            results.append(Kind.RESULT.at(piece[0]))
            b.sized[results[-1]] = (low(QUERIES) + high(STATS)) / parts
            b.emit(ResultOfPart, (buffers.Q, total), results[-1:], COPIED / parts, piece=piece)
    moves = 2 * low(QUERIES) if len(results) > 1 else NOTHING
    b.emit(JoinOut, results, (buffers.OUT, buffers.LSE), moves)
    b.wait(b.under_way)


def staged_backward(b: ProgramBuilder, steps: Steps) -> None:
    """Compute the keys of the last stage first. Their gradients return during the next stages."""
    stages, results, sums = b.schedule.stages, [], []
    for at, step in enumerate(steps):
        b.begin(at, step)
        post_casts(b, step)
        _compute_gradients(b, at, step)
        first = at - at % stages  # the first step of this part of the heads
        if at == first:
            # As in an all-gather, free what the previous part sent.
            b.wait(step.collect)
            if at:
                sums.append(_own_gradients(b, at - stages, steps[at - stages : at]))
        if step.stage:
            _return_rows(b, at, step, begins=at == first)
            continue
        results.append(buffers.DQ if len(steps) == stages else Kind.DQ_PART.at(step.part[0]))
        parts = b.piece(step.part)[1]
        b.sized[results[-1]] = low(QUERIES) / parts
        moves = (2 * COPIED + (stages - 1) * ADDED) / parts
        of_stages = [Kind.DQ.at(n) for n in range(first, at + 1)]
        extra = {"piece": b.piece(step.part), "scratch": high(QUERIES) / parts}
        b.emit(AddDq, (buffers.Q, *of_stages), results[-1:], moves, **extra)
    b.wait(b.under_way)
    sums.append(_own_gradients(b, len(steps) - stages, steps[-stages:]))
    b.emit(Own, (b.kv, *sums), (buffers.DK, buffers.DV))
    # Under Ulysses the last operation, AddHeads, carries this charge.
    moves = NOTHING if b.sharing > 1 else joined_size(len(results))
    b.emit(Join, results, (buffers.DQ,), moves)


def _keys(b: ProgramBuilder, at: int, step: ScheduleStep) -> Buffer:
    """Wait for the keys of a step. Return the name of the buffer that the kernel reads."""
    own, keys, piece = b.kv, Kind.KEYS.at(at), b.piece(step.part)
    if step.stage:
        casts = wait_for_rows(b, step)
        b.sized[keys] = _received(casts, low) / piece[1]
        rows = [post.writes[0] for post in casts]
        b.emit(MergeStage, rows, (keys,), 2 * b.sized[keys], stage=step.stage)
        return keys
    if piece[1] == 1:
        return own
    b.sized[keys] = low(KEYS) / piece[1]
    b.emit(Take, (own,), (keys,), 2 * b.sized[keys], piece=piece)
    return keys


def _received(casts: Sequence[Post], width: Callable[[Unit], Size]) -> Size:
    """Return the size of the rows that these casts bring, for all heads."""
    return total_size(width(RECEIVED[post.cast]) for post in casts)


def _compute_gradients(b: ProgramBuilder, at: int, step: ScheduleStep) -> None:
    """Call the kernel. It writes "dq" and "dkeys" of this step."""
    keys, (part, parts) = _keys(b, at, step), b.piece(step.part)
    copies = b.traits.copies_parts and parts > 1
    moves = 4 * low(QUERIES) / parts if copies else NOTHING
    b.emit(Cut, (buffers.LSE,), (Kind.LSE.at(at),), moves, piece=(part, parts))
    copied = (2 * low(QUERIES) + high(STATS)) / parts if copies else NOTHING
    made = Kind.DQ.at(at), Kind.DKEYS.at(at)
    b.sized[made[0]], b.sized[made[1]] = low(QUERIES) / parts, as_made(KEYS) / parts
    if step.stage:
        b.sized[made[1]] = _received(arrived_rows(b, step), as_made) / parts
    reads = buffers.Q, buffers.DOUT, buffers.OUT, Kind.LSE.at(at), keys
    b.compute(ComputeBackward, step, reads, made, copied)


def _return_rows(b: ProgramBuilder, at: int, step: ScheduleStep, *, begins: bool) -> None:
    """Send the gradients of a step's rows home."""
    rows, parts = Kind.ROWS.at(step.part[0]), b.piece(step.part)[1]
    size = b.cast_size(high) / parts
    if begins:
        b.sized[rows] = size
        b.emit(ZeroRows, (b.kv,), (rows,), size, piece=b.piece(step.part))
    made, casts = Kind.DKEYS.at(at), arrived_rows(b, step)
    moves, scratch = (_received(casts, low) + _received(casts, high)) / parts, b.sized[made] / 2
    b.emit(SplitRows, (made, rows), (rows,), moves, stage=step.stage, scratch=scratch)
    sources: tuple[Buffer, ...] = (rows,)
    for t in step.send:
        # Rows that crossed nodes return there last, after the cast inside the node has returned.
        crosses = b.forwards(t) or len(b.casts) == 1
        cast = 0 if crosses else step.stage
        assert cast is not None
        b.post(t, sources, (Kind.RETURNED.at(t.number),), high(RECEIVED[cast]) / parts, cast=cast)
        sources = rows, Kind.RETURNED.at(t.number)


def _own_gradients(b: ProgramBuilder, at: int, of_part: Steps) -> Buffer:
    """Add what other ranks returned to the gradients of this rank's own rows."""
    part, parts = of_part[0].part[0], b.piece(of_part[0].part)[1]
    rows, own = Kind.ROWS.at(part), Kind.OWN_ROWS.at(part)
    for step in of_part:
        # The last transfer of a step returns to the owners; others return to a relay.
        for t in step.send[-1:]:
            post = b.posted[t.number]
            moves = 3 * high(SENT[post.cast]) / parts
            b.emit(ReduceRows, post.writes, (rows,), moves, cast=post.cast)
    b.sized[own] = high(KEYS) / parts
    made = Kind.DKEYS.at(at + len(of_part) - 1)
    b.emit(OwnRows, (rows, made), (own,), (2 * high(KEYS) + KEYS_ADDED) / parts)
    return own
