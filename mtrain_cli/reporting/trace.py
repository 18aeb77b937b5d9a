"""Write records as `trace.json`, for Perfetto and chrome://tracing.

Each rank is a process. Its first thread is the compute stream; the others are lanes of the links,
since messages may overlap. An arrow connects the sending of a shard with its arrival. Every row is
one slice, except gaps, and compute phases and waits of zero duration.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from mtrain_cli.config.documents import replace_text
from mtrain_cli.parallel.recording import (
    COMPUTING,
    EXPERTS,
    GAP,
    ITERATION,
    KINDS,
    PASS,
    RECEIVE,
    SEND,
    STAGE,
)
from mtrain_cli.records.record_files import ROW, as_frame

MOST_ROWS = 400_000  # A browser can open this many. A larger trace has only some of the layers.
_COMPUTE = 0  # thread number of the compute stream
_LANES = 100  # thread numbers for each link class and direction


def write_trace(rows: np.ndarray, summary: dict[str, Any], path: Path) -> int:
    """Write the trace of all ranks to ``path``. Return the number of slices.

    rows: records of one iteration of every case, of dtype `ROW`.
    """
    rows = rows[rows["phase"] != KINDS.index(GAP)]
    if len(rows) > MOST_ROWS:
        layers = np.unique(rows["layer"][rows["layer"] >= 0])
        count = max(1, len(layers) * MOST_ROWS // len(rows))
        chosen = [-1, *layers[np.linspace(0, len(layers) - 1, count).astype(int)]]
        rows = rows[np.isin(rows["layer"], chosen)]
    frame = _in_order(as_frame({name: rows[name] for name in ROW.names or ()}))
    events = list(_events(frame, summary))
    shown = sorted(map(int, set(frame.layer) - {-1}))
    info = {"cases": [case["label"] for case in summary["cases"]], "layers": shown}
    document = {"displayTimeUnit": "ms", "otherData": {"mtrain": info}, "traceEvents": events}
    replace_text(path, json.dumps(document, separators=(",", ":")))
    return sum(event["ph"] == "X" for event in events)


def _in_order(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Shift the cases in time so that each case starts after the previous case ends."""
    begin = 0.0
    for case in sorted(set(rows.case)):
        mine = rows.case == case
        rows.loc[mine, "start_us"] += begin
        begin = float((rows.start_us + rows.dur_us)[mine].max()) * 1.02
    return rows


def _events(rows: pandas.DataFrame, summary: dict[str, Any]) -> Iterator[dict[str, Any]]:
    rows = rows.assign(tid=_COMPUTE)
    moved = rows.phase.isin([SEND, RECEIVE])
    names: dict[tuple[int, int], str] = {}
    for (rank, link, phase), mine in rows[moved].groupby(["rank", "link", "phase"], observed=True):
        first = _LANES * (1 + 2 * list(rows.link.cat.categories).index(link) + (phase == RECEIVE))
        lanes = _lanes(mine.start_us.to_numpy(), mine.dur_us.to_numpy())
        rows.loc[mine.index, "tid"] = first + lanes
        for lane in np.unique(lanes).tolist():
            names[int(rank), first + lane] = f"{link} {phase}" + f" {lane + 1}" * bool(lane)
    for rank in sorted(set(rows["rank"])):
        yield _meta(rank, 0, "process_name", f"rank {rank}")
        yield _meta(rank, 0, "process_sort_index", int(rank), "sort_index")
        yield _meta(rank, _COMPUTE, "thread_name", "attention")
    for (rank, tid), name in sorted(names.items()):
        yield _meta(rank, tid, "thread_name", name)
        yield _meta(rank, tid, "thread_sort_index", tid, "sort_index")
    order = {ITERATION: 0, STAGE: 1, PASS: 2}
    rows = rows.assign(depth=[order.get(phase, 3) for phase in rows.phase]).sort_values(
        ["rank", "tid", "start_us", "depth"]
    )
    for row in rows.itertuples():
        if row.phase in COMPUTING and not row.dur_us > 0:
            continue
        yield {
            "ph": "X",
            "cat": _category(row.phase),
            "name": _name(row),
            "pid": int(row.rank),
            "tid": int(row.tid),
            "ts": round(row.start_us, 3),
            "dur": round(float(row.dur_us), 3),
            "args": _arguments(row, summary["cases"]),
        }
    yield from _arrows(rows)


