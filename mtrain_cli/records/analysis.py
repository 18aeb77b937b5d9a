"""Analyse a profile or simulation: imbalance degrees, where time goes and why workers wait.

`profiles/definitions.md` defines every figure. Rows are read in batches, once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mtrain_cli.parallel.recording import ATTENTION, COLUMNS
from mtrain_cli.records.imbalance import degrees, ratios
from mtrain_cli.records.record_files import LINKS, RecordedFolder
from mtrain_cli.records.record_sums import (
    BUSY,
    EXPOSED,
    LATE,
    SPENT,
    Iteration,
    RecordedShape,
    iterations,
    survey,
)
from mtrain_cli.records.wait_causes import WaitAttribution, WaitCause

DEGREES = ("worker", "step", "total", "critical")
# Where the time of a pass goes. `exposed LINK` splits exposed communication by link.
BINS = (*BUSY, LATE, *(f"{EXPOSED} {link}".strip() for link in LINKS))
MOST_VALUES = 1 << 21  # step times kept for percentiles
MOST_TABLES = 48  # samples kept for distributions
QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Estimate:
    """Mean and standard deviation of n samples.

    error: standard error of the mean; NaN for a single iteration, which has no spread.
    """

    mean: float
    std: float
    n: int
    error: float = field(default=float("nan"), compare=False)

    @staticmethod
    def of(values: np.ndarray, iterations: np.ndarray | None = None) -> Estimate:
        """Estimate from samples.

        Args:
            values: the samples, any shape.
            iterations: the iteration of each sample. Layers of one iteration are slow or fast
                together, so the error counts each iteration's mean as one value.
        """
        values = np.asarray(values, np.float64).reshape(-1)
        if not len(values):
            return Estimate(float("nan"), float("nan"), 0)
        means = values
        if iterations is not None:
            _, owner = np.unique(iterations, return_inverse=True)
            means = np.bincount(owner, values) / np.bincount(owner)
        error = float(means.std(ddof=1)) / len(means) ** 0.5 if len(means) > 1 else float("nan")
        return Estimate(
            float(values.mean()),
            float(values.std(ddof=1)) if len(values) > 1 else 0.0,
            len(values),
            error,
        )

    def to_json(self) -> dict[str, Any]:
        return {"mean": _rounded(self.mean), "std": _rounded(self.std), "n": self.n}


@dataclass(frozen=True)
class Degrees:
    """Imbalance degrees over samples, see `Imbalance`."""

    worker: Estimate
    step: Estimate
    total: Estimate
    critical: Estimate

    @staticmethod
    def of(values: np.ndarray, iterations: np.ndarray) -> Degrees:
        """Estimate from values [4, samples] and the iteration of each sample."""
        return Degrees(*(Estimate.of(v, iterations) for v in values))

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name).to_json() for name in DEGREES}


@dataclass(frozen=True)
class Ratios:
    """Computation ratios over samples, see `ComputationRatios`."""

    step: Estimate
    total: Estimate

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step.to_json(), "total": self.total.to_json()}


@dataclass(frozen=True)
class PassAnalysis:
    """One direction (forward, recompute or backward) of a case. Times in ms.

    A worker is a position in a context group; figures are means over samples.

    direction: forward, recompute or backward
    attention: [workers, steps], attention kernels
    elapsed: [workers, steps], all time of a step
    late: [workers, steps], waits before the peer started sending
    exposed: [workers, steps], exposed communication
    pairs, blocks: [workers, steps], computed query-key pairs and block pairs
    columns: [workers], single columns gathered once
    column_pairs: [workers], query-key pairs of these columns
    time, work: imbalance degrees of ms and of pairs
    computation: computation ratios
    duration: one layer on the slowest worker, over iterations
    p50, p95, longest: elapsed time of one worker's step
    layers: per layer, ms of the slowest worker; mean ms of attention, late and exposed waits
    across_workers: [steps, 5], quantiles (`QUANTILES`) of attention time over workers
    across_steps: [workers, 5], quantiles of attention time over steps
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
    p50: float
    p95: float
    longest: float
    layers: list[dict[str, float]]
    across_workers: np.ndarray
    across_steps: np.ndarray

    def to_json(self) -> dict[str, Any]:
        return {
            "direction": self.direction,
            "time": self.time.to_json(),
            "work": self.work.to_json(),
            "computation": self.computation.to_json(),
            "duration_ms": self.duration.to_json(),
            "step_ms": {
                "p50": _rounded(self.p50),
                "p95": _rounded(self.p95),
                "max": _rounded(self.longest),
            },
            "attention_ms": _rounded(self.attention),
            "step_time_ms": _rounded(self.elapsed),
            "late_ms": _rounded(self.late),
            "exposed_ms": _rounded(self.exposed),
            "pairs": np.rint(self.pairs).astype(np.int64).tolist(),
            "blocks": np.rint(self.blocks).astype(np.int64).tolist(),
            "columns_ms": _rounded(self.columns),
            "column_pairs": np.rint(self.column_pairs).astype(np.int64).tolist(),
            "layers": [
                {name: _rounded(value) for name, value in layer.items()} for layer in self.layers
            ],
            "across_workers_ms": _rounded(self.across_workers),
            "across_steps_ms": _rounded(self.across_steps),
        }


