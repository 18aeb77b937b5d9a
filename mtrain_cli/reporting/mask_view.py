"""What a mask allows, and what it means for each layout: tables and a picture for `mtrain mask`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.parallel.layout import Layout

_CELLS = 128  # rows and columns of a picture
_SIDE = 5  # pixels per cell


@dataclass(frozen=True)
class LayoutShare:
    """What the workers of a layout compute under a mask. Each tuple has one entry per worker.

    layout: name of the layout.
    pairs: number of query-key pairs.
    slices: number of rectangles, full, causal or banded, that cover these pairs.
    remote: number of keys of other workers that some query of the worker sees.
    others: number of keys of other workers.
    """

    layout: str
    pairs: tuple[int, ...]
    slices: tuple[int, ...]
    remote: tuple[int, ...]
    others: int

    @property
    def imbalance(self) -> float:
        """Pairs of the worker with the most pairs, divided by the mean; 1.0 without pairs."""
        mean = sum(self.pairs) / len(self.pairs)
        return max(self.pairs) / mean if mean else 1.0

    @property
    def remote_share(self) -> float:
        """Share of the keys of other workers that a worker needs, as a mean over workers."""
        return sum(self.remote) / (len(self.remote) * self.others) if self.others else 0.0


def share_of(mask: SequenceMask, layout: Layout) -> LayoutShare:
    """Count what each worker computes. mask: padded like the layout."""
    everywhere = np.arange(mask.padded)
    pairs, slices, remote = [], [], []
    for rank in range(layout.workers):
        own = layout.positions(rank)
        spans = mask.spans(own, everywhere)
        edges = np.zeros(mask.padded + 1, np.int64)
        np.add.at(edges, spans.low.ravel(), 1)
        np.add.at(edges, spans.high.ravel(), -1)
        needed = edges.cumsum()[:-1] > 0
        needed[own] = False
        pairs.append(spans.pairs)
        slices.append(len(spans.slices))
        remote.append(int(needed.sum()))
    others = mask.length * (layout.workers - 1) // layout.workers
    return LayoutShare(layout.name, tuple(pairs), tuple(slices), tuple(remote), others)


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
