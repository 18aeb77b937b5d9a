"""What the commands of `mtrain simulate` do: predict, write files, and print."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mtrain_cli.commands import simulate_output as output
from mtrain_cli.commands.options import writing
from mtrain_cli.commands.simulate_request import Job
from mtrain_cli.config.cluster import Cluster, load_cluster
from mtrain_cli.config.documents import digest, json_text
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.sizes import parse_share
from mtrain_cli.console import Console
from mtrain_cli.parallel.program import Recompute
from mtrain_cli.records import record_files
from mtrain_cli.records.analysis import analyse
from mtrain_cli.records.pipeline_times import prediction_entry
from mtrain_cli.reporting import sweeps
from mtrain_cli.reporting.table import Table
from mtrain_cli.reporting.terminal import print_table
from mtrain_cli.simulation.calibration import Calibration, describe_source, load_user_calibration
from mtrain_cli.simulation.expert_cost import dealt_over
from mtrain_cli.simulation.prediction import CONSTANTS, AttentionWorkload, BoundedTime, Prediction
from mtrain_cli.simulation.recommend import label
from mtrain_cli.simulation.recommend import recommend as search
from mtrain_cli.simulation.scenario import (
    PredictedScenario,
    Scenario,
    evaluate,
    predict_attention_alone,
    predict_training,
)

_SHOWN = 8  # configurations in the table of a recommendation
_MOST_POINTS = 5000


def predict_steps(job: Job) -> None:
    """Predict a training step for every combination of settings, layouts and exchanges."""
    # Settings vary slowest, so that points with the same indices are adjacent.
    names = sorted(job.axes, key=lambda name: name in ("nodes", "workers"))
    points = [
        dict(zip(names, values, strict=True))
        for values in itertools.product(*(job.axes[name] for name in names))
    ]
    if (count := len(points) * len(job.layouts) * len(job.exchanges)) > _MOST_POINTS:
        raise ConfigError(f"{count} configurations to predict; allowed: at most {_MOST_POINTS}")
    folder = _folder_of(job)
    scenarios: dict[str, Scenario] = {}
    pair_lines: dict[str, None] = {}
    # The scenarios come first: they check all settings before anything is predicted.
    for point in points:
        settings = [f"{n}={v}" for n, v in point.items() if n not in _KEYS]
        own = {name: parse(point[name]) for name, parse in _KEYS.items() if name in point and parse}
        request = job.request.at(settings, **own)
        scenario = scenarios[_key_of(point)] = request.scenario()
        pair_lines[f"pairs  {request.describe_pairs(scenario.problem.pattern)}"] = None
    outcomes: dict[str, PredictedScenario] = {}
    rows: dict[str, dict[str, Any]] = {}
    for point, layout, exchange in itertools.product(points, job.layouts, job.exchanges):
        cluster = job.cluster
        if "nodes" in point:
            cluster = load_cluster(job.request.cluster, nodes=int(point["nodes"]))
        workers = int(point.get("workers", job.given_workers or cluster.gpus))
        row: dict[str, Any] = {
            "point": point,
            "workers": workers,
            "layout": layout,
            "exchange": exchange,
        }
        scenario, with_rows = scenarios[_key_of(point)], job.typed.files and not job.axes
        run = cluster, scenario, workers, layout, exchange
        try:
            outcome = predict_training(*run, number=len(outcomes), rows=with_rows)
        except ConfigError as error:
            if not job.axes:
                raise
            row["cannot"] = error.problems[0]
            rows[str(row)] = row
            continue
        row |= row_of(outcome) | {"remarks": list(outcome.remarks)}
        # `auto` may choose an exchange that is also compared by its name.
        identity = str((point, workers, layout, row["exchange"]))
        if identity not in rows:
            rows[identity], outcomes[identity] = row, outcome
    if not outcomes:
        raise ConfigError(next(iter(rows.values()))["cannot"])
    first, *others = (outcome.remarks for outcome in outcomes.values())
    remarks = [text for text in first if all(text in other for other in others)]
    for row in rows.values():
        row["remarks"] = [text for text in row.get("remarks", ()) if text not in remarks]
    results, shown, predictions = list(outcomes.values()), list(rows.values()), list[Prediction]()
    if job.axes:
        most = max(row["workers"] for row in shown)
        more: dict[str, Any] = {"workers": most, "cases": [], "remarks": remarks, "sweep": shown}
    else:
        predictions = [outcome.attention for outcome in results]
        more = _entries(next(iter(scenarios.values())).problem, results)
    content = _document(job.cluster, load_user_calibration(job.request.calibration), **more)
    if folder is not None and job.axes:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            sweeps.sweep_table([(folder.name, shown)]).write(folder)

    def show(console: Console) -> None:
        kernels = output.kernel_lines(row.get("kernel") for row in shown)
        output.print_lines(console, [*pair_lines, *kernels])
        print_table(console, _step_table(job.cluster, shown))
        output.print_lines(console, (f"not    {why}" for why in sweeps.why_not(shown)))
        if not job.axes:
            if len(results) > 1 or not results[0].step.fits:
                output.print_lines(console, [output.best_line(results)])
            if len(results) > 1:
                output.print_lines(console, ["parts  of one row follow; --json has those of all"])
            output.print_lines(console, output.step_lines(output.main_outcome(results)))
        every = (remark for outcome in results for remark in outcome.remarks)
        output.print_notes(console, remarks if job.axes else every)

    _deliver(job, folder, content, predictions, show)


def _step_table(cluster: Cluster, rows: Sequence[Mapping[str, Any]]) -> Table:
    heading = f"{cluster.name} ({cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu.name})"
    return dataclasses.replace(sweeps.sweep_table([("", rows)]), title=f"{heading}, predicted")


# Keys of a sweep that are not settings, and how to parse them for a request.
_KEYS: dict[str, Callable[[str], Any] | None] = {
    "nodes": None,
    "workers": None,
    "density": parse_share,
    "columns": int,
}


def _key_of(point: Mapping[str, str]) -> str:
    """Return the values that a scenario depends on."""
    return str({n: v for n, v in point.items() if n not in ("nodes", "workers")})


def predict_attention(job: Job, recompute: bool) -> None:
    """Predict a layer's attention for every layout and exchange."""
    request, planned = job.request, not job.request.without_a_model
    scenario = request.scenario() if planned else request.scenario_without_model()
    problem, calibration, folder = scenario.problem, scenario.calibration, _folder_of(job)
    by_label: dict[tuple[str, str], Prediction] = {}
    for layout, exchange in itertools.product(job.layouts, job.exchanges):
        prediction = predict_attention_alone(
            job.cluster,
            scenario,
            layout,
            exchange,
            workers=job.workers,
            planned=planned,
            recompute=Recompute.EVERYTHING if recompute else Recompute.NOTHING,
            number=len(by_label),
            rows=job.typed.files,
        )
        by_label.setdefault((layout, prediction.facts["exchange"]), prediction)
    predictions = list(by_label.values())
    content = _document(job.cluster, calibration, **_attention_entries(problem, predictions))

    def show(console: Console) -> None:
        output.print_assumed(console, job, problem.pattern, [p.kernel for p in predictions])
        print_table(console, output.attention_table(job.cluster, problem, predictions))
        output.print_notes(console, (remark for p in predictions for remark in p.remarks))

    _deliver(job, folder, content, predictions, show)


