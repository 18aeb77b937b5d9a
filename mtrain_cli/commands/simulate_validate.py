"""`mtrain simulate validate`: compare predictions with the measured cases of profiles."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import typer

from mtrain_cli import __version__
from mtrain_cli.commands.options import writing
from mtrain_cli.commands.simulate_files import require_no_out, require_writable
from mtrain_cli.commands.simulate_output import brief_remark
from mtrain_cli.config.cluster import Cluster
from mtrain_cli.config.documents import json_text
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.console import Console
from mtrain_cli.records import record_files
from mtrain_cli.records.shipped_profiles import find_shipped
from mtrain_cli.reporting.table import Column, Table
from mtrain_cli.reporting.terminal_width import print_table, say
from mtrain_cli.simulation.calibration import Calibration, describe_source, same_device
from mtrain_cli.simulation.prediction_accuracy import PredictionAccuracy, accuracy
from mtrain_cli.simulation.validation import (
    CaseComparison,
    MeasuredRun,
    MismatchedPrediction,
    PassComparison,
    PredictedCase,
    compare,
    digest,
    key_of,
    open_prediction,
    open_run,
    replay,
    replayed_work,
    sources,
    write_predictions,
)
from mtrain_cli.training.flops import peak_flops

FILE = "validation.json"
_CPU = "CPU"  # device of a profile without GPUs
_LABEL = len("imbalance  ")  # width of the label that begins each line
_SHOWN = 12  # constants named in one line
# The simulator's own constants, which no calibration replaces (`simulation.costs`).
ASSUMED = "number of launches of a step; time to estimate an index"


def validate(
    runs: Sequence[Path],
    saved: Sequence[Path],
    cluster: Cluster,
    calibration: Calibration | None,
    out: Path | None,
    *,
    files: bool,
    as_json: bool,
) -> None:
    """Compare predictions with measurements, and print the errors of the predictions.

    Args:
        saved: folders of predictions, or folders that contain folders of predictions. If empty,
            predict the cases now.
    """
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
        overall = accuracy(compared)
        document = _document(
            measured, predictions, cluster, calibration, compared, overall, missing
        )
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / FILE).write_text(json_text(document, indent=1) + "\n")
    if as_json:
        typer.echo(json_text(document, indent=1))
        return
    _show(Console(highlight=False, soft_wrap=True), document, compared, overall)
    if files:
        typer.echo(f"files  {folder}")


@contextmanager
def _folder(out: Path | None, files: bool) -> Iterator[Path]:
    """Yield a folder for the files, or a temporary folder if ``files`` is false."""
    if not files:
        require_no_out(out)
        with tempfile.TemporaryDirectory() as place:
            yield Path(place, "validation")
        return
    folder = out or Path("measurements", f"validation-{time.strftime('%Y%m%d-%H%M%S')}")
    if (folder / FILE).exists() or (folder / record_files.SUMMARY).exists():
        raise ConfigError(
            f"--out {folder}: already holds a validation, profile or simulation; give a new folder"
        )
    require_writable(folder)
    yield folder


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
    given: dict[Any, PredictedCase] = {}
    for path in predictions:
        given |= open_prediction(path)
    compared: list[CaseComparison] = []
    missing = []
    for number, run in enumerate(runs):
        by_case, replayed = given, {}
        if not predictions:
            by_case = _replay(run, cluster, calibration, folder / f"predicted-{number}")
            replayed = replayed_work(run, by_case)
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


def _replay(
    run: MeasuredRun, cluster: Cluster, calibration: Calibration | None, folder: Path
) -> dict[Any, PredictedCase]:
    predicted = [
        replay(run, case, cluster, calibration, number) for number, case in enumerate(run.cases)
    ]
    write_predictions(folder, predicted, "attention")
    return open_prediction(folder)


def _document(
    runs: Sequence[MeasuredRun],
    predictions: Sequence[Path],
    cluster: Cluster,
    calibration: Calibration | None,
    compared: Sequence[CaseComparison],
    accuracy: PredictionAccuracy,
    missing: Sequence[str],
) -> dict[str, Any]:
    if predictions:
        first = record_files.open_records(predictions[0].expanduser()).summary
        described = first.get("cluster") or {}
        by_source = sources((described.get("constants") or {}).items())
        named, files = described.get("name"), first.get("calibration")
        gpu = described.get("gpu")
        on_cpu = gpu is not None and peak_flops(gpu) is None  # it does not record the device type
    else:
        by_source, named = sources(cluster.constants().items()), cluster.name
        files = describe_source(cluster.gpu.name, calibration)
        gpu, on_cpu = cluster.gpu.name, cluster.gpu.is_cpu
    return {
        "schema": 1,
        "kind": "validation",
        "command": ["mtrain", *sys.argv[1:]],
        "versions": {"mtrain": __version__},
        "runs": [
            {"folder": str(run.folder), "started": run.started, "devices": _devices(run)}
            for run in runs
        ],
        "predictions": [
            {"folder": str(path), "sha256": digest(path.expanduser() / record_files.SUMMARY)}
            for path in predictions
        ],
        "cluster": named,
        "constants": by_source,
        "assumed": ASSUMED,
        "elsewhere": _device_mismatches(runs, gpu, on_cpu, named),
        "calibration": files,
        "agreement": accuracy.to_json(),
        "cases": [case.to_json() for case in compared],
        "not_predicted": list(missing),
    }


def _device_mismatches(
    runs: Sequence[MeasuredRun], gpu: str | None, on_cpu: bool, cluster: str | None
) -> list[str]:
    """Return a line for each run that was measured on another device than was predicted."""
    if gpu is None:
        return []
    return [
        f"{run.folder} ran on {name}, but the prediction is for {cluster}, which has {gpu}. The "
        "errors compare different hardware; give --cluster FILE that describes the machine of the "
        "profile"
        for run in runs
        for name in dict.fromkeys(_devices(run))
        if not (on_cpu if name == _CPU else same_device(name, gpu))
    ]


def _devices(run: MeasuredRun) -> list[str]:
    environment = run.recorded.summary.get("environment") or {}
    gpus = environment.get("gpus") or [_CPU]
    return [str(gpu.get("name", gpu) if isinstance(gpu, dict) else gpu) for gpu in gpus]


def _show(
    console: Console,
    document: dict[str, Any],
    compared: Sequence[CaseComparison],
    accuracy: PredictionAccuracy,
) -> None:
    for line in document["elsewhere"]:
        say(console, f"warning: {line}", style="yellow")
    print_table(console, _table(compared))
    for line in (*_accuracy_lines(accuracy), *_ranking_lines(document), *_source_lines(document)):
        say(console, line, _LABEL)
    for entry in document["predictions"]:
        console.print(f"sha256     {entry['sha256']}  {entry['folder']}/summary.json")
    for line in _order_lines(document, compared):
        say(console, line, _LABEL)
    notes = [
        *dict.fromkeys(brief_remark(remark) for case in compared for remark in case.remarks),
        *(f"measured, but not predicted: {label}" for label in document["not_predicted"]),
    ]
    for note in notes:
        say(console, f"note       {note}", _LABEL, style="yellow")


def _accuracy_lines(accuracy: PredictionAccuracy) -> Iterator[str]:
    passes = "".join(f", {name} {error:.1%}" for name, error in accuracy.passes.items())
    yield (
        f"time       mean absolute error {accuracy.mape:.1%}, largest of a whole case "
        f"{accuracy.worst:+.1%}{passes}"
    )
    yield (
        f"common     predicted / measured is {accuracy.common:.2f} in the median; without this "
        f"factor, mean absolute error {accuracy.mape_without_common:.1%}"
    )
    yield f"bounds     hold for {accuracy.covered:.0%} of the passes"
    yield (
        f"imbalance  degrees off by {accuracy.degree:.3f} on average, "
        f"{accuracy.worst_degree:.3f} at most"
    )
    yield f"work       {accuracy.equal} of {accuracy.cells} counts equal"


def _ranking_lines(document: dict[str, Any]) -> Iterator[str]:
    results = document["agreement"]
    for name, value in results["spearman"].items():
        found = results["fastest_found"][name]
        fastest = "the fastest was found" if found else "another one was the fastest"
        folder, _, group = name.rpartition(": ")
        pattern, seq, workers = group.rsplit(" ", 2)
        run = f"{Path(folder).name}, " if len(document["runs"]) > 1 else ""
        yield (
            f"ranking    {run}{pattern}, {int(seq):,} tokens, {workers} workers: Spearman "
            f"{value:+.2f}, {fastest}"
        )
    if not results["spearman"]:
        yield "ranking    fewer than three comparable layouts and exchanges"


def _source_lines(document: dict[str, Any]) -> Iterator[str]:
    for source, names in document["constants"].items():
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        yield f"{source:<10} {', '.join(names[:_SHOWN])}{more}"
    yield f"{'assumed':<10} {document['assumed']}"
    yield f"kernels    {_kernel_source(document['calibration'])}"


def _kernel_source(calibration: dict[str, Any] | None) -> str:
    if calibration is None:
        return "from a calibration that the prediction does not name"
    scaled = ", another device: scaled by peak FLOP/s" if calibration.get("scaled") else ""
    return f"{', '.join(calibration['files'])} of {calibration['device']}{scaled}"


def _order_lines(document: dict[str, Any], compared: Sequence[CaseComparison]) -> Iterator[str]:
    started = {run["folder"]: run["started"] for run in document["runs"]}
    pairs = sorted({(case.written, started[case.run]) for case in compared if case.written})
    for written, measured in pairs:
        first, second, order = _seconds(written), _seconds(measured), ""
        if first is not None and second is not None:
            order = f", {'before' if first <= second else 'AFTER'} it was measured"
        yield f"when       predicted {written}{order}, measured {measured}"


def _seconds(text: str) -> float | None:
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S%z"))
    except ValueError:
        return None


def _table(compared: Sequence[CaseComparison]) -> Table:
    several = len({case.run for case in compared}) > 1
    columns = [
        Column(
            "case",
            lambda case: f"{Path(case.run).name}: {case.label}" if several else case.label,
            words=True,
        ),
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
        f"ms: of a layer on the slowest worker, measured {_definition(compared)}. ±: spread of the "
        "recorded iterations. error: predicted / measured - 1. in: measured is within the "
        "predicted bounds. steps: mean absolute error of attention over workers and steps. "
        "ranks: largest error of a rank's time. ID: predicted imbalance degree of time, and its "
        "difference from the measured one."
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
    measured, predicted = p.ranks
    errors = predicted / np.maximum(measured, 1e-9) - 1
    return f"{errors[np.argmax(np.abs(errors))]:+.1%}"


def _degree(p: PassComparison, name: str) -> str:
    measured, predicted = p.degrees[name]
    return f"{predicted:.2f} {predicted - measured:+.3f}"


def _definition(compared: Sequence[CaseComparison]) -> str:
    kinds = {p.bare is not None for case in compared for p in case.passes.values()}
    bare = "without recording, the median (`mtrain report`: bare)"
    recorded = "while recording, the mean (`mtrain report`: pass ms)"
    if len(kinds) == 2:
        return f"{bare}, or, for several layers, {recorded}"
    return bare if kinds == {True} else recorded
