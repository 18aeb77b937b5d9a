"""`mtrain simulate --validate RUN...`: compare predictions with the measured cases of profiles."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mtrain_cli import resource_dir
from mtrain_cli.config.schema import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from mtrain_cli.console import Console
    from mtrain_cli.simulation.calibration import Calibration
    from mtrain_cli.simulation.cluster import Cluster
    from mtrain_cli.simulation.validation import (
        CaseComparison,
        MeasuredRun,
        PredictedCase,
        PredictionAccuracy,
    )

FILE = "validation.json"
_LABEL = len("imbalance  ")  # width of the label that begins each line
# Columns that a narrow terminal omits, in this order.
SPARE = ("step ID", "ranks", "worker ID", "steps", "best - worst")
_SHOWN = 12  # names in one line
# The simulator's own constants, which no calibration replaces (`simulation.costs`).
ASSUMED = "launches of a step; estimating an index"


def validate(
    runs: Sequence[str],
    predictions: Sequence[Path],
    cluster: Cluster,
    calibration: Calibration | None,
    out: Path | None,
    *,
    files: bool,
    as_json: bool,
) -> None:
    """Compare and print. With ``files``, write validation.json and any new predictions."""
    if files:
        folder = out or Path("measurements", f"validation-{time.strftime('%Y%m%d-%H%M%S')}")
        _validate(runs, predictions, cluster, calibration, folder, as_json=as_json, write=True)
        return
    if out is not None:
        raise ConfigError(f"--out {out}: --no-files writes no files; give one of the two")
    with tempfile.TemporaryDirectory() as place:
        _validate(
            runs,
            predictions,
            cluster,
            calibration,
            Path(place, "validation"),
            as_json=as_json,
            write=False,
        )


def _validate(
    runs: Sequence[str],
    predictions: Sequence[Path],
    cluster: Cluster,
    calibration: Calibration | None,
    folder: Path,
    *,
    as_json: bool,
    write: bool,
) -> None:
    from mtrain_cli.commands.simulate_output import new_folder
    from mtrain_cli.console import Console
    from mtrain_cli.records import record_files
    from mtrain_cli.simulation.validation import (
        MismatchedPrediction,
        accuracy,
        compare,
        open_prediction,
        open_run,
    )

    if (folder / FILE).exists() or (folder / record_files.SUMMARY).exists():
        raise ConfigError(
            f"--out {folder}: already holds a validation, profile or simulation; give a new folder"
        )
    new_folder(folder)
    measured_runs = [open_run(_resolve(Path(run).expanduser())) for run in runs]
    given: dict[Any, PredictedCase] = {}
    predictions = [
        path
        for given_path in predictions
        for path in _predictions_in(_resolve(given_path.expanduser()))
    ]
    for path in predictions:
        given |= open_prediction(path)
    compared: list[CaseComparison] = []
    missing = []
    for number, run in enumerate(measured_runs):
        by_case = (
            given
            if predictions
            else _replay(run, cluster, calibration, folder / f"predicted-{number}")
        )
        for case in run.cases:
            predicted = by_case.get(_key(case.facts))
            if predicted is None:
                missing.append(f"{run.folder.name}: {case.label}")
                continue
            try:
                compared.append(compare(run, case, predicted))
            except MismatchedPrediction as reason:
                missing.append(f"{run.folder.name}: {case.label}: {reason}")
    if not compared:
        source = (
            ", ".join(f"--prediction {path}" for path in predictions) or f"--validate {runs[0]}"
        )
        raise ConfigError(
            f"{source}: no prediction matches the {len(missing)} measured cases, such as "
            f"{missing[0]}"
        )
    overall = accuracy(compared)
    document = _document(
        measured_runs, predictions, cluster, calibration, compared, overall, missing
    )
    _write(folder, document)
    if as_json:
        typer.echo(json.dumps(document, indent=1))
        return
    _show(Console(highlight=False, soft_wrap=True), document, compared, overall)
    if write:
        typer.echo(f"files  {folder}")


def _resolve(path: Path) -> Path:
    """Return the path, or the folder of this name that ships with mtrain."""
    ships = resource_dir("profiles") / path
    return ships if not path.is_absolute() and not path.exists() and ships.is_dir() else path


def _predictions_in(path: Path) -> list[Path]:
    """Return the path of a prediction, or all predictions in a folder."""
    inside = (
        sorted(file.parent for file in path.glob("*/summary.json"))
        if path.is_dir() and not (path / "summary.json").is_file()
        else []
    )
    return inside or [path]


def _key(facts: dict[str, Any]) -> Any:
    from mtrain_cli.simulation.validation import key_of

    return key_of(facts)


def _replay(
    run: MeasuredRun, cluster: Cluster, calibration: Calibration | None, folder: Path
) -> dict[Any, PredictedCase]:
    from mtrain_cli.simulation.validation import open_prediction, replay, write_predictions

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
    from mtrain_cli import __version__
    from mtrain_cli.records import record_files
    from mtrain_cli.simulation.calibration import describe_source
    from mtrain_cli.simulation.validation import digest, sources

    if predictions:
        first = record_files.open_records(predictions[0].expanduser()).summary
        described = first.get("cluster") or {}
        by_source = sources((described.get("constants") or {}).items())
        named, files = described.get("name"), first.get("calibration")
    else:
        by_source, named = sources(cluster.constants().items()), cluster.name
        files = describe_source(cluster.gpu.name, calibration)
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
        "elsewhere": _device_mismatches(runs, predictions, cluster),
        "calibration": files,
        "agreement": accuracy.to_json(),
        "cases": [case.to_json() for case in compared],
        "not_predicted": list(missing),
    }


def _device_mismatches(
    runs: Sequence[MeasuredRun], predictions: Sequence[Path], cluster: Cluster
) -> list[str]:
    """Return a line for each run on a device that the cluster does not have."""
    from mtrain_cli.simulation.calibration import same_device

    if predictions:
        return []
    mismatches = []
    for run in runs:
        devices = dict.fromkeys(_devices(run))
        wrong = [
            name
            for name in devices
            if (
                not cluster.gpu.is_cpu if name == "CPU" else not same_device(name, cluster.gpu.name)
            )
        ]
        mismatches += [
            f"{run.folder} ran on {name}, and {cluster.name} has {cluster.gpu.name}"
            for name in wrong
        ]
    return mismatches


def _devices(run: MeasuredRun) -> list[str]:
    environment = run.recorded.summary.get("environment") or {}
    gpus = environment.get("gpus") or []
    return [str(gpu.get("name", gpu)) if isinstance(gpu, dict) else str(gpu) for gpu in gpus] or [
        "CPU"
    ]


def _write(folder: Path, document: dict[str, Any]) -> None:
    from mtrain_cli.launch.failures import RunError

    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(json.dumps(document, indent=1) + "\n")
    except OSError as error:
        raise RunError(f"{folder}: could not be written ({error.strerror or error})") from error


def _show(
    console: Console,
    document: dict[str, Any],
    compared: Sequence[CaseComparison],
    accuracy: PredictionAccuracy,
) -> None:
    from mtrain_cli.commands.simulate_output import brief_remark
    from mtrain_cli.reporting.terminal_width import print_table, say

    def line(text: str, style: str | None = None) -> None:
        say(console, text, _LABEL, style)

    print_table(console, _table(compared), SPARE)
    say(
        console,
        f"ms: of a layer on the slowest worker, measured {_definition(compared)}. ±: spread of the "
        "recorded iterations. error: predicted / measured - 1. in: measured is within the "
        "predicted bounds. steps: mean absolute error of attention over workers and steps. "
        "ranks: largest error of a rank's time. ID: predicted imbalance degree of time, and its "
        "difference from the measured one.",
    )
    results = document["agreement"]
    line(
        f"time       mean absolute error {accuracy.mape:.1%}, largest of a whole case "
        f"{accuracy.worst:+.1%}"
        + "".join(f", {name} {error:.1%}" for name, error in accuracy.passes.items())
    )
    line(
        f"common     predictions are x {accuracy.common:.2f} in the median; without that factor, "
        f"mean absolute error {accuracy.mape_without_common:.1%}"
    )
    line(f"bounds     hold for {accuracy.covered:.0%} of the passes")
    line(
        f"imbalance  degrees off by {accuracy.degree:.3f} on average, "
        f"{accuracy.worst_degree:.3f} at most"
    )
    line(f"work       {accuracy.equal} of {accuracy.cells} counts equal")
    for name, value in results["spearman"].items():
        fastest = (
            "the fastest was found"
            if results["fastest_found"][name]
            else "another one was the fastest"
        )
        folder, _, group = name.rpartition(": ")
        pattern, seq, workers = group.rsplit(" ", 2)
        run = f"{Path(folder).name}, " if len(document["runs"]) > 1 else ""
        line(
            f"ranking    {run}{pattern}, {int(seq):,} tokens, {workers} workers: Spearman "
            f"{value:+.2f}, {fastest}"
        )
    if not results["spearman"]:
        line("ranking    fewer than three comparable layouts and exchanges")
    for source, names in document["constants"].items():
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        line(f"{source:<10} {', '.join(names[:_SHOWN])}{more}")
    line(f"{'assumed':<10} {document['assumed']}")
    line(f"kernels    {_kernel_source(document['calibration'])}")
    for entry in document["predictions"]:
        console.print(f"sha256     {entry['sha256']}  {entry['folder']}/summary.json")
    _print_order(console, document, compared)
    for remark in dict.fromkeys(remark for case in compared for remark in case.remarks):
        line(f"note       {brief_remark(remark)}", style="yellow")
    for text in document["elsewhere"]:
        line(f"note       {text}", style="yellow")
    for label in document["not_predicted"]:
        line(f"note       measured, but not predicted: {label}", style="yellow")


def _kernel_source(calibration: dict[str, Any] | None) -> str:
    if calibration is None:
        return "from a calibration that the prediction does not name"
    source = f"{', '.join(calibration['files'])} of {calibration['device']}"
    return (
        f"{source}, another device: scaled by peak FLOP/s" if calibration.get("scaled") else source
    )


def _print_order(
    console: Console, document: dict[str, Any], compared: Sequence[CaseComparison]
) -> None:
    from mtrain_cli.reporting.terminal_width import say

    started = {run["folder"]: run["started"] for run in document["runs"]}
    pairs = sorted({(case.written, started[case.run]) for case in compared if case.written})
    for written, measured in pairs:
        when = _seconds(written), _seconds(measured)
        order = "" if None in when else ", before" if when[0] <= when[1] else ", AFTER"  # type: ignore[operator]
        say(
            console,
            f"when       predicted {written}{order + ' it was measured' if order else ''}, "
            f"measured {measured}",
            _LABEL,
        )


def _seconds(text: str) -> float | None:
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S%z"))
    except ValueError:
        return None


def _table(compared: Sequence[CaseComparison]) -> Table:
    import numpy as np
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(
        title="predicted against measured", title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0)
    )
    table.add_column("case")
    table.add_column("pass")
    for name in (
        "measured",
        "predicted",
        "error",
        "best - worst",
        "in",
        "steps",
        "ranks",
        "worker ID",
        "step ID",
    ):
        table.add_column(name, justify="right")
    several = len({case.run for case in compared}) > 1
    for case in compared:
        lines = []
        for name, p in case.passes.items():
            measured, predicted = p.ranks
            rank_errors = predicted / np.maximum(measured, 1e-9) - 1
            degrees = [
                f"{p.degrees[d][1]:.2f} {p.degrees[d][1] - p.degrees[d][0]:+.3f}"
                for d in ("worker", "step")
            ]
            lines.append([
                name, f"{p.measured:.2f} ±{p.std:.2f}", f"{p.predicted:.2f}", f"{p.error:+.1%}",
                f"{p.low:.4g} - {p.high:.4g}", "yes" if p.inside else "no", f"{p.mape:.1%}",
                f"{rank_errors[np.argmax(np.abs(rank_errors))]:+.1%}", *degrees,
            ])  # fmt: skip
        lines.append(
            [
                "all",
                f"{case.measured:.2f}",
                f"{case.predicted:.2f}",
                f"{case.error:+.1%}",
                *[""] * 6,
            ]
        )
        # One row per case, so that its name wraps next to its passes.
        label = f"{Path(case.run).name}: {case.label}" if several else case.label
        table.add_row(label, *("\n".join(column) for column in zip(*lines, strict=True)))
    return table


def _definition(compared: Sequence[CaseComparison]) -> str:
    """Return which times were measured: with or without recording (bare in `mtrain report`)."""
    kinds = {p.bare is not None for case in compared for p in case.passes.values()}
    bare = "without recording, the median (`mtrain report`: bare)"
    recorded = "while recording, the mean (`mtrain report`: pass ms)"
    return (
        f"{bare}, or, for several layers, {recorded}"
        if len(kinds) == 2
        else bare
        if kinds == {True}
        else recorded
    )
