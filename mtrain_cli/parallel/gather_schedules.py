"""Schedules of exchanges that gather keys: all-gathers and group casts, in stages or not."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import count

from mtrain_cli.config.exchanges import EXCHANGE_TRAITS
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


def all_gather(options: ScheduleOptions) -> Schedule:
    """Gather all KV on every rank, with one collective per part of the heads."""
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
                        collect=numbers_of(before) if turn == 0 else (),
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
) -> tuple[Transfer, ...]:
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

    def near() -> tuple[Transfer, ...]:
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
