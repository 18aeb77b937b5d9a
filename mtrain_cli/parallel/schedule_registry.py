"""Make the schedule of an exchange by name, with Ulysses around it if ranks share heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import import_module

from mtrain_cli.config.exchanges import EXCHANGE_TRAITS
from mtrain_cli.parallel.schedule import (
    HEADS,
    PerRank,
    Schedule,
    ScheduleOptions,
    ScheduleStep,
    Steps,
    Transfer,
)


@lru_cache(maxsize=16)  # planning asks for few schedules, each many times
def make_schedule(exchange: str, options: ScheduleOptions) -> Schedule:
    """Make the schedule of an exchange.

    Raises:
        ValueError: the exchange does not exist, or the numbers do not fit together.
    """
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
