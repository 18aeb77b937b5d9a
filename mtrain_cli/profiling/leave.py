"""The files of a profile: parts after every sample, and at the end one table, the indices, a trace and the summary."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.profiling import records
from mtrain_cli.profiling.analysis import analyse
from mtrain_cli.profiling.measure import ATTENTION_ONLY, Bench, Case, Plan, slowest
from mtrain_cli.profiling.work import Estimated, own_work
from mtrain_cli.reporting.trace import write_trace
from mtrain_cli.training.flops import causal_pairs


class Leaving:
    """What becomes of the samples. Called alike by all workers; the first one writes."""

    def __init__(self, run_dir: RunDir, plan: Plan, bench: Bench, cases: Sequence[Case], folder: Path | None = None) -> None:
        """folder: where files are left, None for the run's own."""
        self.folder, self.plan, self.bench, self.cases = folder or run_dir.path, plan, bench, cases
        self.samples = 0
        self.first = bench.environment.rank == 0
        self._parts = records.reopen(self.folder) if self.first else 0
        self._waiting: list[np.ndarray] = []
        self._last: dict[int, Sequence[Estimated]] = {}
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
        work = own_work(case.exchange, case.config.model.num_heads, self._layers(case), estimated)
        self._last[case.number] = estimated
        rows = self.bench.collector.collect(case.number, iteration, work, case.flop)
        if self.first:
            self._waiting.append(rows)

    def _layers(self, case: Case) -> range:
        return range(1 if self.plan.mode == ATTENTION_ONLY else case.config.model.num_layers)

    def timed(self, case: Case, plain: float, recorded: float) -> None:
        """Seconds of one iteration on this worker, without and with records."""
        self._times[case.number].append((plain, recorded))

    def sampled(self) -> None:
        """One sample of every case is complete."""
        self.samples += 1
        self._write_part()

    def sampled_case(self) -> None:
        """A sample of one case is complete, where cases follow one another."""
        self._write_part()

    def case_done(self, case: Case, **measured: float) -> None:
        """All samples of one case are complete. measured: for its entry in the summary."""
        self._document["cases"][case.number].update(measured)
        if case.number == len(self.cases) - 1:
            self.samples = self.plan.samples
            self._document["samples"] = self.samples

    def peer(self, measured: dict[str, Any]) -> None:
        """What was measured of others, for the summary."""
        self._document["peers"].append(measured)

    def facts(self, case: Case) -> dict[str, Any]:
        """The entry of a case in the summary."""
        return self._document["cases"][case.number]

    def _write_part(self) -> None:
        if not self.first:
            return
        rows = np.concatenate(self._waiting)
        self._waiting.clear()
        self._note_density(rows)
        self._parts += 1
        records.write_part(rows, self.folder, self._parts)
        self._document["samples"] = self.samples
        records.write_summary(self.folder, self._document)

    def _note_density(self, rows: np.ndarray) -> None:
        """Of the cases in rows: pairs computed over causal pairs, the mean over heads, layers and sequences."""
        forward = rows[rows["direction"] == records.WORDS["direction"].index("forward")]
        for case in self.cases:
            config = case.config
            sequences = config.train.micro_batch if self.plan.mode == ATTENTION_ONLY else config.train.global_batch
            every = config.model.num_heads * len(self._layers(case)) * sequences * causal_pairs(config.seq)
            if self.plan.mode == ATTENTION_ONLY:
                every *= self.bench.environment.dp
            mine = forward["pairs"][forward["case"] == case.number]
            if len(mine):
                self._document["cases"][case.number]["density"] = float(mine.sum() / every)

    def finish(self) -> dict[str, Any]:
        """Joins what there is -> the summary, on the first worker."""
        everyone = self.bench.everyone((self._times, self.bench.collector.uncertainty))
        self._save_indices()
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
        if self._parts:
            recorded = records.open_records(self.folder)
            self._document["results"] = [found.to_json() for found in analyse(recorded)]
            records.write_summary(self.folder, self._document)
            write_trace(recorded, self.folder / records.TRACE)
        return self._document

    def _save_indices(self) -> None:
        """Writes the indices of the last sample, those of the first context group: one set for each pattern."""
        for case in self.cases:
            del case
