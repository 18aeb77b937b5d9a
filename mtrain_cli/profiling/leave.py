"""The files of a profile: parts after every sample, and at the end one table, the indices, a trace and the summary."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mtrain_cli.attention.index import BlockBitmap, Index
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.parallel.recording import ATTENTION, COLUMNS, FORWARD
from mtrain_cli.profiling import records
from mtrain_cli.profiling.measure import Bench, Case, Plan, slowest
from mtrain_cli.profiling.work import own_work

# Masks of a micro-batch, and the index of every layer; None for dense attention.
Estimated = tuple[list[SequenceMask], Mapping[int, Index] | None]


class Leaving:
    """What becomes of the samples. Called alike by all workers; the first one writes."""

    def __init__(self, run_dir: RunDir, plan: Plan, bench: Bench, cases: Sequence[Case]) -> None:
        self.folder, self.plan, self.bench, self.cases = run_dir.path, plan, bench, cases
        self.samples = 0
        self.first = bench.environment.rank == 0
        self._parts = 0
        self._waiting: list[np.ndarray] = []
        self._times: dict[int, list[tuple[float, float]]] = {case.number: [] for case in cases}
        facts = run_dir.environment
        self._document: dict[str, Any] = {
            "kind": "profile",
            "mode": plan.mode,
            "complete": False,
            "workers": bench.environment.workers,
            "samples_wanted": plan.samples,
            "samples": 0,
            "environment": json.loads(facts.read_text()) if self.first and facts.exists() else {},
            "clock": {"uncertainty_us": None},
            "overhead": None,
            "cases": [case.facts(bench.environment) for case in cases],
            "peers": [],
            "results": [],
        }
        self._document["command"] = self._document["environment"].get("command", [])
        if self.first:
            records.write_summary(self.folder, self._document)

    def recorded(self, case: Case, iteration: int, estimated: Sequence[Estimated]) -> None:
        """The iteration that was just recorded. iteration: training step, or sample where attention alone is measured."""
        work = own_work(case, estimated)
        rows = self.bench.collector.collect(case.number, iteration, work, case.flop)
        if self.first:
            self._waiting.append(rows)

    def timed(self, case: Case, plain: float, recorded: float) -> None:
        """Seconds of one iteration on this worker, without and with records."""
        self._times[case.number].append((plain, recorded))

    def sampled(self, iteration: int) -> None:  # noqa: ARG002
        """One sample of every case is complete."""
        self.samples += 1
        if self.first:
            records.write_part(np.concatenate(self._waiting), self.folder, self.samples)
            self._waiting.clear()
            self._document["samples"] = self.samples
            records.write_summary(self.folder, self._document)

    def finish(self) -> dict[str, Any]:
        """Joins what there is -> the summary, on the first worker."""
        environment = self.bench.environment
        everyone = self.bench.everyone((self._times, self.bench.collector.uncertainty))
        indices = self._indices()
        if not self.first:
            return {}
        for case, facts in zip(self.cases, self._document["cases"], strict=True):
            times = [mine[case.number] for mine, _ in everyone]
            if times[0]:
                plain, recorded = slowest(times).T
                facts["iteration_ms"] = [round(float(ms), 4) for ms in plain * 1e3]
                facts["overhead"] = float(np.median(recorded / plain) - 1)
        overheads = [facts["overhead"] for facts in self._document["cases"] if facts.get("overhead") is not None]
        self._document["overhead"] = statistics.fmean(overheads) if overheads else None
        self._document["clock"] = {"uncertainty_us": max(uncertainty for _, uncertainty in everyone) * 1e6}
        self._document["complete"] = self.samples >= self.plan.samples
        records.join_parts(self.folder)
        records.write_summary(self.folder, self._document)
        if indices:
            save_indices(self.folder / records.INDEX, indices)
        if self.samples:
            recorded = records.open_records(self.folder)
            found = analyse(recorded)
            self._document["results"] = [case.to_json() for case in found]
            records.write_summary(self.folder, self._document)
            write_trace(recorded, self.folder / records.TRACE)
        del environment
        return self._document
