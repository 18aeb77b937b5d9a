"""Sweeps of `mtrain simulate`: table, CSV sheet and scaling figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from mtrain_cli.config.sizes import format_size
from mtrain_cli.parallel.exchange_selection import short_label
from mtrain_cli.reporting.tables import Sheet
from mtrain_cli.reporting.terminal_width import number
from mtrain_cli.training.run_plan import FITS

Row = Mapping[str, Any]
WORDS = ("layout", "exchange", "fits")  # columns of words
SPARE = ("HFU", "best - worst", "data x context")  # a narrow terminal drops these first
LEGEND = (
    "s / step: one optimizer step; best and worst: all constants at their best or worst bound. "
    "HFU: share of peak FLOP/s that kernels execute. GiB: per GPU. bold: the fastest that fits. "
    f"all_gather in N: in N parts of the heads. {FITS}."
)
_AXES = ("nodes", "workers")  # numbers of GPUs
_DASHES = ("solid", "dot", "dashdot")
_COLOURS = ("#2f6fb5", "#d97706", "#4d9f6f", "#c8352b", "#8c6bb1", "#7a5c3e", "#d26fa5", "#5b5b5b")


def swept_settings(row: Row) -> dict[str, str]:
    """Return the settings that were swept, other than the number of GPUs."""
    return {name: value for name, value in row.get("point", {}).items() if name not in _AXES}


def cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]], list[str]]:
    """Return headings, cells and the state of each row: best, fits or not.

    best: the fastest that fits, among rows of equal settings and GPUs.
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
    """One row per configuration. `why_not` gives the reasons of impossible ones."""
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    heads, lines, states = cells(rows)
    for name in heads:
        table.add_column(name, justify="left" if name in WORDS else "right")
    for row, line, state in zip(rows, lines, states, strict=True):
        if "cannot" in row:
            line[-1] = "impossible"
        table.add_row(*line, style={"best": "bold", "not": "dim"}.get(state))
    return table


def why_not(rows: Sequence[Row]) -> list[str]:
    """Return each reason why configurations are impossible, once."""
    return list(dict.fromkeys(row["cannot"] for row in rows if "cannot" in row))


def _group(row: Row) -> tuple:
    return (*swept_settings(row).items(), row["workers"])


def sheet(runs: Sequence[tuple[str, Sequence[Row]]]) -> Sheet:
    """Return sweep.csv of (name, rows) of each run."""
    names = list(
        dict.fromkeys(name for _, rows in runs for row in rows for name in row.get("point", {}))
    )
    columns = (
        *("run", *(f"swept {name}" for name in names), "workers", "cp", "layout", "exchange"),
        *("kernel", "seq", "density", "seconds_low", "seconds", "seconds_high"),
        *("tokens_per_second_per_gpu", "mfu", "hfu", "memory_gib", "fits", "cannot"),
    )
    table = []
    for run, row in ((run, row) for run, rows in runs for row in rows):
        head = [
            run,
            *(row.get("point", {}).get(name) for name in names),
            row["workers"],
            row.get("cp"),
            row["layout"],
            row["exchange"],
        ]
        if "cannot" in row:
            table.append((*head, *[None] * 10, False, row["cannot"]))
            continue
        seconds = row["seconds"]
        table.append(
            (
                *head,
                *(row[name] for name in ("kernel", "seq", "density")),
                *(seconds[bound] for bound in ("low", "value", "high")),
                row["tokens_per_second_per_gpu"]["value"],
                *(row[name] for name in ("mfu", "hfu")),
                row["memory_bytes"] / 2**30,
                row["fits"],
                None,
            )
        )
    return Sheet("sweep", columns, table)


_QUANTITIES = (
    (
        "tokens/s, all GPUs",
        lambda row, bound: row["tokens_per_second_per_gpu"][bound] * row["workers"],
        True,
    ),
    ("tokens/s/GPU", lambda row, bound: row["tokens_per_second_per_gpu"][bound], False),
    ("seconds per step", lambda row, bound: row["seconds"][bound], False),
    ("GiB per GPU", lambda row, bound: row["memory_bytes"] / 2**30, False),  # noqa: ARG005
)  # fmt: skip


