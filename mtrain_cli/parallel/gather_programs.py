"""The programs of exchanges that gather keys before the kernel runs."""

from __future__ import annotations

from mtrain_cli.parallel import buffers
from mtrain_cli.parallel.arrangements import (
    Cut,
    Join,
    JoinOut,
    Order,
    Own,
    Pack,
    Place,
    Rename,
    Shards,
    Take,
)
from mtrain_cli.parallel.buffers import Buffer, Kind
from mtrain_cli.parallel.cast_programs import add_returned_rows, cast_keys, return_rows
from mtrain_cli.parallel.operations import ComputeBackward, ComputeForward
from mtrain_cli.parallel.program import KEYS, NOTHING, QUERIES, STATS, Size, as_made, high, low
from mtrain_cli.parallel.program_builder import KEYS_COPIED, ProgramBuilder, Steps
from mtrain_cli.parallel.schedule import ScheduleStep


def gather_forward(b: ProgramBuilder, steps: Steps) -> None:
    """Gather each part of the heads while the previous part is computed."""
    b.begin(0, steps[0])
    b.emit(Pack, (buffers.K, buffers.V), (b.kv,), 2 * low(KEYS))
    parts = []
    for at, step in enumerate(steps):
        b.begin(at, step)
        keys = _gather_keys(b, at, step)
        parts.append(Kind.PART.at(at))
        b.compute(ComputeForward, step, (buffers.Q, keys), (parts[-1],))
    moves = 2 * low(QUERIES) if len(parts) > 1 else NOTHING
    b.emit(JoinOut, parts, (buffers.OUT, buffers.LSE), moves)
    b.wait(b.under_way)


def gather_backward(b: ProgramBuilder, steps: Steps) -> None:
    """Gather keys as in forward. Reduce-scatter the gradients of a part during the next part."""
    parts = len(steps)
    cut = (low(KEYS) + high(KEYS)) * b.schedule.groups / parts
    copied = (2 * low(QUERIES) + high(STATS)) / parts
    copies = b.traits.copies_parts and parts > 1
    own, dq, sums = b.kv, [], []
    for at, step in enumerate(steps):
        b.begin(at, step)
        keys, piece = _gather_keys(b, at, step), b.piece(step.part)
        moves = 4 * low(QUERIES) / parts if copies and b.schedule.groups > 1 else NOTHING
        b.emit(Cut, (buffers.LSE,), (Kind.LSE.at(at),), moves, piece=piece)
        made = (buffers.DQ if parts == 1 else Kind.DQ.at(at), Kind.DKEYS.at(at))
        reads = (buffers.Q, buffers.DOUT, buffers.OUT, Kind.LSE.at(at), keys)
        b.compute(ComputeBackward, step, reads, made, copied if copies else NOTHING)
        if not step.send:
            whole = buffers.DQ, buffers.DKV_OF_PARTS
            b.emit(Place, (buffers.Q, own, *made), whole, cut, piece=piece)
            continue
        dq.append(made[0])
        # The previous part is sent from a buffer of the same size as the next one. Free it first.
        b.wait(step.collect)
        if b.schedule.traits.by_mask:
            if at:
                add_returned_rows(b, at - 1, steps[at - 1])
            sums.append(return_rows(b, at, step, made[1]))
        else:
            sums.append(_scatter_gradients(b, at, step, made[1], cut))
    b.wait(b.under_way)
    if b.schedule.traits.by_mask and steps[-1].send:
        add_returned_rows(b, parts - 1, steps[-1])
    if sums:
        b.emit(Own, (own, *sums), (buffers.DK, buffers.DV))
    else:
        b.emit(Rename, (own, buffers.DKV_OF_PARTS), (buffers.DK, buffers.DV))
    # Under Ulysses the last operation, AddHeads, carries this charge.
    moves = NOTHING if b.sharing > 1 else joined_size(parts)
    b.emit(Join, dq or [buffers.DQ], (buffers.DQ,), moves)


def joined_size(parts: int) -> Size:
    """Return the bytes that memory moves to join the gradients of all parts of the heads."""
    return KEYS_COPIED + 2 * low(QUERIES) if parts > 1 else KEYS_COPIED


def _gather_keys(b: ProgramBuilder, at: int, step: ScheduleStep) -> Buffer:
    """Post the gathers of a step, and put the step's keys in order of position."""
    own, keys = b.kv, Kind.KEYS.at(at)
    if b.schedule.traits.by_mask and step.wait:
        return cast_keys(b, at, step)
    for t in step.post:
        source, piece, leaving = Kind.GATHERED.at(t.after), (0, 1), []
        if not b.forwards(t):
            source, piece = own, b.piece(t.part)
            # A part of the heads leaves from a copy.
            leaving = [Kind.LEAVING.at(t.number)] if piece[1] > 1 else []
        payload = b.payload(t)
        b.post(t, (source,), (Kind.GATHERED.at(t.number), *leaving), payload, piece=piece)
    b.wait(step.wait)
    if not step.wait:
        b.emit(Take, (own,), (keys,), piece=b.piece(step.part))
        return keys
    last = b.posted[step.wait[-1]].transfer
    moves = 2 * low(KEYS) * b.schedule.groups / (step.part[1] // b.sharing)
    among = len(last.peers) if b.forwards(last) else 0
    b.emit(Order, (Kind.GATHERED.at(last.number),), (keys,), moves, among=among)
    return keys


def _scatter_gradients(
    b: ProgramBuilder, at: int, step: ScheduleStep, made: Buffer, moves: Size
) -> Buffer:
    """Cut key gradients into shards and reduce-scatter the shards."""
    name = Kind.SHARDS.at(at)
    among = len(step.send[0].peers) if len(step.send) > 1 else 0
    scratch = _scratch_of_shards(b, among) * b.schedule.groups / b.piece(step.part)[1]
    b.emit(Shards, (made,), (name,), moves, among=among, scratch=scratch)
    for t in step.send:
        b.post(t, (name,), (Kind.SUM.at(t.number),), b.payload(t))
        name = Kind.SUM.at(t.number)
    # The kernel's dk and dv stay until the reduce-scatter has started.
    b.hold(made)
    return name


def _scratch_of_shards(b: ProgramBuilder, among: int) -> Size:
    """Return the memory of the copies that cut a rank's share of gradients into shards."""
    if among:
        return high(KEYS)
    if b.sharing > 1:
        return as_made(KEYS) / 2
    return 3 * as_made(KEYS) / 4 if b.traits.zigzag else NOTHING
