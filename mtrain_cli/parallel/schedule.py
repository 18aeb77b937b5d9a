"""Schedules: the steps of an exchange for every rank of a context group, as plain data.

Shard s contains the queries, keys and values of rank s of the context group. Ranks are numbered
node by node: rank = node * per_node + local. A step is one kernel call with the transfers around
this call. Each rank runs the parts of a step in this order:

    post -> wait -> compute -> collect -> send

`lowering.lower` turns the steps of one rank into its operations (a `Program`). `Executor` runs the
operations, and the simulator predicts their time. As an example, take rank 0 in a ring of 3 ranks,
in the forward pass. In step 1 this rank computes shard 2 and receives shard 1. The step is

    ScheduleStep(queries=(0,), keys=(2,), wait=(0,), post=(Transfer(1, "p2p", sends=(2,),
                 receives=(1,), to=1, source=2, after=0, ...),))

Transfer 0, posted in step 0, brings shard 2 from rank 2. `ring_programs.ring_forward` emits:

    operation  reads       writes   what the executor does
    Begin      -           -        tags the spans and messages that follow with step 1
    Post       kv 2        kv 1     starts: send shard 2 to rank 1, receive shard 1 from rank 2
    Wait       -           -        waits for transfer 0, which brings shard 2
    Compute    q, kv 2     part 1   calls the kernel: out and lse of this rank's queries
    Merge      part 1      total    merges these into out and lse so far; frees kv 0 and part 1

Transfer 1 forwards the shard that transfer 0 brings, so transfer 1 runs after transfer 0. Step 2
waits for transfer 1 and computes shard 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import count
from typing import TypeVar

from mtrain_cli.config.exchanges import EXCHANGE_TRAITS, ExchangeTraits

T = TypeVar("T")

# Channels: all ranks; the ranks of one node; counterparts (the ranks with the same local number).
CONTEXT, INNER, OUTER = "context", "inner", "outer"
# Payloads. "heads" is also the channel of its own all-to-all.
KV, DKV, QUERIES, DQ, HEADS = "kv", "dkv", "queries", "dq", "heads"
GRADIENTS = (DKV, DQ)
COLUMNS = "columns"  # single columns of an index, summed over all ranks outside the schedule
SUM = "all_reduce"  # kind of the COLUMNS transfer
# Kinds of the transfers that carry only the rows that the masks of a batch need, and of those that
# return the gradients of these rows.
GROUP_CAST, GROUP_REDUCE = "group_cast", "group_reduce"
UNSCHEDULED = -2  # number of the COLUMNS transfer


@dataclass(frozen=True)
class Transfer:
    """One message of one rank.

    number: index of the transfer among the rank's transfers in a pass. All ranks of a communicator
        post the communicator's transfers in the order of their numbers. Each channel has one
        communicator for data and one for gradients.
    kind: ``p2p`` (send to one rank and receive the same payload from another), ``all_gather``,
        ``reduce_scatter``, ``all_to_all``, ``group_cast`` or ``group_reduce``. The last two send
        some rows of the shards to each peer. `cast_rows.CastRows` names these rows.
    payload: ``kv``; ``queries`` (query messages, from which another worker computes gradients);
        the gradients ``dkv`` and ``dq``; or ``heads`` (the all-to-alls of Ulysses).
    channel: ``context``, ``inner``, ``outer`` or ``heads``.
    sends, receives: numbers of the shards.
    to, source: ranks, for p2p.
    peers: ranks in order, for collectives.
    after: number of the transfer that delivers the payload of this transfer and so must complete
        first; None if this rank already holds the payload.
    part: (i, n): transfer the i-th of n equal parts of the heads.
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

    @property
    def shards(self) -> int:
        """Number of shards in the posted tensor; 1 if the tensor does not consist of shards."""
        if self.kind in (SUM, "all_to_all", GROUP_CAST, GROUP_REDUCE):
            return 1
        return len(self.sends) + (len(self.receives) if self.kind == "reduce_scatter" else 0)

    @property
    def share(self) -> Fraction:
        """Number of bytes that a rank sends, divided by the size of the tensor that it posts.

        A rank receives the same number of bytes. For a collective of n ranks the number is a lower
        bound. A gather sends the tensor to n - 1 peers. A reduce-scatter and an all-to-all send one
        n-th of the tensor to each peer. An all-reduce sends one n-th to each peer twice. The tensor
        of a group cast has only rows for other ranks.
        """
        if self.kind in ("p2p", GROUP_CAST, GROUP_REDUCE):
            return Fraction(1)
        n = len(self.peers)
        return {"all_gather": n, SUM: 2}.get(self.kind, 1) * Fraction(n - 1, n)


