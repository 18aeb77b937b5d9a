"""Exchanges that gather keys: all-gathers and group casts, in one kernel call or in stages.

A group cast in stages computes a rank's own keys while the casts travel, then the received keys,
and merges the outputs. Backward computes the received keys first: their gradients travel home while
the rank computes its own keys (MagiAttention, section 4.3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

from mtrain_cli.config.exchanges import EXCHANGE_TRAITS
from mtrain_cli.parallel import buffers
from mtrain_cli.parallel import operations as ops
from mtrain_cli.parallel.buffers import Buffer, Kind
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
from mtrain_cli.parallel.program_builder import (
    ADDED,
    COPIED,
    KEYS_ADDED,
    KEYS_COPIED,
    ProgramBuilder,
)
from mtrain_cli.parallel.schedule import (
    CONTEXT,
    DKV,
    GROUP_CAST,
    GROUP_REDUCE,
    INNER,
    KV,
    OUTER,
    PerRank,
    Schedule,
    ScheduleOptions,
    ScheduleStep,
    Steps,
    Transfer,
    numbers_of,
)

Transfers = tuple[Transfer, ...]


def all_gather(options: ScheduleOptions) -> Schedule:
    """Gather all KV on every rank, with one collective per part of the heads."""
    return _gather("all_gather", options)


def hierarchical_all_gather(options: ScheduleOptions) -> Schedule:
    """Gather KV across nodes among ranks with the same local rank, then inside each node."""
    return _gather("hierarchical_all_gather", options)


def group_cast(options: ScheduleOptions) -> Schedule:
    """Gather the rows of KV that a rank's queries see, with one collective per part of the heads.

    The schedule is that of `all_gather`. The rows depend on the masks of a batch (MagiAttention,
    section 4.2).
    """
    return _gather("group_cast", options)


def hierarchical_group_cast(options: ScheduleOptions) -> Schedule:
    """Cast rows across nodes among ranks with the same local rank, then inside each node.

    A row enters each other node at most once.
    """
    return _gather("hierarchical_group_cast", options)


def _gather(name: str, options: ScheduleOptions) -> Schedule:
    workers, chunks, traits = options.workers, options.chunks, EXCHANGE_TRAITS[name]
    nodes = -(-workers // options.per_node) if traits.hierarchical else 1
    stages = 1
    if workers > 1 and options.stages > 1:
        assert traits.by_mask, "only group casts have stages"
        stages = options.stages if 1 < nodes < workers else 2

    def steps(rank: int, backward: bool) -> Steps:
        if workers == 1:
            return tuple(ScheduleStep((0,), (0,), (c, chunks)) for c in range(chunks))
        make = partial(_collectives, rank, workers, nodes, count(), traits.by_mask, stages == 3)
        result: list[ScheduleStep] = []
        before: Transfers = ()
        # The first part overlaps only with the stage of own keys: step 0 posts it. Every other part
        # is gathered while the part before it is computed.
        ready = make(KV, (0, chunks))
        for c in range(chunks):
            following = make(KV, (c + 1, chunks)) if c + 1 < chunks else ()
            gradients = make(DKV, (c, chunks)) if backward else ()
            of_part = _stages(rank, workers, nodes, stages, ready, gradients)
            posts = {0: ready if c == 0 else ()}
            # Received keys are computed first in backward, last in forward.
            at = 0 if backward or stages == 1 else 1
            posts[at] = (*posts.get(at, ()), *following)
            for turn, step in enumerate(reversed(of_part) if backward else of_part):
                collect = numbers_of(before) if turn == 0 else ()
                post = posts.get(turn, ())
                result.append(replace(step, part=(c, chunks), post=post, collect=collect))
            ready, before = following, gradients
        return tuple(result)

    forward, backward = (PerRank(workers, partial(steps, backward=b)) for b in (False, True))
    of_ranks = forward, backward, PerRank(workers, lambda r: (r,))
    return Schedule(name, traits, workers, options.per_node, *of_ranks, stages=stages)


def _stages(
    rank: int, workers: int, nodes: int, stages: int, casts: Transfers, gradients: Transfers
) -> list[ScheduleStep]:
    """Return the steps that compute one part of the heads, in the order of forward."""
    everyone, own = range(workers), (rank,)
    if stages == 1:
        wait = (casts[-1].number,)
        return [ScheduleStep(own, tuple(everyone), wait=wait, send=gradients)]
    first = ScheduleStep(own, own, stage=0)
    if stages == 2:
        others = tuple(r for r in everyone if r != rank)
        wait = (casts[-1].number,)
        return [first, ScheduleStep(own, others, stage=1, wait=wait, send=gradients)]
    per_node = workers // nodes
    mates = tuple(r for r in everyone if r // per_node == rank // per_node and r != rank)
    far = tuple(r for r in everyone if r // per_node != rank // per_node)
    _, near, relayed = casts
    *returning, of_mates = gradients or (None,)
    home = (of_mates,) if of_mates is not None else ()
    return [
        first,
        ScheduleStep(own, mates, stage=1, wait=(near.number,), send=home),
        ScheduleStep(own, far, stage=2, wait=(relayed.number,), send=tuple(returning)),
    ]


def _collectives(
    rank: int,
    workers: int,
    nodes: int,
    number: count[int],
    by_mask: bool,
    splits: bool,
    payload: str,
    part: tuple[int, int],
) -> Transfers:
    """Return one rank's transfers that gather keys, or that reduce-scatter their gradients."""
    everyone = tuple(range(workers))
    gathers = payload == KV
    gather, reduce = (GROUP_CAST, GROUP_REDUCE) if by_mask else ("all_gather", "reduce_scatter")

    def collective(peers, holds, channel, after=None, shards=everyone) -> Transfer:
        held = set(holds)
        others = tuple(s for s in shards if s not in held)
        kind, sends, receives = (gather, holds, others) if gathers else (reduce, others, holds)
        route = channel, sends, receives
        return Transfer(next(number), kind, payload, *route, peers=peers, after=after, part=part)

    per_node = workers // nodes
    if 1 in (nodes, per_node):
        return (collective(everyone, (rank,), CONTEXT),)
    node, local = divmod(rank, per_node)
    counterparts = tuple(n * per_node + local for n in range(nodes))
    node_ranks = tuple(node * per_node + m for m in range(per_node))

    def across(after=None) -> Transfer:
        return collective(counterparts, (rank,), OUTER, after, counterparts)

    def near() -> Transfers:
        return (collective(node_ranks, (rank,), INNER, shards=node_ranks),) if splits else ()

    def inside(after=None) -> Transfer:
        near_ranks = set(node_ranks) if splits else set()
        holds, shards = (
            tuple(s for s in ranks if s not in near_ranks) for ranks in (counterparts, everyone)
        )
        return collective(node_ranks, holds, INNER, after, shards)

    if gathers:
        outer = across()
        return outer, *near(), inside(outer.number)
    inner = inside()
    return inner, across(inner.number), *near()


