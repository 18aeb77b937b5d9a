"""The page of `mtrain mask show --plot`: the mask, who holds and who sends which rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from mtrain_cli import __version__
from mtrain_cli.config.sizes import format_size
from mtrain_cli.parallel.dispatch import RowPrices
from mtrain_cli.reporting import elements, plots
from mtrain_cli.reporting.mask_view import LayoutShare, MaskView, cell_edges, density, holders
from mtrain_cli.reporting.table import Column, Section, Table, count, fixed, percent

# Colors of ranks, which show on light and dark pages. Rank 8 has the color of rank 0, and so on.
_RANKS = (
    *("#3b7cc4", "#d97706", "#4d9f6f", "#c8352b"),
    *("#9a6fc0", "#a0794f", "#d26fa5", "#7d8791"),
)
_MASK = "91,125,214"
_PARTS = (8, 4)  # into which ticks divide an axis
_STRIP = 16  # columns of the strip that shows the ranks of a cell's rows
_NUMBERED = 16  # most ranks of a heat map with a number in each cell
_SHOWN = 64  # most ranks in a table or figure


def write(path: Path, title: str, masks: Sequence[MaskView], cluster: str = "auto") -> None:
    """Write the page of the masks of all kinds of layers.

    cluster: `topology.cluster` of the prices.
    """
    picture, travels = mask_figure(masks), travel_figure(masks)
    pair = "".join(f'<div class="panel">{elements.figure(one)}</div>' for one in (picture, travels))
    body = [
        f"<header><h1>{escape(title)}</h1></header>",
        *(elements.report_section(_layouts(view, len(masks) > 1)) for view in masks),
        elements.note(layouts_note(masks[0].shares[0].prices, cluster)),
        f'<div class="panels">{pair}</div>',
        *(_ranks(view, len(masks) > 1) for view in masks),
        f"<footer>written by mtrain {escape(__version__)}</footer>",
    ]
    elements.write(path, title, body, (picture, travels))


def _layouts(view: MaskView, named: bool) -> Section:
    title = f"Layouts: {view.title}" if named else "Layouts"
    return Section(title, [layouts_table(view, title)])


def layouts_note(prices: RowPrices, cluster: str) -> str:
    """Explain the columns of `layouts_table`.

    cluster: `topology.cluster`, which gives the prices; auto means H200s.
    """
    gpus = "H200s" if cluster == "auto" else cluster
    return (
        "Most: the largest number of a rank. Slices: rectangles, full, causal or banded, that "
        "cover the pairs of a rank. Rows are those that a group cast moves in the forward pass of "
        "a layer. Cost: the pairs of a rank plus the price of the rows that it receives, divided "
        f"by the mean number of pairs. On {gpus}, a row of this model costs as much as "
        f"{prices.inner:,} pairs, and {prices.outer:,} if it comes from another node. Without "
        "overlap, attention takes as long as the largest cost, and 1 is the best."
    )


def mask_figure(masks: Sequence[MaskView]) -> plots.Figure:
    """Draw each mask, with the ranks that hold each cell's rows in a strip beside the queries."""
    drawn = []
    for view in masks:
        edges = cell_edges(view.mask.length)
        middles = plots.numbers((edges[:-1] + edges[1:]) / 2, 8)
        cells = plots.numbers(density(view.mask), 2)
        drawn += [
            _view(view, share, [_density(cells, middles), *_strip(share, edges, middles)])
            for share in view.shares
        ]
    note = (
        "The strip on the left has the colors of the ranks that hold the rows of each cell. The "
        "darker a cell, the larger the share of its pairs that the mask allows."
    )
    return plots.Figure(
        "mask", "Who holds which rows", ("layers", "layout"), drawn, note, False, True
    )


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


def _density(cells: list, middles: list[float]) -> plots.Trace:
    # Even a cell with few allowed pairs must show.
    scale = [[0, f"rgba({_MASK},0)"], [1e-6, f"rgba({_MASK},0.3)"], [1, f"rgba({_MASK},1)"]]
    hover = "query %{y:,.0f}, key %{x:,.0f}: %{z:.0%} of the pairs"
    return plots.heat(
        cells,
        middles,
        middles,
        "",
        hover,
        colorscale=scale,
        reversescale=False,
        zmax=1,
        showscale=False,
    )


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


def travel_figure(masks: Sequence[MaskView]) -> plots.Figure:
    """Draw the rows that a group cast moves, by receiving and sending rank."""
    most = max((int(s.sent.max()) for view in masks for s in view.shares), default=0)
    drawn = []
    for view in masks:
        for share in view.shares:
            workers = share.layout.workers
            shown = plots.evenly(range(workers), _SHOWN)
            rows = share.sent.T[np.ix_(shown, shown)]
            few = len(shown) <= _NUMBERED
            numbered = {"text": [[_short(n) for n in row] for row in rows.tolist()]}
            trace = plots.heat(
                rows.tolist(),
                [str(rank) for rank in shown],
                [str(rank) for rank in shown],
                "rows",
                "rank %{y} receives %{z:,} rows from rank %{x}",
                zmax=max(1, most),
                **({**numbered, "texttemplate": "%{text}"} if few else {}),
            )
            x = plots.axis("sending rank", type="category")
            y = plots.downward("receiving rank", type="category")
            shape = plots.layout(640, x, y)
            drawn.append(plots.FigureView((view.title, share.layout.name), [trace], shape))
    note = (
        "Rows of keys and values that a group cast moves. If the ranks fill several nodes, a row "
        "enters a node once, and a rank of the node passes it on (hierarchical_group_cast)."
    )
    return plots.Figure("travels", "What travels", ("layers", "layout"), drawn, note, False, True)


def _short(rows: int) -> str:
    """Return a number of rows in at most five letters; "" for 0. k is 1,024."""
    if rows < 10_000:
        return str(rows) if rows else ""
    return f"{rows / 1024:.3g}k" if rows < 1000 * 1024 else f"{rows / 1024**2:.3g}m"


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


def _ranks(view: MaskView, named: bool) -> str:
    columns = [Column("rank", lambda rank: rank, words=True)]
    for share in view.shares:
        name, traffic, outer = share.layout.name, share.traffic, share.traffic.outer.received
        far = [Column("rows from other nodes", outer.__getitem__, count, group=name)]
        columns += [
            Column("pairs", traffic.pairs.__getitem__, count, group=name),
            Column("rows received", traffic.received.__getitem__, count, group=name),
            *(far if outer.any() else []),
            Column("cost", share.costs.__getitem__, fixed(3), group=name),
        ]
    title = f"Ranks: {view.title}" if named else "Ranks"
    shown = plots.evenly(range(view.shares[0].layout.workers), _SHOWN)
    return elements.report_section(Section(title, [Table(title, columns, shown)]))
