"""What a mask allows, and what it means for each layout: the counts of `mtrain mask show`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mtrain_cli.attention.mask import IntArray, SequenceMask
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.config.schema import LAYOUTS, ConfigError
from mtrain_cli.parallel.dispatch import Balancer, RowPrices
from mtrain_cli.parallel.layout import Balanced, Layout, make_layout
from mtrain_cli.parallel.traffic import ROW_BLOCK, Traffic, count_traffic

_CELLS = 128  # rows and columns of a picture
_MOST_CHUNKS = 4096  # that a search balances within seconds
_MOST_COUNTED = 1 << 25  # blocks of rows of all workers


@dataclass(frozen=True)
class LayoutShare:
    """What the workers of a layout compute under a mask, and which rows travel.

    layout: which worker holds which tokens.
    slices: number of rectangles, full, causal or banded, that cover the pairs of each worker.
    traffic: pairs of each worker, and the rows that a group cast moves, by layer.
    prices: number of pairs that take as long as one received row.
    tokens: number of tokens, without padding.
    """

    layout: Layout
    slices: tuple[int, ...]
    traffic: Traffic
    prices: RowPrices
    tokens: int

    @property
    def imbalance(self) -> float:
        """Pairs of the worker with the most pairs, divided by the mean; 1.0 without pairs."""
        return self.traffic.imbalance if self.traffic.pairs.any() else 1.0

    @property
    def remote_share(self) -> float:
        """Share of the rows of other workers that a worker receives, as a mean over workers."""
        return self.traffic.share_moved(self.tokens)

    @property
    def costs(self) -> list[float]:
        """Pairs and priced rows of each worker, divided by the mean number of pairs.

        If nothing overlaps, an attention takes as long as the largest cost. The best cost is 1.
        """
        mean = max(1.0, float(self.traffic.pairs.mean()))
        return (self.traffic.cost(*self.prices) / mean).tolist()


@dataclass(frozen=True)
class MaskView:
    """The mask of one kind of layer.

    title: the mask, and its layers if the others have another mask.
    mask: the mask of a sequence that is one document, without padding.
    shares: one per layout.
    """

    title: str
    mask: SequenceMask
    shares: tuple[LayoutShare, ...]


def views(
    kinds: Sequence[tuple[MaskRule, int]],
    seq: int,
    workers: int,
    *,
    per_node: int | None = None,
    block_size: int = ROW_BLOCK,
    prices: RowPrices | None = None,
) -> list[MaskView]:
    """Count what each mask allows, and what it means for each layout.

    All kinds of layers share one balanced layout, because a batch has one. With too many chunks to
    balance within seconds, it is left out.

    Args:
        kinds: each mask with the number of its layers, as from `MaskRule.by_layers`.
        per_node: number of workers that share a node; None if all do.
        block_size: number of tokens per stripe of the striped layout.
        prices: prices of received rows; None for the defaults of `RowPrices`.

    Raises:
        ConfigError: the workers do not fill nodes, or there are too many to count rows.
    """
    if per_node is not None and workers % min(workers, per_node):
        raise ConfigError(
            f"topology.gpus_per_node={per_node}: must divide the number of workers, {workers}"
        )
    names = [name for name in LAYOUTS if name != Balanced.name]
    layouts = [make_layout(name, workers, seq, block_size) for name in names]
    counts = tuple(count for _, count in kinds)
    balancer = Balancer(workers, seq, per_node=per_node, prices=prices, layers=counts)
    if balancer.padded_seq // balancer.chunk <= _MOST_CHUNKS:
        masks = [[rule.undivided(seq, seq)] for rule, _ in kinds]
        layouts.append(balancer.layout(masks))
    found = []
    for rule, count in kinds:
        title = rule.mask.describe()
        if len(kinds) > 1:
            title = f"{title}, {count} of {sum(counts)} layers"
        shares = (
            share_of(rule.undivided(seq, layout.padded_seq), layout, per_node, prices)
            for layout in layouts
        )
        found.append(MaskView(title, rule.undivided(seq, seq), tuple(shares)))
    return found


def share_of(
    mask: SequenceMask,
    layout: Layout,
    per_node: int | None = None,
    prices: RowPrices | None = None,
) -> LayoutShare:
    """Count what each worker computes and receives.

    mask: padded like the layout.
    per_node, prices: as in `views`.

    Raises:
        ConfigError: there are too many workers and rows to count.
    """
    everywhere = np.arange(mask.padded)
    shards = [layout.positions(rank) for rank in range(layout.workers)]
    # Rows travel in blocks, which no two workers share.
    edges = np.flatnonzero(np.diff(holders(layout))) + 1
    block = math.gcd(ROW_BLOCK, layout.padded_seq, *edges.tolist())
    if layout.workers * layout.padded_seq // block > _MOST_COUNTED:
        raise ConfigError(
            f"seq={mask.length}: with {layout.workers} workers, there are too many blocks of "
            f"{block} rows to count; give fewer workers or a shorter sequence, a multiple of "
            f"{ROW_BLOCK * layout.workers}"
        )
    return LayoutShare(
        layout,
        tuple(len(mask.spans(own, everywhere).slices) for own in shards),
        count_traffic([[mask]], shards, per_node=per_node, block=block),
        prices or RowPrices(),
        mask.length,
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