def cast_keys(b: ProgramBuilder, at: int, step: ScheduleStep) -> Buffer:
    """Post the group casts of a step, and put the step's keys in order of position."""
    post_casts(b, step)
    own, keys, piece = b.kv, Kind.KEYS.at(at), b.piece(step.part)
    moves = 2 * b.cast_size(low) / piece[1]
    arrived = (post.writes[0] for post in wait_for_rows(b, step))
    b.emit(ops.MergeRows, (own, *arrived), (keys,), moves, piece=piece)
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
    b.emit(ops.SplitRows, (made,), (rows,), moves, scratch=scratch)
    _post_returns(b, step, rows)
    return Kind.OWN_ROWS.at(at)


def _post_returns(b: ProgramBuilder, step: ScheduleStep, rows: Buffer) -> None:
    """Send the gradients of rows that crossed nodes last, after the cast inside the node."""
    sources: tuple[Buffer, ...] = (rows,)
    for t in step.send:
        cast = 0 if b.forwards(t) or len(b.casts) == 1 else step.stage or 1
        payload = high(RECEIVED[cast]) / b.piece(step.part)[1]
        b.post(t, sources, (Kind.RETURNED.at(t.number),), payload, cast=cast)
        sources = rows, Kind.RETURNED.at(t.number)


def add_returned_rows(b: ProgramBuilder, at: int, step: ScheduleStep) -> None:
    """Add the gradients that other ranks returned to those of this rank's own rows."""
    post, rows = b.posted[step.send[-1].number], Kind.ROWS.at(at)
    parts = b.piece(step.part)[1]
    moves = 3 * high(SENT[post.cast]) / parts
    b.emit(ops.ReduceRows, post.writes, (rows,), moves, cast=post.cast)
    b.emit(ops.OwnRows, (rows,), (Kind.OWN_ROWS.at(at),), 2 * high(KEYS) / parts)


