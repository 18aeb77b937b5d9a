"""Show a sweep of `mtrain simulate`: table, CSV file and scaling figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

from mtrain_cli.config.sizes import format_size
from mtrain_cli.grouping import grouped
from mtrain_cli.parallel.exchange_selection import short_label
from mtrain_cli.reporting import plots
from mtrain_cli.reporting.plots import Figure, FigureView, Trace
from mtrain_cli.reporting.table import BEST, NOT, Column, Table, count, fixed, number, percent
from mtrain_cli.training.run_plan import FITS

Row = Mapping[str, Any]
LEGEND = (
    "s / step: one optimizer step; best and worst: all constants at their best or worst bound. "
    "HFU: share of peak FLOP/s that kernels execute. GiB: per GPU. bold: the fastest that fits. "
    f"all_gather in N: heads gathered in N parts. {FITS}"
)
_AXES = ("nodes", "workers")  # swept settings that change the number of GPUs
_DASHES = ("solid", "dot", "dashdot")


def swept_settings(row: Row) -> dict[str, str]:
    """Return the swept settings of a row, except those that change the number of GPUs."""
    return {name: value for name, value in row.get("point", {}).items() if name not in _AXES}


def sweep_table(runs: Sequence[tuple[str, Sequence[Row]]]) -> Table:
    """Return a table with a row per configuration, and sweep.csv. runs: (name, rows) of each run.

    The states of the rows are:
    - best: the fastest row that fits into memory, among rows with equal settings and number of GPUs
    - not: a row that does not fit into memory, or that is impossible (`why_not` says why)
    """
    every = [(run, row) for run, rows in runs for row in rows]
    points = dict.fromkeys(name for _, row in every for name in row.get("point", {}))
    fastest: dict[tuple, float] = {}
    for run, row in every:
        if row.get("fits"):
            group = (run, *_group(row))
            fastest[group] = min(row["seconds"]["value"], fastest.get(group, float("inf")))

    grouping = any(row.get("dp", 1) > 1 for _, row in every)

    def state(pair: tuple[str, Row]) -> str:
        run, row = pair
        if not row.get("fits"):
            return NOT
        return BEST * (row["seconds"]["value"] == fastest[run, *_group(row)])

    columns = [
        Column("run" * (len(runs) > 1), lambda pair: pair[0], key="run", words=True),
        *map(_swept_column, points),
        _column("GPUs", _get("workers"), key="workers"),
        *([_column("data x context", _groups, drop=3)] if grouping else []),
        _column("", _get("cp"), key="cp"),
        _column("layout", _get("layout"), key="layout", words=True),
        _column("exchange", _get("exchange"), short_label, "exchange", words=True),
        *(_column("", _get(name), key=name) for name in ("kernel", "seq", "density")),
        _column("", _seconds("low"), key="seconds_low"),
        _column("s / step", _seconds("value"), partial(number, digits=4), "seconds"),
        _column("best - worst", _bounds, drop=2),
        _column("", _seconds("high"), key="seconds_high"),
        _column("tokens/s/GPU", _likely_rate, count, "tokens_per_second_per_gpu"),
        _column("", _get("mfu"), key="mfu"),
        _column("HFU", _get("hfu"), percent, "hfu", drop=1),
        _column("GiB", _gib, fixed(1), "memory_gib"),
        _column("fits", _fits, words=True),
        _column("", lambda row: "cannot" not in row and row["fits"], key="fits"),
        _column("", _get("cannot"), key="cannot"),
    ]
    return Table("Predicted steps", columns, every, LEGEND, "sweep", state)


def _column(name: str, value: Callable[[Row], Any], *more: Any, **options: Any) -> Column:
    """Return a column of (run, row) pairs. value: function of the row."""
    return Column(name, lambda pair: value(pair[1]), *more, **{"missing": "", **options})


def _swept_column(name: str) -> Column:
    shown = "" if name in _AXES else name
    return _column(shown, lambda row: row.get("point", {}).get(name), key=f"swept {name}")


def _get(name: str) -> Callable[[Row], Any]:
    return lambda row: row.get(name)


def _seconds(bound: str) -> Callable[[Row], Any]:
    return lambda row: row.get("seconds", {}).get(bound)


def _groups(row: Row) -> str | None:
    return f"{row['dp']} x {row['cp']}" if "dp" in row else None


def _bounds(row: Row) -> str | None:
    if "cannot" in row:
        return None
    return f"{number(row['seconds']['low'])} - {number(row['seconds']['high'])}"


def _likely_rate(row: Row) -> float | None:
    return None if "cannot" in row else _rate(row, "value")


def _fits(row: Row) -> str:
    return "impossible" if "cannot" in row else "yes" if row["fits"] else "no"


def _gib(row: Row) -> float | None:
    return None if "cannot" in row else row["memory_bytes"] / 2**30


def why_not(rows: Sequence[Row]) -> list[str]:
    """Return the reasons why configurations are impossible, without repeats."""
    return list(dict.fromkeys(row["cannot"] for row in rows if "cannot" in row))


def _group(row: Row) -> tuple:
    return (*swept_settings(row).items(), row["workers"])


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
    """Draw a line per layout and exchange, and a band between the bounds of the fastest line."""
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
