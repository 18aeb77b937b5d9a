"""Analyze a profile or simulation: imbalance degrees, time by category and causes of waits.

`profiles/definitions.md` defines every number. The analysis reads the rows in batches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mtrain_cli.parallel.recording import ATTENTION, COLUMNS
from mtrain_cli.records.imbalance import Estimate, degrees, ratios, rounded
from mtrain_cli.records.pipeline_times import PipelineTimes
from mtrain_cli.records.record_files import LINKS, RecordedFolder
from mtrain_cli.records.record_sums import (
    BUSY,
    EXPOSED,
    LATE,
    SPENT,
    Iteration,
    RecordedShape,
    TensorWaits,
    iterations,
    survey,
)
from mtrain_cli.records.waits import WaitAttribution, WaitCause, causes_of

DEGREES = ("worker", "step", "total", "critical")
# The categories of a pass's time (bins). `exposed LINK` is exposed communication on one link class.
BINS = (*BUSY, LATE, *(f"{EXPOSED} {link}".strip() for link in LINKS))


class Degrees(NamedTuple):
    """Estimates of the imbalance degrees, which `Imbalance` explains."""

    worker: Estimate
    step: Estimate
    total: Estimate
    critical: Estimate


class Ratios(NamedTuple):
    """Estimates of the computation ratios, which `imbalance.ratios` explains."""

    step: Estimate
    total: Estimate


def _estimates(degrees: np.ndarray, ratios: np.ndarray, owners: np.ndarray) -> dict[str, Any]:
    """Return the fields time, work and computation of an analysis."""
    time, work = (Degrees(*(Estimate.of(v, owners) for v in kind)) for kind in degrees)
    computation = Ratios(*(Estimate.of(v, owners) for v in ratios))
    return {"time": time, "work": work, "computation": computation}


@dataclass(frozen=True)
class PassAnalysis:
    """One direction (forward, recompute or backward) of a case. Times are in milliseconds.

    A worker is a position in a context group. Arrays are means over samples, [workers, steps].

    attention, elapsed: time of attention kernels, and of whole steps.
    late, exposed: waits before the peer started to send, and exposed communication.
    pairs, blocks: number of computed query-key pairs, and of block pairs with such pairs.
    columns, column_pairs: time and pairs of attention to gathered single columns, [workers]. They
        belong to no step, because a ring gathers these columns once per pass.
    time, work: imbalance degrees of attention time and of the number of query-key pairs.
    duration: time of one layer's pass on the slowest worker, as an estimate over iterations.
    longest: maximum of the time of one worker's step.
    layers: for each layer, the time of the slowest worker's pass, and the times of attention, late
        waits and exposed communication, averaged over workers.
    """

    direction: str
    attention: np.ndarray
    elapsed: np.ndarray
    late: np.ndarray
    exposed: np.ndarray
    pairs: np.ndarray
    blocks: np.ndarray
    columns: np.ndarray
    column_pairs: np.ndarray
    time: Degrees
    work: Degrees
    computation: Ratios
    duration: Estimate
    longest: float
    layers: list[dict[str, float]]

    def to_json(self) -> dict[str, Any]:
        return {
            "direction": self.direction,
            **{name: _json(getattr(self, name)) for name in ("time", "work", "computation")},
            "duration_ms": _json(self.duration),
            "step_ms": {"max": _json(self.longest)},
            "attention_ms": _json(self.attention),
            "step_time_ms": _json(self.elapsed),
            "late_ms": _json(self.late),
            "exposed_ms": _json(self.exposed),
            "pairs": _whole(self.pairs),
            "blocks": _whole(self.blocks),
            "columns_ms": _json(self.columns),
            "column_pairs": _whole(self.column_pairs),
            "layers": _json(self.layers),
        }


@dataclass(frozen=True)
class CaseAnalysis:
    """One case of a profile.

    facts: entry of the case in the summary.
    time, work, computation: as in `PassAnalysis`, averaged over forward and backward.
    bins: time per iteration by category in milliseconds, [directions, ranks, BINS].
    passes_ms: time of all passes per iteration in milliseconds: the sum of ``bins``.
    iteration_ms: time of a whole iteration on the slowest rank.
    tokens: number of tokens per iteration, over all context groups; None if unknown.
    samples: a sample is one layer of one micro-batch in one context group.
    workers: number of ranks in a context group.
    partial: whether iterations or ranks are missing.
    tensor: waits for messages of tensor groups per iteration; None without tensor parallelism.
    pipeline: the passes of a pipeline per iteration; None without a pipeline.
    """

    number: int
    label: str
    facts: dict[str, Any]
    passes: dict[str, PassAnalysis]
    time: Degrees
    work: Degrees
    computation: Ratios
    bins: np.ndarray
    passes_ms: np.ndarray
    iteration_ms: Estimate
    tokens: int | None
    iterations: int
    wanted: int
    samples: int
    workers: int
    groups: int
    layers: tuple[int, ...]
    missing: tuple[int, ...]
    partial: bool
    causes: list[WaitCause] = field(default_factory=list)
    tensor: TensorWaits | None = None
    pipeline: PipelineTimes | None = None

    @property
    def directions(self) -> tuple[str, ...]:
        return tuple(self.passes)

    @property
    def present(self) -> list[int]:
        """Return the ranks with rows."""
        return [rank for rank in range(self.workers * self.groups) if rank not in self.missing]

    def bare_ms(self, direction: str) -> float | None:
        """Return the median ms of a layer's pass without recording; None for several layers."""
        ms = self.facts.get(f"{direction}_ms")
        return float(ms) if ms is not None and len(self.layers) == 1 else None

    def bin_ms(self, name: str, direction: str | None = None) -> float:
        """Return the time of one category (`BINS`) per iteration in ms, averaged over ranks.

        direction: name of a pass; None for the sum over all passes.
        """
        chosen = slice(None) if direction is None else [self.directions.index(direction)]
        return float(self.bins[chosen][:, self.present, BINS.index(name)].sum(0).mean())

    @property
    def exposed(self) -> dict[str, float]:
        """Return the exposed communication by link class, in ms per iteration and rank."""
        links = [name for name in BINS if name.startswith(EXPOSED) and self.bin_ms(name) > 0]
        return {name.removeprefix(EXPOSED).strip() or "link": self.bin_ms(name) for name in links}

    def to_json(self) -> dict[str, Any]:
        """Return the case's entry in the results of summary.json, rounded."""
        used = [i for i, name in enumerate(BINS) if self.bins[..., i].any() or name in SPENT]
        return {
            "case": self.number,
            **{name: getattr(self, name) for name in ("label", "samples", "iterations", "partial")},
            **{name: getattr(self, name) for name in ("workers", "groups", "layers", "tokens")},
            "iterations_wanted": self.wanted,
            "missing_ranks": self.missing,
            "iteration_ms": _json(self.iteration_ms),
            **{name: _json(getattr(self, name)) for name in ("time", "work", "computation")},
            "bins": [BINS[i] for i in used],
            "bins_ms": dict(zip(self.directions, _json(self.bins[..., used]), strict=True)),
            "passes_ms": dict(zip(self.directions, _json(self.passes_ms), strict=True)),
            "passes": {name: analysis.to_json() for name, analysis in self.passes.items()},
            "causes": [{**vars(cause), "ms": _json(cause.ms)} for cause in self.causes],
            **({"tensor_ms": _json(vars(self.tensor))} if self.tensor is not None else {}),
            **({"pipeline": _json(self.pipeline.to_json())} if self.pipeline is not None else {}),
        }