def recommend(job: Job) -> None:
    """Search for the fastest configuration that fits. The exit code is 1 if nothing fits."""
    scenario = job.request.scenario()
    if job.request.slow and scenario.config.topology.context_parallel == "auto":
        # The group of a rank depends on the size of groups, and several sizes are tried.
        raise ConfigError(
            "slow: this command tries context groups of several sizes; set "
            "topology.context_parallel=N, or leave slow out"
        )
    folder = _folder_of(job)
    # Settings that the user typed stay fixed.
    fixed = job.request.sets("train.activation_checkpoint")
    kinds = {"recomputations": (scenario.config.train.activation_checkpoint,)} if fixed else {}
    with _progress() as progress:
        compared = job.layouts, job.exchanges
        result = search(job.cluster, scenario, job.workers, *compared, progress=progress, **kinds)
    ranked = result.ranked
    rows = [{"configuration": label(outcome.plan), **row_of(outcome)} for outcome in ranked]
    lines = list(output.recommendation_lines(job.cluster, result, scenario.words))
    rejected = [{"what": what, "why": why} for what, why in result.rejected]
    entries = _entries(scenario.problem, ranked[:1]) if ranked else {"workers": job.workers}
    recommended = {"ranked": rows, "rejected": rejected, "lines": lines}
    content = _document(job.cluster, scenario.calibration, **entries, recommended=recommended)
    predictions: list[Prediction] = []
    if folder is not None and ranked:
        with_rows = evaluate(job.cluster, scenario, ranked[0].plan, rows=True, bounds=False)
        predictions = [with_rows.attention]

    def show(console: Console) -> None:
        kernels = [outcome.plan.kernel for outcome in ranked]
        output.print_assumed(console, job, scenario.problem.pattern, kernels)
        if ranked:
            by_time = sorted(rows, key=lambda row: row["seconds"]["value"])
            print_table(console, _step_table(job.cluster, by_time[:_SHOWN]))
            if len(rows) > _SHOWN:
                console.print(f"and {len(rows) - _SHOWN} slower ones that fit")
        output.print_lines(console, lines)
        if ranked:
            output.print_lines(console, output.step_lines(ranked[0]))
            output.print_notes(console, ranked[0].remarks)

    _deliver(job, folder if ranked else None, content, predictions, show)
    if not ranked:
        raise typer.Exit(1)


