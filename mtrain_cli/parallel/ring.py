"""Rings: shards of keys or of queries circulate, and each step computes one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import count
from math import lcm
from typing import TYPE_CHECKING

from mtrain_cli.config.exchanges import EXCHANGE_TRAITS
from mtrain_cli.parallel import buffers
from mtrain_cli.parallel import operations as ops
from mtrain_cli.parallel.buffers import Buffer, Kind
from mtrain_cli.parallel.program import (
    ADDED,
    COLUMNS,
    COPIED,
    KEYS,
    KEYS_ADDED,
    KEYS_COPIED,
    NOTHING,
    QUERIES,
    WIDE_COLUMNS,
    Size,
    high,
    low,
)
from mtrain_cli.parallel.schedule import (
    _NONE,
    CONTEXT,
    DKV,
    DQ,
    INNER,
    KV,
    OUTER,
    UNSCHEDULED,
    PerRank,
    Schedule,
    ScheduleOptions,
    ScheduleStep,
    Steps,
    Transfer,
    numbers_of,
)
from mtrain_cli.parallel.schedule import QUERIES as QUERY_PAYLOAD

if TYPE_CHECKING:
    from mtrain_cli.parallel.lowering import ProgramBuilder


def _rings(name: str, options: ScheduleOptions) -> Schedule:
    workers, traits = options.workers, EXCHANGE_TRAITS[name]
    queries = options.circulates == QUERY_PAYLOAD
    nodes = -(-workers // options.per_node) if traits.hierarchical else 1
    inner = INNER if traits.hierarchical else CONTEXT
    rings = _Rings(nodes, workers // nodes, options.prefetch, inner)
    forward = PerRank(workers, rings.forward)
    backward = PerRank(workers, rings.backward_of_queries if queries else rings.backward_of_keys)
    keeps = PerRank(workers, lambda r: (r,) if queries else forward[r][-1].keys)
    of_ranks = forward, backward, keeps
    return Schedule(name, traits, workers, options.per_node, *of_ranks, options.circulates)


# Counterparts are ranks of different nodes with the same local rank. A rank posts an outer hop one
# round of the inner ring before it needs the shard (MTraining, section 4.2 and algorithm 2, whose
# formula for inner neighbors omits the first rank of the node).
ring, hierarchical_ring = (partial(_rings, name) for name in ("ring", "hierarchical_ring"))


def shorter_rings(
    exchange: str, options: ScheduleOptions, least: int = 16, unit: int = 1
) -> tuple[tuple[Fraction, ScheduleOptions], ...]:
    """Return the options of two shorter rings, the shortest first, each with a weight.

    The steps of a long ring repeat. So its bytes and times are the weighted sums of those of two
    rings with fewer workers and shards of the same size, and its peak memory is that of each.
    Short rings and other exchanges stand for themselves, with weight 1.

    least: number of shards in the shortest ring. unit: number of workers that divides both.
    """
    traits, heads = EXCHANGE_TRAITS[exchange], options.heads
    unit = lcm(unit, max(options.per_node, heads) if traits.hierarchical else heads)
    fewest = max(4 * unit, max(least, 4 * options.prefetch) * heads)
    fewest = -(-fewest // unit) * unit
    if traits.gathers or options.workers <= 2 * fewest:
        return ((Fraction(1), options),)
    times, found = Fraction(options.workers - fewest, fewest), []
    for weight, workers in ((1 - times, fewest), (times, 2 * fewest)):
        per_node = options.per_node if traits.hierarchical else workers
        found.append((weight, replace(options, workers=workers, per_node=per_node)))
    return tuple(found)


Link = tuple[str, int, int]  # channel, rank to send to, rank to receive from


@dataclass(frozen=True)
class _Rings:
    """Rings of `size` ranks inside each of `nodes` nodes, and of counterparts across nodes."""

    nodes: int
    size: int
    prefetch: int
    inner: str

    def rank(self, node: int, local: int) -> int:
        return node % self.nodes * self.size + local % self.size

    def forward(self, rank: int) -> Steps:
        """In turn t of phase p, compute shard (node - p, local - t), and send it to local + 1."""
        return self._circulate(rank, KV, direction=1, first=0)

    def backward_of_keys(self, rank: int) -> Steps:
        """Send KV back the way it came. The gradient of a shard follows one step behind."""
        # A pass starts with the shard that arrived last in forward, and ends with every shard and
        # its whole gradient on its owner. At the end of a phase, the counterpart of the shard's
        # owner has the sum of its node, adds the sum of the previous nodes, and sends the total to
        # the next node.
        node, local = divmod(rank, self.size)
        circulating = self._circulate(rank, KV, direction=-1, first=1)
        inner, outer = self._gradient_hops(rank, DKV, -1, circulating)
        steps = list(circulating)
        from_inner = _NONE  # arrives here; the next step adds it
        from_outer = _NONE  # arrives here; the last step of a phase adds it
        for index, step in enumerate(steps):
            phase, turn = divmod(index, self.size)
            collect, from_inner = from_inner, _NONE
            send = _NONE
            if turn < self.size - 1:
                send = from_inner = (inner(step.keys[0], steps[index + 1].keys[0]),)
            else:
                collect, from_outer = collect + from_outer, _NONE
                if phase < self.nodes - 1:
                    arriving = self.rank(node + phase + 2, local)
                    send = from_outer = (outer(step.keys[0], arriving),)
            steps[index] = replace(step, collect=numbers_of(collect), send=send)
        return tuple(steps)

    def backward_of_queries(self, rank: int) -> Steps:
        """Keep KV on its rank. Circulate queries, with their gradients one hop behind."""
        # See BurstEngine, section 3.1. At the start of a phase, this rank keeps its part of a
        # gradient until the rest has gone round the inner ring. In later phases than the first, the
        # queries belong to a counterpart, so the node's sum travels from node to node until it
        # reaches their owner.
        node, local = divmod(rank, self.size)
        circulating = self._circulate(rank, QUERY_PAYLOAD, direction=1, first=0)
        inner, outer = self._gradient_hops(rank, DQ, 1, circulating)
        steps = list(circulating)

        def to_next_node(phase: int) -> tuple[Transfer, ...]:
            """Return the hop that sends a phase's gradient to the next node."""
            shards = self.rank(node - phase, local), self.rank(node - phase - 1, local)
            return (outer(*shards),) if phase else ()

        from_inner = from_outer = _NONE
        for index, step in enumerate(steps):
            phase, turn = divmod(index, self.size)
            collect, from_inner = from_inner, _NONE
            send = _NONE
            if turn > 0:
                arriving = self.rank(node - phase, local - turn - 1)
                send = from_inner = (inner(step.queries[0], arriving),)
            elif phase > 0:
                collect += from_outer
                send = from_outer = to_next_node(phase - 1)
            steps[index] = replace(step, collect=numbers_of(collect), send=send)
        collect, send = from_inner + from_outer, to_next_node(self.nodes - 1)
        if collect or send:
            steps.append(ScheduleStep((), (), collect=numbers_of(collect), send=send))
        if send:
            steps.append(ScheduleStep((), (), collect=numbers_of(send)))
        return tuple(steps)

    def _links(self, rank: int, direction: int) -> tuple[Link, Link]:
        """Return the links inside the node and across nodes on which a rank sends and receives."""
        node, local = divmod(rank, self.size)
        inner = self.rank(node, local + direction), self.rank(node, local - direction)
        outer = self.rank(node + direction, local), self.rank(node - direction, local)
        return (self.inner, *inner), (OUTER, *outer)

    def _gradient_hops(
        self, rank: int, payload: str, direction: int, steps: Steps
    ) -> list[Callable[[int, int], Transfer]]:
        """Return two functions (sent shard, received shard) -> hop: inside and across nodes."""
        number = count(sum(len(step.transfers) for step in steps))
        return [partial(_hop, number, payload, link) for link in self._links(rank, direction)]

    def _circulate(self, rank: int, payload: str, direction: int, first: int) -> Steps:
        """Make the steps that compute shards and send them to the next rank, without gradients."""
        node, local = divmod(rank, self.size)
        number, (inner, outer), steps = count(), self._links(rank, direction), list[ScheduleStep]()
        base: Transfer | None = None  # delivers the first shard of the next phase
        for phase in range(self.nodes):
            from_node = node - direction * (phase + first)
            shards = [
                self.rank(from_node, local - direction * (turn + first))
                for turn in range(self.size)
            ]
            before = arrived = base
            waits: list[list[int]] = [[] for _ in shards]
            posts: list[list[Transfer]] = [[] for _ in shards]
            if arrived is not None:
                waits[0].append(arrived.number)
            if phase < self.nodes - 1:
                # Post the outer hop before the inner ones: it has the whole phase to arrive.
                following = self.rank(from_node - direction, local - direction * first)
                base = _hop(number, payload, outer, shards[0], following, arrived)
                posts[0].append(base)
            for turn in range(1, self.size):
                before = _hop(number, payload, inner, shards[turn - 1], shards[turn], before)
                posts[max(0, turn - self.prefetch)].append(before)
                waits[turn].append(before.number)
            for shard, wait, post in zip(shards, waits, posts, strict=True):
                pair = ((shard,), (rank,)) if payload == QUERY_PAYLOAD else ((rank,), (shard,))
                steps.append(ScheduleStep(*pair, wait=tuple(wait), post=tuple(post)))
        return tuple(steps)