def analyse(recorded: RecordedFolder) -> list[CaseAnalysis]:
    """Return one analysis for each case that has rows, in the order of the cases.

    Raises:
        ConfigError: a file of rows is damaged, has another schema or does not match the summary.
    """
    shapes, last = survey(recorded)
    uncertainty = float((recorded.summary.get("clock") or {}).get("uncertainty_us") or 0.0) / 1e3
    ends_together = recorded.summary.get("mode") != "training"
    totals = {
        case: _CaseTotals(shape, WaitAttribution(shape, uncertainty, ends_together))
        for case, shape in shapes.items()
        if shape.steps and shape.layers
    }
    for shape, iteration in iterations(recorded, shapes, last):
        if shape.case in totals:
            totals[shape.case].add(iteration)
    wanted = int(recorded.summary.get("samples_wanted") or 0)
    return [case.result(wanted) for case in totals.values()]


class _CaseTotals:
    def __init__(self, shape: RecordedShape, waits: WaitAttribution) -> None:
        self.shape, self.waits = shape, waits
        directions, layers = len(shape.directions), len(shape.layers)
        self.sums = np.zeros((len(SPENT), directions, shape.workers, shape.slots))
        self.pairs, self.blocks = np.zeros((2, directions, shape.workers, shape.slots))
        self.counts = np.zeros((directions, shape.workers))
        self.bins = np.zeros((directions, shape.groups, shape.workers, len(BINS)))
        self.passes = np.zeros((directions, shape.groups, shape.workers))
        # Per layer: number of samples, then ms of the slowest worker, attention, late, exposed.
        self.by_layer = np.zeros((directions, layers, 5))
        # Per direction: [ms and pairs, 4 degrees, samples], ratios, and iteration of samples.
        self.degrees, self.ratios, self.owners = (
            [list[np.ndarray]() for _ in shape.directions] for _ in range(3)
        )
        self.durations: list[np.ndarray] = []  # one [directions] per iteration
        self.wholes: list[float] = []
        self.tensor = TensorWaits.none(shape.ranks) if shape.tensor > 1 else None
        self.pipeline: list[PipelineTimes] = []
        self.numbers: list[int] = []
        self.longest = np.zeros(directions)

    def add(self, iteration: Iteration) -> None:
        shape = self.shape
        self.numbers.append(iteration.number)
        self.waits.add(iteration)
        if self.tensor is not None and iteration.tensor is not None:
            self.tensor.late += iteration.tensor.late
            self.tensor.exposed += iteration.tensor.exposed
        if iteration.pipeline is not None:
            self.pipeline.append(iteration.pipeline)
        self.bins[..., : len(BUSY)] += np.moveaxis(
            iteration.spent[: len(BUSY)].sum((2, 5), dtype=np.float64), 0, -1
        )
        late = iteration.spent[SPENT.index(LATE)]
        self.bins[..., len(BUSY)] += late.sum((1, 4), dtype=np.float64)
        self.bins[..., len(BUSY) + 1 :] += np.moveaxis(iteration.link.sum(-1), 1, -1)
        self.passes += np.nansum(iteration.length, 1)
        if not np.isnan(iteration.whole).all():
            self.wholes.append(float(np.nanmax(iteration.whole)))
        # Leave out workers without rows.
        durations = np.zeros((len(shape.directions), shape.groups, iteration.length.shape[1]))
        for group in range(shape.groups):
            workers = np.flatnonzero(shape.present[group])
            if not len(workers):
                continue
            for d, direction in enumerate(shape.directions):
                steps = shape.steps[direction]
                # [SPENT, samples, workers, slots]
                spent = iteration.spent[:, d, :, group][:, :, workers].astype(np.float64)
                valid = spent.sum((0, 2, 3)) > 0
                if not valid.any():
                    continue
                spent = spent[:, valid]
                pairs = iteration.pairs[d, valid, group][:, workers].astype(np.float64)
                blocks = iteration.blocks[d, valid, group][:, workers].astype(np.float64)
                length = iteration.length[d, valid, group][:, workers]
                length = np.where(np.isnan(length), spent.sum((0, 3)), length)
                slowest = length.max(1)
                durations[d, group, valid] = slowest
                self._add_samples(d, steps, spent, pairs, slowest)
                self.sums[:, d, workers] += spent.sum(1)
                self.pairs[d, workers] += pairs.sum(0)
                self.blocks[d, workers] += blocks.sum(0)
                self.counts[d, workers] += valid.sum()
                self._add_layers(d, np.flatnonzero(valid) % len(shape.layers), spent, slowest)
        live = np.maximum((durations > 0).sum((1, 2)), 1)
        self.durations.append(durations.sum((1, 2)) / live)

    def _add_samples(
        self, d: int, steps: int, spent: np.ndarray, pairs: np.ndarray, slowest: np.ndarray
    ) -> None:
        """Add the samples of direction d.

        spent, pairs: ms by category, [SPENT, samples, workers, slots], and numbers of pairs.
        slowest: ms of the slowest worker's pass, [samples].
        """
        attention, columns = spent[SPENT.index(ATTENTION)], spent[SPENT.index(COLUMNS), ..., 0]
        in_steps = attention[..., 1 : steps + 1]
        elapsed = spent[..., 1 : steps + 1].sum(0)
        work = degrees(pairs[..., 1 : steps + 1], pairs[..., 0])
        self.degrees[d].append(np.stack([degrees(in_steps, columns), work]))
        self.owners[d].append(np.full(len(in_steps), len(self.numbers)))
        self.ratios[d].append(ratios(in_steps, elapsed, in_steps.sum(2) + columns, slowest))
        self.longest[d] = max(self.longest[d], float(elapsed.max(initial=0)))

    def _add_layers(
        self, d: int, layers: np.ndarray, spent: np.ndarray, slowest: np.ndarray
    ) -> None:
        mean = spent.mean(2).sum(2)  # [SPENT, samples]
        computed = mean[SPENT.index(ATTENTION)] + mean[SPENT.index(COLUMNS)]
        waits = mean[SPENT.index(LATE)], mean[SPENT.index(EXPOSED)]
        parts = np.stack([np.ones(len(slowest)), slowest, computed, *waits], -1)
        np.add.at(self.by_layer[d], layers, parts)

    def result(self, wanted: int) -> CaseAnalysis:
        shape, count = self.shape, max(1, len(self.numbers))
        passes = {
            name: self._pass(d, name) for d, name in enumerate(shape.directions) if self.degrees[d]
        }
        chosen = [
            d for d, name in enumerate(shape.directions) if name in passes and name != "recompute"
        ] or list(range(len(passes)))
        # The directions have the same samples, unless a killed run lacks the last backward pass.
        both = [np.concatenate(self.degrees[d], -1) for d in chosen] or [np.zeros((2, 4, 0))]
        shares = [np.concatenate(self.ratios[d], -1) for d in chosen] or [np.zeros((2, 0))]
        samples = min(b.shape[-1] for b in both)
        estimates = _estimates(
            np.mean([b[..., :samples] for b in both], 0),
            np.mean([s[..., :samples] for s in shares], 0),
            np.concatenate(self.owners[chosen[0]])[:samples] if chosen else np.zeros(0, np.int64),
        )
        facts, label = shape.facts, str(shape.facts.get("label") or f"case {shape.case}")
        stages = 1 if shape.pipeline is None else shape.pipeline.stages
        groups = shape.groups // (shape.tensor * stages)  # that train on different sequences
        sequences = int(facts.get("micro_batch") or 1) * len(shape.micros) * groups
        tensor = self.tensor and TensorWaits(self.tensor.late / count, self.tensor.exposed / count)
        tokens = int(facts.get("seq") or 0) * sequences
        return CaseAnalysis(
            number=shape.case,
            label=label,
            facts=facts,
            passes=passes,
            **estimates,
            bins=self._by_rank(self.bins) / count,
            passes_ms=self._by_rank(self.passes) / count,
            iteration_ms=Estimate.of(np.array(self.wholes)),
            tokens=tokens or None,
            iterations=len(self.numbers),
            wanted=max(wanted, len(self.numbers)),
            samples=samples,
            workers=shape.workers,
            groups=shape.groups,
            layers=shape.layers,
            missing=shape.missing,
            partial=len(self.numbers) < wanted or bool(shape.missing),
            causes=causes_of(self.waits, tensor),
            tensor=tensor,
            pipeline=PipelineTimes.mean(self.pipeline) if self.pipeline else None,
        )

    def _by_rank(self, table: np.ndarray) -> np.ndarray:
        flat = table.reshape(len(table), self.shape.ranks, *table.shape[3:])
        return flat[:, self.shape.places]

    def _pass(self, d: int, name: str) -> PassAnalysis:
        steps = self.shape.steps[name]
        counts = np.maximum(self.counts[d], 1)[:, None]
        spent = self.sums[:, d] / counts
        pairs, blocks = self.pairs[d] / counts, self.blocks[d] / counts
        inside = slice(1, steps + 1)
        names = ("ms", "attention_ms", "late_ms", "exposed_ms")
        layers = [
            {"layer": float(layer), **dict(zip(names, (sums / number).tolist(), strict=True))}
            for layer, (number, *_), sums in zip(
                self.shape.layers, self.by_layer[d], self.by_layer[d][:, 1:], strict=True
            )
            if number
        ]
        return PassAnalysis(
            direction=name,
            attention=spent[SPENT.index(ATTENTION), :, inside],
            elapsed=spent[..., inside].sum(0),
            late=spent[SPENT.index(LATE), :, inside],
            exposed=spent[SPENT.index(EXPOSED), :, inside],
            pairs=pairs[:, inside],
            blocks=blocks[:, inside],
            columns=spent[SPENT.index(COLUMNS), :, 0],
            column_pairs=pairs[:, 0],
            **_estimates(
                np.concatenate(self.degrees[d], -1),
                np.concatenate(self.ratios[d], -1),
                np.concatenate(self.owners[d]),
            ),
            duration=Estimate.of(np.array(self.durations)[:, d]),
            longest=float(self.longest[d]),
            layers=layers,
        )


def _json(value: Any) -> Any:
    """Return a value for JSON, rounded to five digits. NaN and infinity become None."""
    if isinstance(value, Estimate):
        return value.to_json()
    if isinstance(value, Degrees | Ratios):
        return _json(value._asdict())
    if isinstance(value, dict):
        return {name: _json(entry) for name, entry in value.items()}
    if isinstance(value, list | np.ndarray):
        return [_json(entry) for entry in value]
    return rounded(value)


def _whole(table: np.ndarray) -> Any:
    return np.rint(table).astype(np.int64).tolist()
