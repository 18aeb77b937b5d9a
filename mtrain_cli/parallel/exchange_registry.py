"""Make the exchange of a run by name."""

from __future__ import annotations

from mtrain_cli.parallel.exchange import Exchange
from mtrain_cli.parallel.exchange_selection import ExchangeChoice
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.parallel.schedule import KV, ScheduleOptions
from mtrain_cli.parallel.schedule_registry import make_schedule


def make_exchange(
    name: str,
    layout: Layout,
    group: ContextGroup,
    *,
    chunks: int = 1,
    prefetch: int = 1,
    circulates: str = KV,
    stages: int = 1,
    shared_columns: bool = True,
) -> Exchange:
    """Make the exchange of a run. `exchange_selection.choose_exchange` resolves ``auto`` first."""
    options = ScheduleOptions(
        group.size, group.per_node, chunks, prefetch, circulates, group.heads, stages
    )
    return Exchange(layout, group, make_schedule(name, options), shared_columns=shared_columns)


def make_chosen_exchange(choice: ExchangeChoice, layout: Layout, group: ContextGroup) -> Exchange:
    return make_exchange(
        choice.name,
        layout,
        group,
        chunks=choice.chunks,
        prefetch=choice.prefetch,
        circulates=choice.circulates,
        stages=choice.stages,
        shared_columns=choice.shared_columns,
    )
