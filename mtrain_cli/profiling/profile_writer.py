"""Write a profile: rows after each sample; records, indices, trace and summary at the end."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mtrain_cli.attention.index import BlockBitmap, GatedBitmap, Index, StartBitmap, VerticalSlash
from mtrain_cli.launch.failures import not_written
from mtrain_cli.profiling.measurement import ATTENTION_ONLY, Bench, MeasurementCase, MeasurementPlan
from mtrain_cli.profiling.record_collector import Estimated, own_loads, own_work
from mtrain_cli.records import expert_loads, record_files
from mtrain_cli.records.analysis import analyse
from mtrain_cli.records.expert_loads import analyse_experts
from mtrain_cli.records.index_file import RecordedSetup, save_indices
from mtrain_cli.reporting.report_source import open_source
from mtrain_cli.reporting.sections import show_sources
from mtrain_cli.reporting.tables import recording_cost
from mtrain_cli.reporting.terminal import make_console
from mtrain_cli.reporting.trace import write_trace
from mtrain_cli.training.flops import causal_pairs
from mtrain_cli.training.router_batches import OwnLoads


class ProfileWriter:
    """Writes the samples of a profile. All workers call the same methods; the first worker writes.

    folder: folder to write to; by default the run's folder.
    entries: the summary's entries of all cases, with those of earlier attempts.
    """

    def __init__(
        self,
        plan: MeasurementPlan,
        bench: Bench,
        cases: Sequence[MeasurementCase],
        folder: Path | None = None,
        entries: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        self.folder, self.plan = folder or bench.run_dir.path, plan
        self.bench, self.first, self.cases, self.samples = bench, bench.first, cases, 0
        self.problem: str | None = None  # the last write error
        self._waiting: list[np.ndarray] = []
        self._loads: list[np.ndarray] = []
        self._latest: dict[int, np.ndarray] = {}  # rows of the latest iteration, by case
        self._last: dict[int, Sequence[Estimated]] = {}
        self._iteration = 0
        self._times: dict[int, list[tuple[float, float]]] = {case.number: [] for case in cases}
        facts = bench.facts() if self.first else {}
        if entries is None:
            entries = [case.facts(bench.environment) for case in cases]
        self._document: dict[str, Any] = {
            **{"kind": "profile", "mode": plan.mode, "complete": False},
            "workers": bench.environment.dims.workers,
            **{"samples_wanted": plan.samples, "samples": 0, "environment": facts},
            **{"clock": {"uncertainty_us": None}, "overhead": None},
            **{"cases": list(entries), "results": [], "command": facts.get("command", [])},
            "peers": [],
        }
        if self.first:
            record_files.write_summary(self.folder, self._document)

    def recorded(
        self,
        case: MeasurementCase,
        iteration: int,
        estimated: Sequence[Estimated],
        loads: OwnLoads | None = None,
    ) -> None:
        """Collect the rows of the iteration that just ended.

        Args:
            iteration: number of the training step, or of the sample of an attention-only profile.
            loads: loads of the experts by this worker's tokens; None for a model without experts.
        """
        # Keep the indices in host memory, not on the GPU.
        held = [
            of._replace(indices=of.indices and {i: x.to("cpu") for i, x in of.indices.items()})
            for of in estimated
        ]
        heads = case.config.of_worker.model.num_heads
        work = own_work(case.exchange, heads, self._layers(case), held)
        self._last[case.number], self._iteration = held, iteration
        rows = self.bench.collector.collect(case.number, iteration, work, case.flop)
        if loads is not None:
            rank = self.bench.environment.rank
            self._loads += self.bench.gather(own_loads(loads, case.number, iteration, rank))
        if self.first:
            self._waiting.append(rows)
            self._latest[case.number] = rows

    def _layers(self, case: MeasurementCase) -> Sequence[int]:
        if self.plan.mode == ATTENTION_ONLY:
            return case.single_layers
        return range(case.config.model.num_layers) if case.layers is None else case.layers

    def timed(self, case: MeasurementCase, plain: float, recorded: float) -> None:
        """Add this worker's times of an iteration without and with recording, in seconds."""
        self._times[case.number].append((plain, recorded))

    def sampled(self, number: int, samples: int) -> None:
        """Write the rows since the last call.

        Args:
            number: number of the file of rows.
            samples: number of samples that all cases have completed so far.
        """
        self.samples = self._document["samples"] = samples
        if not self.first:
            return
        rows = np.concatenate(self._waiting)
        loads = np.concatenate(self._loads or [np.empty(0, expert_loads.ROW)])
        self._waiting, self._loads = [], []
        self._note_density(rows)
        record_files.write_part(rows, self.folder, number)
        if len(loads):
            record_files.write_part(loads, self.folder, number, expert_loads.LOAD_PARTS)
        record_files.write_summary(self.folder, self._document)

    def peer(self, measured: dict[str, Any]) -> None:
        """Add the times of another implementation to the summary."""
        self._document["peers"].append(measured)

    def facts(self, case: MeasurementCase) -> dict[str, Any]:
        """Return the case's entry in the summary, to read or change it."""
        return self._document["cases"][case.number]

    def _note_density(self, rows: np.ndarray) -> None:
        alone = self.plan.mode == ATTENTION_ONLY
        forward = rows[rows["direction"] == record_files.WORDS["direction"].index("forward")]
        for case in self.cases:
            config, train = case.config, case.config.train
            sequences = (
                train.micro_batch * self.bench.environment.dims.dp if alone else train.global_batch
            )
            layers = len(self._layers(case))
            every = config.model.num_heads * layers * sequences * causal_pairs(config.seq)
            pairs = forward["pairs"][forward["case"] == case.number]
            if len(pairs):
                self.facts(case)["density"] = float(pairs.sum() / every)

    def finish(self, *, analysed: bool = True) -> None:
        """Write indices, trace and summary. analysed: join the files of rows, and add results."""
        everyone = self.bench.gather((self._times, self.bench.collector.uncertainty))
        self.save_indices()
        if not self.first:
            return
        for case in self.cases:
            times = np.array([mine[case.number] for mine, _ in everyone], dtype=np.float64)
            if times.size:  # [workers, iterations, 2]
                plain, recorded = times.max(0).T
                self.facts(case)["overhead"] = float(np.median(recorded / plain) - 1)
                for name, seconds in (("iteration_ms", plain), ("recorded_ms", recorded)):
                    self.facts(case)[name] = [round(float(ms), 4) for ms in seconds * 1e3]
        known = [facts.get("overhead") for facts in self._document["cases"]]
        overheads = [overhead for overhead in known if overhead is not None]
        self._document["overhead"] = statistics.fmean(overheads) if overheads else None
        self._document["clock"] = {
            "uncertainty_us": max(uncertainty for _, uncertainty in everyone) * 1e6
        }
        self._document["complete"] = self.samples >= self.plan.samples
        if analysed:
            record_files.join_parts(self.folder)
            record_files.join_parts(self.folder, expert_loads.LOAD_PARTS, expert_loads.LOADS)
        record_files.write_summary(self.folder, self._document)
        if not self._latest:
            return
        if analysed:
            recorded = record_files.open_records(self.folder)
            experts = {each.case: each.to_json() for each in analyse_experts(recorded)}
            self._document["results"] = [
                case.to_json() | ({"experts": experts[case.number]} if experts else {})
                for case in analyse(recorded)
            ]
            record_files.write_summary(self.folder, self._document)
        latest = np.concatenate(list(self._latest.values()))
        write_trace(latest, self._document, self.folder / record_files.TRACE)

    def show(self) -> None:
        """Print the tables and the paths of the files, on the first worker."""
        if not self.first or not self._latest:
            return
        console, folder = make_console(), shlex.quote(str(self.folder))
        show_sources(console, [open_source(self.folder)])
        for peer in self._document["peers"]:
            times = f"{peer['forward_ms']:.1f} ms forward, {peer['backward_ms']:.1f} ms backward"
            console.print(f"peer  {peer['label']}, {peer['seq']:,} tokens: {times}", soft_wrap=True)
        if (cost := recording_cost(self._document)) is not None:
            console.print(f"recording  {cost}", soft_wrap=True)
        console.print(f"files  {self.folder}", soft_wrap=True)
        console.print(f"draw   mtrain report {folder}", soft_wrap=True)
        console.print(f"other  mtrain profile what-if {folder}", soft_wrap=True)

    def save_indices(self) -> None:
        """Write the indices of each pattern in the last sample, for its first micro-batch.

        They are those of the first context group; with tensor parallelism, of its first heads.
        """
        first = self.cases[0]
        model = first.config.of_worker.model
        chosen: dict[str, MeasurementCase] = {}
        for case in self.cases:
            if case.config.seq == first.config.seq:
                chosen.setdefault(case.config.sparsity.pattern, case)
        cases = [case for case in chosen.values() if case.number in self._last]
        # The file has masks of two kinds of layers.
        if not cases or any(len(self._last[case.number][0].others) > 1 for case in cases):
            return
        computed = self._last[cases[0].number][0]
        bounds = {c.config.sparsity.pattern: c.config.sparsity.column_bound for c in cases}
        schedule, topology = first.exchange.schedule, first.config.topology
        setup = RecordedSetup(
            seq=first.config.seq, heads=model.num_heads, kv_heads=model.num_kv_heads,
            head_dim=model.head_dim, dtype_bytes=first.choices.dtype.itemsize,
            workers=self.bench.environment.dims.cp, per_node=schedule.per_node,
            layout=first.choices.layout.name, exchange=schedule.exchange,
            block_size=topology.block_size, chunk=topology.chunk,
            iteration=self._iteration,
            columns={name: bound for name, bound in bounds.items() if bound != 0},
        )  # fmt: skip
        parts = self._parts_of_indices(cases)
        if self.first:
            path = self.folder / record_files.INDEX
            try:
                full = next((f for c in cases for f in self._last[c.number][0].others), None)
                save_indices(path, setup, computed.masks, parts, full)
            except OSError as error:
                self.problem = not_written(error, path)
        for _ in parts:  # Some parts need a gather, so every worker must reach the end.
            pass

    def _parts_of_indices(
        self, cases: Sequence[MeasurementCase]
    ) -> Iterator[tuple[str, int, Index | None]]:
        """Yield (pattern, layer, index), layer by layer."""
        # All workers must iterate to the end: some steps gather an index on the first worker.
        e = self.bench.environment
        first_group = not any(e.dims.coordinate(dim, e.rank) for dim in ("dp", "tp"))
        for case in cases:
            pattern, latest = case.config.sparsity.pattern, self._last[case.number][0]
            indices = latest.indices
            for layer in self._layers(case):
                if indices is None or any(layer in other.layers for other in latest.others):
                    yield pattern, layer, None
                    continue
                index = indices.get(layer)  # with a pipeline, the stage of the layer has it
                if e.dims.pp == 1 and (index is None or not _in_parts(index)):
                    parts: Sequence[Index] = [index] if index is not None and first_group else []
                else:
                    parts = self._gathered(index if first_group else None)
                # An index without parts is the same on all workers of a context group.
                for part in parts if parts and _in_parts(parts[0]) else parts[:1]:
                    yield pattern, layer, part

    def _gathered(self, mine: Index | None) -> Sequence[Index]:
        sent = None if mine is None else (_FORMS.index(type(mine)), _as_arrays(mine))
        workers = self.bench.environment.dims.workers
        everyone: list[Any] | None = [None] * workers if self.first else None
        dist.gather_object(sent, everyone, group=self.bench.host_group)
        return [_received(*index) for index in everyone or () if index is not None]


# The classes of indices, which travel between ranks as numbers and arrays.
_FORMS: Sequence[type[Index]] = (VerticalSlash, BlockBitmap, GatedBitmap, StartBitmap)


def _as_arrays(index: Index) -> dict[str, Any]:
    values = {field.name: getattr(index, field.name) for field in fields(index)}
    return values | {name: tensor.numpy() for name, tensor in index.tensors().items()}


def _received(form: int, values: dict[str, Any]) -> Index:
    arrays = {n: torch.from_numpy(v) for n, v in values.items() if isinstance(v, np.ndarray)}
    return _FORMS[form](**values | arrays)


def _in_parts(index: Index) -> bool:
    return isinstance(index, BlockBitmap) and len(index.rows) < index.blocks
