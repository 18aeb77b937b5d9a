"""Schedules: the steps of an exchange for every rank of a context group, as plain data.

Shard s contains the queries, keys and values of rank s of the context group. Ranks are numbered
node by node: rank = node * per_node + local. A step is one kernel call with the transfers around
it. A rank runs its parts in the order post -> wait -> compute -> collect -> send. If a transfer is
posted before its shard is there, ``after`` names the transfer that brings it. For example, step 1
of rank 0 in a ring of 3 ranks sends on shard 2, which transfer 0 brought from rank 2, receives
shard 1 for step 2, and computes shard 2:

    ScheduleStep(queries=(0,), keys=(2,), wait=(0,), post=(Transfer(1, "p2p", sends=(2,),
                 receives=(1,), to=1, source=2, after=0, ...),))
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
        post its transfers in the order of their numbers. Each channel has one communicator for data
        and one for gradients.
    kind: ``p2p`` (send to rank ``to`` and receive the same payload from ``source``) or a collective
        of ``peers``. Group casts and reduces move the rows that `cast_rows.CastRows` names.
    after: number of the transfer that delivers the payload and so must complete first; None if this
        rank already holds the payload.
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
        """Number of bytes that a rank sends, and receives, divided by the tensor that it posts.

        It is a lower bound for a collective of n ranks. A gather sends the tensor to n - 1 peers. A
        reduce-scatter and an all-to-all send one n-th to each peer, an all-reduce does so twice.
        The tensor of a group cast has only rows for other ranks.
        """
        if self.kind in ("p2p", GROUP_CAST, GROUP_REDUCE):
            return Fraction(1)
        n = len(self.peers)
        return {"all_gather": n, SUM: 2}.get(self.kind, 1) * Fraction(n - 1, n)


@dataclass(frozen=True)
class ScheduleStep:
    """One kernel call of a rank and the transfers around it: post, wait, compute, collect, send.

    queries, keys: numbers of the shards that the kernel call computes; both empty in a step that
        has only transfers.
    stage: in a staged group cast, 0 for this rank's own keys, and from 1 for received keys; else
        None.
    collect: numbers of the gradient transfers that must complete after the computation: hops whose
        gradients the rank adds up, or reduce-scatters whose send buffers the next one reuses.
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


@dataclass(frozen=True)
class Schedule:
    """The steps of an exchange. All ranks have the same number of steps, on the same channels.

    keeps: for each rank, the numbers of the key shards that it holds from forward to backward.
    rounds: whether messages of gradients are rounded to bfloat16. Sums stay in float32.
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
    stages: int = 0
    stages_backward: int = 0
    rounds: bool = False

    @property
    def casts(self) -> int:
        """Number of group casts of a part of the heads in forward."""
        casts = [t for step in self.forward[0] for t in step.post if t.kind == GROUP_CAST]
        return sum(t.part == casts[0].part for t in casts)

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
        named = {t.channel for step in steps for t in step.transfers}
        return tuple(channel for channel in (CONTEXT, INNER, OUTER) if channel in named)


@dataclass(frozen=True)
class ScheduleOptions:
    """The sizes and choices from which `make_schedule` makes a schedule.

    chunks: number of equal parts of the heads, of which one moves while another is computed.
    prefetch: number of steps by which a ring posts a hop before the step that needs it.
    heads: number of neighboring ranks that share heads (Ulysses).
    stages, stages_backward: number of kernel calls for received keys in forward and backward, after
        (in backward, before) the call for a rank's own keys: each for the keys of some ranks, in a
        hierarchy first for those of the node. 0: one call for all keys. A number that is too
        large means the largest.
    rounds: whether messages of gradients are rounded to bfloat16.
    """

    workers: int
    per_node: int
    chunks: int = 1
    prefetch: int = 1
    circulates: str = KV
    heads: int = 1
    stages: int = 0
    stages_backward: int = 0
    rounds: bool = False


def numbers_of(transfers: Sequence[Transfer]) -> tuple[int, ...]:
    return tuple(t.number for t in transfers)


@lru_cache(maxsize=16)  # planning asks for few schedules, each many times
def make_schedule(exchange: str, options: ScheduleOptions) -> Schedule:
    if exchange not in EXCHANGE_TRAITS:
        names = ", ".join(EXCHANGE_TRAITS)
        raise ValueError(f"topology.exchange={exchange}: no such exchange; allowed: auto, {names}")
    workers, per_node, heads = options.workers, options.per_node, options.heads
    if min(workers, per_node, options.chunks, options.prefetch, heads) < 1:
        raise ValueError(f"{options}: every number but those of stages must be at least 1.")
    if workers % heads:
        raise ValueError(
            f"{workers} workers: not a multiple of the {heads} ranks that share heads."
        )
    if workers > per_node and workers % per_node:
        raise ValueError(f"{workers} workers: not a multiple of {per_node} ranks per node.")
    module, _, function = EXCHANGE_TRAITS[exchange].schedule.partition(":")
    make: Callable[[ScheduleOptions], Schedule] = getattr(import_module(module), function)
    if heads == 1:
        return replace(make(options), rounds=options.rounds)
    groups = workers // heads
    if per_node % heads and heads % per_node:
        raise ValueError(
            f"{heads} ranks that share heads do not fit nodes of {per_node} ranks: one number must "
            "divide the other."
        )
    # Neighboring ranks share heads. Keys move between these groups.
    per_node = min(groups, max(1, per_node // heads))
    inner = make(replace(options, workers=groups, per_node=per_node, heads=1))
    return _share_heads(replace(inner, rounds=options.rounds), options)


def casts_by_stage(casts: Sequence[Transfer], *, backward: bool) -> list[Transfer]:
    """Return the casts of a part of the heads by the stage that computes their rows.

    casts: in the order in which a pass posts them. Backward begins with the last stage.
    """
    numbers, stages = numbers_of(casts), list[list[Transfer]]()
    for t in casts:
        if t.after in numbers:  # it forwards rows of the cast before it
            stages[-1].append(t)
        else:
            stages.append([t])
    return [t for of in (reversed(stages) if backward else stages) for t in of]


def with_stages(schedule: Schedule, forward: int, backward: int) -> Schedule:
    """Return the schedule of a group cast with other numbers of stages."""
    parts = len({step.part for step in schedule.forward[0] if step.queries})
    options = ScheduleOptions(
        schedule.workers, schedule.per_node, parts, heads=schedule.heads, rounds=schedule.rounds
    )
    options = replace(options, stages=forward, stages_backward=backward)
    return make_schedule(schedule.exchange, options)


def _share_heads(inner: Schedule, options: ScheduleOptions) -> Schedule:
    """Wrap Ulysses around another exchange."""
    heads = options.heads

    def spread(of_groups: Sequence[Steps]) -> Sequence[Steps]:
        def of_rank(rank: int) -> Steps:
            return _trade_around(of_groups[rank // heads], *divmod(rank, heads), heads)

        return PerRank(options.workers, of_rank)

    keeps = PerRank(options.workers, lambda r: _members(inner.keeps[r // heads], heads))
    forward, backward = spread(inner.forward), spread(inner.backward)
    whole = replace(inner, workers=options.workers, per_node=options.per_node, heads=heads)
    return replace(whole, forward=forward, backward=backward, keeps=keeps)


def _members(groups: tuple[int, ...], heads: int) -> tuple[int, ...]:
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
        replace(
            s,
            queries=_members(s.queries, heads),
            keys=_members(s.keys, heads),
            part=part(s.part),
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
