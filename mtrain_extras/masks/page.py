"""What `mtrain mask show` shows: what a mask allows, what it means for each layout, and a page."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

import numpy as np

from mtrain_cli import __version__
from mtrain_cli.attention.mask import IntArray, SequenceMask
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.config.parallel_checks import number_of_chunks
from mtrain_cli.config.schema import LAYOUTS, MOST_CHUNKS, Config, ConfigError
from mtrain_cli.config.sizes import format_size
from mtrain_cli.data.dataset import Sample
from mtrain_cli.data.labels import IGNORED
from mtrain_cli.parallel.cast_rows import row_block, too_many_to_count
from mtrain_cli.parallel.dispatch import RowPrices
from mtrain_cli.parallel.layout import Balanced, Layout
from mtrain_cli.parallel.traffic import Traffic, count_traffic
from mtrain_cli.reporting import elements, plots
from mtrain_cli.reporting.table import Column, Section, Table, count, fixed, percent
from mtrain_cli.training.batch import unseen_labels
from mtrain_cli.training.layout_choice import choose_layout, make_balancer

# Colors of ranks, which show on light and dark pages. Rank 8 has the color of rank 0, and so on.
_RANKS = (
    *("#3b7cc4", "#d97706", "#4d9f6f", "#c8352b"),
    *("#9a6fc0", "#a0794f", "#d26fa5", "#7d8791"),
)
_MASK = "91,125,214"
_PARTS = (8, 4)  # into which ticks divide an axis
_STRIP = 16  # columns of the strip that shows the ranks of a cell's rows
_CELLS = 128  # rows and columns of the picture


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
    for rule, number in kinds:
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
            title = f"{title}, {number} of {layers} layers"
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


# --- page -----


def write(path: Path, title: str, masks: Sequence[MaskView], cluster: str = "auto") -> None:
    """Write the page of the masks of all kinds of layers.

    cluster: `topology.cluster` of the prices.
    """
    picture = mask_figure(masks)
    tables = [
        layouts_table(view, "Layouts" + f": {view.title}" * (len(masks) > 1)) for view in masks
    ]
    body = [
        f"<header><h1>{escape(title)}</h1></header>",
        *(elements.report_section(Section(table.title, [table])) for table in tables),
        elements.note(layouts_note(masks[0].shares[0].prices, cluster)),
        elements.figure(picture),
        f"<footer>written by mtrain {escape(__version__)}</footer>",
    ]
    elements.write(path, title, body, [picture])


def layouts_note(prices: RowPrices, cluster: str) -> str:
    """Explain the columns of `layouts_table`.

    cluster: `topology.cluster`, which gives the prices; auto means H200s.
    """
    gpus = "H200s" if cluster == "auto" else cluster
    return (
        "Most: the largest number of a rank. Slices: rectangles, full, causal or banded, that "
        "cover the pairs of a rank. Rows are those that a group cast moves in the forward pass of "
        "a layer. Cost: the pairs of a rank plus the cost of the rows that it receives, divided "
        f"by the mean number of pairs. On {gpus}, a row of this model costs as much as "
        f"{prices.inner:,} pairs, and {prices.outer:,} if it comes from another node. Without "
        "overlap, attention takes as long as the largest cost, and 1 is the best."
    )


def mask_figure(masks: Sequence[MaskView]) -> plots.Figure:
    """Draw each mask, with the ranks that hold each cell's rows in a strip beside the queries."""
    drawn = []
    # Even a cell with few allowed pairs must show.
    scale = [[0, f"rgba({_MASK},0)"], [1e-6, f"rgba({_MASK},0.3)"], [1, f"rgba({_MASK},1)"]]
    look = {"colorscale": scale, "reversescale": False, "zmax": 1, "showscale": False}
    hover = "query %{y:,.0f}, key %{x:,.0f}: %{z:.0%} of the pairs"
    for view in masks:
        edges = cell_edges(view.mask.length)
        middles = plots.numbers((edges[:-1] + edges[1:]) / 2, 8)
        cells = plots.numbers(density(view.mask), 2)
        picture = plots.heat(cells, middles, middles, "", hover, **look)
        drawn += [
            _view(view, share, [picture, *_strip(share, edges, middles)]) for share in view.shares
        ]
    note = (
        "The strip on the left has the colors of the ranks that hold the rows of each cell. The "
        "darker a cell, the larger the share of its pairs that the mask allows."
    )
    return plots.Figure("mask", "Who holds which rows", ("layers", "layout"), drawn, note)


def _view(view: MaskView, share: LayoutShare, data: list[plots.Trace]) -> plots.FigureView:
    tokens = view.mask.length
    parts = next((n for n in _PARTS if tokens % (1024 * n) == 0), _PARTS[0])
    ticks = [tokens * i // parts for i in range(parts + 1)]
    in_k = tokens % (1024 * parts) == 0  # else some labels would have the form 1k, others 1,536
    marks = {
        "tickvals": ticks,
        "ticktext": [format_size(n) if in_k else f"{n:,}" for n in ticks],
        "showgrid": False,
    }
    x = plots.axis("keys", domain=[0.09, 1], range=[0, tokens], **marks)
    # The strip stands between the axis of the queries and the mask.
    y = plots.axis("queries", anchor="free", position=0, range=[tokens, 0], **marks)
    strip = {"domain": [0.005, 0.07], "showticklabels": False, "ticks": "", "showgrid": False}
    shape = plots.layout(640, x, y, xaxis2=strip, hovermode="closest")
    return plots.FigureView((view.title, share.layout.name), data, shape)


def _strip(share: LayoutShare, edges: np.ndarray, middles: list[float]) -> list[plots.Trace]:
    held = holders(share.layout)
    ranks = []
    for start, stop in itertools.pairwise(edges):
        owners = np.sort(held[start:stop])
        at = ((np.arange(_STRIP) + 0.5) / _STRIP * len(owners)).astype(int)
        ranks.append(owners[at].tolist())
    colours = len(_RANKS)
    steps = [[edge / colours, colour] for i, colour in enumerate(_RANKS) for edge in (i, i + 1)]
    strip = plots.heat(
        [[rank % colours for rank in row] for row in ranks],
        range(_STRIP),
        middles,
        "",
        "rows around %{y:,.0f}: rank %{customdata}",
        customdata=ranks,
        colorscale=steps,
        reversescale=False,
        zmin=-0.5,
        zmax=colours - 0.5,
        showscale=False,
        xaxis="x2",
    )
    workers = share.layout.workers
    legend = [
        {
            "type": "scatter",
            "mode": "markers",
            "x": [None],
            "y": [None],
            "name": f"rank {i}" + (f", {i + colours}, ..." if i + colours < workers else ""),
            "marker": {"color": colour, "size": 10, "symbol": "square"},
        }
        for i, colour in enumerate(_RANKS[:workers])
    ]
    return [strip, *legend]


def layouts_table(view: MaskView, title: str) -> Table:
    """Return a table with a row per layout."""
    columns = [
        Column("layout", lambda share: share.layout.name, words=True),
        Column("pairs, most", lambda share: share.traffic.pairs.max(), count),
        Column("most/mean", lambda share: share.traffic.imbalance, fixed(2)),
        Column("slices, most", lambda share: max(share.slices), count),
        Column("rows, most", lambda share: share.traffic.received.max(), count),
        Column("rows moved", lambda share: share.remote, percent),
        Column("cost", lambda share: max(share.costs), fixed(2)),
    ]
    return Table(title, columns, view.shares)
