"""The files of a profile: parts after every sample, and at the end one table, the indices, a trace and the summary."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mtrain_cli.attention.index import BlockBitmap, Index
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.config.schema import Config
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.profiling import records
from mtrain_cli.profiling.analysis import analyse
from mtrain_cli.profiling.index_file import RecordedSetup, save_indices
from mtrain_cli.profiling.measurement import (
    ATTENTION_ONLY,
    Bench,
    MeasurementCase,
    MeasurementPlan,
    slowest,
)
from mtrain_cli.profiling.recorded_work import Estimated, own_work
from mtrain_cli.reporting.report_source import open_source
from mtrain_cli.reporting.tables import recording_cost
from mtrain_cli.reporting.terminal import make_console, show_sources
from mtrain_cli.reporting.trace import write_trace
from mtrain_cli.training.flops import causal_pairs


class ProfileWriter:
    """What becomes of the samples. Called alike by all workers; the first one writes.

    cases: those to come, each with its place among the entries of the summary. entries: of these and of earlier attempts; None: of cases
    alone. folder: where files are left, None for the run's own.
    """

    def __init__(
        self,
        run_dir: RunDir,
        plan: MeasurementPlan,
        bench: Bench,
        cases: Sequence[MeasurementCase],
        folder: Path | None = None,
        entries: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        self.folder, self.plan, self.bench, self.cases = folder or run_dir.path, plan, bench, cases
        self.samples = 0
        self.first = bench.environment.rank == 0
        self.problem: str | None = None  # with what was to be written
        self._waiting: list[np.ndarray] = []
        self._latest: dict[int, np.ndarray] = {}  # by case: rows of its last iteration
        self._last: dict[int, Sequence[Estimated]] = {}
        self._iteration = 0
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
            "cases": [case.facts(bench.environment) for case in cases]
            if entries is None
            else list(entries),
            "peers": [],
            "results": [],
        }
        self._document["command"] = self._document["environment"].get("command", [])
        if self.first:
            records.write_summary(self.folder, self._document)

    def recorded(
        self, case: MeasurementCase, iteration: int, estimated: Sequence[Estimated]
    ) -> None:
        """The iteration that was just recorded. iteration: training step, or sample where attention alone is measured."""
        # Devices keep nothing of it.
        held = [
            (masks, None if found is None else {n: index.to("cpu") for n, index in found.items()})
            for masks, found in estimated
        ]
        work = own_work(case.exchange, case.config.model.num_heads, self._layers(case), held)
        self._last[case.number], self._iteration = held, iteration
        rows = self.bench.collector.collect(case.number, iteration, work, case.flop)
        if self.first:
            self._waiting.append(rows)
            self._latest[case.number] = rows

    def _layers(self, case: MeasurementCase) -> range:
        return range(1 if self.plan.mode == ATTENTION_ONLY else case.config.model.num_layers)

    def timed(self, case: MeasurementCase, plain: float, recorded: float) -> None:
        """Seconds of one iteration on this worker, without and with records."""
        self._times[case.number].append((plain, recorded))

    def sampled(self, number: int, samples: int) -> None:
        """Writes what was recorded since the last time as a part of that number. samples: complete ones, of all cases, so far."""
        self.samples = self._document["samples"] = samples
        if not self.first:
            return
        rows = np.concatenate(self._waiting)
        self._waiting.clear()
        self._note_density(rows)
        records.write_part(rows, self.folder, number)
        records.write_summary(self.folder, self._document)

    def measured(self, case: MeasurementCase, **values: float) -> None:
        """values: for the entry of a case in the summary."""
        self._document["cases"][case.number].update(values)

    def peer(self, measured: dict[str, Any]) -> None:
        """What was measured of others, for the summary."""
        self._document["peers"].append(measured)

    def facts(self, case: MeasurementCase) -> dict[str, Any]:
        """The entry of a case in the summary."""
        return self._document["cases"][case.number]

    def _note_density(self, rows: np.ndarray) -> None:
        """Of the cases in rows: pairs computed over causal pairs, the mean over heads, layers and sequences."""
        forward = rows[rows["direction"] == records.WORDS["direction"].index("forward")]
        for case in self.cases:
            config = case.config
            sequences = (
                config.train.micro_batch
                if self.plan.mode == ATTENTION_ONLY
                else config.train.global_batch
            )
            every = (
                config.model.num_heads
                * len(self._layers(case))
                * sequences
                * causal_pairs(config.seq)
            )
            if self.plan.mode == ATTENTION_ONLY:
                every *= self.bench.environment.dp
            mine = forward["pairs"][forward["case"] == case.number]
            if len(mine):
                self._document["cases"][case.number]["density"] = float(mine.sum() / every)

    def finish(self, *, analysed: bool = True) -> None:
        """Indices, trace and summary; on the first worker. analysed: with one table of all parts, and results in the summary."""
        everyone = self.bench.everyone((self._times, self.bench.collector.uncertainty))
        self.save_indices()
        if not self.first:
            return
        for case in self.cases:
            times = [mine[case.number] for mine, _ in everyone]
            if times[0]:
                plain, recorded = slowest(times).T
                self.measured(case, overhead=float(np.median(recorded / plain) - 1))
                for name, seconds in (("iteration_ms", plain), ("recorded_ms", recorded)):
                    self.facts(case)[name] = [round(float(ms), 4) for ms in seconds * 1e3]
        overheads = [
            facts["overhead"]
            for facts in self._document["cases"]
            if facts.get("overhead") is not None
        ]
        self._document["overhead"] = statistics.fmean(overheads) if overheads else None
        self._document["clock"] = {
            "uncertainty_us": max(uncertainty for _, uncertainty in everyone) * 1e6
        }
        self._document["complete"] = self.samples >= self.plan.samples
        if analysed:
            records.join_parts(self.folder)
        records.write_summary(self.folder, self._document)
        if not self._latest:
            return
        if analysed:
            self._document["results"] = [
                found.to_json() for found in analyse(records.open_records(self.folder))
            ]
            records.write_summary(self.folder, self._document)
        write_trace(
            np.concatenate(list(self._latest.values())), self._document, self.folder / records.TRACE
        )

    def show(self) -> None:
        """Prints what was found, on the first worker."""
        if not self.first or not self._latest:
            return
        source = open_source(self.folder)
        console = make_console()
        show_sources(console, [source])
        if (cost := recording_cost(self._document)) is not None:
            console.print(f"recording  {cost}", soft_wrap=True)
        console.print(f"files  {self.folder}", soft_wrap=True)
        console.print(f"draw   mtrain report {shlex.quote(str(self.folder))}", soft_wrap=True)
        console.print(
            f"other  mtrain profile what-if {shlex.quote(str(self.folder))}", soft_wrap=True
        )

    def save_indices(self) -> None:
        """Writes the indices of the last sample, those of the first forward pass of the first context group: one set for each pattern."""
        first = self.cases[0]
        chosen = {
            case.config.sparsity.pattern: case
            for case in reversed(self.cases)
            if case.config.seq == first.config.seq
        }
        cases = [
            chosen[name]
            for name in dict.fromkeys(case.config.sparsity.pattern for case in self.cases)
            if name in chosen
        ]
        cases = [case for case in cases if case.number in self._last]
        if not cases:
            return
        masks, _ = self._last[cases[0].number][0]
        columns = {case.config.sparsity.pattern: _most_columns(case.config) for case in cases}
        setup = RecordedSetup(
            seq=first.config.seq,
            heads=first.config.model.num_heads,
            kv_heads=first.config.model.num_kv_heads,
            head_dim=first.config.model.head_dim,
            dtype_bytes=first.choices.dtype.itemsize,
            workers=self.bench.environment.cp,
            per_node=first.exchange.schedule.per_node,
            layout=first.config.layout,
            exchange=first.exchange.schedule.exchange,
            block_size=first.config.topology.block_size,
            needs_out=first.choices.kernel.needs_out,
            iteration=self._iteration,
            columns={name: most for name, most in columns.items() if most != 0},
        )
        found = self._parts_of_indices(cases)
        if self.first:
            self._write_indices(setup, masks, found)
        for _ in found:  # to the end, on every worker
            pass

    def _write_indices(
        self,
        setup: RecordedSetup,
        masks: Sequence[SequenceMask],
        found: Iterator[tuple[str, int, Index | None]],
    ) -> None:
        try:
            save_indices(self.folder / records.INDEX, setup, masks, found)
        except OSError as error:
            self.problem = (
                f"{self.folder / records.INDEX}: could not be written ({error.strerror or error})"
            )

    def _parts_of_indices(
        self, cases: Sequence[MeasurementCase]
    ) -> Iterator[tuple[str, int, Index | None]]:
        """Layer by layer, called alike by all workers; on the first one everything that is there."""
        e = self.bench.environment
        for case in cases:
            _, indices = self._last[case.number][0]
            for layer in self._layers(case):
                index = indices.get(layer) if indices is not None else None
                mine = (
                    index.to("cpu")
                    if index is not None and e.rank < e.cp and (self.first or _in_parts(index))
                    else None
                )
                everyone = [mine] if self.first else None
                if index is not None and _in_parts(index):
                    everyone = self._gathered(mine)
                if indices is None:
                    yield case.config.sparsity.pattern, layer, None
                for part in everyone or ():
                    if part is not None:
                        yield case.config.sparsity.pattern, layer, part

    def _gathered(self, mine: Index | None) -> list[Index | None] | None:
        """Bitmaps of all workers on the first one, sent as arrays."""
        assert mine is None or isinstance(mine, BlockBitmap)
        sent = (
            None
            if mine is None
            else (mine.block, mine.blocks, mine.bits.numpy(), mine.rows.numpy())
        )
        everyone: list[Any] | None = [None] * self.bench.environment.workers if self.first else None
        dist.gather_object(sent, everyone, group=self.bench.host_group)
        if everyone is None:
            return None
        return [
            None
            if part is None
            else BlockBitmap(part[0], part[1], torch.from_numpy(part[2]), torch.from_numpy(part[3]))
            for part in everyone
        ]


def _in_parts(index: Index) -> bool:
    """Whether every worker holds the rows of its own queries only."""
    return isinstance(index, BlockBitmap) and len(index.rows) < index.blocks


def _most_columns(config: Config) -> int | None:
    """As `exchange_selection.ExchangeNeeds` wants it."""
    sparsity = config.sparsity
    if sparsity.pattern == "vertical_slash":
        return sparsity.max_columns or None
    return sparsity.columns or 0
