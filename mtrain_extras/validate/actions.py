"""`mtrain simulate validate`: compare predictions with the measured cases of profiles."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import typer

from mtrain_cli import __version__
from mtrain_cli.commands.options import writing
from mtrain_cli.commands.simulate_actions import new_folder
from mtrain_cli.config.cluster import Cluster
from mtrain_cli.config.documents import digest, json_text
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.suggest import find_shipped
from mtrain_cli.console import Console
from mtrain_cli.records import record_files
from mtrain_cli.reporting.table import Column, Table
from mtrain_cli.reporting.terminal import print_table, say
from mtrain_cli.simulation.calibration import (
    Calibration,
    describe_source,
    load_user_calibration,
    same_device,
)
from mtrain_cli.training.flops import peak_flops
from mtrain_extras.validate.validation import (
    CaseComparison,
    MeasuredRun,
    MismatchedPrediction,
    PassComparison,
    PredictedCase,
    agreement,
    compare,
    key_of,
    micro_batch_tables,
    open_prediction,
    open_run,
    replay,
    write_predictions,
)

FILE = "validation.json"
_CPU = "CPU"  # device of a profile without GPUs
_LABEL = len("imbalance  ")  # width of the label that begins each line


def validate(
    runs: Sequence[Path],
    saved: Sequence[Path],
    cluster: Cluster,
    calibration_files: str | None,
    out: Path | None,
    *,
    files: bool,
    as_json: bool,
) -> None:
    """Compare predictions with measurements, and print the errors of the predictions.

    saved: folders of predictions, or folders of such folders; if empty, predict the cases now.
    """
    calibration = load_user_calibration(calibration_files)
    with _folder(out, files) as folder:
        measured = [open_run(run) for run in runs]
        predictions = [path for place in saved for path in _predictions_in(find_shipped(place))]
        compared, missing = _compare(measured, predictions, cluster, calibration, folder)
        if not compared:
            options = ", ".join(f"--prediction {path}" for path in predictions)
            raise ConfigError(
                f"{options or f'RUN {runs[0]}'}: no prediction matches the {len(missing)} measured "
                f"cases, such as {missing[0]}"
            )
        document = {
            "schema": 1,
            "kind": "validation",
            "command": ["mtrain", *sys.argv[1:]],
            "versions": {"mtrain": __version__},
            "runs": [
                {"folder": str(run.folder), "started": run.started, "devices": _devices(run)}
                for run in measured
            ],
            "predictions": [
                {
                    "folder": str(path),
                    "sha256": digest(path.expanduser() / record_files.SUMMARY),
                }
                for path in predictions
            ],
            **_origin(measured, predictions, cluster, calibration),
            "agreement": agreement(compared),
            "cases": [case.to_json() for case in compared],
            "not_predicted": missing,
        }
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / FILE).write_text(json_text(document, indent=1) + "\n")
    if as_json:
        typer.echo(json_text(document, indent=1))
        return
    _show(Console(highlight=False, soft_wrap=True), document, compared)
    if files:
        typer.echo(f"files  {folder}")


@contextmanager
def _folder(out: Path | None, files: bool) -> Iterator[Path]:
    """Yield a folder for the files, or a temporary folder if ``files`` is false."""
    if folder := new_folder("validation", out, files, FILE, record_files.SUMMARY):
        yield folder
        return
    with tempfile.TemporaryDirectory() as place:
        yield Path(place, "validation")


def _predictions_in(path: Path) -> list[Path]:
    if not path.is_dir() or (path / "summary.json").is_file():
        return [path]
    return sorted(file.parent for file in path.glob("*/summary.json")) or [path]


def _compare(
    runs: Sequence[MeasuredRun],
    predictions: Sequence[Path],
    cluster: Cluster,
    calibration: Calibration | None,
    folder: Path,
) -> tuple[list[CaseComparison], list[str]]:
    """Return the comparisons, and the labels of measured cases without a prediction."""
    given: dict[Any, PredictedCase] = {}
    for path in predictions:
        given |= open_prediction(path)
    compared: list[CaseComparison] = []
    missing = []
    for number, run in enumerate(runs):
        by_case, replayed = given, {}
        if not predictions:
            now = [replay(run, case, cluster, calibration, n) for n, case in enumerate(run.cases)]
            write_predictions(folder / f"predicted-{number}", now)
            by_case = open_prediction(folder / f"predicted-{number}")
            layers = {c.number: by_case[key_of(c.facts)].analysis.layers for c in run.cases}
            iteration = run.indices.setup.iteration
            replayed = micro_batch_tables(run.recorded, run.cases, layers, iteration)
        for case in run.cases:
            label, predicted = f"{run.folder.name}: {case.label}", by_case.get(key_of(case.facts))
            if predicted is None:
                missing.append(label)
                continue
            try:
                compared.append(compare(run, case, predicted, replayed.get(case.number)))
            except MismatchedPrediction as reason:
                missing.append(f"{label}: {reason}")
    return compared, missing


def _origin(
    runs: Sequence[MeasuredRun],
    predictions: Sequence[Path],
    cluster: Cluster,
    calibration: Calibration | None,
) -> dict[str, Any]:
    """Return where the predicted times come from.

    ``elsewhere`` has a line for each run that was measured on another device than was predicted.
    """
    named: str | None = cluster.name
    gpu: str | None = cluster.gpu.name
    on_cpu = cluster.gpu.is_cpu
    files: dict[str, Any] | None = describe_source(cluster.gpu.name, calibration)
    if predictions:
        first = record_files.open_records(predictions[0].expanduser()).summary
        described = first.get("cluster") or {}
        named, gpu, files = described.get("name"), described.get("gpu"), first.get("calibration")
        on_cpu = gpu is not None and peak_flops(gpu) is None  # it does not record the device type
    elsewhere = [
        f"{run.folder} ran on {name}, but the prediction is for {named}, which has {gpu}. The "
        "errors compare different hardware; give --cluster FILE that describes the machine of the "
        "profile"
        for run in runs
        for name in dict.fromkeys(_devices(run))
        if gpu is not None and not (on_cpu if name == _CPU else same_device(name, gpu))
    ]
    return {"cluster": named, "elsewhere": elsewhere, "calibration": files}


def _devices(run: MeasuredRun) -> list[str]:
    environment = run.recorded.summary.get("environment") or {}
    gpus = environment.get("gpus") or [_CPU]
    return [str(gpu.get("name", gpu) if isinstance(gpu, dict) else gpu) for gpu in gpus]


def _show(console: Console, document: dict[str, Any], compared: Sequence[CaseComparison]) -> None:
    for line in document["elsewhere"]:
        say(console, f"warning: {line}", style="yellow")
    print_table(console, _table(compared))
    for line in _lines(document):
        say(console, line, _LABEL)
    for entry in document["predictions"]:
        console.print(f"sha256     {entry['sha256']}  {entry['folder']}/summary.json")
    started = {run["folder"]: run["started"] for run in document["runs"]}
    for written, run in sorted({(case.written, case.run) for case in compared if case.written}):
        order = ""
        with suppress(TypeError, ValueError):  # a time of another form
            late = datetime.fromisoformat(written) > datetime.fromisoformat(started[run])
            order = f", {'AFTER' if late else 'before'} it was measured"
        say(console, f"when       predicted {written}{order}, measured {started[run]}", _LABEL)
    remarks = [remark for case in compared for remark in case.remarks]
    missing = [f"measured, but not predicted: {label}" for label in document["not_predicted"]]
    for note in dict.fromkeys([*remarks, *missing]):
        say(console, f"note       {note}", _LABEL, style="yellow")


def _lines(document: dict[str, Any]) -> Iterator[str]:
    """Yield lines on the errors, and on the sources of the predicted times."""
    errors = document["agreement"]
    passes = "".join(f", {name} {error:.1%}" for name, error in errors["mape_of_passes"].items())
    yield (
        f"time       mean absolute error {errors['mape']:.1%}, largest of a whole case "
        f"{errors['worst_error']:+.1%}{passes}"
    )
    yield (
        f"common     predicted / measured is {errors['common_factor']:.2f} in the median; without "
        f"this factor, mean absolute error {errors['mape_beside_common_factor']:.1%}"
    )
    yield f"bounds     hold for {errors['inside_bounds']:.0%} of the passes"
    yield (
        f"imbalance  degrees off by {errors['degree_mean_error']:.3f} on average, "
        f"{errors['degree_worst_error']:.3f} at most"
    )
    yield f"work       {errors['work_cells_equal']} of {errors['work_cells']} counts equal"
    for group, value in errors["spearman"].items():
        fastest = "was found" if errors["fastest_found"][group] else "was another one"
        yield f"ranking    {Path(group).name}: Spearman {value:+.2f}, the fastest {fastest}"
    yield f"kernels    {_kernel_source(document['calibration'])}"


def _kernel_source(calibration: dict[str, Any] | None) -> str:
    if calibration is None:
        return "from a calibration that the prediction does not name"
    scaled = ", another device: scaled by peak FLOP/s" if calibration.get("scaled") else ""
    return f"{', '.join(calibration['files'])} of {calibration['device']}{scaled}"


def _table(compared: Sequence[CaseComparison]) -> Table:
    several = len({case.run for case in compared}) > 1

    def label(case: CaseComparison) -> str:
        return f"{Path(case.run).name}: {case.label}" if several else case.label

    columns = [
        Column("case", label, words=True),
        Column("pass", lambda case: "\n".join([*case.passes, "all"]), words=True),
        _column(
            "measured", lambda p: f"{p.measured:.2f} ±{p.std:.2f}", lambda c: f"{c.measured:.2f}"
        ),
        _column("predicted", lambda p: f"{p.predicted:.2f}", lambda c: f"{c.predicted:.2f}"),
        _column("error", lambda p: f"{p.error:+.1%}", lambda c: f"{c.error:+.1%}"),
        _column("best - worst", lambda p: f"{p.low:.4g} - {p.high:.4g}", drop=5),
        _column("in", lambda p: "yes" if p.inside else "no"),
        _column("steps", lambda p: f"{p.mape:.1%}", drop=4),
        _column("ranks", _rank_error, drop=2),
        _column("worker ID", lambda p: _degree(p, "worker"), drop=3),
        _column("step ID", lambda p: _degree(p, "step"), drop=1),
    ]
    note = (
        "ms: of a layer on the slowest worker, measured without recording (median) or while "
        "recording (mean). ±: spread of the recorded iterations. error: predicted / measured - 1. "
        "in: measured is within the predicted bounds. steps: mean absolute error of attention over "
        "workers and steps. ranks: largest error of a rank's time. ID: predicted imbalance degree "
        "of time, and its difference from the measured one."
    )
    return Table("predicted against measured", columns, compared, note)


def _column(
    name: str,
    of_pass: Callable[[PassComparison], str],
    whole: Callable[[CaseComparison], str] = lambda _: "",
    drop: int = 0,
) -> Column:
    """Return a column of one row per case, with a line per pass, so that long names wrap."""

    def lines(case: CaseComparison) -> str:
        return "\n".join([*map(of_pass, case.passes.values()), whole(case)])

    return Column(name, lines, drop=drop)


def _rank_error(p: PassComparison) -> str:
    errors = p.ranks[1] / np.maximum(p.ranks[0], 1e-9) - 1
    return f"{errors[np.argmax(np.abs(errors))]:+.1%}"


def _degree(p: PassComparison, name: str) -> str:
    measured, predicted = p.degrees[name]
    return f"{predicted:.2f} {predicted - measured:+.3f}"
