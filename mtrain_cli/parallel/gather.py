"""Exchanges that gather keys: all-gathers and group casts, in one kernel call or in stages.

A group cast in stages computes own keys while the casts travel, then received keys, and merges the
outputs. Backward computes received keys first: their gradients travel home while the rank computes
its own keys (MagiAttention, section 4.3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise
from typing import TYPE_CHECKING

from mtrain_cli.config.exchanges import EXCHANGE_TRAITS
from mtrain_cli.grouping import grouped
from mtrain_cli.parallel import buffers
from mtrain_cli.parallel import operations as ops
from mtrain_cli.parallel.buffers import Buffer, Kind
from mtrain_cli.parallel.program import (
    ADDED,
    COPIED,
    KEYS,
    KEYS_ADDED,
    KEYS_COPIED,
    NOTHING,
    QUERIES,
    STATS,
    Post,
    Size,
    Unit,
    as_made,
    high,
    low,
    total_size,
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
    casts_by_stage,
    numbers_of,
)

if TYPE_CHECKING:
    from mtrain_cli.parallel.lowering import ProgramBuilder

Transfers = tuple[Transfer, ...]
Ranks = tuple[int, ...]
# The ranks of some keys, and the collectives that bring them, in turn: channel, peers, and the
# ranks whose keys this rank holds and receives.
Piece = tuple[Ranks, list[tuple[str, Ranks, Ranks, Ranks]]]


def _gather(name: str, options: ScheduleOptions) -> Schedule:
    workers, traits = options.workers, EXCHANGE_TRAITS[name]
    nodes = -(-workers // options.per_node) if traits.hierarchical else 1
    size, given = workers // nodes, (options.stages, options.stages_backward)
    assert traits.by_mask or not any(given), "only group casts have stages"
    forward, backward = (min(n, most_stages(nodes, size)) for n in given)
    make = [_Gathers(nodes, size, options.chunks, n, traits.by_mask) for n in (forward, backward)]
    return Schedule(
        name,
        traits,
        workers,
        options.per_node,
        PerRank(workers, partial(make[0].steps, backward=False)),
        PerRank(workers, partial(make[1].steps, backward=True)),
        PerRank(workers, lambda r: (r,)),
        stages=forward,
        stages_backward=backward,
    )


def most_stages(nodes: int, size: int) -> int:
    """Return the largest number of stages: a rank each, or this node and then a node each."""
    return nodes if 1 < nodes < nodes * size else nodes * size - 1


# An all-gather brings all KV to every rank, with one collective per part of the heads. A group cast
# brings the rows that the rank's queries see under the masks of a batch (MagiAttention, section
# 4.2). The hierarchical forms first gather across nodes, among ranks with the same local rank, then
# inside each node, so that a row enters each other node at most once.
all_gather, hierarchical_all_gather, group_cast, hierarchical_group_cast = (
    partial(_gather, name)
    for name in ("all_gather", "hierarchical_all_gather", "group_cast", "hierarchical_group_cast")
)


@dataclass(frozen=True)
class _Gathers:
    """Gathers over `nodes` nodes of `size` ranks, in `chunks` parts of the heads."""

    nodes: int
    size: int
    chunks: int
    stages: int
    by_mask: bool

    @property
    def everyone(self) -> range:
        return range(self.nodes * self.size)

    def steps(self, rank: int, *, backward: bool) -> Steps:
        chunks = self.chunks
        if len(self.everyone) == 1:
            return tuple(ScheduleStep((0,), (0,), (c, chunks)) for c in range(chunks))
        pieces = self._pieces(rank)
        make = partial(self._transfers, pieces, count(), backward=backward)
        result: list[ScheduleStep] = []
        before: list[Transfer] = []
        # The first part overlaps only with the stage of own keys: step 0 posts it. Every other part
        # is gathered while the part before it is computed.
        ready = make(KV, (0, chunks))
        for c in range(chunks):
            following = make(KV, (c + 1, chunks)) if c + 1 < chunks else []
            gradients = make(DKV, (c, chunks)) if backward else [()] * len(pieces)
            of_part = self._stages(rank, pieces, ready, gradients)
            posts = {0: _in_order(ready) if c == 0 else []}
            # Received keys are computed first in backward, last in forward.
            at = 0 if backward or not self.stages else 1
            posts[at] = posts.get(at, []) + _in_order(following)
            for turn, step in enumerate(reversed(of_part) if backward else of_part):
                collect = numbers_of(before) if turn == 0 else ()
                post = tuple(posts.get(turn, ()))
                result.append(replace(step, part=(c, chunks), post=post, collect=collect))
            ready, before = following, _in_order(gradients)
        return tuple(result)

    def _stages(
        self,
        rank: int,
        pieces: Sequence[Piece],
        casts: Sequence[Transfers],
        gradients: Sequence[Transfers],
    ) -> list[ScheduleStep]:
        """Return the steps that compute one part of the heads, in the order of forward."""
        own, waits = (rank,), [(of_piece[-1].number,) for of_piece in casts]
        if not self.stages:
            return [ScheduleStep(own, tuple(self.everyone), wait=waits[0], send=gradients[0])]
        of_pieces = enumerate(zip(pieces, waits, gradients, strict=True), 1)
        return [ScheduleStep(own, own, stage=0)] + [
            ScheduleStep(own, keys, stage=stage, wait=wait, send=send)
            for stage, ((keys, _), wait, send) in of_pieces
        ]

    def _pieces(self, rank: int) -> list[Piece]:
        """Return the pieces of received keys, the nearest first, with the hops that bring each."""
        everyone, size = tuple(self.everyone), self.size
        if 1 in (self.nodes, size):
            whole = len(everyone)
            pieces = _cut(range(1, whole), max(1, self.stages))
            senders = [tuple(sorted((rank - k) % whole for k in away)) for away in pieces]
            return [(of, [(CONTEXT, everyone, (rank,), of)]) for of in senders]
        node, local = divmod(rank, size)
        mates, counterparts = everyone[node * size : (node + 1) * size], everyone[local::size]
        found: list[Piece] = []
        if self.stages > 1:
            near = tuple(r for r in mates if r != rank)
            found.append((near, [(INNER, mates, (rank,), near)]))
        for away in _cut(range(1, self.nodes), max(1, self.stages - 1)):
            nodes = {(node - k) % self.nodes for k in away} | ({node} if self.stages < 2 else set())
            holds = tuple(r for r in counterparts if r // size in nodes)
            keys = tuple(r for r in everyone if r // size in nodes and r != rank)
            relayed = tuple(r for r in holds if r != rank)
            arriving = tuple(r for r in keys if r not in holds)
            hops = [(OUTER, counterparts, (rank,), relayed), (INNER, mates, holds, arriving)]
            found.append((keys, hops))
        return found

    def _transfers(
        self,
        pieces: Sequence[Piece],
        number: count[int],
        payload: str,
        part: tuple[int, int],
        *,
        backward: bool,
    ) -> list[Transfers]:
        """Return, by piece, the transfers that gather keys, or that reduce-scatter gradients.

        Backward begins with the last piece.
        """
        gathers, found = payload == KV, list[Transfers]()
        kinds = (GROUP_CAST, GROUP_REDUCE) if self.by_mask else ("all_gather", "reduce_scatter")
        for _, hops in reversed(pieces) if backward else pieces:
            made: list[Transfer] = []
            for channel, peers, holds, others in hops if gathers else reversed(hops):
                sends, receives = (holds, others) if gathers else (others, holds)
                after = made[-1].number if made else None
                route = channel, sends, receives, None, None, peers, after
                made.append(Transfer(next(number), kinds[not gathers], payload, *route, part))
            found.append(tuple(made))
        return found[::-1] if backward else found


def _in_order(by_piece: Sequence[Transfers]) -> list[Transfer]:
    """Return transfers in the order in which ranks post them."""
    return sorted((t for made in by_piece for t in made), key=lambda t: t.number)


def _cut(away: range, pieces: int) -> list[range]:
    """Cut a range into pieces of nearly equal length."""
    edges = [len(away) * at // pieces for at in range(pieces + 1)]
    return [away[start:stop] for start, stop in pairwise(edges)]


def _post_casts(b: ProgramBuilder, step: ScheduleStep) -> None:
    for part, transfers in grouped(step.post, lambda t: t.part).items():
        own, piece = b.kv, b.piece(part)
        numbers = numbers_of(casts_by_stage(transfers, backward=b.backward))
        for t in transfers:
            cast = numbers.index(t.number)
            sources = (own, Kind.GATHERED.at(t.after)) if b.forwards(t) else (own,)
            writes = Kind.GATHERED.at(t.number), Kind.LEAVING.at(t.number)
            b.post(t, sources, writes, low(b.leaving_rows(cast)) / piece[1], piece, cast)


def _arrived_rows(b: ProgramBuilder, step: ScheduleStep) -> tuple[Post, ...]:
    """Return the casts that bring the rows for which a step waits."""
    last = b.posted[step.wait[-1]]
    if not b.forwards(last.transfer):
        return (last,)
    assert last.transfer.after is not None
    return b.posted[last.transfer.after], last


def _wait_for_rows(b: ProgramBuilder, step: ScheduleStep) -> tuple[Post, ...]:
    casts = _arrived_rows(b, step)
    b.wait(step.wait)
    b.wait([post.transfer.number for post in casts[:-1]])
    return casts


def _post_returns(b: ProgramBuilder, step: ScheduleStep, rows: Buffer) -> None:
    """Send the gradients of rows that crossed nodes last, after the cast inside the node."""
    sources: tuple[Buffer, ...] = (rows,)
    for t, post in zip(step.send, reversed(_arrived_rows(b, step)), strict=True):
        payload = b.sent(b.arriving_rows(post.cast)) / b.piece(step.part)[1]
        writes = Kind.RETURNED.at(t.number), *_leaving(t, b.rounds)
        b.post(t, sources, writes, payload, cast=post.cast)
        sources = rows, Kind.RETURNED.at(t.number)


def _leaving(t: Transfer, copies: bool) -> tuple[Buffer, ...]:
    """Return the buffer from which a transfer leaves, if it leaves from a copy."""
    return (Kind.LEAVING.at(t.number),) if copies else ()


def _own_rows(b: ProgramBuilder, at: int, of_part: Steps, made: tuple[Buffer, ...] = ()) -> Buffer:
    """Add what other ranks returned to the gradients of this rank's own rows.

    at: number of the buffers. made: gradients that the stage of own keys computed.
    """
    rows, own, parts = Kind.ROWS.at(at), Kind.OWN_ROWS.at(at), b.piece(of_part[0].part)[1]
    for step in of_part:
        # The last transfer of a step returns to the owners; others return to a relay.
        for t in step.send[-1:]:
            post = b.posted[t.number]
            unit = b.leaving_rows(post.cast)
            moves = (2 * high(unit) + b.sent(unit)) / parts
            b.emit(ops.ReduceRows, post.writes, (rows,), moves, cast=post.cast)
    moves = (2 * high(KEYS) + (KEYS_ADDED if made else NOTHING)) / parts
    b.emit(ops.OwnRows, (rows, *made), (own,), moves)
    return own


def gather_forward(b: ProgramBuilder, steps: Steps) -> None:
    """Gather each part of the heads while the previous part is computed. Merge its stages."""
    calls, results = b.stages + 1, []
    b.begin(0, steps[0])
    b.emit(ops.Pack, (buffers.K, buffers.V), (b.kv,), 2 * low(KEYS))
    for at, step in enumerate(steps):
        b.begin(at, step)
        keys, part, piece = _keys(b, at, step), Kind.PART.at(at), b.piece(step.part)
        b.compute(ops.ComputeForward, step, (buffers.Q, keys), (part,))
        if calls == 1:
            results.append(part)
            continue
        total, parts = Kind.TOTAL.at(piece[0]), piece[1]
        # As in a ring, the first merge moves nothing, and the second converts the output.
        moves = {0: NOTHING, 1: ADDED + COPIED}.get(at % calls, ADDED)
        b.emit(ops.MergeForward, (part,), (total,), moves / parts)
        if at % calls == calls - 1:
            results.append(Kind.RESULT.at(piece[0]))
            b.emit(ops.ResultOfPart, (buffers.Q, total), results[-1:], COPIED / parts, piece=piece)
    moves = 2 * low(QUERIES) if len(results) > 1 else NOTHING
    b.emit(ops.JoinOut, results, (buffers.OUT, buffers.LSE), moves)
    b.wait()


def gather_backward(b: ProgramBuilder, steps: Steps) -> None:
    """Gather keys as in forward. Reduce-scatter the gradients of a part during the next part."""
    parts = len(steps)
    cut = (low(KEYS) + high(KEYS)) * b.schedule.groups / parts
    copied = (2 * low(QUERIES) + high(STATS)) / parts
    copies = b.traits.copies_parts and parts > 1
    own, dq, sums = b.kv, list[Buffer](), list[Buffer]()
    for at, step in enumerate(steps):
        b.begin(at, step)
        keys, piece = _keys(b, at, step), b.piece(step.part)
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
        if not b.schedule.traits.by_mask:
            sums[-1:] = [_added(b, arrived) for arrived in sums[-1:]]
            sums.append(_scatter_gradients(b, at, step, made[1], cut))
            continue
        if at:
            sums.append(_own_rows(b, at - 1, steps[at - 1 : at]))
        rows, split = Kind.ROWS.at(at), (b.cast_size(low) + b.cast_size(high)) / piece[1]
        scratch = b.cast_size(as_made) / (2 * piece[1])
        b.emit(ops.SplitRows, made[1:], (rows,), split, scratch=scratch)
        _post_returns(b, step, rows)
    b.wait()
    if not b.schedule.traits.by_mask:
        sums[-1:] = [_added(b, arrived) for arrived in sums[-1:]]
    elif steps[-1].send:
        sums.append(_own_rows(b, parts - 1, steps[-1:]))
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


def _keys(b: ProgramBuilder, at: int, step: ScheduleStep) -> Buffer:
    """Post the transfers of a step, and put the step's keys in order of position.

    Return the buffer that the kernel reads.
    """
    own, keys, piece = b.kv, Kind.KEYS.at(at), b.piece(step.part)
    by_mask = b.schedule.traits.by_mask
    (_post_casts if by_mask else _post_gathers)(b, step)
    if not step.wait:
        if step.stage is None:
            b.emit(ops.Take, (own,), (keys,), piece=piece)
        elif piece[1] == 1:
            return own
        else:
            b.sized[keys] = low(KEYS) / piece[1]
            b.emit(ops.Take, (own,), (keys,), 2 * b.sized[keys], piece=piece)
        return keys
    if by_mask:
        casts = _wait_for_rows(b, step)
        rows = [post.writes[0] for post in casts]
        if step.stage:
            b.sized[keys] = _received(b, casts, low) / piece[1]
            b.emit(ops.MergeStage, rows, (keys,), 2 * b.sized[keys], stage=step.stage)
        else:
            moves = 2 * b.cast_size(low) / piece[1]
            b.emit(ops.MergeRows, (own, *rows), (keys,), moves, piece=piece)
        return keys
    b.wait(step.wait)
    last = b.posted[step.wait[-1]].transfer
    moves = 2 * low(KEYS) * b.schedule.groups / (step.part[1] // b.sharing)
    among = len(last.peers) if b.forwards(last) else 0
    # Zigzag reverses half of the pieces of keys and of values, one after the other.
    scratch = moves / 8 if b.traits.zigzag else NOTHING
    fields = {"among": among, "scratch": scratch}
    b.emit(ops.Order, (Kind.GATHERED.at(last.number),), (keys,), moves, **fields)
    return keys


def _post_gathers(b: ProgramBuilder, step: ScheduleStep) -> None:
    for t in step.post:
        source, piece, leaving = Kind.GATHERED.at(t.after), (0, 1), _leaving(t, False)
        if not b.forwards(t):
            source, piece = b.kv, b.piece(t.part)
            leaving = _leaving(t, piece[1] > 1)  # a part of the heads leaves from a copy
        payload = b.payload(t)
        b.post(t, (source,), (Kind.GATHERED.at(t.number), *leaving), payload, piece=piece)


def _scatter_gradients(
    b: ProgramBuilder, at: int, step: ScheduleStep, made: Buffer, moves: Size
) -> Buffer:
    """Cut key gradients into shards and reduce-scatter the shards."""
    name = Kind.SHARDS.at(at)
    among = len(step.send[0].peers) if len(step.send) > 1 else 0
    scratch = _scratch_of_shards(b, among) * b.schedule.groups / b.piece(step.part)[1]
    b.emit(ops.Shards, (made,), (name,), moves, among=among, scratch=scratch)
    for t in step.send:
        sums = b.rounds and b.forwards(t)
        writes, payload = (Kind.SUM.at(t.number), *_leaving(t, sums)), b.payload(t)
        # The float32 sums, twice as large, are gone before their rounded copy leaves.
        scratch = payload * len(t.peers) if sums else NOTHING
        b.post(t, (name,), writes, payload, scratch=scratch)
        name = Kind.SUM.at(t.number)
    # The kernel's dk and dv stay until the reduce-scatter has started.
    b.hold(made)
    return name


def _added(b: ProgramBuilder, arrived: Buffer) -> Buffer:
    """Add up the shards that a rounded reduce-scatter delivered. Other sums are complete."""
    if not b.rounds:
        return arrived
    assert arrived.generation is not None
    t, whole = b.posted[arrived.generation].transfer, Kind.OWN_ROWS.at(arrived.generation)
    moves = (2 * high(KEYS) + b.sent(KEYS)) * len(t.peers) / b.piece(t.part)[1]
    b.emit(ops.AddShards, (arrived,), (whole,), moves)
    return whole


def _scratch_of_shards(b: ProgramBuilder, among: int) -> Size:
    """Return the memory of the copies that cut a rank's share of gradients into shards."""
    # dk and dv are cut in turn. Shards in node order are a copy of those in rank order. Ranks that
    # share heads copy a gradient into rank order. A zigzag layout copies the half of the pieces
    # that it reverses. Other layouts write shards directly.
    if among:
        return b.sent(KEYS)
    if b.sharing > 1:
        return as_made(KEYS) / 2
    return 3 * as_made(KEYS) / 4 if b.traits.zigzag else NOTHING


