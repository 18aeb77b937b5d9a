"""Make the exchange of a run by name."""

from __future__ import annotations

from dataclasses import replace

from mtrain_cli.parallel.all_gather_exchange import AllGatherExchange
from mtrain_cli.parallel.exchange import Exchange
from mtrain_cli.parallel.layout import Joined, Layout
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.parallel.ring_exchange import RingExchange
from mtrain_cli.parallel.schedule import KV, Schedule, ScheduleOptions, make_schedule
from mtrain_cli.parallel.ulysses_exchange import UlyssesExchange


def make_exchange(
    name: str,
    layout: Layout,
    group: ContextGroup,
    *,
    chunks: int = 1,
    prefetch: int = 1,
    circulates: str = KV,
    shared_columns: bool = True,
) -> Exchange:
    """Make the exchange of a run. `exchange_selection.choose_exchange` resolves ``auto`` first.

    chunks, prefetch, circulates: see `schedule.ScheduleOptions`.
    shared_columns: in rings, gather the single columns of an index once.
    """
    options = ScheduleOptions(group.size, group.per_node, chunks, prefetch, circulates, group.heads)
    schedule = make_schedule(name, options)
    if group.heads == 1:
        return _plain(layout, group, schedule, (0, 1), shared_columns)
    assert group.exchange is not None
    among = replace(options, workers=group.exchange.size, per_node=group.exchange.per_node, heads=1)
    part = (group.rank % group.heads, group.heads)
    inner = _plain(
        Joined.of(layout, group.heads),
        group.exchange,
        make_schedule(name, among),
        part,
        shared_columns,
    )
    return UlyssesExchange(layout, group, schedule, inner)


def _plain(
    layout: Layout,
    group: ContextGroup,
    schedule: Schedule,
    part: tuple[int, int],
    shared_columns: bool,
) -> Exchange:
    if schedule.exchange in ("ring", "hierarchical_ring"):
        return RingExchange(layout, group, schedule, part, shared_columns=shared_columns)
    return AllGatherExchange(layout, group, schedule, part)