def _hop(
    number: count[int], payload: str, link: Link, sent: int, received: int, before=None
) -> Transfer:
    channel, to, source = link
    after = None if before is None else before.number
    route = channel, (sent,), (received,), to, source
    return Transfer(next(number), "p2p", payload, *route, after=after)


_CIRCULATING = {KV: Kind.KV, QUERY_PAYLOAD: Kind.QUERIES}
# By payload of a gradient: the kind of its buffers, and what a buffer holds.
_RETURNING = {DKV: (Kind.DKV, KEYS), DQ: (Kind.DQUERIES, QUERIES)}


def ring_forward(b: ProgramBuilder, steps: Steps) -> None:
    """Circulate key shards; merge the attention over each shard into the output so far."""
    b.begin(0, steps[0])
    b.emit(ops.Pack, (buffers.K, buffers.V), (b.kv,), 2 * low(KEYS))
    if b.traits.columns:
        b.emit(ops.Pick, (b.kv,), (buffers.COLUMNS,), 2 * low(COLUMNS))
        b.sum_columns(buffers.COLUMNS, low(WIDE_COLUMNS))
    # The first merge moves nothing: its result becomes the output so far. The second merge converts
    # the output to float32.
    merged = {0: NOTHING, 1: ADDED + COPIED}
    for at, step in enumerate(steps):
        b.begin(at, step)
        _hops(b, step.post)
        b.wait(step.wait)
        keys, part = Kind.KV.of(b.shard(step.keys)), Kind.PART.at(at)
        b.compute(ops.ComputeForward, step, (buffers.Q, keys), (part,))
        b.emit(ops.MergeForward, (part,), (buffers.TOTAL,), merged.get(at, ADDED))
        if at == 0 and b.traits.columns:
            b.wait((UNSCHEDULED,))
            b.emit(
                ops.ColumnsForward, (buffers.Q, buffers.COLUMNS, buffers.TOTAL), (buffers.TOTAL,)
            )
        b.end_step(step, keys)
    b.emit(ops.Result, (buffers.Q, buffers.TOTAL), (buffers.OUT, buffers.LSE), COPIED)


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
        b.emit(ops.TakeSum, (keys,), (total,))
        b.compute(ops.ComputeBackward, step, (*reads, keys), made)
        moves = ADDED + KEYS_COPIED
        b.emit(ops.MergeBackward, made, (buffers.DQ_SUM, total), moves, begins=(total,))
        _exchange_gradients(b, step)
        b.end_step(step, keys)
    _end_backward(b, Kind.DKV.of(b.own))