def _write_files(folder: Path, content: dict[str, Any], rows: Sequence[np.ndarray]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, of_prediction in enumerate(rows):
        record_files.write_part(of_prediction, folder, number)
    record_files.join_parts(folder)
    record_files.write_summary(folder, content)
    if rows:
        # With the digest of the records in the summary, the summary's digest covers both.
        content["records_sha256"] = digest(folder / record_files.RECORDS)
        record_files.write_summary(folder, content)
        results = analyse(record_files.open_records(folder))
        content["results"] = [result.to_json() for result in results]
        record_files.write_summary(folder, content)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn("configurations"), BarColumn(), MofNCompleteColumn())
    hidden, console = not sys.stderr.isatty(), Console(stderr=True)
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=hidden
    ) as bar:
        task = bar.add_task("")
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _deliver(
    job: Job,
    folder: Path | None,
    content: dict[str, Any],
    predictions: Sequence[Prediction],
    show: Callable[[Console], None],
) -> None:
    """Write the files unless ``folder`` is None, and print the result as JSON or as tables."""
    if folder is not None:
        with writing(folder):
            _write_files(folder, content, [p.rows for p in predictions if p.rows is not None])
    if job.typed.as_json:
        typer.echo(json_text(content, indent=1))
        return
    console = Console(highlight=False, soft_wrap=True)
    show(console)
    console.print(f"took   {time.perf_counter() - job.started:.1f} s")
    if folder is not None:
        console.print(f"sha256 {digest(folder / 'summary.json')}  {folder}/summary.json")
        console.print(f"files  {folder}\ndraw   mtrain report {folder}")


def _document(cluster: Cluster, calibration: Calibration | None, **more: Any) -> dict[str, Any]:
    """Return the content of summary.json that all simulations share, with ``more`` added."""
    constants = {**cluster.constants(), **CONSTANTS}
    rows = [*(more.get("cases") or ()), *(more.get("sweep") or ())]
    kernel = next((row["kernel"] for row in rows if row.get("kernel")), None)
    return {
        **record_files.computed_summary("simulation"),
        "mode": "attention",
        "clock": {"uncertainty_us": 0.0},
        "overhead": None,
        "cluster": {
            "name": cluster.name, "nodes": cluster.nodes,
            "gpus_per_node": cluster.gpus_per_node, "gpu": cluster.gpu.name,
            "constants": {key: dataclasses.asdict(constant) for key, constant in constants.items()},
        },
        "calibration": describe_source(cluster.gpu.name, calibration, kernel),
        **more,
    }  # fmt: skip


def _range(time: BoundedTime) -> dict[str, float]:
    return {name: round(value, 5) for name, value in dataclasses.asdict(time).items()}


