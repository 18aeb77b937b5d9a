"""Traces of played records: every row is a slice on the thread of its rank, in order."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict

import pytest
from synthetic_records import Play, facts_of, ring, rows_of

from mtrain_cli.parallel.recording import COMPUTING, GAP, KINDS, RECEIVE, SEND
from mtrain_cli.reporting import trace
from mtrain_cli.reporting.trace import write_trace

PLAY = Play(ring(4), lambda _d, r, s: 1 + 0.2 * r + 0.1 * s, link={"context": 0.3}, merge=0.05)


def written(folder, layers=(0, 1)):
    """Write a trace. Return the records, the number of slices, and the events."""
    rows = rows_of(PLAY, layers=layers)
    summary = {"cases": [facts_of(PLAY.schedule)], "workers": 4}
    count = write_trace(rows, summary, folder / "trace.json")
    return rows, count, json.loads((folder / "trace.json").read_text())


def test_every_row_but_gaps_and_empty_phases_is_a_slice(tmp_path):
    rows, count, document = written(tmp_path)
    empty = [KINDS.index(kind) for kind in COMPUTING]
    shown = [
        row
        for row in rows
        if row["phase"] != KINDS.index(GAP) and (row["dur_us"] > 0 or row["phase"] not in empty)
    ]
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == count == len(shown)
    assert document["otherData"]["mtrain"]["layers"] == [0, 1]
    total = sum(float(row["dur_us"]) for row in shown)
    assert sum(event["dur"] for event in slices) == pytest.approx(total, rel=1e-4)


def test_slices_of_one_thread_nest_or_follow_each_other(tmp_path):
    _, _, document = written(tmp_path)
    threads = defaultdict(list)
    for event in document["traceEvents"]:
        if event["ph"] == "X" and event["cat"] != "span":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(threads) > 8, "each of four ranks has a compute stream, sends and arrivals"
    for times in threads.values():
        times.sort()
        for (_, end), (begin, _) in itertools.pairwise(times):
            assert end <= begin + 2e-3


def test_arrows_lead_from_each_send_to_its_arrival(tmp_path):
    rows, _, document = written(tmp_path)
    events = document["traceEvents"]
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert set(starts) == set(ends)
    assert len(starts) == sum(rows["phase"] == KINDS.index(SEND))
    assert len(starts) == sum(rows["phase"] == KINDS.index(RECEIVE))
    for number, start in starts.items():
        assert (ends[number]["pid"] - start["pid"]) % 4 in (1, 3), "a neighbour in the ring"
        assert ends[number]["ts"] >= start["ts"]


def test_a_large_trace_has_only_some_layers(tmp_path, monkeypatch):
    layers = tuple(range(8))
    rows = rows_of(PLAY, layers=layers)
    monkeypatch.setattr(trace, "MOST_ROWS", len(rows) // 2)
    _, _, document = written(tmp_path, layers)
    shown = document["otherData"]["mtrain"]["layers"]
    assert 2 <= len(shown) < 8
    assert {shown[0], shown[-1]} == {0, 7}
