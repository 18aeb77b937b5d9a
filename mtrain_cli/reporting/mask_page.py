"""The files of `mtrain mask show --plot`: a page with the mask and its layouts, or an SVG file."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from mtrain_cli import __version__
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.config.sizes import format_size
from mtrain_cli.parallel.dispatch import RowPrices
from mtrain_cli.printable import same_width
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
_WIDTH, _MARGIN, _LINE = 208, 8, 15  # units of the drawing
_CELLS = 64  # rows and columns of the SVG file
_LETTERS = 30  # of a title that fit into a line
_STYLE = """
svg { font-family: system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif }
text { fill: #1f2328; font-size: 12px } .card { fill: #ffffff; stroke: #d1d9e0 }
.back { fill: #eef1f4 } .full { fill: #2f6fc4 } .partial { fill: #9cbce4 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .card { fill: #0d1117; stroke: #3d444d }
  .back { fill: #21262d } .full { fill: #5b9be0 } .partial { fill: #35547a }
}
"""
MEANING = "Queries from top to bottom, keys from left to right. Dark: all pairs. Light: some pairs."


def write(path: Path, title: str, masks: Sequence[MaskView], cluster: str = "auto") -> None:
    """Write the page of the masks of all kinds of layers.

    cluster: `topology.cluster` of the prices.
    """
    picture = mask_figure(masks)
    named = [f": {view.title}" * (len(masks) > 1) for view in masks]
    tables = [
        layouts_table(view, f"Layouts{name}") for view, name in zip(masks, named, strict=True)
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


def _density(cells: list, middles: list[float]) -> plots.Trace:
    # Even a cell with few allowed pairs must show.
    scale = [[0, f"rgba({_MASK},0)"], [1e-6, f"rgba({_MASK},0.3)"], [1, f"rgba({_MASK},1)"]]
    hover = "query %{y:,.0f}, key %{x:,.0f}: %{z:.0%} of the pairs"
    look = {"colorscale": scale, "reversescale": False, "zmax": 1, "showscale": False}
    return plots.heat(cells, middles, middles, "", hover, **look)


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


def svg(mask: SequenceMask, title: str) -> str:
    """Return an SVG file with the title above the mask, for light and dark pages."""
    lines = textwrap.wrap(title, _LETTERS)
    side = _WIDTH - 2 * _MARGIN
    top = _MARGIN + _LINE * len(lines)
    height = top + side + _MARGIN
    texts = (
        f'<text x="{_MARGIN}" y="{_MARGIN + _LINE * row - 4}">{escape(line)}</text>'
        for row, line in enumerate(lines, 1)
    )
    parts = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}">',
        f"<title>{escape(title)}</title><desc>{MEANING}</desc>",
        f"<style>{_STYLE}</style>",
        f'<rect x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="6" class="card"/>',
        *texts,
        f'<rect x="{_MARGIN}" y="{top}" width="{side}" height="{side}" class="back"/>',
        _cells(mask, _MARGIN, top, side),
        "</svg>",
        "",
    )
    # Replace control characters: a user may print the file to a terminal.
    return same_width("\n".join(parts))


def _cells(mask: SequenceMask, left: float, top: float, side: float) -> str:
    table = density(mask, _CELLS)
    full, some = table == 1, (table > 0) & (table < 1)
    scale = side / len(table)
    place = f"translate({left:g} {top:g}) scale({scale:.6g})"
    paths = "".join(
        f'<path class="{kind}" d="{_runs(flags)}"/>'
        for kind, flags in (("full", full), ("partial", some))
        if flags.any()
    )
    return f'<g transform="{place}" shape-rendering="crispEdges">{paths}</g>'


def _runs(flags: np.ndarray) -> str:
    """Return a path with one rectangle per run of true cells of a row. Each cell is 1 x 1."""
    path = []
    for row, cells in enumerate(flags):
        edges = np.flatnonzero(np.diff(cells.astype(np.int8), prepend=0, append=0)).tolist()
        pairs = zip(edges[::2], edges[1::2], strict=True)
        path += [f"M{a} {row}h{b - a}v1h{a - b}z" for a, b in pairs]
    return "".join(path)