def _entries(problem: AttentionWorkload, outcomes: Sequence[PredictedScenario]) -> dict[str, Any]:
    """Return the entries of summary.json on predicted steps."""
    entries = _attention_entries(problem, [outcome.attention for outcome in outcomes])
    for entry, outcome in zip(entries["predicted"], outcomes, strict=True):
        entry["step"] = row_of(outcome)
        if outcome.step.pipeline is not None:
            entry["pipeline"] = prediction_entry(outcome.step.pipeline)
    return entries


def _attention_entries(
    problem: AttentionWorkload, predictions: Sequence[Prediction]
) -> dict[str, Any]:
    predicted = [
        {
            "label": p.facts["label"],
            "ms": _range(p.duration),
            "remarks": list(p.remarks),
            "passes": {
                name: {
                    "ms": _range(attention_pass.duration),
                    "time": dataclasses.asdict(attention_pass.time),
                    "work": dataclasses.asdict(attention_pass.work),
                    "computed": attention_pass.computed,
                    "late_ms": attention_pass.late,
                    "exposed_ms": attention_pass.exposed,
                }
                for name, attention_pass in p.passes.items()
            },
        }
        for p in predictions
    ]
    return {
        "workers": predictions[0].setup.workers,
        "layers": list(problem.layers),
        "cases": [p.facts for p in predictions],
        "predicted": predicted,
        "results": [],
    }


def new_folder(kind: str, out: Path | None, files: bool, *names: str) -> Path | None:
    """Return ``out``, or a folder in measurements/; None without ``files``.

    Raises:
        ConfigError: the folder holds a file of these names, or cannot be written; or --out and
            --no-files are both given.
    """
    if not files:
        if out is not None:
            raise ConfigError(f"--out {out}: --no-files writes no files; give one of the two")
        return None
    folder = out or Path("measurements", f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}")
    if any((folder / name).exists() for name in names):
        raise ConfigError(f"--out {folder}: already holds a profile or {kind}; give a new folder")
    place = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not (place.is_dir() and os.access(place, os.W_OK)):
        raise ConfigError(f"--out {folder}: cannot be written; give another folder, or --no-files")
    return folder


def _folder_of(job: Job) -> Path | None:
    return new_folder("simulation", job.typed.out, job.typed.files, record_files.SUMMARY)


def row_of(outcome: PredictedScenario) -> dict[str, Any]:
    """Return the predicted numbers of one training run.

    ``mfu`` is None for sparse attention. ``mfu_as_dense`` also counts the pairs that sparse
    attention skips, so it may exceed 1.
    """
    step, plan = outcome.step, outcome.plan
    degrees = {
        f"{name}_{of}": output.mean_degree(outcome.attention, of, name)
        for of, name in itertools.product(("time", "work"), ("worker", "step"))
    }
    return {
        "layout": outcome.layout,
        "exchange": plan.exchange.label,
        "kernel": plan.kernel,
        "seq": plan.config.seq,
        "nodes": -(-plan.dims.workers // max(1, plan.environment.workers_per_node)),
        "workers": plan.dims.workers,
        "cp": outcome.context,
        "dp": plan.dims.dp,
        "tp": plan.dims.tp,
        "ep": dealt_over(plan),
        "activation_checkpoint": plan.config.train.activation_checkpoint,
        "density": outcome.attention.facts["density"],
        "seconds": _six_digits(step.seconds),
        "tokens_per_second_per_gpu": _six_digits(step.tokens_per_second_per_gpu),
        "mfu": step.mfu if outcome.dense else None,
        "mfu_as_dense": step.mfu,
        "hfu": step.hfu,
        "memory_bytes": plan.memory.total,
        "memory_parts": plan.memory.peak.parts,
        "memory_reserve_bytes": plan.memory.reserve,
        "capacity_bytes": plan.hardware.memory,
        "fits": step.fits,
        "parts_s": {name: float(f"{value:.6g}") for name, value in step.parts.items()},
        "hidden_weights_s": step.hidden,
        "hidden_state_bytes": step.hidden_states,
        "expert_rows": None if step.experts is None else dataclasses.asdict(step.experts),
        "degrees": degrees,
    }


def _six_digits(time: BoundedTime) -> dict[str, float]:
    return {name: float(f"{value:.6g}") for name, value in vars(time).items()}