@dataclass(frozen=True)
class CaseAnalysis:
    """One case of a profile.

    number, label: of the case in the summary
    facts: the case's entry in the summary
    passes: one analysis per direction
    time, work, computation: means of the forward and backward pass
    bins: [directions, ranks, BINS], ms of an iteration
    passes_ms: [directions, ranks], ms of all passes of an iteration; the bins add up to it
    iteration_ms: whole iterations on the slowest rank
    tokens: of an iteration, over all groups
    iterations, wanted: recorded and requested
    samples: iterations x forward passes x layers x groups
    typical: the iteration whose passes took the median time
    missing: ranks without rows
    partial: iterations or ranks are missing
    causes: of waits, the costliest first
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
    typical: int
    missing: tuple[int, ...]
    partial: bool
    causes: list[WaitCause] = field(default_factory=list)

    @property
    def directions(self) -> tuple[str, ...]:
        return tuple(self.passes)

    @property
    def present(self) -> list[int]:
        """Ranks with rows."""
        return [rank for rank in range(self.workers * self.groups) if rank not in self.missing]

    def bare_ms(self, direction: str) -> float | None:
        """Return ms of one layer's pass without recording: slowest worker, median iteration.

        None if it was not measured or the case has several layers. `PassAnalysis.duration` covers
        recorded iterations, which take a little longer.
        """
        ms = self.facts.get(f"{direction}_ms")
        return float(ms) if ms is not None and len(self.layers) == 1 else None

    def bin_ms(self, name: str, direction: str | None = None) -> float:
        """Return ms of a bin in an iteration, mean over ranks."""
        chosen = slice(None) if direction is None else [self.directions.index(direction)]
        return float(self.bins[chosen][:, self.present, BINS.index(name)].sum(0).mean())

    @property
    def exposed(self) -> dict[str, float]:
        """Exposed ms of an iteration by link, mean over ranks, without links that have none."""
        by_bin = {name: self.bin_ms(name) for name in BINS if name.startswith(EXPOSED)}
        return {
            name.removeprefix(EXPOSED).strip() or "link": ms
            for name, ms in by_bin.items()
            if ms > 0
        }

    def to_json(self) -> dict[str, Any]:
        """Return the entry of summary.json; tables are rounded."""
        used = [i for i, name in enumerate(BINS) if self.bins[..., i].any() or name in SPENT]
        return {
            "case": self.number,
            "label": self.label,
            "samples": self.samples,
            "iterations": self.iterations,
            "iterations_wanted": self.wanted,
            "partial": self.partial,
            "missing_ranks": list(self.missing),
            "workers": self.workers,
            "groups": self.groups,
            "layers": list(self.layers),
            "typical_iteration": self.typical,
            "tokens": self.tokens,
            "iteration_ms": self.iteration_ms.to_json(),
            "time": self.time.to_json(),
            "work": self.work.to_json(),
            "computation": self.computation.to_json(),
            "bins": [BINS[i] for i in used],
            "bins_ms": {
                name: _rounded(self.bins[d][:, used]) for d, name in enumerate(self.directions)
            },
            "passes_ms": {
                name: _rounded(self.passes_ms[d]) for d, name in enumerate(self.directions)
            },
            "passes": {name: analysis.to_json() for name, analysis in self.passes.items()},
            "causes": [
                {
                    "text": c.text,
                    "ms": _rounded(c.ms),
                    "kind": c.kind,
                    "direction": c.direction,
                    "rank": c.rank,
                    "step": c.step,
                }
                for c in self.causes
            ],
        }


def analyse(recorded: RecordedFolder) -> list[CaseAnalysis]:
    """Return one analysis per case that has rows, in the order of the cases.

    Raises:
        ConfigError: a file of rows is damaged, has another schema or does not match its summary.
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
    """Sums and samples kept from the iterations of a case."""

    def __init__(self, shape: RecordedShape, waits: WaitAttribution) -> None:
        self.shape, self.waits = shape, waits
        directions, layers = len(shape.directions), len(shape.layers)
        self.present = shape.present.any(0)  # workers with rows in at least one group
        self.sums = np.zeros((len(SPENT), directions, shape.workers, shape.slots))
        self.pairs, self.blocks = np.zeros((2, directions, shape.workers, shape.slots))
        self.counts = np.zeros((directions, shape.workers))
        self.bins = np.zeros((directions, shape.groups, shape.workers, len(BINS)))
        self.passes = np.zeros((directions, shape.groups, shape.workers))
        # per layer: samples, slowest, attention, late, exposed
        self.by_layer = np.zeros((directions, layers, 5))
        # per direction: [ms and pairs, 4 degrees, samples]
        self.degrees: list[list[np.ndarray]] = [[] for _ in shape.directions]
        self.ratios: list[list[np.ndarray]] = [[] for _ in shape.directions]
        # per direction: the iteration of each sample
        self.owners: list[list[np.ndarray]] = [[] for _ in shape.directions]
        self.durations: list[np.ndarray] = []  # one [directions] per iteration
        self.wholes: list[float] = []
        self.numbers: list[int] = []
        self.values: list[list[np.ndarray]] = [[] for _ in shape.directions]
        self.longest = np.zeros(directions)
        self.tables: list[list[np.ndarray]] = [[] for _ in shape.directions]
        total = len(shape.iterations) * len(shape.micros) * layers * shape.groups
        self.random = np.random.default_rng(0)
        self.value_stride = max(1, total * shape.workers * shape.slots // MOST_VALUES)
        self.table_stride = max(1, -(-total // MOST_TABLES))

    def add(self, iteration: Iteration) -> None:
        shape = self.shape
        self.numbers.append(iteration.number)
        self.waits.add(iteration)
        self.bins[..., : len(BUSY)] += np.moveaxis(
            iteration.spent[: len(BUSY)].sum((2, 5), dtype=np.float64), 0, -1
        )
        late = iteration.spent[SPENT.index(LATE)]
        self.bins[..., len(BUSY)] += late.sum((1, 4), dtype=np.float64)
        self.bins[..., len(BUSY) + 1 :] += np.moveaxis(iteration.link.sum(-1), 1, -1)
        there = ~np.isnan(iteration.length)
        self.passes += np.where(there, iteration.length, 0).sum(1)
        if not np.isnan(iteration.whole).all():
            self.wholes.append(float(np.nanmax(iteration.whole)))
        # A context group contributes the workers that have rows.
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
        """Add samples of one direction; spent is [SPENT, samples, workers, slots]."""
        attention, columns = spent[SPENT.index(ATTENTION)], spent[SPENT.index(COLUMNS), ..., 0]
        in_steps = attention[..., 1 : steps + 1]
        elapsed = spent[..., 1 : steps + 1].sum(0)
        work = _degrees(pairs[..., 1 : steps + 1], pairs[..., 0])
        self.degrees[d].append(np.stack([_degrees(in_steps, columns), work]))
        self.owners[d].append(np.full(len(in_steps), len(self.numbers)))
        self.ratios[d].append(ratios(in_steps, elapsed, in_steps.sum(2) + columns, slowest))
        # Draw at random: a fixed stride would pick the same steps or layers every time.
        kept = elapsed.reshape(-1)
        kept = (
            kept
            if self.value_stride == 1
            else kept[self.random.random(kept.size) * self.value_stride < 1]
        )
        self.values[d].append(kept.astype(np.float32))
        self.longest[d] = max(self.longest[d], float(elapsed.max(initial=0)))
        if spent.shape[2] == int(self.present.sum()):
            drawn = self.random.random(len(in_steps)) * self.table_stride < 1
            drawn[0] |= not self.tables[d]
            self.tables[d] += list(in_steps[drawn].astype(np.float32))

    def _add_layers(
        self, d: int, layers: np.ndarray, spent: np.ndarray, slowest: np.ndarray
    ) -> None:
        mean = spent.mean(2).sum(2)  # [SPENT, samples]
        computed = mean[SPENT.index(ATTENTION)] + mean[SPENT.index(COLUMNS)]
        parts = (
            np.ones(len(slowest)),
            slowest,
            computed,
            mean[SPENT.index(LATE)],
            mean[SPENT.index(EXPOSED)],
        )
        np.add.at(self.by_layer[d], layers, np.stack(parts, -1))

    def result(self, wanted: int) -> CaseAnalysis:
        shape, count = self.shape, max(1, len(self.numbers))
        passes = {
            name: self._pass(d, name) for d, name in enumerate(shape.directions) if self.degrees[d]
        }
        chosen = [
            d for d, name in enumerate(shape.directions) if name in passes and name != "recompute"
        ] or list(range(len(passes)))
        both = [np.concatenate(self.degrees[d], -1) for d in chosen]
        shares = [np.concatenate(self.ratios[d], -1) for d in chosen]
        # Samples of both directions pair up, unless a killed run left one out.
        samples = min((b.shape[-1] for b in both), default=0)
        mean = np.mean([b[..., :samples] for b in both], 0) if both else np.zeros((2, 4, 0))
        share = np.mean([s[..., :samples] for s in shares], 0) if shares else np.zeros((2, 0))
        owners = np.concatenate(self.owners[chosen[0]])[:samples] if both else np.zeros(0, np.int64)
        total = np.array(self.durations).sum(1)
        facts = shape.facts
        tokens = (
            int(facts.get("seq") or 0)
            * int(facts.get("micro_batch") or 1)
            * len(shape.micros)
            * shape.groups
        )
        return CaseAnalysis(
            number=shape.case,
            label=str(facts.get("label") or f"case {shape.case}"),
            facts=facts,
            passes=passes,
            time=Degrees.of(mean[0], owners),
            work=Degrees.of(mean[1], owners),
            computation=Ratios(Estimate.of(share[0], owners), Estimate.of(share[1], owners)),
            bins=self.bins.reshape(len(shape.directions), shape.ranks, len(BINS)) / count,
            passes_ms=self.passes.reshape(len(shape.directions), shape.ranks) / count,
            iteration_ms=Estimate.of(np.array(self.wholes)),
            tokens=tokens or None,
            iterations=len(self.numbers),
            wanted=max(wanted, len(self.numbers)),
            samples=samples,
            workers=shape.workers,
            groups=shape.groups,
            layers=shape.layers,
            typical=self.numbers[int(np.argsort(total, kind="stable")[(len(total) - 1) // 2])],
            missing=shape.missing,
            partial=len(self.numbers) < wanted or bool(shape.missing),
            causes=self.waits.causes(),
        )

    def _pass(self, d: int, name: str) -> PassAnalysis:
        steps = self.shape.steps[name]
        counts = np.maximum(self.counts[d], 1)[:, None]
        spent = self.sums[:, d] / counts
        pairs, blocks = self.pairs[d] / counts, self.blocks[d] / counts
        inside = slice(1, steps + 1)
        values = np.concatenate(self.values[d])
        degrees = np.concatenate(self.degrees[d], -1)
        share = np.concatenate(self.ratios[d], -1)
        owners = np.concatenate(self.owners[d])
        layers = []
        for layer, (number, slowest, attention, late, exposed) in zip(
            self.shape.layers, self.by_layer[d], strict=True
        ):
            if number:
                row = {
                    "ms": slowest,
                    "attention_ms": attention,
                    "late_ms": late,
                    "exposed_ms": exposed,
                }
                means = {key: float(value / number) for key, value in row.items()}
                layers.append({"layer": float(layer), **means})
        tables = (
            np.stack(self.tables[d])
            if self.tables[d]
            else np.zeros((1, int(self.present.sum()), steps), np.float32)
        )
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
            time=Degrees.of(degrees[0], owners),
            work=Degrees.of(degrees[1], owners),
            computation=Ratios(Estimate.of(share[0], owners), Estimate.of(share[1], owners)),
            duration=Estimate.of(np.array(self.durations)[:, d]),
            p50=float(np.percentile(values, 50)) if len(values) else float("nan"),
            p95=float(np.percentile(values, 95)) if len(values) else float("nan"),
            longest=float(self.longest[d]),
            layers=layers,
            across_workers=np.quantile(tables, QUANTILES, axis=(0, 1)).T,
            across_steps=np.quantile(tables, QUANTILES, axis=(0, 2)).T,
        )


def _degrees(tables: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return [4, samples].

    Single columns count as one more step when workers are compared, and as none when the steps of
    one worker are compared.
    """
    values = degrees(tables)
    if columns.any():
        values[[0, 2, 3]] = degrees(np.concatenate([tables, columns[..., None]], -1))[[0, 2, 3]]
    return values


def _rounded(value: Any) -> Any:
    """Round to five digits; NaN and infinity become None."""
    array = np.asarray(value, np.float64)
    if array.ndim:
        return (
            [_rounded(part) for part in array]
            if array.ndim > 1
            else [_rounded(float(v)) for v in array]
        )
    return float(f"{array:.5g}") if np.isfinite(array) else None