def _category(phase: str) -> str:
    if phase in (SEND, RECEIVE):
        return "message"
    return "span" if phase in (ITERATION, STAGE, PASS, EXPERTS) else "compute"


def _name(row: Any) -> str:
    if row.phase == PASS:
        return f"layer {row.layer} {row.direction}"
    if row.phase == EXPERTS:
        return f"experts of layer {row.layer} {row.direction}"
    if row.phase == STAGE:
        return f"stage {row.step} {row.direction}, micro-batch {row.micro}"
    if row.phase in (SEND, RECEIVE):
        return f"{row.phase} {row.payload}"
    return f"wait {row.link}".strip() if row.phase == "wait" else str(row.phase)


def _arguments(row: Any, cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    facts = cases[row.case]
    arguments: dict[str, Any] = {"case": facts["label"]}
    arguments |= {name: int(getattr(row, name)) for name in ("iteration", "layer", "step")}
    for kind, layers in facts.get("layer_kinds", {}).items():
        if row.layer in layers:
            arguments["layer_kind"] = kind
    present = [name for name in ("shard", "peer") if getattr(row, name) >= 0]
    present += [name for name in ("blocks", "columns", "pairs", "bytes") if getattr(row, name)]
    arguments |= {name: int(getattr(row, name)) for name in present}
    if row.late_us > 0:
        arguments["late_us"] = round(float(row.late_us), 3)
    return arguments


def _lanes(start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Return a lane for each interval, so that the intervals of one lane do not overlap."""
    ends: list[float] = []
    lanes = np.zeros(len(start), np.int64)
    for at in np.argsort(start, kind="stable"):
        # The margins allow for rounding: the trace has times in whole nanoseconds.
        lane = next((lane for lane, end in enumerate(ends) if end <= start[at] + 1e-3), len(ends))
        if lane == len(ends):
            ends.append(0.0)
        ends[lane] = start[at] + length[at] + 2e-3
        lanes[at] = lane
    return lanes


def _arrows(rows: pandas.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield an arrow from the k-th send of a shard between two ranks to its k-th arrival."""
    key = ["case", "iteration", "micro", "layer", "direction", "payload", "shard"]
    hops = rows[rows.phase.isin([SEND, RECEIVE]) & (rows.peer >= 0)].sort_values("start_us")
    sent, received = hops[hops.phase == SEND].copy(), hops[hops.phase == RECEIVE].copy()
    sent["source"], sent["to"] = sent["rank"], sent["peer"]
    received["source"], received["to"] = received["peer"], received["rank"]
    both = [*key, "source", "to"]
    for table in (sent, received):
        table["turn"] = table.groupby(both, observed=True).cumcount()
    pairs = sent.merge(received, on=[*both, "turn"], suffixes=("_s", "_r"))
    for number, row in enumerate(pairs.itertuples()):
        arrow = {"cat": "shard", "name": f"{row.payload}", "id": number}
        begin = row.start_us_s
        end = max(row.start_us_r + row.dur_us_r, begin)
        start = {"ph": "s", "pid": int(row.source), "tid": int(row.tid_s), "ts": round(begin, 3)}
        stop = {"pid": int(row.to), "tid": int(row.tid_r), "ts": round(end, 3)}
        yield {**arrow, **start}
        yield {**arrow, "ph": "f", "bp": "e", **stop}


def _meta(rank: int, tid: int, kind: str, value: Any, key: str = "name") -> dict[str, Any]:
    place = {"pid": int(rank), "tid": int(tid), "ts": 0}
    return {"ph": "M", "name": kind, **place, "args": {key: value}}
