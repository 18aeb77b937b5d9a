"""Count the work of this worker in a recorded iteration, from masks and indices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mtrain_cli.attention.index import Index
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.mask_rule import FullLayers
from mtrain_cli.parallel.context_attention import ContextAttention
from mtrain_cli.parallel.exchange import Exchange
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.profiling.record_collector import Work
from mtrain_cli.simulation.work_counts import WorkCounter
from mtrain_cli.training.batch import MixedAttention


class Estimated(NamedTuple):
    """What attention computed in a micro-batch.

    layout: which rank holds which tokens.
    indices: the indices by layer; None for dense attention.
    full: the layers that see all earlier tokens instead of a window, or that have no index in a
        sparse model; None if all layers are alike.
    """

    layout: Layout
    masks: Sequence[SequenceMask]
    indices: Mapping[int, Index] | None
    full: FullLayers | None = None


def estimated(attend: ContextAttention | MixedAttention) -> Estimated:
    """Return what an attention has computed for its batch."""
    if isinstance(attend, MixedAttention):
        full = FullLayers(attend.full.plan.masks, attend.full_layers, attend.layers)
        return estimated(attend.window)._replace(full=full)
    indices = None if attend.index is None else attend.index.estimated
    return Estimated(attend.plan.placement.layout, attend.plan.masks, indices)


def own_work(
    exchange: Exchange, heads: int, layers: Sequence[int], micro_batches: Sequence[Estimated]
) -> Work:
    """Return the work of this worker by (micro-batch, layer).

    Args:
        micro_batches: what each micro-batch computed. A bitmap may hold only this worker's query
            blocks.
    """
    rank = exchange.group.rank
    work: Work = {}
    for micro, (layout, masks, indices, full) in enumerate(micro_batches):
        others = [layer for layer in layers if full is None or layer not in full.layers]
        kinds = [(masks, others, indices)]
        if full is not None:
            kinds.append((full.masks, [layer for layer in layers if layer in full.layers], None))
        block = next(iter(indices.values())).block if indices else None
        for of_kind, numbers, of_layers in kinds:
            counter = WorkCounter.make(
                exchange.schedule,
                layout,
                of_kind,
                heads,
                block,
                shared_columns=exchange.gathers_columns,
            )
            if of_layers is None:
                dense = counter.count(None, rank)
                work |= {(micro, layer): dense for layer in numbers}
            else:
                work |= {(micro, n): counter.count(index, rank) for n, index in of_layers.items()}
    return work
