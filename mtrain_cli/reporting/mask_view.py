"""What a mask allows, and what it means for each layout: the counts of `mtrain mask show`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from mtrain_cli.attention.mask import IntArray, SequenceMask
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.config.parallel_checks import number_of_chunks
from mtrain_cli.config.schema import LAYOUTS, MOST_CHUNKS, Config, ConfigError
from mtrain_cli.data.dataset import Sample
from mtrain_cli.data.labels import IGNORED
from mtrain_cli.parallel.cast_rows import row_block, too_many_to_count
from mtrain_cli.parallel.dispatch import RowPrices
from mtrain_cli.parallel.layout import Balanced, Layout
from mtrain_cli.parallel.traffic import Traffic, count_traffic
from mtrain_cli.training.batch import unseen_labels
from mtrain_cli.training.layout_choice import choose_layout, make_balancer

_CELLS = 128  # rows and columns of a picture


@dataclass(frozen=True)
class LayoutShare:
    """What the workers of a layout compute under a mask, and which rows a group cast moves.

    slices: number of rectangles, full, causal or banded, that cover the pairs of each worker.
    traffic: pairs and rows of each worker. A row is the key and the value of one token.
    prices: number of pairs that take as long as one received row.
    """

    layout: Layout
    slices: tuple[int, ...]
    traffic: Traffic
    prices: RowPrices

    @property
    def remote(self) -> float:
        """Share of the rows of other workers that a worker receives, as a mean over workers."""
        return self.traffic.share_moved(self.layout.padded_seq)

    @property
    def costs(self) -> list[float]:
        """Pairs and priced rows of each worker, divided by the mean number of pairs.

        Without overlap, attention takes as long as the largest cost. The best cost is 1.
        """
        mean = max(1.0, float(self.traffic.pairs.mean()))
        return (self.traffic.cost(*self.prices) / mean).tolist()


@dataclass(frozen=True)
class MaskView:
    """The mask of one kind of layer, the labels that count, and a share per layout."""

    title: str
    mask: SequenceMask
    labels: int
    shares: tuple[LayoutShare, ...]


def views(
    config: Config, workers: int, per_node: int | None = None, sample: Sample | None = None
) -> list[MaskView]:
    """Count what each mask allows, and what it means for each layout.

    All kinds of layers share one balanced layout, because a batch has one. With too many chunks to
    balance within seconds, it is left out.

    Args:
        per_node: number of workers that share a node; None if all do.
        sample: a sequence of the data with its own mask; None for a sequence that is one document.

    Raises:
        ConfigError: the workers do not fill nodes, there are too many to count rows, or too few or
            too many chunks for them.
    """
    per_node = min(per_node or workers, workers)
    if workers % per_node:
        raise ConfigError(
            f"topology.gpus_per_node={per_node}: must divide the number of workers, {workers}"
        )
    if wrong := list(number_of_chunks(config, workers)):
        raise ConfigError(*wrong)
    # A group cast inside groups that share heads would move rows between groups.
    config = replace(config, topology=replace(config.topology, ulysses="auto", exchange="auto"))
    balancer = make_balancer(config, workers, per_node)
    names = list(LAYOUTS)
    if balancer.padded_seq // balancer.chunk > MOST_CHUNKS:
        names.remove(Balanced.name)
    named = [config.changed(topology={"layout": name}) for name in names]
    layouts = [choose_layout(one, workers, per_node).layout for one in named]
    found, layers = [], config.model.num_layers
    kinds = MaskRule.of(config).by_layers(layers)
    for rule, count in kinds:
        mask, labels = rule.undivided(config.seq, config.seq), np.zeros(config.seq, np.int32)
        title = rule.mask.describe()
        if sample is not None:
            mask, labels = rule(None, config.seq, config.seq, sample.slices), sample.labels
            title = "first sequence of the data"
            layouts = [
                balancer.layout([[mask]]) if layout.name == Balanced.name else layout
                for layout in layouts
            ]
        if len(kinds) > 1:
            title = f"{title}, {count} of {layers} layers"
        counted = int((unseen_labels(labels, mask) != IGNORED).sum())
        shares = (
            share_of(
                mask.repadded(layout.padded_seq),
                layout,
                config.sparsity.block,
                per_node=per_node,
                prices=balancer.prices,
            )
            for layout in layouts
        )
        found.append(MaskView(title, mask, counted, tuple(shares)))
    return found


def share_of(
    mask: SequenceMask,
    layout: Layout,
    block: int | None = None,
    *,
    per_node: int | None = None,
    prices: RowPrices | None = None,
) -> LayoutShare:
    """Count what each worker computes and receives.

    mask: padded like the layout.
    block: number of tokens per block of a dynamic index; None for dense attention.
    per_node: number of workers that share a node; None if all do.
    prices: prices of received rows; None for the defaults of `RowPrices`.

    Raises:
        ConfigError: there are too many workers and rows to count.
    """
    if too_many_to_count(layout):
        raise ConfigError(
            f"seq={mask.length}: with {layout.workers} workers, there are too many rows to count; "
            "give fewer workers or a shorter sequence"
        )
    shards = [layout.positions(rank) for rank in range(layout.workers)]
    everywhere = np.arange(mask.padded)
    together = row_block(layout, block)
    return LayoutShare(
        layout,
        tuple(len(mask.spans(own, everywhere).slices) for own in shards),
        count_traffic([[mask]], shards, per_node=per_node, block=together),
        prices or RowPrices(),
    )


def holders(layout: Layout) -> IntArray:
    """Return the worker that holds each position, int64 [padded]."""
    found = np.empty(layout.padded_seq, np.int64)
    for rank in range(layout.workers):
        found[layout.positions(rank)] = rank
    return found


def cell_edges(length: int, cells: int = _CELLS) -> IntArray:
    """Return where each cell of a picture starts, and where the last one ends, int64 [cells + 1].

    A sequence with fewer tokens than ``cells`` has one cell per token.
    """
    return np.unique(np.linspace(0, length, cells + 1).astype(np.int64))


def density(mask: SequenceMask, cells: int = _CELLS) -> np.ndarray:
    """Return the share of allowed pairs in each cell, float [cells, cells] or smaller.

    Rows are queries, columns are keys.
    """
    edges = cell_edges(mask.length, cells)
    widths = np.diff(edges)
    low, high = (bound[..., None] for bound in (mask.low, mask.high))
    table = np.zeros((len(widths), len(widths)))
    for row, (start, stop) in enumerate(itertools.pairwise(edges)):
        rows = slice(start, stop)
        keys = np.minimum(high[:, rows], edges[1:]) - np.maximum(low[:, rows], edges[:-1])
        table[row] = keys.clip(0).sum((0, 1)) / (widths[row] * widths)
    return table