def queries_backward(b: ProgramBuilder, steps: Steps) -> None:
    """Keep the keys on their rank, and circulate query messages. The queries' gradients follow."""
    b.begin(0, steps[0])
    reads = _begin_backward(b, 6 * low(QUERIES) + high(QUERIES))  # includes the message
    placeholder = low(QUERIES) if b.traits.copies_parts else NOTHING
    b.emit(ops.Message, reads, (Kind.QUERIES.of(b.own),))
    b.emit(ops.Zero, (b.kv,), (buffers.DKV_SUM,))
    for at, step in enumerate(steps):
        b.begin(at, step)
        _hops(b, step.post)
        b.wait(step.wait)
        computed = [Kind.QUERIES.of(b.shard(step.queries))] if step.queries else []
        if step.queries:
            total = Kind.DQUERIES.of(b.shard(step.queries))
            made = Kind.DQ.at(at), Kind.DKEYS.at(at)
            b.pooled.add(total)
            b.emit(ops.TakeSum, (buffers.Q,), (total,))
            b.compute(ops.ComputeMessage, step, (*computed, b.kv), made, placeholder)
            moves = COPIED + KEYS_ADDED
            b.emit(ops.MergeBackward, made, (total, buffers.DKV_SUM), moves, begins=(total,))
        _exchange_gradients(b, step)
        b.end_step(step, *computed)
    b.emit(ops.Reduce, (Kind.DQUERIES.of(b.own),), (buffers.DQ_SUM,))
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
        kind, unit = _RETURNING[post.transfer.payload]
        total = kind.of(b.shard(post.transfer.receives))
        b.emit(ops.Reduce, post.writes, (total,), 2 * high(unit) + b.sent(unit))
    for t in step.send:
        kind, unit = _RETURNING[t.payload]
        leaves = kind.of(b.shard(t.sends))
        arrives = Buffer(kind, b.shard(t.receives), generation=t.number)
        if b.rounds:
            total, leaves = leaves, Kind.ROUNDED.at(t.number)
            b.emit(ops.Round, (total,), (leaves,), high(unit) + b.sent(unit))
        b.sized |= dict.fromkeys((leaves, arrives), b.sent(unit))
        b.pooled |= {leaves, arrives}
        b.post(t, (leaves,), (arrives,), b.payload(t))


