"""The table and CSV file of a sweep of `mtrain simulate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from mtrain_cli.grouping import grouped
from mtrain_cli.parallel.exchange_selection import short_label
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


def sweep_table(runs: Sequence[tuple[str, Sequence[Row]]]) -> Table:
    """Return a table with a row per configuration, and sweep.csv. runs: (name, rows) of each run.

    A row is `BEST` if it is the fastest that fits into memory, among rows with equal settings and
    number of GPUs. It is `NOT` if it does not fit, or is impossible (`why_not` says why).
    """
    every = [(run, row) for run, rows in runs for row in rows]
    points = dict.fromkeys(name for _, row in every for name in row.get("point", {}))

    def group(run: str, row: Row) -> tuple:
        settings = (item for item in row.get("point", {}).items() if item[0] not in _AXES)
        return run, *settings, row["workers"]

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

    def bounds(row: Row) -> str | None:
        low, high = row["seconds"]["low"], row["seconds"]["high"]
        # Equal bounds were not predicted: a search predicts them for its two best.
        return f"{number(low)} - {number(high)}" if low < high else None

    def rate(row: Row) -> float:
        return row["tokens_per_second_per_gpu"]["value"]

    def groups(row: Row) -> str | None:
        return f"{row['dp']} x {row['cp']}" if "dp" in row else None

    def fits(row: Row) -> str:
        return "impossible" if "cannot" in row else "yes" if row["fits"] else "no"

    def degree(name: str) -> Callable[[Row], Any]:
        return lambda row: row.get("degrees", {}).get(name)

    several_sizes = len({row.get("workers") for _, row in every}) > 1
    several_groups = any(row.get("dp", 1) > 1 for _, row in every)
    named = any("configuration" in row for _, row in every)
    sparse = any(row.get("density", 1) < 1 for _, row in every)
    dense = any(row.get("mfu") is not None for _, row in every)
    columns = [
        Column("run" * (len(runs) > 1), itemgetter(0), key="run", words=True),
        *map(swept, points),
        _column("GPUs" * several_sizes, _get("workers"), key="workers"),
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
        _column("tokens/s/GPU", possible(rate), count, "tokens_per_second_per_gpu"),
        _column("MFU" * dense, _get("mfu"), percent, "mfu", drop=4),
        _column("HFU", _get("hfu"), percent, "hfu", drop=1),
        _column("worker", degree("worker_work"), fixed(2), drop=6),
        _column("step", degree("step_work"), fixed(2), drop=5),
        _column("GiB", possible(lambda row: row["memory_bytes"] / 2**30), fixed(1), "memory_gib"),
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


def why_not(rows: Sequence[Row]) -> list[str]:
    """Return the reasons why configurations are impossible, without repeats."""
    return list(dict.fromkeys(row["cannot"] for row in rows if "cannot" in row))