def gather_forward(b: ProgramBuilder, steps: Steps) -> None:
    """Gather each part of the heads while the previous part is computed."""
    b.begin(0, steps[0])
    b.emit(ops.Pack, (buffers.K, buffers.V), (b.kv,), 2 * low(KEYS))
    parts = []
    for at, step in enumerate(steps):
        b.begin(at, step)
        keys = _gather_keys(b, at, step)
        parts.append(Kind.PART.at(at))
        b.compute(ops.ComputeForward, step, (buffers.Q, keys), (parts[-1],))
    moves = 2 * low(QUERIES) if len(parts) > 1 else NOTHING
    b.emit(ops.JoinOut, parts, (buffers.OUT, buffers.LSE), moves)
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
        b.emit(ops.Cut, (buffers.LSE,), (Kind.LSE.at(at),), moves, piece=piece)
        made = (buffers.DQ if parts == 1 else Kind.DQ.at(at), Kind.DKEYS.at(at))
        reads = (buffers.Q, buffers.DOUT, buffers.OUT, Kind.LSE.at(at), keys)
        b.compute(ops.ComputeBackward, step, reads, made, copied if copies else NOTHING)
        if not step.send:
            whole = buffers.DQ, buffers.DKV_OF_PARTS
            b.emit(ops.Place, (buffers.Q, own, *made), whole, cut, piece=piece)
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
        b.emit(ops.Own, (own, *sums), (buffers.DK, buffers.DV))
    else:
        b.emit(ops.Rename, (own, buffers.DKV_OF_PARTS), (buffers.DK, buffers.DV))
    # Under Ulysses the last operation, AddHeads, carries this charge.
    moves = NOTHING if b.sharing > 1 else joined_size(parts)
    b.emit(ops.Join, dq or [buffers.DQ], (buffers.DQ,), moves)


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
        b.emit(ops.Take, (own,), (keys,), piece=b.piece(step.part))
        return keys
    last = b.posted[step.wait[-1]].transfer
    moves = 2 * low(KEYS) * b.schedule.groups / (step.part[1] // b.sharing)
    among = len(last.peers) if b.forwards(last) else 0
    b.emit(ops.Order, (Kind.GATHERED.at(last.number),), (keys,), moves, among=among)
    return keys


def _scatter_gradients(
    b: ProgramBuilder, at: int, step: ScheduleStep, made: Buffer, moves: Size
) -> Buffer:
    """Cut key gradients into shards and reduce-scatter the shards."""
    name = Kind.SHARDS.at(at)
    among = len(step.send[0].peers) if len(step.send) > 1 else 0
    scratch = _scratch_of_shards(b, among) * b.schedule.groups / b.piece(step.part)[1]
    b.emit(ops.Shards, (made,), (name,), moves, among=among, scratch=scratch)
    for t in step.send:
        b.post(t, (name,), (Kind.SUM.at(t.number),), b.payload(t))
        name = Kind.SUM.at(t.number)
    # The kernel's dk and dv stay until the reduce-scatter has started.
    b.hold(made)
    return name


def _scratch_of_shards(b: ProgramBuilder, among: int) -> Size:
    """Return the memory of the copies that cut a rank's share of gradients into shards."""
    # dk and dv are cut in turn. Shards in node order are a copy of those in rank order. Ranks that
    # share heads copy a gradient into rank order. A zigzag layout copies the half of the pieces
    # that it reverses. Other layouts write shards directly.
    if among:
        return high(KEYS)
    if b.sharing > 1:
        return as_made(KEYS) / 2
    return 3 * as_made(KEYS) / 4 if b.traits.zigzag else NOTHING


def staged_forward(b: ProgramBuilder, steps: Steps) -> None:
    """Merge the attention over the keys of each stage, one part of the heads after the other."""
    stages = b.schedule.stages
    b.begin(0, steps[0])
    b.emit(ops.Pack, (buffers.K, buffers.V), (b.kv,), 2 * low(KEYS))
    results = []
    for at, step in enumerate(steps):
        b.begin(at, step)
        post_casts(b, step)
        piece, keys, part = b.piece(step.part), _keys(b, at, step), Kind.PART.at(at)
        b.compute(ops.ComputeForward, step, (buffers.Q, keys), (part,))
        total, parts = Kind.TOTAL.at(piece[0]), piece[1]
        b.sized[total] = (high(QUERIES) + high(STATS)) / parts
        # As in a ring, the first merge moves nothing, and the second converts the output.
        moves = {0: NOTHING, 1: ADDED + COPIED}.get(at % stages, ADDED)
        b.emit(ops.MergeForward, (part,), (total,), moves / parts)
        if at % stages == stages - 1:
            results.append(Kind.RESULT.at(piece[0]))
            b.sized[results[-1]] = (low(QUERIES) + high(STATS)) / parts
            b.emit(ops.ResultOfPart, (buffers.Q, total), results[-1:], COPIED / parts, piece=piece)
    moves = 2 * low(QUERIES) if len(results) > 1 else NOTHING
    b.emit(ops.JoinOut, results, (buffers.OUT, buffers.LSE), moves)
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
        b.emit(ops.AddDq, (buffers.Q, *of_stages), results[-1:], moves, **extra)
    b.wait(b.under_way)
    sums.append(_own_gradients(b, len(steps) - stages, steps[-stages:]))
    b.emit(ops.Own, (b.kv, *sums), (buffers.DK, buffers.DV))
    # Under Ulysses the last operation, AddHeads, carries this charge.
    moves = NOTHING if b.sharing > 1 else joined_size(len(results))
    b.emit(ops.Join, results, (buffers.DQ,), moves)


def _keys(b: ProgramBuilder, at: int, step: ScheduleStep) -> Buffer:
    """Wait for the keys of a step. Return the name of the buffer that the kernel reads."""
    own, keys, piece = b.kv, Kind.KEYS.at(at), b.piece(step.part)
    if step.stage:
        casts = wait_for_rows(b, step)
        b.sized[keys] = _received(casts, low) / piece[1]
        rows = [post.writes[0] for post in casts]
        b.emit(ops.MergeStage, rows, (keys,), 2 * b.sized[keys], stage=step.stage)
        return keys
    if piece[1] == 1:
        return own
    b.sized[keys] = low(KEYS) / piece[1]
    b.emit(ops.Take, (own,), (keys,), 2 * b.sized[keys], piece=piece)
    return keys


def _received(casts: Sequence[Post], width: Callable[[Unit], Size]) -> Size:
    """Return the size of the rows that these casts bring, for all heads."""
    return total_size(width(RECEIVED[post.cast]) for post in casts)


def _compute_gradients(b: ProgramBuilder, at: int, step: ScheduleStep) -> None:
    """Call the kernel. It writes "dq" and "dkeys" of this step."""
    keys, (part, parts) = _keys(b, at, step), b.piece(step.part)
    copies = b.traits.copies_parts and parts > 1
    moves = 4 * low(QUERIES) / parts if copies else NOTHING
    b.emit(ops.Cut, (buffers.LSE,), (Kind.LSE.at(at),), moves, piece=(part, parts))
    copied = (2 * low(QUERIES) + high(STATS)) / parts if copies else NOTHING
    made = Kind.DQ.at(at), Kind.DKEYS.at(at)
    b.sized[made[0]], b.sized[made[1]] = low(QUERIES) / parts, as_made(KEYS) / parts
    if step.stage:
        b.sized[made[1]] = _received(arrived_rows(b, step), as_made) / parts
    reads = buffers.Q, buffers.DOUT, buffers.OUT, Kind.LSE.at(at), keys
    b.compute(ops.ComputeBackward, step, reads, made, copied)


def _return_rows(b: ProgramBuilder, at: int, step: ScheduleStep, *, begins: bool) -> None:
    """Send the gradients of a step's rows home."""
    rows, parts = Kind.ROWS.at(step.part[0]), b.piece(step.part)[1]
    size = b.cast_size(high) / parts
    if begins:
        b.sized[rows] = size
        b.emit(ops.ZeroRows, (b.kv,), (rows,), size, piece=b.piece(step.part))
    made, casts = Kind.DKEYS.at(at), arrived_rows(b, step)
    moves, scratch = (_received(casts, low) + _received(casts, high)) / parts, b.sized[made] / 2
    b.emit(ops.SplitRows, (made, rows), (rows,), moves, stage=step.stage, scratch=scratch)
    _post_returns(b, step, rows)


def _own_gradients(b: ProgramBuilder, at: int, of_part: Steps) -> Buffer:
    """Add what other ranks returned to the gradients of this rank's own rows."""
    part, parts = of_part[0].part[0], b.piece(of_part[0].part)[1]
    rows, own = Kind.ROWS.at(part), Kind.OWN_ROWS.at(part)
    for step in of_part:
        # The last transfer of a step returns to the owners; others return to a relay.
        for t in step.send[-1:]:
            post = b.posted[t.number]
            moves = 3 * high(SENT[post.cast]) / parts
            b.emit(ops.ReduceRows, post.writes, (rows,), moves, cast=post.cast)
    b.sized[own] = high(KEYS) / parts
    made = Kind.DKEYS.at(at + len(of_part) - 1)
    b.emit(ops.OwnRows, (rows, made), (own,), (2 * high(KEYS) + KEYS_ADDED) / parts)
    return own