def _begin_backward(b: ProgramBuilder, moves: Size) -> tuple[Buffer, ...]:
    """Begin a ring's backward pass: compute delta, and start the sum of dq."""
    columns = b.traits.columns
    reads = (buffers.Q, buffers.DOUT, buffers.OUT, buffers.LSE, buffers.DELTA)
    made = (buffers.DELTA,) if columns else (buffers.DELTA, buffers.DQ_SUM)
    b.emit(ops.Delta, reads[:3], made, moves)
    if columns:
        b.emit(ops.ColumnsBackward, (*reads, buffers.COLUMNS), (buffers.DQ_SUM, buffers.DCOLUMNS))
        b.sum_columns(buffers.DCOLUMNS, high(WIDE_COLUMNS))
    return reads


def _end_backward(b: ProgramBuilder, gradient: Buffer) -> None:
    b.pooled.add(gradient)
    if b.traits.columns:
        b.wait((UNSCHEDULED,))
        # Each rank adds only those columns that are among its own keys.
        moves = 3 * high(COLUMNS) / b.schedule.workers
        b.emit(ops.AddColumns, (buffers.DCOLUMNS,), (gradient,), moves)
    reads = (buffers.Q, buffers.DQ_SUM, gradient)
    b.emit(ops.Gradients, reads, (buffers.DQ, buffers.DK, buffers.DV), COPIED + KEYS_COPIED)
