"""Schedules: for every rank of a context group the steps of an exchange, as plain data.

A schedule is made without a process group. The executor (`exchange.py`) follows it, tests play it through, profiler and simulator read it.

Shard s is what rank s of the context group holds: its queries, its keys and values. Ranks are numbered node by node: rank = node *
per_node + local.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TypeVar

T = TypeVar("T")

CONTEXT, INNER, OUTER = (
    "context",
    "inner",
    "outer",
)  # all ranks; those of a node; counterparts, one of each node
KV, DKV, QUERIES, DQ, HEADS = (
    "kv",
    "dkv",
    "queries",
    "dq",
    "heads",
)  # payloads; heads is a channel too
GRADIENTS = (DKV, DQ)


@dataclass(frozen=True)
class Transfer:
    """One message of one rank.

    number: counts the transfers of a rank and pass, from 0. Those of one channel and of one kind of payload are posted in this order.
    kind: ``p2p`` (to one peer while the same payload arrives from another), or a collective among ``peers``: ``all_gather``,
        ``reduce_scatter``, ``all_to_all``.
    payload: ``kv``, ``queries`` (what another worker needs to compute the gradients of these queries), their gradients ``dkv`` and ``dq``,
        or ``heads`` (all_to_all: tokens of all heads for heads of all tokens, or back).
    channel: the ranks among which it is one of many such messages: ``context``, ``inner`` (of a node) or ``outer`` (counterparts).
    sends, receives: the shards that leave and arrive. to, source: ranks, for p2p. peers: ranks in order, for collectives.
    after: number of the transfer that has to be complete before this one can begin, since it sends on what that one brought.
    part: (i, n), the i-th of n equal parts of the heads.
    """

    number: int
    kind: str
    payload: str
    channel: str
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    to: int | None = None
    source: int | None = None
    peers: tuple[int, ...] = ()
    after: int | None = None
    part: tuple[int, int] = (0, 1)


@dataclass(frozen=True)
class ScheduleStep:
    """One computation of a rank, in one kernel call, and the transfers around it, in this order: post, wait, compute, collect, send.

    queries, keys: the shards whose attention is computed; none in a step that only closes a pass. part: (i, n), for the i-th of n equal
    parts of the heads.
    post: posted first, so that they run beside the computation. wait: numbers of transfers that must be complete before it.
    collect: numbers of gradient transfers that must be complete after it. What arrived by a hop is added to what it gave; a collective has
    its memory back before the next one takes as much.
    send: posted after that.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    part: tuple[int, int] = (0, 1)
    wait: tuple[int, ...] = ()
    post: tuple[Transfer, ...] = ()
    collect: tuple[int, ...] = ()
    send: tuple[Transfer, ...] = ()

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        return self.post + self.send


Steps = tuple[ScheduleStep, ...]


