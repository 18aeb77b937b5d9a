"""The times of experts in a recorded step (`mtrain profile step`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mtrain_cli.grouping import grouped
from mtrain_cli.parallel.recording import BACKWARD, FORWARD, RECOMPUTE
from mtrain_cli.reporting.table import Column, Table, fixed, number

Rows = Sequence[dict[str, Any]]  # of one recorded step and pass
Named = Sequence[tuple[str, dict[str, Any]]]  # name of a run, and content of its summary.json
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


def time_table(named: Named) -> Table:
    """Return a table with a row per recorded step and pass; without rows for dense models."""
    groups = grouped(time_rows(named), lambda row: (row["run"], row["direction"]))
    keys = ((run, direction) for run, _ in named for direction in _ORDER)
    rows = [groups[key] for key in keys if key in groups]
    several = len(named) > 1
    columns = [
        *([Column("run", lambda rows: rows[0]["run"], words=True)] if several else []),
        Column("pass", lambda rows: rows[0]["direction"], words=True),
        *(Column(name.removesuffix("_ms"), _mean(name), _ms) for name in _FIELDS),
        Column("worker imbalance", _imbalance, fixed(2)),
        Column("slowest layer", _slowest, drop=1),
    ]
    return Table("Experts, by layer", columns, rows, NOTE)


def _ms(value: float) -> str:
    return number(value, 3) if value else "0"


def _mean(name: str) -> Callable[[Rows], float]:
    return lambda rows: float(np.mean([row[name] for row in rows]))


def _by_layer(rows: Rows) -> dict[int, np.ndarray]:
    return {
        layer: np.array([row["experts_ms"] for row in own])
        for layer, own in grouped(rows, lambda row: row["layer"]).items()
    }


def _imbalance(rows: Rows) -> float:
    times = _by_layer(rows).values()
    return float(np.mean([ms.max() / ms.mean() if ms.any() else 1.0 for ms in times]))


def _slowest(rows: Rows) -> str:
    slowest, layer = max((float(ms.max()), -layer) for layer, ms in _by_layer(rows).items())
    return f"{-layer} ({number(slowest)})"