@dataclass(frozen=True)
class ScheduleStep:
    """One kernel call of a rank and the transfers around it: post, wait, compute, collect, send.

    queries, keys: numbers of the query shard and the key shard that the kernel call computes. Both
        tuples are empty in a step that has only transfers.
    part: (i, n): compute the i-th of n equal parts of the heads.
    stage: in a staged group cast, 0 for this rank's own keys, and 1 or 2 for received keys; else
        None.
    post: transfers that start first, to overlap with the computation.
    wait: numbers of the transfers that must complete before the computation.
    collect: numbers of the gradient transfers that must complete after the computation. A completed
        hop delivers a gradient, to which the rank adds its own part. A completed reduce-scatter
        frees its send buffer before the next reduce-scatter allocates a buffer.
    send: gradient transfers that start last.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    part: tuple[int, int] = (0, 1)
    stage: int | None = None
    wait: tuple[int, ...] = ()
    post: tuple[Transfer, ...] = ()
    collect: tuple[int, ...] = ()
    send: tuple[Transfer, ...] = ()

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        return self.post + self.send


Steps = tuple[ScheduleStep, ...]
_NONE: tuple[Transfer, ...] = ()


class PerRank(Sequence[T]):
    """One value per rank, made on first access, so that a rank makes only the values it reads."""

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
    """The steps of an exchange. All ranks have the same number of steps, on the same channels.

    exchange: name of the exchange.
    traits: properties of the exchange. Callers read these properties and never compare the name.
    workers: number of ranks of the context group.
    per_node: number of ranks of the context group that share a node.
    forward, backward: the steps of each pass, by rank.
    keeps: for each rank, the numbers of the key shards that it holds from forward to backward.
    circulates: what circulates in a ring's backward pass, ``kv`` or ``queries``.
    heads: number of ranks that share heads by all-to-alls (Ulysses) around the exchange; 1 without
        Ulysses.
    stages: number of kernel calls for each part of the heads in a group cast.
    """

    exchange: str
    traits: ExchangeTraits
    workers: int
    per_node: int
    forward: Sequence[Steps]
    backward: Sequence[Steps]
    keeps: Sequence[tuple[int, ...]]
    circulates: str = KV
    heads: int = 1
    stages: int = 1

    @property
    def nodes(self) -> int:
        return -(-self.workers // self.per_node)

    @property
    def groups(self) -> int:
        """Number of groups of ranks that share heads. Keys or queries move between the groups."""
        return self.workers // self.heads

    @property
    def gathers(self) -> bool:
        """Whether a rank has all keys before it calls the kernel. If False, shards circulate."""
        return self.traits.gathers

    @property
    def queries_travel(self) -> bool:
        """Whether queries circulate in backward instead of keys."""
        return not self.gathers and self.circulates == QUERIES

    @property
    def channels(self) -> tuple[str, ...]:
        """The channels of keys, queries and their gradients, without the channel of Ulysses."""
        steps = (*self.forward[0], *self.backward[0])
        named = {t.channel for step in steps for t in (*step.post, *step.send)}
        return tuple(channel for channel in (CONTEXT, INNER, OUTER) if channel in named)


@dataclass(frozen=True)
class ScheduleOptions:
    """The sizes and choices from which `make_schedule` makes a schedule.

    workers: number of ranks of the context group.
    per_node: number of ranks of the group that share a node.
    chunks: number of equal parts of the heads. An all-gather moves one part while the previous part
        is computed.
    prefetch: number of hops that a ring posts ahead of the computation.
    circulates: what circulates in a ring's backward pass, ``kv`` or ``queries``.
    heads: number of ranks that share heads by all-to-alls (Ulysses); 1 without Ulysses.
    stages: number of kernel calls in which a group cast computes each part of the heads: 1 for all
        keys at once; 2 for a rank's own keys, then received keys; 3 for own keys, keys of the node,
        then keys of other nodes. If all ranks share a node, 3 means 2.
    """

    workers: int
    per_node: int
    chunks: int = 1
    prefetch: int = 1
    circulates: str = KV
    heads: int = 1
    stages: int = 1


def make_schedule(exchange: str, options: ScheduleOptions) -> Schedule:
    """Make the schedule of an exchange.

    Raises:
        ValueError: the exchange does not exist, or the numbers do not fit together.
    """
    if exchange not in _EXCHANGES:
        names = ", ".join(_EXCHANGES)
        raise ValueError(f"topology.exchange={exchange}: no such exchange; allowed: auto, {names}")
    workers, heads = options.workers, options.heads
    if workers % heads:
        raise ValueError(
            f"{workers} workers: not a multiple of the {heads} ranks that share heads."
        )
    if min(workers, options.per_node, options.chunks, options.prefetch, heads, options.stages) < 1:
        raise ValueError(f"{options}: every number must be at least 1.")
    if workers > options.per_node and workers % options.per_node:
        raise ValueError(f"{workers} workers: not a multiple of {options.per_node} ranks per node.")
    if heads == 1:
        return _EXCHANGES[exchange](options)
    groups = workers // heads
    if options.per_node % heads and heads % options.per_node:
        raise ValueError(
            f"{heads} ranks that share heads do not fit nodes of {options.per_node} ranks: one "
            "number must divide the other."
        )
    # Neighboring ranks share heads. Keys move between these groups; a node holds per_node of them.
    per_node = min(groups, max(1, options.per_node // heads))
    return _share_heads(
        _EXCHANGES[exchange](replace(options, workers=groups, per_node=per_node, heads=1)), options
    )


def all_gather(options: ScheduleOptions) -> Schedule:
    """Gather all KV on every rank, with one collective per part of the heads.

    One reduce-scatter per part returns the gradients.
    """
    return _gather("all_gather", options)


def hierarchical_all_gather(options: ScheduleOptions) -> Schedule:
    """Gather KV across nodes among ranks with the same local rank, then inside each node.

    Each shard enters each other node once, and all ranks of a node use their links to other nodes.
    """
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
        before: tuple[Transfer, ...] = ()
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
                result.append(
                    replace(
                        step,
                        part=(c, chunks),
                        post=posts.get(turn, ()),
                        collect=_numbers(before) if turn == 0 else (),
                    )
                )
            ready, before = following, gradients
        return tuple(result)

    forward, backward = (PerRank(workers, partial(steps, backward=b)) for b in (False, True))
    keeps = PerRank(workers, lambda r: (r,))
    return Schedule(
        name, traits, workers, options.per_node, forward, backward, keeps, stages=stages
    )


def _stages(
    rank: int,
    workers: int,
    nodes: int,
    stages: int,
    casts: tuple[Transfer, ...],
    gradients: tuple[Transfer, ...],
) -> list[ScheduleStep]:
    """Return the steps that compute one part of the heads, in the order of forward.

    A step waits for the last transfer that brings its keys.

    casts, gradients: the part's transfers; see `_collectives`.
    """
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
) -> tuple[Transfer, ...]:
    """Return one rank's transfers that gather keys, or that reduce-scatter their gradients.

    With several nodes of several ranks there are two transfers: keys cross nodes first, then spread
    inside each node; gradients take the reverse way. Otherwise there is one collective among all
    ranks.

    by_mask: whether the collectives carry only the rows that the masks need.
    splits: whether keys of this node and keys of other nodes spread inside the node in separate
        transfers. The order is then: across nodes, keys of the node, keys of other nodes. For
        gradients it is: keys of other nodes inside the node, across nodes, keys of the node.
    payload: KV or DKV.
    part: (i, n), the i-th of n equal parts of the heads.
    """
    everyone = tuple(range(workers))
    gathers = payload == KV
    gather, reduce = (GROUP_CAST, GROUP_REDUCE) if by_mask else ("all_gather", "reduce_scatter")

    def collective(peers, holds, channel, after=None, shards=everyone) -> Transfer:
        others = tuple(s for s in shards if s not in holds)
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

    def near() -> tuple[Transfer, ...]:
        return (collective(node_ranks, (rank,), INNER, shards=node_ranks),) if splits else ()

    def inside(after=None) -> Transfer:
        shards = tuple(s for s in everyone if not splits or s not in node_ranks)
        return collective(
            node_ranks, tuple(s for s in counterparts if s in shards), INNER, after, shards
        )

    if gathers:
        outer = across()
        return outer, *near(), inside(outer.number)
    inner = inside()
    return inner, across(inner.number), *near()


def ring(options: ScheduleOptions) -> Schedule:
    """Circulate key shards in one ring over all ranks.

    Each rank computes a shard while it sends that shard to the next rank.
    """
    return _rings("ring", options)


def hierarchical_ring(options: ScheduleOptions) -> Schedule:
    """Circulate shards in a ring inside every node, and in rings of counterparts across nodes.

    Counterparts are ranks of different nodes with the same local rank. A rank posts an outer hop
    one round of the inner ring before it needs the shard (MTraining, section 4.2 and algorithm 2,
    whose formula for inner neighbors omits the first rank of the node).
    """
    return _rings("hierarchical_ring", options)


def _rings(name: str, options: ScheduleOptions) -> Schedule:
    queries, workers, traits = options.circulates == QUERIES, options.workers, EXCHANGE_TRAITS[name]
    nodes = -(-workers // options.per_node) if traits.hierarchical else 1
    inner = INNER if traits.hierarchical else CONTEXT
    rings = _Rings(nodes, workers // nodes, options.prefetch, inner)
    forward = PerRank(workers, rings.forward)
    backward = PerRank(workers, rings.backward_of_queries if queries else rings.backward_of_keys)
    keeps = PerRank(workers, lambda r: (r,) if queries else forward[r][-1].keys)
    of_ranks = forward, backward, keeps
    return Schedule(name, traits, workers, options.per_node, *of_ranks, options.circulates)


@dataclass(frozen=True)
class _Rings:
    """Rings of `size` ranks inside each of `nodes` nodes, and rings of counterparts across nodes.

    A pass has one phase per node. A phase has one turn per rank of a node. With one node there is
    one flat ring.
    """

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
        """Send KV back the way it came. The gradient of a shard follows one step behind.

        A pass starts with the shard that arrived last in forward. It ends with every shard and its
        complete gradient on the shard's owner. Each rank adds its part to a gradient and sends the
        gradient to the next rank. At the end of a phase, the counterpart of the shard's owner has
        the sum of its node. The counterpart adds the sum of the previous nodes and sends the total
        to the next node. Gradients take size - 1 inner hops per phase and nodes - 1 outer hops per
        pass.
        """
        node, local = divmod(rank, self.size)
        steps = list(self._circulate(rank, KV, direction=-1, first=1))
        inner, outer = self._gradient_hops(rank, DKV, -1, _numbers_after(steps))
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
            steps[index] = replace(step, collect=_numbers(collect), send=send)
        return tuple(steps)

    def backward_of_queries(self, rank: int) -> Steps:
        """Keep KV on its rank. Circulate queries, with their gradients one hop behind.

        See BurstEngine, section 3.1. At the start of a phase, this rank computes its part of the
        gradient of some queries. It keeps this part until the rest of the gradient has gone round
        the inner ring. In the first phase these queries are this rank's own. In later phases they
        belong to a counterpart, so the node's sum travels from node to node until the sum reaches
        the queries' owner.
        """
        node, local = divmod(rank, self.size)
        steps = list(self._circulate(rank, QUERIES, direction=1, first=0))
        inner, outer = self._gradient_hops(rank, DQ, 1, _numbers_after(steps))

        def to_next_node(phase: int) -> tuple[Transfer, ...]:
            """Return the hop that sends a phase's gradient to the next node.

            Return no hop for the first phase, whose gradient belongs to this rank.
            """
            shards = self.rank(node - phase, local), self.rank(node - phase - 1, local)
            return (outer(*shards),) if phase else ()

        from_inner = _NONE
        from_outer = _NONE
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
            steps[index] = replace(step, collect=_numbers(collect), send=send)
        collect, send = from_inner + from_outer, to_next_node(self.nodes - 1)
        if collect or send:
            steps.append(ScheduleStep((), (), collect=_numbers(collect), send=send))
        if send:
            steps.append(ScheduleStep((), (), collect=_numbers(send)))
        return tuple(steps)

    def _gradient_hops(
        self, rank: int, payload: str, direction: int, number: count[int]
    ) -> tuple[Callable[[int, int], Transfer], Callable[[int, int], Transfer]]:
        """Return two functions (shard to send, shard to receive) -> hop.

        The first function makes hops inside the node, the second makes hops across nodes.
        """
        node, local = divmod(rank, self.size)
        inner = self.rank(node, local + direction), self.rank(node, local - direction)
        outer = self.rank(node + direction, local), self.rank(node - direction, local)

        def hop(channel: str, to: int, source: int, sent: int, received: int) -> Transfer:
            return self._make_hop(number, payload, channel, sent, received, to, source)

        return partial(hop, self.inner, *inner), partial(hop, OUTER, *outer)

    def _circulate(self, rank: int, payload: str, direction: int, first: int) -> Steps:
        """Make the steps that compute shards and send them to the next rank, without gradients.

        direction: 1 sends shards to the next rank and the next node, so that this rank meets the
            shards of its predecessors in turn; -1 reverses the direction.
        first: distance to the owner of the first shard: the number of nodes, and equally the number
            of local ranks.
        """
        node, local = divmod(rank, self.size)
        number = count()
        steps: list[ScheduleStep] = []
        base: Transfer | None = None  # delivers the first shard of the next phase
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
                # Post the outer hop before the inner ones: it has the whole phase to arrive.
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
        route = channel, (sent,), (received,)
        return Transfer(next(number), "p2p", payload, *route, to=to, source=source, after=after)


def _numbers(transfers: Sequence[Transfer]) -> tuple[int, ...]:
    return tuple(t.number for t in transfers)


def _numbers_after(steps: list[ScheduleStep]) -> count[int]:
    return count(sum(len(step.transfers) for step in steps))


def _share_heads(inner: Schedule, options: ScheduleOptions) -> Schedule:
    """Wrap Ulysses around another exchange.

    The ranks R * heads to R * heads + heads - 1 form group R, which shares heads. The first
    all-to-all gives each rank the tokens of its whole group, for 1 / heads of the heads. For these
    heads the rank then acts as rank R of the inner exchange. The last all-to-all undoes the trade
    (DeepSpeed-Ulysses, arXiv:2309.14509; USP, arXiv:2405.07719).
    """
    heads = options.heads

    def spread(of_groups: Sequence[Steps]) -> Sequence[Steps]:
        return PerRank(
            options.workers,
            lambda r: _trade_around(of_groups[r // heads], r // heads, r % heads, heads),
        )

    return replace(
        inner,
        workers=options.workers,
        per_node=options.per_node,
        forward=spread(inner.forward),
        backward=spread(inner.backward),
        keeps=PerRank(options.workers, lambda r: _members(inner.keeps[r // heads], heads)),
        heads=heads,
    )


def _members(groups: tuple[int, ...], heads: int) -> tuple[int, ...]:
    """Return the ranks of these groups. heads: number of ranks per group."""
    return tuple(g * heads + m for g in groups for m in range(heads))


def _trade_around(steps: Steps, group: int, place: int, heads: int) -> Steps:
    """Add the two all-to-alls around the steps of an inner exchange.

    group: number of the rank's group, which is also its rank in the inner exchange.
    place: rank inside the group.
    heads: number of ranks per group.
    """

    def rank(of_group: int | None) -> int | None:
        return None if of_group is None else of_group * heads + place

    def part(of_inner: tuple[int, int]) -> tuple[int, int]:
        return place * of_inner[1] + of_inner[0], heads * of_inner[1]

    def lift(t: Transfer) -> Transfer:
        # The inner transfers wait for transfer 0, which trades tokens for heads.
        return replace(
            t,
            number=t.number + 1,
            sends=_members(t.sends, heads),
            receives=_members(t.receives, heads),
            to=rank(t.to),
            source=rank(t.source),
            peers=tuple(p * heads + place for p in t.peers),
            after=0 if t.after is None else t.after + 1,
            part=part(t.part),
        )

    result = [
        ScheduleStep(
            _members(s.queries, heads),
            _members(s.keys, heads),
            part(s.part),
            s.stage,
            wait=tuple(n + 1 for n in s.wait),
            post=tuple(map(lift, s.post)),
            collect=tuple(n + 1 for n in s.collect),
            send=tuple(map(lift, s.send)),
        )
        for s in steps
    ]
    peers, own = _members((group,), heads), (group * heads + place,)
    trade = Transfer(0, "all_to_all", HEADS, HEADS, own, peers, peers=peers, part=(place, heads))
    result[0] = replace(result[0], post=(trade, *result[0].post), wait=(0, *result[0].wait))
    number = sum(len(s.transfers) for s in result)
    back = replace(trade, number=number, sends=peers, receives=own)
    return (*result, ScheduleStep((), (), post=(back,), wait=(number,)))


_EXCHANGES: dict[str, Callable[[ScheduleOptions], Schedule]] = {
    "all_gather": all_gather,
    "hierarchical_all_gather": hierarchical_all_gather,
    "group_cast": group_cast,
    "hierarchical_group_cast": hierarchical_group_cast,
    "ring": ring,
    "hierarchical_ring": hierarchical_ring,
}