def staged_backward(b: ProgramBuilder, steps: Steps) -> None:
    """Compute the keys of the last stage first. Their gradients return during the next stages."""
    calls, results, sums = b.stages + 1, [], []
    for at, step in enumerate(steps):
        b.begin(at, step)
        _compute_gradients(b, at, step)
        first = at - at % calls  # the first step of this part of the heads
        if at == first:
            # As in an all-gather, free what the previous part sent.
            b.wait(step.collect)
            if at:
                sums.append(_own_gradients(b, at - calls, steps))
        piece, total = b.piece(step.part), Kind.DQ_SUM.at(step.part[0])
        b.sized[total] = high(QUERIES) / piece[1]
        reads = (buffers.Q, Kind.DQ.at(at), *((total,) if at > first else ()))
        moves = (ADDED if at > first else COPIED) / piece[1]
        b.emit(ops.AddDq, reads, (total,), moves, piece=piece)
        if step.stage:
            _return_rows(b, at, step, begins=at == first)
            continue
        results.append(buffers.DQ if len(steps) == calls else Kind.DQ_PART.at(step.part[0]))
        b.emit(ops.ResultOfDq, (buffers.Q, total), results[-1:], COPIED / piece[1])
    b.wait()
    sums.append(_own_gradients(b, len(steps) - calls, steps))
    b.emit(ops.Own, (b.kv, *sums), (buffers.DK, buffers.DV))
    # Under Ulysses the last operation, AddHeads, carries this charge.
    moves = NOTHING if b.sharing > 1 else joined_size(len(results))
    b.emit(ops.Join, results, (buffers.DQ,), moves)


