"""Compare predictions with measurements, by step, by rank and as a whole.

Predictions come from an earlier `mtrain simulate --out FOLDER`, or from the shapes, indices and
configuration that a run recorded, never its times. The same analysis reads both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from mtrain_cli.config.cluster import Cluster
from mtrain_cli.config.documents import digest
from mtrain_cli.config.exchanges import EXCHANGE_TRAITS, ULYSSES
from mtrain_cli.config.schema import LAYOUTS, Config, ConfigError
from mtrain_cli.config.suggest import find_shipped, no_such, shipped_with
from mtrain_cli.grouping import grouped
from mtrain_cli.parallel.exchange_selection import parse_label
from mtrain_cli.parallel.recording import ATTENTION, COLUMNS, DIRECTIONS, KINDS
from mtrain_cli.records import record_files
from mtrain_cli.records.analysis import CaseAnalysis, PassAnalysis, analyse
from mtrain_cli.records.index_file import RecordedIndices, load_indices
from mtrain_cli.records.record_files import RecordedFolder
from mtrain_cli.simulation.calibration import Calibration
from mtrain_cli.simulation.prediction import AttentionWorkload, Prediction, predict
from mtrain_cli.simulation.scenario import PairSource
from mtrain_cli.simulation.what_if import InvalidSetup, ReplaySetup, index_of, topology_of
from mtrain_cli.training.layout_choice import row_prices

PASSES = ("forward", "backward")
DEGREES = ("worker", "step")
_TIMES = ("measured", "recorded", "std", "predicted", "low", "high")
_DENSE, _FIXED = "dense", "fixed"
_LEAST_RANKED = 3
_ONE_MICRO_BATCH = (
    "counts are those of the first micro-batch of the last recorded iteration, which the "
    "prediction repeats; measured times are means over all micro-batches"
)
_NEEDED = (
    "case", "iteration", "micro", "layer", "direction", "step", "rank", "phase", "blocks", "pairs",
)  # fmt: skip
Key = tuple[Any, ...]


@dataclass(frozen=True)
class MeasuredRun:
    """A profile with its analyzed cases and its recorded indices."""

    folder: Path
    recorded: RecordedFolder
    cases: tuple[CaseAnalysis, ...]
    indices: RecordedIndices

    @property
    def started(self) -> str:
        return str((self.recorded.summary.get("environment") or {}).get("started") or "")


def open_run(folder: Path) -> MeasuredRun:
    """Open a profile.

    Raises:
        ConfigError: the folder holds no complete profile with indices.
    """

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"RUN {folder}: {why}")

    named = find_shipped(folder)
    places = (Path(parent, named) for parent in ("", "measurements", "runs"))
    folder = next((place for place in places if place.is_dir()), named)
    if not folder.is_dir():
        written = "a folder that `mtrain profile imbalance` wrote"
        raise refuse(no_such("profile", str(folder), shipped_with("*/predictions"), written))
    inside = next(
        (f for f in (folder, folder / "profile") if (f / record_files.SUMMARY).is_file()), None
    )
    if inside is None:
        raise refuse(
            f"no profile ({record_files.SUMMARY} is missing); `mtrain profile imbalance` writes one"
        )
    recorded = record_files.open_records(inside)
    kind, done, wanted = map(recorded.summary.get, ("kind", "samples", "samples_wanted"))
    if kind != "profile":
        raise refuse(f"is a {kind}, not a measurement; give it as --prediction {folder}")
    if not recorded.complete:
        raise refuse(f"ended early ({done} of {wanted} samples); measure again")
    if not (inside / record_files.INDEX).is_file():
        raise refuse(f"{record_files.INDEX} is missing, so nothing can be replayed; measure again")
    indices = load_indices(inside / record_files.INDEX)
    cases = tuple(analyse(recorded))
    if not cases:
        raise refuse("no records; measure again")
    return MeasuredRun(folder, recorded, cases, indices)


def key_of(facts: dict[str, Any]) -> Key:
    """Return the facts that a measured case and its prediction must share."""
    exchange = str(facts.get("exchange"))
    parsed = parse_label(exchange, 1, 1)  # for the name, which does not depend on these sizes
    hierarchical = parsed is not None and EXCHANGE_TRAITS[parsed[0]].hierarchical
    per_node = facts.get("per_node") if hierarchical else None
    names = ("seq", "micro_batch", "cp", "num_heads", "num_kv_heads", "head_dim", "kernel")
    numbers = (facts.get(name) for name in names)
    return (facts.get("pattern"), facts.get("layout"), exchange, per_node, *numbers)


def replay(
    run: MeasuredRun,
    case: CaseAnalysis,
    cluster: Cluster,
    calibration: Calibration | None,
    number: int,
) -> Prediction:
    """Predict a measured case from its recorded indices.

    Raises:
        ConfigError: the case cannot be replayed.
    """
    facts = case.facts
    kinds: dict[str, type] = dict.fromkeys(("cp", "seq", "per_node"), int)
    kinds |= dict.fromkeys(("layout", "exchange", "pattern", "kernel"), str)
    wrong = [name for name, kind in kinds.items() if not isinstance(facts.get(name), kind)]
    if wrong or facts["layout"] not in LAYOUTS:
        name = (wrong or ["layout"])[0]
        why = f"{record_files.SUMMARY} has {name}={facts.get(name)} of {case.label}; measure again"
        raise ConfigError(f"RUN {run.folder}: {why}")
    if (workers := facts["cp"]) > cluster.gpus:
        raise ConfigError(
            f"--cluster {cluster.name}: has {cluster.gpus} GPUs, but {run.folder} used {workers}; "
            "give a larger cluster"
        )
    config = _config(run, case)
    try:
        prediction = predict(
            cluster,
            _workload(run, case),
            _setup(facts, config),
            kernel=str(facts["kernel"]),
            dense_kernel=facts.get("dense_kernel"),
            calibration=calibration,
            number=number,
            rows=True,
            prices=None if config is None else row_prices(config),
        )
    except InvalidSetup as error:
        raise ConfigError(f"RUN {run.folder}: {case.label}: {error}") from None
    if prediction.rows is None:
        why = "the prediction has too many records; give a prediction of fewer layers"
        raise ConfigError(f"RUN {run.folder}: {case.label}: {why}")
    return prediction


def _setup(facts: dict[str, Any], config: Config | None) -> ReplaySetup:
    """Make the setup of a recorded case. The label of its exchange has all but topology.columns."""
    workers, label = int(facts["cp"]), str(facts["exchange"])
    per_node = int(facts["per_node"]) or workers
    parsed = parse_label(label, workers, per_node)
    if parsed is None:
        raise ConfigError(f"unknown exchange {label!r}; measure again with this version")
    name, made = parsed
    # If workers only share heads, no other exchange moves keys between them.
    only_heads = made.heads == workers > 1
    setup = ReplaySetup(str(facts["layout"]), ULYSSES if only_heads else name, workers, per_node)
    options = replace(
        topology_of(setup),
        ulysses="auto" if only_heads else made.heads,
        chunks=made.chunks,
        prefetch=made.prefetch,
        circulates=made.circulates,
        stages=made.stages,
        stages_backward=made.stages_backward,
        gradient_dtype="bfloat16" if made.rounds else "float32",
        columns="auto" if config is None else config.topology.columns,
    )
    return replace(setup, options=options)


def _workload(run: MeasuredRun, case: CaseAnalysis) -> AttentionWorkload:
    made, facts, pattern = run.indices.setup, case.facts, str(case.facts["pattern"])
    seq = int(facts["seq"])
    workload = partial(
        AttentionWorkload,
        pattern=pattern,
        columns=made.columns.get(pattern, -1),
        model=str(facts.get("model", "")),
    )
    if seq == made.seq and pattern in run.indices.patterns:
        indices, layers = run.indices, set(run.indices.layers(pattern)) & set(case.layers)
        if not layers:
            why = f"{record_files.INDEX} has no index of any layer of {case.label}"
            raise ConfigError(f"RUN {run.folder}: {why}")
        shown, index = tuple(sorted(layers)), partial(index_of, indices, pattern)
        estimated = pattern not in (_DENSE, _FIXED)
        return workload(made, indices.masks, shown, index, full=indices.full, estimated=estimated)
    # The file has indices for one length. Dense and fixed cases of other lengths do not need it.
    config = _config(run, case)
    if pattern not in (_DENSE, _FIXED) or config is None:
        saved = f"{run.folder.name}/predictions"
        own = saved if (run.folder / "predictions").is_dir() else "DIR"
        raise ConfigError(
            f"RUN {run.folder}: {record_files.INDEX} has only {', '.join(run.indices.patterns)} of "
            f"{made.seq} tokens, so {case.label} cannot be predicted now; give predictions from "
            f"before the measurement, as --prediction {own}, or measure one length per run"
        )
    problem = PairSource(pattern).problem(config)
    made = replace(made, seq=seq, columns={}, iteration=0)
    shown, full = tuple(case.layers), problem.full
    return workload(made, problem.masks, shown, problem.index, full=full, estimated=False)


def _config(run: MeasuredRun, case: CaseAnalysis) -> Config | None:
    from mtrain_cli.config import resolved_file

    path = run.recorded.folder / "cases" / f"{case.number}.yaml"
    return resolved_file.load(path) if path.is_file() else None


def write_predictions(folder: Path, predictions: Sequence[Prediction]) -> None:
    """Write predictions of attention in the form that `open_prediction` reads."""
    for number, prediction in enumerate(predictions):
        assert prediction.rows is not None
        record_files.write_part(prediction.rows, folder, number)
    record_files.join_parts(folder)
    predicted = [
        {
            "label": p.facts["label"],
            "remarks": list(p.remarks),
            "passes": {name: {"ms": asdict(d.duration)} for name, d in p.passes.items()},
        }
        for p in predictions
    ]
    document = {
        "kind": "simulation",
        "mode": "attention",
        "complete": True,
        "workers": max(p.setup.workers for p in predictions),
        "samples_wanted": 1,
        "samples": 1,
        "cases": [p.facts for p in predictions],
        "predicted": predicted,
    }
    record_files.write_summary(folder, document)


@dataclass(frozen=True)
class PredictedCase:
    """The prediction of one case.

    bounds: ms of a layer by pass, with the keys ``low``, ``value`` and ``high``.
    written: when the prediction was written; empty for a new one.
    """

    analysis: CaseAnalysis
    bounds: dict[str, dict[str, float]]
    remarks: tuple[str, ...]
    folder: Path
    written: str = ""


def open_prediction(folder: Path) -> dict[Key, PredictedCase]:
    """Read the predictions of a folder, by case.

    Raises:
        ConfigError: the folder holds no simulation with records, or its records were replaced.
    """

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"--prediction {folder}: {why}")

    writes = "`mtrain simulate --out FOLDER` writes one"
    if not folder.exists():
        names = sorted({str(Path(name).parent) for name in shipped_with("*/*/*/summary.json")})
        written = "a folder that `mtrain simulate --out FOLDER` wrote"
        raise refuse(no_such("prediction", str(folder), names, written))
    if not (folder / record_files.SUMMARY).is_file():
        raise refuse(f"no prediction ({record_files.SUMMARY} is missing); {writes}")
    recorded = record_files.open_records(folder)
    summary = recorded.summary
    if summary.get("kind") != "simulation":
        raise refuse(f"is a {summary.get('kind')}, not a prediction; {writes}")
    expected = summary.get("records_sha256")
    if expected is not None and (not recorded.parts or digest(recorded.parts[0]) != expected):
        raise refuse(
            f"{record_files.RECORDS} is not the file written with {record_files.SUMMARY}; predict "
            "again"
        )
    written = str((summary.get("environment") or {}).get("started") or "")
    predictions = {}
    for case in analyse(recorded):
        of_case = summary["predicted"][case.number]
        bounds = {name: of_pass["ms"] for name, of_pass in of_case["passes"].items()}
        predictions[key_of(case.facts)] = PredictedCase(
            case, bounds, tuple(of_case.get("remarks", ())), folder, written
        )
    return predictions


@dataclass(frozen=True)
class PassComparison:
    """One pass of a case, measured and predicted. Times are in ms, of one layer's slowest worker.

    bare: measured without recording (`CaseAnalysis.bare_ms`); None if unknown.
    recorded, std: measured with recording, and its standard deviation.
    ranks: (measured, predicted) time of each rank, with waits and gathered columns.
    mape: mean absolute relative error of attention, over all ranks and steps.
    degrees: (measured, predicted) imbalance degrees of time.
    cells, equal: entries of `work_table`, and how many are equal.
    """

    bare: float | None
    recorded: float
    std: float
    predicted: float
    low: float
    high: float
    ranks: tuple[np.ndarray, np.ndarray]
    mape: float
    degrees: dict[str, tuple[float, float]]
    cells: int
    equal: int

    @property
    def measured(self) -> float:
        return self.recorded if self.bare is None else self.bare

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def inside(self) -> bool:
        return self.low <= self.measured <= self.high

    def to_json(self) -> dict[str, Any]:
        measured, predicted = self.ranks
        ranks = {
            "measured_ms": measured,
            "predicted_ms": predicted,
            "error": _relative(predicted, measured),
        }
        return {
            **{f"{name}_ms": getattr(self, name) for name in _TIMES},
            "measured_without_records": self.bare is not None,
            "error": self.error,
            "inside_bounds": self.inside,
            "attention_mape": self.mape,
            "ranks": {name: np.round(values, 5).tolist() for name, values in ranks.items()},
            "work_cells": self.cells,
            "work_cells_equal": self.equal,
            "degrees": {
                name: {"measured": m, "predicted": p, "error": p - m}
                for name, (m, p) in self.degrees.items()
            },
        }


@dataclass(frozen=True)
class CaseComparison:
    """One case, measured and predicted.

    group: (run, pattern, length, workers). Cases of one group are ranked together.
    """

    run: str
    label: str
    group: Key
    passes: dict[str, PassComparison]
    remarks: tuple[str, ...] = ()
    prediction: str = ""
    written: str = ""

    @property
    def measured(self) -> float:
        return sum(p.measured for p in self.passes.values())

    @property
    def predicted(self) -> float:
        return sum(p.predicted for p in self.passes.values())

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "case": self.label,
            "measured_ms": self.measured,
            "predicted_ms": self.predicted,
            "error": self.error,
            "prediction": self.prediction,
            "written": self.written,
            "remarks": list(self.remarks),
            "passes": {name: p.to_json() for name, p in self.passes.items()},
        }


class MismatchedPrediction(ValueError):
    """A prediction describes another configuration than the one that ran."""


def compare(
    run: MeasuredRun,
    case: CaseAnalysis,
    predicted: PredictedCase,
    replayed: Mapping[str, np.ndarray] | None = None,
) -> CaseComparison:
    """Compare a measured case with its prediction.

    replayed: measured work of the micro-batch that the prediction repeats, by pass; None for the
        mean over all micro-batches.

    Raises:
        MismatchedPrediction: measurement and prediction differ in steps or workers.
    """
    passes, remarks = {}, predicted.remarks
    for name in PASSES:
        if name not in case.passes or name not in predicted.analysis.passes:
            continue
        measured, other = case.passes[name], predicted.analysis.passes[name]
        if measured.attention.shape != other.attention.shape:
            ours, theirs = case.facts.get("exchange"), predicted.analysis.facts.get("exchange")
            raise MismatchedPrediction(
                f"the prediction is for exchange {theirs!r} with {other.attention.shape[1]} steps "
                f"in {name}, but the run used {ours!r} with {measured.attention.shape[1]} steps"
            )
        mean = work_table(measured)
        work = mean if replayed is None else replayed[name]
        if not np.array_equal(work, mean):
            remarks = tuple(dict.fromkeys([*remarks, _ONE_MICRO_BATCH]))
        passes[name] = _compare_pass(
            measured, other, predicted.bounds[name], case.bare_ms(name), work
        )
    folder, facts = str(run.folder), case.facts
    return CaseComparison(
        run=folder,
        label=case.label,
        group=(folder, facts["pattern"], facts["seq"], facts["cp"]),
        passes=passes,
        remarks=remarks,
        prediction=str(predicted.folder),
        written=predicted.written,
    )


def _compare_pass(
    measured: PassAnalysis,
    other: PassAnalysis,
    bounds: dict[str, float],
    bare: float | None,
    work: np.ndarray,
) -> PassComparison:
    computed = (measured.attention > 0) & (other.attention > 0)
    cells = np.abs(_relative(other.attention, measured.attention))[computed]
    return PassComparison(
        bare=bare,
        recorded=measured.duration.mean,
        std=measured.duration.std,
        predicted=bounds["value"],
        low=bounds["low"],
        high=bounds["high"],
        ranks=(measured.elapsed.sum(1) + measured.columns, other.elapsed.sum(1) + other.columns),
        mape=float(cells.mean()) if cells.size else 0.0,
        degrees={
            name: (getattr(measured.time, name).mean, getattr(other.time, name).mean)
            for name in DEGREES
        },
        cells=work.size,
        equal=int((work == work_table(other)).sum()),
    )


def _relative(predicted: np.ndarray, measured: np.ndarray) -> np.ndarray:
    return np.divide(predicted, measured, out=np.ones_like(predicted), where=measured > 0) - 1


def agreement(cases: Sequence[CaseComparison]) -> dict[str, Any]:
    """Summarize the relative errors of all cases (`profiles/definitions.md`, Validation).

    ``spearman`` and ``fastest_found`` are by group of three cases or more.
    """
    errors = np.array([case.error for case in cases])
    passes = [(name, p) for case in cases for name, p in case.passes.items()]
    degrees = np.abs([p - m for _, one_pass in passes for m, p in one_pass.degrees.values()])
    times = {
        f"{group[0]}: {' '.join(map(str, group[1:]))}": [
            pd.Series([getattr(case, of) for case in members]) for of in ("measured", "predicted")
        ]
        for group, members in grouped(cases, lambda case: case.group).items()
        if len(members) >= _LEAST_RANKED
    }
    common = float(np.median(errors + 1))
    by_pass = grouped(passes, lambda named: named[0])
    return {
        "mape": float(np.abs(errors).mean()),
        "common_factor": common,
        "mape_beside_common_factor": float(np.abs((errors + 1) / common - 1).mean()),
        "worst_error": float(errors[np.argmax(np.abs(errors))]),
        "mape_of_passes": {
            name: float(np.mean([abs(p.error) for _, p in named]))
            for name, named in by_pass.items()
        },
        "inside_bounds": float(np.mean([p.inside for _, p in passes])),
        "degree_mean_error": float(degrees.mean()),
        "degree_worst_error": float(degrees.max()),
        "work_cells": sum(p.cells for _, p in passes),
        "work_cells_equal": sum(p.equal for _, p in passes),
        # Spearman's correlation is Pearson's of ranks; ties get their mean rank.
        "spearman": {group: float(m.rank().corr(p.rank())) for group, (m, p) in times.items()},
        "fastest_found": {
            group: int(m.argmin()) == int(p.argmin()) for group, (m, p) in times.items()
        },
    }


def work_table(analysis: PassAnalysis) -> np.ndarray:
    """Return the work of a pass, int-valued [ranks, 2 * steps + 1], as a mean over all samples.

    A row holds the query-key pairs of each step, the pairs of gathered columns, and the block pairs
    of each step, which are 0 in a step without pairs.
    """
    return _whole(analysis.pairs, analysis.column_pairs, analysis.blocks)


def micro_batch_tables(
    recorded: RecordedFolder,
    cases: Sequence[CaseAnalysis],
    layers: Mapping[int, Collection[int]],
    iteration: int,
) -> dict[int, dict[str, np.ndarray]]:
    """Return the work of the first micro-batch of an iteration in the first context group.

    Documents differ between micro-batches, and replays know those of one. With tensor parallelism,
    only the first rank of each tensor group counts; with a pipeline, each layer's stage.

    layers: numbers of the layers to count, by number of the case.

    Returns:
        The `work_table` of each pass, by number of the case; none without rows of the iteration.
    """
    sums = {
        (case.number, DIRECTIONS.index(name)): np.zeros(
            (2, case.workers, of_pass.pairs.shape[1] + 1), np.int64
        )
        for case in cases
        for name, of_pass in case.passes.items()
    }
    tensor = {case.number: int(case.facts.get("tp") or 1) for case in cases}
    stages = {c.number: 1 if c.pipeline is None else c.pipeline.pipeline.stages for c in cases}
    of_a_stage = {c.number: c.workers * c.groups // stages[c.number] for c in cases}
    found = set[int]()
    for batch in recorded.batches(_NEEDED):
        counts = (batch["iteration"] == iteration) & (batch["micro"] == 0)
        counts &= np.isin(batch["phase"], [KINDS.index(ATTENTION), KINDS.index(COLUMNS)])
        for (number, direction), both in sums.items():
            mine = counts & (batch["case"] == number) & (batch["direction"] == direction)
            mine &= np.isin(batch["layer"], list(layers[number]))
            rank = batch["rank"] % of_a_stage[number]
            worker, coordinate = np.divmod(rank, tensor[number])
            mine &= (worker < both.shape[1]) & (coordinate == 0)
            if mine.any():
                found.add(number)
            columns = batch["phase"][mine] == KINDS.index(COLUMNS)
            slot = np.where(columns, 0, batch["step"][mine] + 1)
            for table, name in zip(both, ("pairs", "blocks"), strict=True):
                np.add.at(table, (worker[mine], slot), batch[name][mine])
    tables: dict[int, dict[str, np.ndarray]] = {number: {} for number in sorted(found)}
    for (number, direction), both in sums.items():
        if number in found:
            pairs, blocks = both / len(layers[number])
            tables[number][DIRECTIONS[direction]] = _whole(pairs[:, 1:], pairs[:, 0], blocks[:, 1:])
    return tables


def _whole(pairs: np.ndarray, column_pairs: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    return np.rint(np.column_stack([pairs, column_pairs, np.where(pairs > 0, blocks, 0)]))
