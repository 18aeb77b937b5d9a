"""Show a sweep of `mtrain simulate`: table, CSV file and scaling figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

from rich.table import Table

from mtrain_cli.config.sizes import format_size
from mtrain_cli.grouping import grouped
from mtrain_cli.parallel.exchange_selection import short_label
from mtrain_cli.reporting import plots
from mtrain_cli.reporting.plots import Figure, FigureView, Trace
from mtrain_cli.reporting.sheets import Sheet
from mtrain_cli.reporting.terminal_width import new_table, number
from mtrain_cli.training.run_plan import FITS

Row = Mapping[str, Any]
WORDS = ("layout", "exchange", "fits")  # columns that hold text
SPARE = ("HFU", "best - worst", "data x context")  # columns that a narrow terminal drops
LEGEND = (
    "s / step: one optimizer step; best and worst: all constants at their best or worst bound. "
    "HFU: share of peak FLOP/s that kernels execute. GiB: per GPU. bold: the fastest that fits. "
    f"all_gather in N: heads gathered in N parts. {FITS}."
)
_AXES = ("nodes", "workers")  # swept settings that change the number of GPUs
_DASHES = ("solid", "dot", "dashdot")


def swept_settings(row: Row) -> dict[str, str]:
    """Return the swept settings of a row, except those that change the number of GPUs."""
    return {name: value for name, value in row.get("point", {}).items() if name not in _AXES}


def cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]], list[str]]:
    """Return headings, cells and the state of each row.

    The states are:
    - best: the fastest row that fits into memory, among rows with equal settings and number of GPUs
    - fits: another row that fits into memory
    - not: a row that does not fit into memory, or that is impossible
    """
    names = list(dict.fromkeys(name for row in rows for name in swept_settings(row)))
    groups = any(row.get("dp", 1) > 1 for row in rows)
    heads = [*names, "GPUs", *(["data x context"] if groups else []), "layout", "exchange"]
    heads += ["s / step", "best - worst", "tokens/s/GPU", "HFU", "GiB", "fits"]
    fastest: dict[tuple, float] = {}
    for row in rows:
        if "cannot" not in row and row["fits"]:
            fastest[_group(row)] = min(
                row["seconds"]["value"], fastest.get(_group(row), float("inf"))
            )
    lines, states = [], []
    for row in rows:
        head = [*(str(swept_settings(row).get(name, "")) for name in names), str(row["workers"])]
        head += [f"{row['dp']} x {row['cp']}" if "dp" in row else ""] if groups else []
        head += [row["layout"], short_label(row["exchange"])]
        if "cannot" in row:
            lines.append([*head, "", "", "", "", "", row["cannot"]])
            states.append("not")
            continue
        took = row["seconds"]
        lines.append(
            [
                *head,
                number(took["value"], 4),
                f"{number(took['low'])} - {number(took['high'])}",
                f"{row['tokens_per_second_per_gpu']['value']:,.0f}",
                f"{row['hfu']:.1%}",
                f"{row['memory_bytes'] / 2**30:.1f}",
                "yes" if row["fits"] else "no",
            ]
        )
        best = row["fits"] and took["value"] == fastest[_group(row)]
        states.append("best" if best else "fits" if row["fits"] else "not")
    return heads, lines, states


def sweep_table(rows: Sequence[Row]) -> Table:
    """Return a table with a row per configuration. `why_not` explains impossible configurations."""
    heads, lines, states = cells(rows)
    table = new_table(heads, words=0)
    for column in table.columns:
        column.justify = "left" if column.header in WORDS else "right"
    for row, line, state in zip(rows, lines, states, strict=True):
        if "cannot" in row:
            line[-1] = "impossible"
        table.add_row(*line, style={"best": "bold", "not": "dim"}.get(state))
    return table


def why_not(rows: Sequence[Row]) -> list[str]:
    """Return the reasons why configurations are impossible, without repeats."""
    return list(dict.fromkeys(row["cannot"] for row in rows if "cannot" in row))


def _group(row: Row) -> tuple:
    return (*swept_settings(row).items(), row["workers"])


def sheet(runs: Sequence[tuple[str, Sequence[Row]]]) -> Sheet:
    """Return sweep.csv.

    runs: (name, rows) of each run.
    """
    swept = dict.fromkeys(name for _, rows in runs for row in rows for name in row.get("point", {}))
    table = []
    for run, row in ((run, row) for run, rows in runs for row in rows):
        seconds, point = row.get("seconds", {}), row.get("point", {})
        same = {name: row.get(name) for name in ("workers", "cp", "layout", "exchange")}
        of_step = {name: row.get(name) for name in ("kernel", "seq", "density")}
        impossible = "cannot" in row
        table.append(
            {
                "run": run,
                **{f"swept {name}": point.get(name) for name in swept},
                **same,
                **of_step,
                "seconds_low": seconds.get("low"),
                "seconds": seconds.get("value"),
                "seconds_high": seconds.get("high"),
                "tokens_per_second_per_gpu": None if impossible else _rate(row, "value"),
                "mfu": row.get("mfu"),
                "hfu": row.get("hfu"),
                "memory_gib": None if impossible else row["memory_bytes"] / 2**30,
                "fits": not impossible and row["fits"],
                "cannot": row.get("cannot"),
            }
        )
    return Sheet("sweep", table)


# (title, value of a row at one of the bounds low, value and high, whether it ideally grows linearly
# with the number of GPUs)
_QUANTITIES = (
    ("tokens/s, all GPUs", lambda row, at: _rate(row, at) * row["workers"], True),
    ("tokens/s/GPU", lambda row, at: _rate(row, at), False),
    ("seconds per step", lambda row, at: row["seconds"][at], False),
    ("GiB per GPU", lambda row, at: row["memory_bytes"] / 2**30, False),  # noqa: ARG005
)


def _rate(row: Row, bound: str) -> float:
    return row["tokens_per_second_per_gpu"][bound]


def scaling_figure(sweeps: Sequence[tuple[str, Sequence[Row]]]) -> Figure:
    """Draw throughput, time and memory over the number of GPUs, as in figure 6b of MTraining.

    If only the sequence length was swept, the x axis is the sequence length.
    """
    views = []
    for name, rows in sweeps:
        good = [row for row in rows if "cannot" not in row]
        gpus = len({row["workers"] for row in good}) > 1 or len({row["seq"] for row in good}) < 2
        views += [
            _view((name, label, title), group, value, gpus=gpus, ideal=linear and gpus)
            for label, group in grouped(good, partial(_label_of, with_seq=gpus)).items()
            for title, value, linear in _QUANTITIES
        ]
    note = (
        "Band: the fastest line with all constants at their best or worst; hover for the bounds of "
        "the other lines. Crosses do not fit into memory."
    )
    return Figure("scaling", "Scaling", ("sweep", "settings", "quantity"), views, note)


def _label_of(row: Row, with_seq: bool) -> str:
    swept = [f"{k} {v}" for k, v in swept_settings(row).items() if with_seq or k != "seq"]
    return ", ".join(swept) or "as given"


def _view(
    labels: tuple[str, ...], rows: Sequence[Row], value: Any, *, gpus: bool, ideal: bool
) -> FigureView:
    """Draw a line per layout and exchange, and a band between the bounds of the fastest line.

    Args:
        value: function of a row and a bound that returns the quantity to draw. The bound is
            ``value`` (the prediction), ``low`` or ``high``.
    """
    lines = grouped(rows, lambda row: (row["layout"], row["exchange"].partition(" (")[0]))
    at = "workers" if gpus else "seq"
    exchanges = list(dict.fromkeys(exchange for _, exchange in lines))
    layouts = list(dict.fromkeys(layout for layout, _ in lines))
    fastest = min(rows, key=lambda row: (-row[at], row["seconds"]["value"]))
    data: list[Trace] = []
    for (layout_name, exchange), line in lines.items():
        colour = plots.PALETTE[exchanges.index(exchange) % len(plots.PALETTE)]
        dash = _DASHES[layouts.index(layout_name) % len(_DASHES)]
        name = escape(f"{layout_name}, {exchange}")
        traces = _line(name, sorted(line, key=lambda row: row[at]), at, value, colour, dash)
        # Several bands would hide each other. The other lines show their bounds on hover.
        band = [trace for trace in traces if "fill" in trace and fastest in line]
        data = [*band, *data, *(trace for trace in traces if "fill" not in trace)]
    ticks = sorted({row[at] for row in rows})
    if ideal:
        first = min(rows, key=lambda row: (row[at], -value(row, "value")))
        y = plots.numbers([value(first, "value") * n / first[at] for n in ticks])
        style = {"color": "#999", "dash": "longdash"}
        shown = {"mode": "lines", "name": "linear", "x": ticks, "y": y, "line": style}
        data.append({"type": "scatter", **shown, "hoverinfo": "skip"})
    x = plots.axis(
        "GPUs" if gpus else "tokens per sequence",
        type="log",
        tickvals=ticks,
        ticktext=[str(n) if gpus else format_size(n) for n in ticks],
    )
    scale = {"type": "log", "dtick": "D2"} if ideal else {"rangemode": "tozero"}
    return FigureView(labels, data, plots.layout(460, x, plots.axis(labels[-1], **scale)))


def _line(
    name: str, line: Sequence[Row], at: str, value: Any, colour: str, dash: str
) -> list[Trace]:
    x = [row[at] for row in line]
    low, likely, high = (
        plots.numbers([value(row, bound) for row in line]) for bound in ("low", "value", "high")
    )
    fits = ["fits" if row["fits"] else "does not fit" for row in line]
    bounds = "(%{customdata[0]:,.4g} to %{customdata[1]:,.4g})"
    common = {"type": "scatter", "legendgroup": name}
    traces = [
        plots.line(
            name,
            x,
            likely,
            colour,
            legendgroup=name,
            line={"color": colour, "dash": dash},
            customdata=[list(hover) for hover in zip(low, high, fits, strict=True)],
            hovertemplate=f"{name}: %{{y:,.4g}} {bounds}, %{{customdata[2]}}<extra></extra>",
        )
    ]
    if unfit := [i for i, row in enumerate(line) if not row["fits"]]:
        traces.append(
            {
                **common,
                "mode": "markers",
                "x": [x[i] for i in unfit],
                "y": [likely[i] for i in unfit],
                "marker": {"color": colour, "size": 12, "symbol": "x"},
                **plots.QUIET,
            }
        )
    if low != high:
        band = {"x": [*x, *reversed(x)], "y": [*high, *reversed(low)], "fill": "toself"}
        style = {"mode": "lines", "line": {"width": 0}, "fillcolor": colour, "opacity": 0.15}
        traces.append({**common, **band, **style, **plots.QUIET})
    return traces