class PerRank(Sequence[T]):
    """One thing for every rank, made when it is asked for: a rank of a thousand executes its own schedule only."""

    def __init__(self, ranks: int, make: Callable[[int], T]) -> None:
        self._make = make
        self._cached: list[T | None] = [None] * ranks

    def __len__(self) -> int:
        return len(self._cached)

    def __getitem__(self, rank):
        if isinstance(rank, slice):
            return tuple(self[r] for r in range(*rank.indices(len(self))))
        value = self._cached[rank]
        if value is None:
            value = self._cached[rank] = self._make(rank % len(self))
        return value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PerRank) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Schedule:
    """forward[rank], backward[rank]: the steps of that rank. keeps[rank]: the key shards that it holds between the two.

    All ranks have as many steps, with transfers on the same channels. heads: how many ranks share heads by all-to-all (Ulysses) before
    anything else moves; 1 = none.
    """

    exchange: str
    workers: int
    per_node: int
    forward: Sequence[Steps]
    backward: Sequence[Steps]
    keeps: Sequence[tuple[int, ...]]
    circulates: str = KV
    heads: int = 1

    @property
    def nodes(self) -> int:
        return -(-self.workers // self.per_node)

    @property
    def channels(self) -> tuple[str, ...]:
        """Those on which keys or queries move, between the ranks that share no heads."""
        steps = (*self.forward[0], *self.backward[0])
        named = {t.channel for step in steps for t in (*step.post, *step.send)}
        return tuple(channel for channel in (CONTEXT, INNER, OUTER) if channel in named)

    def crosses_nodes(self, rank: int, transfer: Transfer) -> bool:
        """Whether a transfer of a rank leaves or enters its node."""
        others = transfer.peers if transfer.kind != "p2p" else (transfer.to, transfer.source)
        return any(
            other is not None and other // self.per_node != rank // self.per_node
            for other in others
        )


@dataclass(frozen=True)
class ScheduleOptions:
    """What a schedule is made for.

    workers: ranks of the context group. per_node: how many of them share a node. chunks: parts of the heads that all_gather moves one
    after the other, each beside the computation of the one before. prefetch: hops that a ring posts ahead of the computation.
    circulates: what travels in a ring's backward pass, ``kv`` or ``queries``. heads: ranks that share heads by all-to-all.
    """

    workers: int
    per_node: int
    chunks: int = 1
    prefetch: int = 1
    circulates: str = KV
    heads: int = 1


def make_schedule(exchange: str, options: ScheduleOptions) -> Schedule:
    """The schedule of an exchange.

    Raises:
        ValueError: there is no such exchange, or the numbers do not fit together.
    """
    if exchange not in EXCHANGES:
        raise ValueError(
            f"topology.exchange={exchange}: no such exchange; allowed: auto, {', '.join(EXCHANGES)}"
        )
    workers, heads = options.workers, options.heads
    if workers % heads:
        raise ValueError(f"{heads} ranks that share heads do not divide {workers} workers.")
    if min(workers, options.per_node, options.chunks, options.prefetch, heads) < 1:
        raise ValueError(f"Every number of {options} must be at least 1.")
    if workers > options.per_node and workers % options.per_node:
        raise ValueError(f"{options.per_node} ranks a node do not divide {workers} workers.")
    if heads == 1:
        return _EXCHANGES[exchange](options)
    groups = workers // heads
    if options.per_node % heads and heads % options.per_node:
        raise ValueError(
            f"{heads} ranks that share heads do not fit {options.per_node} ranks a node."
        )
    # Neighbours share heads, so a node holds this many of the groups between which keys move.
    per_node = min(groups, max(1, options.per_node // heads))
    return _share_heads(
        _EXCHANGES[exchange](replace(options, workers=groups, per_node=per_node, heads=1)), options
    )


def all_gather(options: ScheduleOptions) -> Schedule:
    """All keys and values reach every rank in one collective a part of the heads; gradients return in one reduce-scatter a part."""
    return _gather("all_gather", options, nodes=1)


def hierarchical_all_gather(options: ScheduleOptions) -> Schedule:
    """Each rank pulls the shards of its counterparts from the other nodes, then shares them inside its node: between nodes every shard
    crosses once a node, over as many links as a node has ranks.
    """
    return _gather(
        "hierarchical_all_gather", options, nodes=-(-options.workers // options.per_node)
    )


def _gather(name: str, options: ScheduleOptions, nodes: int) -> Schedule:
    workers, chunks = options.workers, options.chunks
    everyone = tuple(range(workers))
    per_node = workers // nodes

    def collectives(
        rank: int, payload: str, part: tuple[int, int], number: count[int]
    ) -> tuple[Transfer, ...]:
        gathers = payload == KV
        kind = "all_gather" if gathers else "reduce_scatter"

        def collective(
            peers: tuple[int, ...],
            holds: tuple[int, ...],
            group_shards: tuple[int, ...],
            channel: str,
            after: int | None = None,
        ):
            others = tuple(s for s in group_shards if s not in holds)
            sends, receives = (holds, others) if gathers else (others, holds)
            return Transfer(
                next(number),
                kind,
                payload,
                channel,
                sends,
                receives,
                peers=peers,
                after=after,
                part=part,
            )

        if 1 in (nodes, per_node):
            return (collective(everyone, (rank,), everyone, CONTEXT),)
        node, local = divmod(rank, per_node)
        counterparts = tuple(n * per_node + local for n in range(nodes))
        node_ranks = tuple(node * per_node + m for m in range(per_node))
        if gathers:
            outer = collective(counterparts, (rank,), counterparts, OUTER)
            return outer, collective(node_ranks, counterparts, everyone, INNER, outer.number)
        inner = collective(node_ranks, counterparts, everyone, INNER)
        return inner, collective(counterparts, (rank,), counterparts, OUTER, inner.number)

    def steps(rank: int, backward: bool) -> Steps:
        if workers == 1:
            return tuple(ScheduleStep((0,), (0,), (c, chunks)) for c in range(chunks))
        number = count()
        result: list[ScheduleStep] = []
        before: tuple[Transfer, ...] = ()
        # The first part is gathered at the start of the first step, which waits for it; each other part beside the part before it.
        ready = collectives(rank, KV, (0, chunks), number)
        for c in range(chunks):
            following = collectives(rank, KV, (c + 1, chunks), number) if c + 1 < chunks else ()
            gradients = collectives(rank, DKV, (c, chunks), number) if backward else ()
            posted = (*ready, *following) if c == 0 else following
            result.append(
                ScheduleStep(
                    (rank,),
                    everyone,
                    (c, chunks),
                    (ready[-1].number,),
                    posted,
                    tuple(t.number for t in before),
                    gradients,
                )
            )
            ready, before = following, gradients
        return tuple(result)

    forward, backward = (PerRank(workers, partial(steps, backward=b)) for b in (False, True))
    return Schedule(
        name, workers, options.per_node, forward, backward, PerRank(workers, lambda r: (r,))
    )


def ring(options: ScheduleOptions) -> Schedule:
    """Key shards travel from rank to rank, over all ranks as one ring, while the ones at hand are computed."""
    return _rings("ring", options, nodes=1)


def hierarchical_ring(options: ScheduleOptions) -> Schedule:
    """A ring inside every node, and rings of counterparts across nodes whose hops are posted a whole turn of the inner ring ahead
    (MTraining, section 4.2 and algorithm 2, whose inner neighbours lack the first rank of the node).
    """
    return _rings("hierarchical_ring", options, nodes=-(-options.workers // options.per_node))


def _rings(name: str, options: ScheduleOptions, nodes: int) -> Schedule:
    rings = _Rings(
        nodes, options.workers // nodes, options.prefetch, CONTEXT if name == "ring" else INNER
    )
    queries, workers = options.circulates == QUERIES, options.workers
    forward = PerRank(workers, rings.forward)
    backward = PerRank(workers, rings.backward_of_queries if queries else rings.backward_of_keys)
    keeps = PerRank(workers, lambda r: (r,) if queries else forward[r][-1].keys)
    return Schedule(name, workers, options.per_node, forward, backward, keeps, options.circulates)


@dataclass(frozen=True)
class _Rings:
    """Rings of ``size`` ranks inside ``nodes`` nodes, and of counterparts across them. One node: a flat ring.

    A pass has a phase for every node and, in it, a turn for every rank of the node.
    """

    nodes: int
    size: int
    prefetch: int
    inner: str

    def rank(self, node: int, local: int) -> int:
        return node % self.nodes * self.size + local % self.size

    def forward(self, rank: int) -> Steps:
        """In phase p and turn t the shard of node - p, local - t is computed, while it moves on to local + 1."""
        return self._circulate(rank, KV, direction=1, first=0)

    def backward_of_keys(self, rank: int) -> Steps:
        """The same ways back, from the shard that arrived last in the forward pass: each shard is home in the last step, together with
        its gradient, which every rank hands on after adding its part. What the ranks of a node add up ends its turn at the counterpart of
        the shard's owner and joins there what came from the node before: size - 1 hops a phase inside, nodes - 1 hops across.
        """
        node, local = divmod(rank, self.size)
        steps = list(self._circulate(rank, KV, direction=-1, first=1))
        number = _numbers_after(steps)
        to_inner, from_inner = self.rank(node, local - 1), self.rank(node, local + 1)
        to_outer, from_outer = self.rank(node - 1, local), self.rank(node + 1, local)
        inner: list[Transfer] = []  # on the way to this rank, to be added in the next step
        outer: list[
            Transfer
        ] = []  # on the way to this rank, to be added at the end of the next phase
        for index, step in enumerate(steps):
            phase, turn = divmod(index, self.size)
            collect, inner = inner, []
            send = []
            now = step.keys[0]
            if turn < self.size - 1:
                inner = [
                    self._make_hop(
                        number, DKV, self.inner, now, steps[index + 1].keys[0], to_inner, from_inner
                    )
                ]
                send = inner
            else:
                collect, outer = collect + outer, []
                if phase < self.nodes - 1:
                    outer = [
                        self._make_hop(
                            number,
                            DKV,
                            OUTER,
                            now,
                            self.rank(node + phase + 2, local),
                            to_outer,
                            from_outer,
                        )
                    ]
                    send = outer
            steps[index] = replace(step, collect=tuple(t.number for t in collect), send=tuple(send))
        return tuple(steps)

    def backward_of_queries(self, rank: int) -> Steps:
        """Keys stay; queries travel with what is needed for their gradients, and these follow one hop behind (BurstEngine, section 3.1).

        What a rank adds for the first queries of a phase stays there until the gradient comes back from its turn. After the first phase
        those are a counterpart's, and the sum of the node goes on to the next node, as far as the owner.
        """
        node, local = divmod(rank, self.size)
        steps = list(self._circulate(rank, QUERIES, direction=1, first=0))
        number = _numbers_after(steps)
        to_inner, from_inner = self.rank(node, local + 1), self.rank(node, local - 1)
        to_outer, from_outer = self.rank(node + 1, local), self.rank(node - 1, local)
        inner: list[Transfer] = []
        outer: list[Transfer] = []
        for index in range(len(steps)):
            phase, turn = divmod(index, self.size)
            collect, inner = inner, []
            send: list[Transfer] = []
            if turn > 0:
                inner = [
                    self._make_hop(
                        number,
                        DQ,
                        self.inner,
                        steps[index].queries[0],
                        self.rank(node - phase, local - turn - 1),
                        to_inner,
                        from_inner,
                    )
                ]
                send = inner
            elif phase > 0:
                collect, outer, send = self._pass_to_next_node(
                    number, phase - 1, node, local, collect + outer, to_outer, from_outer
                )
            steps[index] = replace(
                steps[index], collect=tuple(t.number for t in collect), send=tuple(send)
            )
        collect, outer, send = self._pass_to_next_node(
            number, self.nodes - 1, node, local, inner + outer, to_outer, from_outer
        )
        if collect or send:
            steps.append(
                ScheduleStep((), (), collect=tuple(t.number for t in collect), send=tuple(send))
            )
        if outer:
            steps.append(ScheduleStep((), (), collect=tuple(t.number for t in outer)))
        return tuple(steps)

    def _pass_to_next_node(
        self,
        number: count[int],
        phase: int,
        node: int,
        local: int,
        collect: list[Transfer],
        to: int,
        source: int,
    ) -> tuple[list[Transfer], list[Transfer], list[Transfer]]:
        """At the end of a phase of queries -> what is added first, what comes from the node before, and what is sent."""
        if phase == 0:
            return collect, [], []
        hop = self._make_hop(
            number,
            DQ,
            OUTER,
            self.rank(node - phase, local),
            self.rank(node - phase - 1, local),
            to,
            source,
        )
        return collect, [hop], [hop]

    def _circulate(self, rank: int, payload: str, direction: int, first: int) -> Steps:
        """The steps in which a shard is computed and handed on, without gradients.

        direction: 1, shards go to the next rank and the next node, so that the rank meets its predecessors; -1 the other way round. first:
        how far from itself, in nodes and in ranks of a node, the first shard comes from.
        """
        node, local = divmod(rank, self.size)
        number = count()
        steps: list[ScheduleStep] = []
        base: Transfer | None = None  # brings the first shard of the next phase
        for phase in range(self.nodes):
            from_node = node - direction * (phase + first)
            shards = [
                self.rank(from_node, local - direction * (turn + first))
                for turn in range(self.size)
            ]
            arrived = base
            waits: list[list[int]] = [[] for _ in shards]
            posts: list[list[Transfer]] = [[] for _ in shards]
            if arrived is not None:
                waits[0].append(arrived.number)
            if phase < self.nodes - 1:
                # Posted first: it has the whole phase to arrive.
                following = self.rank(from_node - direction, local - direction * first)
                to, source = self.rank(node + direction, local), self.rank(node - direction, local)
                base = self._make_hop(
                    number, payload, OUTER, shards[0], following, to, source, arrived
                )
                posts[0].append(base)
            to, source = self.rank(node, local + direction), self.rank(node, local - direction)
            before = arrived
            for turn in range(1, self.size):
                before = self._make_hop(
                    number, payload, self.inner, shards[turn - 1], shards[turn], to, source, before
                )
                posts[max(0, turn - self.prefetch)].append(before)
                waits[turn].append(before.number)
            for shard, wait, post in zip(shards, waits, posts, strict=True):
                pair = ((shard,), (rank,)) if payload == QUERIES else ((rank,), (shard,))
                steps.append(ScheduleStep(*pair, wait=tuple(wait), post=tuple(post)))
        return tuple(steps)

    def _make_hop(
        self,
        number: count[int],
        payload: str,
        channel: str,
        sent: int,
        received: int,
        to: int,
        source: int,
        before: Transfer | None = None,
    ) -> Transfer:
        after = None if before is None else before.number
        return Transfer(
            next(number),
            "p2p",
            payload,
            channel,
            (sent,),
            (received,),
            to=to,
            source=source,
            after=after,
        )


def _numbers_after(steps: list[ScheduleStep]) -> count[int]:
    return count(sum(len(step.transfers) for step in steps))


def _share_heads(inner: Schedule, options: ScheduleOptions) -> Schedule:
    """Ulysses around another exchange: ranks R * heads .. R * heads + heads - 1 first trade their tokens for parts of the heads, and then
    work as one shard R of the inner exchange, each on its part of the heads (DeepSpeed-Ulysses, arXiv:2309.14509; USP, arXiv:2405.07719).
    """
    heads = options.heads

    def members(groups: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(g * heads + m for g in groups for m in range(heads))

    def lift_steps(steps: Steps, group: int, place: int) -> Steps:
        def rank(of_group: int | None) -> int | None:
            return None if of_group is None else of_group * heads + place

        def part(of_inner: tuple[int, int]) -> tuple[int, int]:
            return place * of_inner[1] + of_inner[0], heads * of_inner[1]

        def lift_transfer(t: Transfer) -> Transfer:
            return replace(
                t,
                number=t.number + 1,
                sends=members(t.sends),
                receives=members(t.receives),
                to=rank(t.to),
                source=rank(t.source),
                peers=tuple(p * heads + place for p in t.peers),
                after=0
                if t.after is None
                else t.after + 1,  # nothing moves before the heads are there
                part=part(t.part),
            )

        def renumber(numbers: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(n + 1 for n in numbers)

        result = [
            ScheduleStep(
                members(s.queries),
                members(s.keys),
                part(s.part),
                renumber(s.wait),
                tuple(map(lift_transfer, s.post)),
                renumber(s.collect),
                tuple(map(lift_transfer, s.send)),
            )
            for s in steps
        ]
        peers = members((group,))
        trade = Transfer(
            0,
            "all_to_all",
            HEADS,
            HEADS,
            (group * heads + place,),
            peers,
            peers=peers,
            part=(place, heads),
        )
        result[0] = replace(result[0], post=(trade, *result[0].post), wait=(0, *result[0].wait))
        back = replace(
            trade, number=sum(len(s.transfers) for s in result), sends=peers, receives=trade.sends
        )
        return (*result, ScheduleStep((), (), post=(back,), wait=(back.number,)))

    def spread(of_groups: Sequence[Steps]) -> Sequence[Steps]:
        return PerRank(
            options.workers, lambda r: lift_steps(of_groups[r // heads], r // heads, r % heads)
        )

    return Schedule(
        inner.exchange,
        options.workers,
        options.per_node,
        spread(inner.forward),
        spread(inner.backward),
        PerRank(options.workers, lambda r: members(inner.keeps[r // heads])),
        inner.circulates,
        heads,
    )


_EXCHANGES: dict[str, Callable[[ScheduleOptions], Schedule]] = {
    "all_gather": all_gather,
    "hierarchical_all_gather": hierarchical_all_gather,
    "ring": ring,
    "hierarchical_ring": hierarchical_ring,
}
EXCHANGES = tuple(_EXCHANGES)