def _received(b: ProgramBuilder, casts: Sequence[Post], width: Callable[[Unit], Size]) -> Size:
    """Return the size of the rows that these casts bring, for all heads."""
    return total_size(width(b.arriving_rows(post.cast)) for post in casts)


def _compute_gradients(b: ProgramBuilder, at: int, step: ScheduleStep) -> None:
    """Call the kernel. It writes "dq" and "dkeys" of this step."""
    keys, (part, parts) = _keys(b, at, step), b.piece(step.part)
    copies = b.traits.copies_parts and parts > 1
    moves = 4 * low(QUERIES) / parts if copies else NOTHING
    b.emit(ops.Cut, (buffers.LSE,), (Kind.LSE.at(at),), moves, piece=(part, parts))
    copied = (2 * low(QUERIES) + high(STATS)) / parts if copies else NOTHING
    made = Kind.DQ.at(at), Kind.DKEYS.at(at)
    size = _received(b, _arrived_rows(b, step), as_made) if step.stage else as_made(KEYS)
    b.sized[made[1]] = size / parts
    reads = buffers.Q, buffers.DOUT, buffers.OUT, Kind.LSE.at(at), keys
    b.compute(ops.ComputeBackward, step, reads, made, copied)


def _return_rows(b: ProgramBuilder, at: int, step: ScheduleStep, *, begins: bool) -> None:
    """Send the gradients of a step's rows home."""
    rows, parts = Kind.ROWS.at(step.part[0]), b.piece(step.part)[1]
    if begins:
        zeros = b.cast_size(high) / parts
        b.emit(ops.ZeroRows, (b.kv,), (rows,), zeros, piece=b.piece(step.part))
    made, casts = Kind.DKEYS.at(at), _arrived_rows(b, step)
    moves, scratch = (
        (_received(b, casts, low) + _received(b, casts, high)) / parts,
        b.sized[made] / 2,
    )
    b.emit(ops.SplitRows, (made, rows), (rows,), moves, stage=step.stage, scratch=scratch)
    _post_returns(b, step, rows)


def _own_gradients(b: ProgramBuilder, first: int, steps: Steps) -> Buffer:
    """End the gradients of own rows for the part of the heads that begins with step ``first``."""
    of_part = steps[first : first + b.stages + 1]
    made = Kind.DKEYS.at(first + len(of_part) - 1)
    return _own_rows(b, of_part[0].part[0], of_part, (made,))
