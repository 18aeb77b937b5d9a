"""Show a sweep of `mtrain simulate`: table, CSV file and scaling figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from operator import itemgetter
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
    "MFU, HFU: share of the peak FLOP/s, by the model's FLOP and by all executed FLOP. worker, "
    "step: imbalance degrees of attention work, largest over mean. GiB: per GPU, as planned by "
    "`mtrain train --dry-run`. bold: the fastest that fits. group_cast: only keys that a worker's "
    "queries see travel to it. "
    f"all_gather in N: heads gathered in N parts. {FITS}"
)
_AXES = ("nodes", "workers")  # swept settings that change the number of GPUs
_BOUNDS = "(%{customdata[0]:,.4g} to %{customdata[1]:,.4g}), %{customdata[2]}"
_DASHES = ("solid", "dot", "dashdot")


def swept_settings(row: Row) -> dict[str, str]:
    """Return the swept settings of a row, except those that change the number of GPUs."""
    return {name: value for name, value in row.get("point", {}).items() if name not in _AXES}


def sweep_table(runs: Sequence[tuple[str, Sequence[Row]]]) -> Table:
    """Return a table with a row per configuration, and sweep.csv. runs: (name, rows) of each run.

    A row is `BEST` if it is the fastest that fits into memory, among rows with equal settings and
    number of GPUs. It is `NOT` if it does not fit, or is impossible (`why_not` says why).
    """
    every = [(run, row) for run, rows in runs for row in rows]
    points = dict.fromkeys(name for _, row in every for name in row.get("point", {}))

    def group(run: str, row: Row) -> tuple:
        return run, *swept_settings(row).items(), row["workers"]

    fitting = grouped((pair for pair in every if pair[1].get("fits")), lambda pair: group(*pair))
    fastest = {key: min(r["seconds"]["value"] for _, r in own) for key, own in fitting.items()}

    def state(pair: tuple[str, Row]) -> str:
        if not pair[1].get("fits"):
            return NOT
        return BEST * (pair[1]["seconds"]["value"] == fastest[group(*pair)])

    def possible(value: Callable[[Row], Any]) -> Callable[[Row], Any]:
        return lambda row: None if "cannot" in row else value(row)

    def swept(name: str) -> Column:
        shown = "" if name in _AXES else name
        return _column(shown, lambda row: row.get("point", {}).get(name), key=f"swept {name}")

    def seconds(bound: str) -> Callable[[Row], Any]:
        return possible(lambda row: row["seconds"][bound])

    def bounds(row: Row) -> str:
        return f"{number(row['seconds']['low'])} - {number(row['seconds']['high'])}"

    def groups(row: Row) -> str | None:
        return f"{row['dp']} x {row['cp']}" if "dp" in row else None

    def fits(row: Row) -> str:
        return "impossible" if "cannot" in row else "yes" if row["fits"] else "no"

    def degree(name: str) -> Callable[[Row], Any]:
        return lambda row: row.get("degrees", {}).get(name)

    several_groups = any(row.get("dp", 1) > 1 for _, row in every)
    named = any("configuration" in row for _, row in every)
    sparse = any(row.get("density", 1) < 1 for _, row in every)
    dense = any(row.get("mfu") is not None for _, row in every)
    columns = [
        Column("run" * (len(runs) > 1), itemgetter(0), key="run", words=True),
        *map(swept, points),
        _column("GPUs", _get("workers"), key="workers"),
        *([_column("data x context", groups, drop=3)] if several_groups else []),
        _column("", _get("cp"), key="cp"),
        _column("configuration" * named, _get("configuration"), words=True),
        _column("" if named else "layout", _get("layout"), key="layout", words=True),
        _column("" if named else "exchange", _get("exchange"), short_label, "exchange", words=True),
        *(_column("", _get(name), key=name) for name in ("kernel", "seq")),
        _column("density" * sparse, _get("density"), percent, "density", drop=7),
        _column("", seconds("low"), key="seconds_low"),
        _column("s / step", seconds("value"), partial(number, digits=4), "seconds"),
        _column("best - worst", possible(bounds), drop=2),
        _column("", seconds("high"), key="seconds_high"),
        _column("tokens/s/GPU", possible(_rate), count, "tokens_per_second_per_gpu"),
        _column("MFU" * dense, _get("mfu"), percent, "mfu", drop=4),
        _column("HFU", _get("hfu"), percent, "hfu", drop=1),
        _column("worker", degree("worker_work"), fixed(2), drop=6),
        _column("step", degree("step_work"), fixed(2), drop=5),
        _column("GiB", possible(_gib), fixed(1), "memory_gib"),
        _column("fits", fits, words=True),
        _column("", lambda row: bool(row.get("fits")), key="fits"),
        _column("", _get("cannot"), key="cannot"),
    ]
    return Table("Predicted steps", columns, every, LEGEND, "sweep", state)


def _column(name: str, value: Callable[[Row], Any], *more: Any, **options: Any) -> Column:
    """Return a column of (run, row) pairs. value: function of the row."""
    return Column(name, lambda pair: value(pair[1]), *more, **{"missing": "", **options})


def _get(name: str) -> Callable[[Row], Any]:
    return lambda row: row.get(name)


def _rate(row: Row, bound: str = "value") -> float:
    return row["tokens_per_second_per_gpu"][bound]


def _gib(row: Row, _bound: str = "") -> float:
    return row["memory_bytes"] / 2**30


def why_not(rows: Sequence[Row]) -> list[str]:
    """Return the reasons why configurations are impossible, without repeats."""
    return list(dict.fromkeys(row["cannot"] for row in rows if "cannot" in row))


# (title, value of a row at one of the bounds low, value and high, whether it ideally grows linearly
# with the number of GPUs)
_QUANTITIES = (
    ("tokens/s, all GPUs", lambda row, at: _rate(row, at) * row["workers"], True),
    ("tokens/s/GPU", _rate, False),
    ("seconds per step", lambda row, at: row["seconds"][at], False),
    ("GiB per GPU", _gib, False),
)


def scaling_figure(sweeps: Sequence[tuple[str, Sequence[Row]]]) -> Figure:
    """Draw throughput, time and memory over the number of GPUs, as in figure 6b of MTraining.

    If only the sequence length was swept, the x axis is the sequence length.
    """
    views = []
    for name, rows in sweeps:
        good = [row for row in rows if "cannot" not in row]
        gpus = len({row["workers"] for row in good}) > 1 or len({row["seq"] for row in good}) < 2

        def settings(row: Row, with_seq: bool = gpus) -> str:
            swept = [f"{k} {v}" for k, v in swept_settings(row).items() if with_seq or k != "seq"]
            return ", ".join(swept) or "as given"

        views += [
            _view((name, label, title), group, value, gpus=gpus, ideal=linear and gpus)
            for label, group in grouped(good, settings).items()
            for title, value, linear in _QUANTITIES
        ]
    note = "Hover for the bounds of all constants. Crosses do not fit into memory."
    return Figure("scaling", "Scaling", ("sweep", "settings", "quantity"), views, note)


def _view(
    labels: tuple[str, ...], rows: Sequence[Row], value: Any, *, gpus: bool, ideal: bool
) -> FigureView:
    """Draw a line per layout and exchange."""
    lines = grouped(rows, lambda row: (row["layout"], row["exchange"].partition(" (")[0]))
    at = "workers" if gpus else "seq"
    exchanges = list(dict.fromkeys(exchange for _, exchange in lines))
    layouts = list(dict.fromkeys(layout for layout, _ in lines))
    data: list[Trace] = []
    for (layout_name, exchange), of_line in lines.items():
        line = sorted(of_line, key=lambda row: row[at])
        colour = plots.PALETTE[exchanges.index(exchange) % len(plots.PALETTE)]
        dash = _DASHES[layouts.index(layout_name) % len(_DASHES)]
        name = escape(f"{layout_name}, {exchange}")
        low, likely, high = (
            plots.numbers([value(row, bound) for row in line]) for bound in ("low", "value", "high")
        )
        fits = ["fits" if row["fits"] else "does not fit" for row in line]
        more: dict[str, Any] = {
            "customdata": list(map(list, zip(low, high, fits, strict=True))),
            "hovertemplate": f"{name}: %{{y:,.4g}} {_BOUNDS}<extra></extra>",
            "legendgroup": name,
            "line": {"color": colour, "dash": dash},
        }
        data.append(plots.line(name, [row[at] for row in line], likely, colour, **more))
        if unfit := [i for i, row in enumerate(line) if not row["fits"]]:
            places = [line[i][at] for i in unfit], [likely[i] for i in unfit]
            cross = {"mode": "markers", "marker": {"color": colour, "size": 12, "symbol": "x"}}
            more = {"legendgroup": name, **cross, **plots.QUIET}
            data.append(plots.line(name, *places, colour, **more))
    ticks = sorted({row[at] for row in rows})
    if ideal:
        first = min(rows, key=lambda row: (row[at], -value(row, "value")))
        ideals = [value(first, "value") * n / first[at] for n in ticks]
        style = {"mode": "lines", "line": {"color": "#999", "dash": "longdash"}}
        data.append(plots.line("linear", ticks, ideals, "#999", **style, hoverinfo="skip"))
    x = plots.axis(
        "GPUs" if gpus else "tokens per sequence",
        type="log",
        tickvals=ticks,
        ticktext=[str(n) if gpus else format_size(n) for n in ticks],
    )
    scale = {"type": "log", "dtick": "D2"} if ideal else {"rangemode": "tozero"}
    return FigureView(labels, data, plots.layout(460, x, plots.axis(labels[-1], **scale)))
