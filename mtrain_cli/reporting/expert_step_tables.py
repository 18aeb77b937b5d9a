"""The times of experts in a recorded step (`mtrain profile step`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from mtrain_cli.grouping import grouped
from mtrain_cli.parallel.recording import BACKWARD, FORWARD, RECOMPUTE
from mtrain_cli.reporting.terminal_width import new_table, number

Named = Sequence[tuple[str, dict[str, Any]]]  # name of a run, and content of its summary.json
HEADS = ("run", "pass", "router", "experts", "waits", "worker imbalance", "slowest layer")
NOTE = (
    "ms of a layer with experts in the recorded step, mean over layers and ranks. router: without "
    "its backward pass; experts: products and element-wise kernels; waits: messages of router and "
    "experts that do not overlap with computation; worker imbalance: largest over mean of the "
    "experts' time across ranks, mean over layers; slowest layer: with its time on the slowest rank"
)
_FIELDS = ("router_ms", "experts_ms", "waits_ms")
_ORDER = (FORWARD, RECOMPUTE, BACKWARD)


def time_rows(named: Named) -> Iterator[dict[str, Any]]:
    """Yield the rows of expert_times.csv: one per recorded step, rank, layer and pass."""
    for run, document in named:
        for rank in document["ranks"]:
            for row in rank.get("experts") or ():  # not in files of earlier versions
                times = {name: float(row[name]) for name in _FIELDS}
                place = {"layer": int(row["layer"]), "direction": str(row["direction"])}
                yield {"run": run, "rank": rank["rank"], **place, **times}


def time_cells(named: Named) -> list[list[str]]:
    """Return a row per recorded step and pass, with the cells of `HEADS`."""
    groups = grouped(time_rows(named), lambda row: (row["run"], row["direction"]))
    runs = [run for run, _ in named]
    return [
        [run, direction, *_of_pass(groups[run, direction])]
        for run in runs
        for direction in _ORDER
        if (run, direction) in groups
    ]


def _of_pass(rows: Sequence[dict[str, Any]]) -> list[str]:
    of_layer = {
        layer: np.array([row["experts_ms"] for row in mine])
        for layer, mine in grouped(rows, lambda row: row["layer"]).items()
    }
    degrees = [float(ms.max() / ms.mean()) if ms.any() else 1.0 for ms in of_layer.values()]
    slowest = max(of_layer, key=lambda layer: float(of_layer[layer].max()))
    means = [float(np.mean([row[name] for row in rows])) for name in _FIELDS]
    return [
        *(number(mean, 3) if mean else "0" for mean in means),
        f"{np.mean(degrees):.2f}",
        f"{slowest} ({number(float(of_layer[slowest].max()), 3)})",
    ]


def time_table(document: dict[str, Any]) -> Table | None:
    """Return the table of one recorded step; None for a model without experts."""
    rows = time_cells([("", document)])
    if not rows:
        return None
    table = new_table(HEADS[1:], title="Experts, by layer", caption=NOTE)
    for _, direction, *cells in rows:
        table.add_row(Text(direction), *cells)
    return table
