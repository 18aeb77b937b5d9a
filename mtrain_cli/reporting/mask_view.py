"""What a mask allows, and what it means for each layout: tables and a picture for `mtrain mask`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.parallel.cast_rows import row_block
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.traffic import Traffic, count_traffic

_CELLS = 128  # rows and columns of a picture
_SIDE = 5  # pixels per cell


@dataclass(frozen=True)
class LayoutShare:
    """What the workers of a layout compute and receive under a mask.

    traffic: pairs and rows of each worker. A row is the key and the value of one token.
    slices: number of rectangles, full, causal or banded, that cover the pairs of each worker.
    remote: share of the rows of other workers that `group_cast` moves to a worker, as a mean over
        the workers.
    """

    traffic: Traffic
    slices: tuple[int, ...]
    remote: float


def share_of(mask: SequenceMask, layout: Layout, block: int | None = None) -> LayoutShare:
    """Count what each worker computes and receives.

    mask: padded like the layout.
    block: number of tokens per block of a dynamic index; None for dense attention.
    """
    shards = [layout.positions(rank) for rank in range(layout.workers)]
    traffic = count_traffic([[mask]], shards, block=row_block(layout, block))
    everywhere = np.arange(mask.padded)
    slices = tuple(len(mask.spans(own, everywhere).slices) for own in shards)
    return LayoutShare(traffic, slices, traffic.share_moved(layout.padded_seq))


def picture(masks: Sequence[tuple[str, SequenceMask]]) -> str:
    """Return an HTML page that shows which share of each cell of query-key pairs is allowed.

    masks: each mask with its title. The first title is that of the page.
    """
    drawings = "".join(
        f'<h1 style="font-size: 1rem">{escape(title)}</h1>\n{_drawing(mask)}'
        for title, mask in masks
    )
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        f"<title>{escape(masks[0][0])}</title>\n"
        f'<body style="font-family: sans-serif">{drawings}'
        "<p>Queries from top to bottom, keys from left to right. The darker a cell, "
        "the larger the share of its pairs that the mask allows.</p></body></html>\n"
    )


def _drawing(mask: SequenceMask) -> str:
    table = density(mask)
    size = len(table) * _SIDE
    cells = [
        f'<rect x="{column * _SIDE}" y="{row * _SIDE}" width="{_SIDE}" height="{_SIDE}" '
        f'fill-opacity="{share:.2f}"/>'
        for (row, column), share in np.ndenumerate(table)
        if share
    ]
    return (
        f'<svg width="{size}" height="{size}" fill="#3f51b5" style="border: 1px solid #888">\n'
        + "\n".join(cells)
        + "\n</svg>\n"
    )


def density(mask: SequenceMask, cells: int = _CELLS) -> np.ndarray:
    """Return the share of allowed pairs in each cell, float [cells, cells] or smaller.

    Rows are queries, columns are keys.
    """
    edges = np.unique(np.linspace(0, mask.length, cells + 1).astype(np.int64))
    widths = np.diff(edges)
    low, high = (bound[..., None] for bound in (mask.low, mask.high))
    table = np.zeros((len(widths), len(widths)))
    for row, (start, stop) in enumerate(itertools.pairwise(edges)):
        rows = slice(start, stop)
        keys = np.minimum(high[:, rows], edges[1:]) - np.maximum(low[:, rows], edges[:-1])
        table[row] = keys.clip(0).sum((0, 1)) / (widths[row] * widths)
    return table
