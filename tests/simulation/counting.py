"""Count the work under a single index."""

from __future__ import annotations

from collections.abc import Sequence

from mtrain_cli.attention.index import Index
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.schedule import Schedule
from mtrain_cli.simulation.work_counts import StepWork, WorkCounter


def count_work(
    schedule: Schedule,
    layout: Layout,
    masks: Sequence[SequenceMask],
    index: Index | None,
    *,
    heads: int,
    shared_columns: bool = True,
    rank: int | None = None,
) -> dict[str, StepWork]:
    """Return the work by direction; see `WorkCounter.count`."""
    block = None if index is None else index.block
    return WorkCounter.make(
        schedule, layout, masks, heads, block, shared_columns=shared_columns
    ).count(index, rank)
