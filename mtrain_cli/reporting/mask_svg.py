"""Draw a mask as an SVG file, without text beyond its title."""

from __future__ import annotations

import textwrap
from html import escape

import numpy as np

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.printable import same_width
from mtrain_cli.reporting.mask_view import density

_WIDTH, _MARGIN, _LINE = 208, 8, 15  # units of the drawing
_CELLS = 64  # rows and columns
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


def inline(mask: SequenceMask, side: int) -> str:
    """Return an SVG element of ``side`` pixels, whose colors the page's class `mask` sets."""
    return (
        f'<svg role="img" width="{side}" height="{side}" class="mask">'
        f"<title>{MEANING}</title>{_cells(mask, 0, 0, side)}</svg>"
    )


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
