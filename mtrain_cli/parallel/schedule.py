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

Transfer 0, posted in step 0, brings shard 2 from rank 2. `ring.ring_forward` emits:

    operation       reads       writes   what the executor does
    Begin           -           -        tags the spans and messages that follow with step 1
    PostHop         kv 2        kv 1     starts: send shard 2 to rank 1, receive shard 1 from rank 2
    Wait            -           -        waits for transfer 0, which brings shard 2
    ComputeForward  q, kv 2     part 1   calls the kernel: out and lse of this rank's queries
    MergeForward    part 1      total    merges these into out and lse so far; frees kv 0 and part 1

Transfer 1 forwards the shard that transfer 0 brings, so transfer 1 runs after transfer 0. Step 2
waits for transfer 1 and computes shard 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from importlib import import_module
from typing import TypeVar

from mtrain_cli.config.exchanges import EXCHANGE_TRAITS, ExchangeTraits

T = TypeVar("T")

# Channels: all ranks; the ranks of one node; counterparts (the ranks with the same local number).
CONTEXT, INNER, OUTER = "context", "inner", "outer"
# Payloads. "heads" is also the channel of its own all-to-all.
KV, DKV, QUERIES, DQ, HEADS = "kv", "dkv", "queries", "dq", "heads"
GRADIENTS = (DKV, DQ)
# Link and payload of the messages of tensor parallelism, which are outside schedules.
TENSOR, HIDDEN = "tensor", "hidden"
STAGE = "stage"  # link of the messages between the stages of a pipeline, also outside schedules
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
    to, source: ranks, for p2p.
    peers: ranks in order, for collectives.
    after: number of the transfer that delivers the payload of this transfer and so must complete
        first; None if this rank already holds the payload.
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
    stage: in a staged group cast, 0 for this rank's own keys, and 1 or 2 for received keys; else
        None.
    collect: numbers of the gradient transfers that must complete after the computation. A completed
        hop delivers a gradient, to which the rank adds its own part. A completed reduce-scatter
        frees its send buffer before the next reduce-scatter allocates a buffer.
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

    traits: properties of the exchange. Callers read these properties and never compare the name.
    keeps: for each rank, the numbers of the key shards that it holds from forward to backward.
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

    chunks: number of equal parts of the heads. An all-gather moves one part while the previous part
        is computed.
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


def numbers_of(transfers: Sequence[Transfer]) -> tuple[int, ...]:
    return tuple(t.number for t in transfers)


@lru_cache(maxsize=16)  # planning asks for few schedules, each many times
def make_schedule(exchange: str, options: ScheduleOptions) -> Schedule:
    """Make the schedule of an exchange."""
    if exchange not in EXCHANGE_TRAITS:
        names = ", ".join(EXCHANGE_TRAITS)
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
    module, _, function = EXCHANGE_TRAITS[exchange].schedule.partition(":")
    make: Callable[[ScheduleOptions], Schedule] = getattr(import_module(module), function)
    if heads == 1:
        return make(options)
    groups = workers // heads
    if options.per_node % heads and heads % options.per_node:
        raise ValueError(
            f"{heads} ranks that share heads do not fit nodes of {options.per_node} ranks: one "
            "number must divide the other."
        )
    # Neighboring ranks share heads. Keys move between these groups; a node holds per_node of them.
    per_node = min(groups, max(1, options.per_node // heads))
    return _share_heads(make(replace(options, workers=groups, per_node=per_node, heads=1)), options)


def _share_heads(inner: Schedule, options: ScheduleOptions) -> Schedule:
    """Wrap Ulysses around another exchange."""
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
    """Add the two all-to-alls around the steps of an inner exchange."""

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