def scaling_views(
    name: str, rows: Sequence[Row]
) -> list[tuple[tuple[str, ...], list[dict[str, Any]], dict[str, Any]]]:
    """Return (labels, traces, layout) of each view, one line per layout and exchange.

    The x axis is the number of GPUs if it was swept, else the sequence length. The fastest line has
    its bounds as a band. name: of the source.
    """
    good = [row for row in rows if "cannot" not in row]
    gpus = len({row["workers"] for row in good}) > 1 or len({row["seq"] for row in good}) < 2
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in good:
        label = [
            f"{key} {value}" for key, value in swept_settings(row).items() if gpus or key != "seq"
        ]
        groups.setdefault((name, ", ".join(label) or "as given"), []).append(row)
    views = []
    for labels, group in groups.items():
        for title, value, linear in _QUANTITIES:
            views.append(
                ((*labels, title), *_view(group, title, value, gpus=gpus, ideal=linear and gpus))
            )
    return views


def _view(
    rows: Sequence[Row], title: str, value: Any, *, gpus: bool, ideal: bool
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        lines.setdefault((row["layout"], _short(row["exchange"])), []).append(row)
    at = "workers" if gpus else "seq"
    colours = {
        name: _COLOURS[i % len(_COLOURS)]
        for i, name in enumerate(dict.fromkeys(exchange for _, exchange in lines))
    }
    dashes = {
        name: _DASHES[i % len(_DASHES)]
        for i, name in enumerate(dict.fromkeys(layout for layout, _ in lines))
    }
    fastest = min(rows, key=lambda row: (-row[at], row["seconds"]["value"]))
    data: list[dict[str, Any]] = []
    for (layout_name, exchange), line in lines.items():
        line = sorted(line, key=lambda row: row[at])
        name, colour = escape(f"{layout_name}, {exchange}"), colours[exchange]
        x = [row[at] for row in line]
        low, likely, high = (
            [_round(value(row, bound)) for row in line] for bound in ("low", "value", "high")
        )
        common = {"type": "scatter", "legendgroup": name}
        if low != high and fastest in line:
            # Several bands would hide each other; the other lines show bounds on hover.
            band = {
                "x": [*x, *reversed(x)],
                "y": [*high, *reversed(low)],
                "fill": "toself",
                "fillcolor": colour,
                "opacity": 0.15,
            }
            data.insert(
                0,
                {
                    **common,
                    **band,
                    "mode": "lines",
                    "line": {"width": 0},
                    "hoverinfo": "skip",
                    "showlegend": False,
                },
            )
        bounds = "(%{customdata[0]:,.4g} to %{customdata[1]:,.4g})"
        hover = [
            [lo, hi, "fits" if row["fits"] else "does not fit"]
            for lo, hi, row in zip(low, high, line, strict=True)
        ]
        data.append(
            {
                **common,
                "mode": "lines+markers",
                "name": name,
                "x": x,
                "y": likely,
                "customdata": hover,
                "line": {"color": colour, "dash": dashes[layout_name]},
                "marker": {"color": colour, "size": 6},
                "hovertemplate": f"{name}: %{{y:,.4g}} {bounds}, %{{customdata[2]}}<extra></extra>",
            }
        )
        if unfit := [i for i, row in enumerate(line) if not row["fits"]]:
            marks = {
                "x": [x[i] for i in unfit],
                "y": [likely[i] for i in unfit],
                "marker": {"color": colour, "size": 12, "symbol": "x"},
            }
            data.append(
                {**common, **marks, "mode": "markers", "hoverinfo": "skip", "showlegend": False}
            )
    if ideal:
        first = min((row for row in rows), key=lambda row: (row[at], -value(row, "value")))
        x = sorted({row[at] for row in rows})
        y = [_round(value(first, "value") * n / first[at]) for n in x]
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "linear",
                "x": x,
                "y": y,
                "hoverinfo": "skip",
                "line": {"color": "#999", "dash": "longdash"},
            }
        )
    ticks = sorted({row[at] for row in rows})
    layout = {
        "height": 460,
        "xaxis": {
            "title": {"text": "GPUs" if gpus else "tokens per sequence"},
            "type": "log",
            "tickvals": ticks,
            "ticktext": [str(n) if gpus else format_size(n) for n in ticks],
        },
        "yaxis": {
            "title": {"text": title},
            **({"type": "log", "dtick": "D2"} if ideal else {"rangemode": "tozero"}),
        },
    }
    return data, layout


def _short(exchange: str) -> str:
    return exchange.partition(" (")[0]


def _round(value: float) -> float:
    return float(f"{value:.5g}")
