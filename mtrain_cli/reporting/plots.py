"""Building blocks of figures: plain plotly traces, axes and rounded numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mtrain_cli.parallel.recording import ARRANGE, ATTENTION, COLUMNS, GAP, INDEX, MERGE
from mtrain_cli.records.record_sums import EXPOSED, LATE

Trace = dict[str, Any]
# Colors of runs or exchanges.
PALETTE = ("#2f6fb5", "#d97706", "#4d9f6f", "#c8352b", "#8c6bb1", "#7a5c3e", "#d26fa5", "#5b5b5b")
# Dash and marker of the lines that have the same color, in turn.
_STROKES = (("solid", "circle"), ("dash", "square"), ("dot", "diamond"), ("dashdot", "cross"))
STYLES = len(PALETTE) * len(_STROKES)  # lines that a reader can tell apart
# Colors of the categories of attention's time.
COLOURS = {
    ATTENTION: "#2f6fb5",
    COLUMNS: "#7fb2e5",
    INDEX: "#8c6bb1",
    MERGE: "#4d9f6f",
    ARRANGE: "#a6d19f",
    GAP: "#b8b8b8",
    LATE: "#c8352b",
    EXPOSED: "#f0a030",
}
_LINK_COLOURS = {"inner": "#f7c873", "outer": "#d97706", "heads": "#e6b8a2"}
LATE_LABEL, EXPOSED_LABEL = "waiting for late peers", "exposed communication"


@dataclass(frozen=True)
class FigureView:
    """The content of a figure for one choice of its selectors (drop-down lists).

    labels: the chosen label of each selector.
    """

    labels: tuple[str, ...]
    data: list[Trace]
    layout: dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """A figure of the page.

    selectors: name of each drop-down list, with which a reader chooses a view.
    together: whether to show all views side by side, without selectors.
    finding: what the figure shows, in sentences.
    """

    name: str
    title: str
    selectors: tuple[str, ...]
    views: list[FigureView]
    note: str = ""
    together: bool = False
    finding: str = ""


def link_colour(link: str) -> str:
    return _LINK_COLOURS.get(link, COLOURS[EXPOSED])


def layout(height: int, x: dict[str, Any], y: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"height": height, "xaxis": x, "yaxis": y, **more}


def axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, **more}


def from_zero(title: str, **more: Any) -> dict[str, Any]:
    """Return an axis that starts at zero."""
    return axis(title, rangemode="tozero", **more)


def downward(title: str, **more: Any) -> dict[str, Any]:
    """Return a vertical axis that starts at the top."""
    return axis(title, autorange="reversed", **more)


def whole(count: int) -> dict[str, Any]:
    """Return settings of an axis with ticks only at integers.

    count: number of positions on the axis.
    """
    return {"dtick": 1} if count <= 20 else {"tickformat": "d"}


def bar(x: Any, y: Any, colour: str, hover: str, **more: Any) -> Trace:
    """Return horizontal bars, unless ``more`` changes the orientation."""
    look = {"marker": {"color": colour}, "hovertemplate": f"{hover}<extra></extra>"}
    return {"type": "bar", "orientation": "h", "x": x, "y": y, **look, **more}


def line(name: str, x: Sequence[Any], y: Sequence[Any], colour: str, **more: Any) -> Trace:
    look = {"line": {"color": colour}, "marker": {"color": colour, "size": 6}}
    common = {"type": "scatter", "mode": "lines+markers", "name": name}
    return {**common, "x": list(x), "y": numbers(y), **look, **more}


def styled(name: str, x: Sequence[Any], y: Sequence[Any], number: int, **more: Any) -> Trace:
    """Return a line whose color, dash and marker differ from those of the `STYLES` - 1 before it.

    number: number of the line in its figure.
    """
    turn, at = divmod(number, len(PALETTE))
    dash, symbol = _STROKES[turn % len(_STROKES)]
    look = {"line": {"color": PALETTE[at], "dash": dash}}
    marker = {"color": PALETTE[at], "size": 6, "symbol": symbol}
    return line(name, x, y, PALETTE[at], **look, marker=marker, **more)


def heat(z: Any, x: Sequence[Any], y: Sequence[Any], unit: str, hover: str, **more: Any) -> Trace:
    """Return a heat map. The ticks of the units density, recall and share are in percent."""
    share = {"tickformat": ".0%"} if unit in ("density", "recall", "share") else {}
    bar = {"title": {"text": unit}, "thickness": 14, **share}
    look = {"colorscale": "YlGnBu", "reversescale": True, "zmin": 0, "colorbar": bar}
    hover = f"{hover}<extra></extra>"
    places = {"x": list(x), "y": list(y), "z": z, "hovertemplate": hover}
    return {"type": "heatmap", **places, **look, **more}


def heat_view(
    labels: tuple[str, ...],
    table: np.ndarray,
    x: tuple[str, Sequence[Any]],
    y: tuple[str, Sequence[Any]],
    unit: str,
    hover: str,
    *,
    side: int = 1 << 16,
    **more: Any,
) -> FigureView:
    """Return a view with a heat map.

    Args:
        x, y: title of the axis, and its positions; y starts at the top.
        side: largest number of cells per axis. A larger table shrinks to maxima of groups of cells.
    """
    small = fold(table, side)
    across, down = (
        cell_labels(positions, small.shape[at]) for at, (_, positions) in ((1, x), (0, y))
    )
    top = float(np.nanmax(small, initial=0)) or 1.0
    trace = heat(numbers(small, 4), across, down, unit, hover, zmax=top, **more)

    def ticks(labels: Sequence[Any]) -> dict[str, Any]:
        words = any(isinstance(label, str) for label in labels)
        return {"type": "category"} if words else whole(labels[-1] - labels[0] + 1)

    axes = axis(x[0], **ticks(across)), downward(y[0], **ticks(down))
    return FigureView(labels, [trace], layout(190 + 18 * min(30, max(4, len(down))), *axes))


def fold(table: np.ndarray, cells: int) -> np.ndarray:
    """Shrink a table to at most cells x cells, each the maximum of a group of cells."""
    for axis in (0, 1):
        size = max(1, -(-table.shape[axis] // cells))
        table = np.maximum.reduceat(table, np.arange(0, table.shape[axis], size), axis=axis)
    return table


def cell_labels(positions: Sequence[int], cells: int) -> list[Any]:
    """Return a label for each cell of an axis: the position, or the positions that it covers."""
    of_cell = -(-len(positions) // max(1, cells))
    if of_cell == 1:
        return list(positions)
    groups = (positions[i : i + of_cell] for i in range(0, len(positions), of_cell))
    return [f"{group[0]}-{group[-1]}" for group in groups]


def evenly(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most ``most`` of the items, evenly spaced, including the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[i] for i in np.unique(np.linspace(0, len(items) - 1, max(most, 1)).astype(int))]


def numbers(values: Any, digits: int = 5) -> Any:
    """Return the values, rounded to keep the page small. None, NaN and infinity become None."""
    array = np.asarray(values, float)
    if array.ndim > 1:
        return [numbers(row, digits) for row in array]
    return [
        float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in array.tolist()
    ]
