"""`mtrain simulate --validate RUN...`: predicted against measured, for every case of profiles."""

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
_LABEL = len("imbalance  ")  # what lines begin with
SPARE = (
    "step ID",
    "ranks",
    "worker ID",
    "steps",
    "best - worst",
)  # what a narrow terminal does without, in this order
_SHOWN = 12  # names in one line
# Constants of the simulator itself that no calibration replaces (`simulation.costs`).
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
    """Compares, prints and, with ``files``, leaves a folder with ``validation.json`` and, where they were not given, the predictions."""
    if files:
        folder = out or Path("measurements", f"validation-{time.strftime('%Y%m%d-%H%M%S')}")
        _validate(runs, predictions, cluster, calibration, folder, as_json=as_json, leave=True)
        return
    if out is not None:
        raise ConfigError(f"--out {out}: --no-files writes none; give one of the two")
    with tempfile.TemporaryDirectory() as place:
        _validate(
            runs,
            predictions,
            cluster,
            calibration,
            Path(place, "validation"),
            as_json=as_json,
            leave=False,
        )


def _validate(
    runs: Sequence[str],
    predictions: Sequence[Path],
    cluster: Cluster,
    calibration: Calibration | None,
    folder: Path,
    *,
    as_json: bool,
    leave: bool,
) -> None:
    from mtrain_cli.commands.simulate_output import new_folder
    from mtrain_cli.console import Console
    from mtrain_cli.profiling import records
    from mtrain_cli.simulation.validation import (
        MismatchedPrediction,
        accuracy,
        compare,
        open_prediction,
        open_run,
    )

    if (folder / FILE).exists() or (folder / records.SUMMARY).exists():
        raise ConfigError(
            f"--out {folder}: holds a validation, profile or simulation already; give a new folder"
        )
    new_folder(folder)
    opened = [open_run(_place(Path(run).expanduser())) for run in runs]
    given: dict[Any, PredictedCase] = {}
    predictions = [one for path in predictions for one in _several(_place(path.expanduser()))]
    for path in predictions:
        given |= open_prediction(path)
    compared: list[CaseComparison] = []
    absent = []
    for number, run in enumerate(opened):
        found = (
            given
            if predictions
            else _replayed(run, cluster, calibration, folder / f"predicted-{number}")
        )
        for case in run.cases:
            predicted = found.get(_key(case.facts))
            if predicted is None:
                absent.append(f"{run.folder.name}: {case.label}")
                continue
            try:
                compared.append(compare(run, case, predicted))
            except MismatchedPrediction as reason:
                absent.append(f"{run.folder.name}: {case.label}: {reason}")
    if not compared:
        which = ", ".join(f"--prediction {path}" for path in predictions) or f"--validate {runs[0]}"
        raise ConfigError(
            f"{which}: nothing to compare for the {len(absent)} cases that were measured, such as {absent[0]}"
        )
    together = accuracy(compared)
    document = _document(opened, predictions, cluster, calibration, compared, together, absent)
    _leave(folder, document)
    if as_json:
        typer.echo(json.dumps(document, indent=1))
        return
    _show(Console(highlight=False, soft_wrap=True), document, compared, together)
    if leave:
        typer.echo(f"files  {folder}")


def _place(path: Path) -> Path:
    """A folder, or one of those that ship with mtrain by its name."""
    ships = resource_dir("profiles") / path
    return ships if not path.is_absolute() and not path.exists() and ships.is_dir() else path


def _several(path: Path) -> list[Path]:
    """A prediction, or all that a folder holds."""
    inside = (
        sorted(file.parent for file in path.glob("*/summary.json"))
        if path.is_dir() and not (path / "summary.json").is_file()
        else []
    )
    return inside or [path]


def _key(facts: dict[str, Any]) -> Any:
    from mtrain_cli.simulation.validation import key_of

    return key_of(facts)


def _replayed(
    run: MeasuredRun, cluster: Cluster, calibration: Calibration | None, folder: Path
) -> dict[Any, PredictedCase]:
    from mtrain_cli.simulation.validation import open_prediction, replay, write_predictions

    found = [
        replay(run, case, cluster, calibration, number) for number, case in enumerate(run.cases)
    ]
    write_predictions(folder, found, "attention")
    return open_prediction(folder)


def _document(
    runs: Sequence[MeasuredRun],
    predictions: Sequence[Path],
    cluster: Cluster,
    calibration: Calibration | None,
    compared: Sequence[CaseComparison],
    together: PredictionAccuracy,
    absent: Sequence[str],
) -> dict[str, Any]:
    from mtrain_cli import __version__
    from mtrain_cli.profiling import records
    from mtrain_cli.simulation.calibration import describe_source
    from mtrain_cli.simulation.validation import digest, sources

    if predictions:
        first = records.open_records(predictions[0].expanduser()).summary
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
            {"folder": str(path), "sha256": digest(path.expanduser() / records.SUMMARY)}
            for path in predictions
        ],
        "cluster": named,
        "constants": by_source,
        "assumed": ASSUMED,
        "elsewhere": _elsewhere(runs, predictions, cluster),
        "calibration": files,
        "agreement": together.to_json(),
        "cases": [case.to_json() for case in compared],
        "not_predicted": list(absent),
    }


def _elsewhere(
    runs: Sequence[MeasuredRun], predictions: Sequence[Path], cluster: Cluster
) -> list[str]:
    """Runs on devices that the cluster does not have."""
    from mtrain_cli.simulation.calibration import same_device

    if predictions:
        return []
    found = []
    for run in runs:
        devices = dict.fromkeys(_devices(run))
        wrong = [
            name
            for name in devices
            if (
                not cluster.gpu.is_cpu if name == "CPU" else not same_device(name, cluster.gpu.name)
            )
        ]
        found += [
            f"{run.folder} ran on {name}, and {cluster.name} has {cluster.gpu.name}"
            for name in wrong
        ]
    return found


def _devices(run: MeasuredRun) -> list[str]:
    found = run.recorded.summary.get("environment") or {}
    gpus = found.get("gpus") or []
    return [str(gpu.get("name", gpu)) if isinstance(gpu, dict) else str(gpu) for gpu in gpus] or [
        "CPU"
    ]


def _leave(folder: Path, document: dict[str, Any]) -> None:
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
    together: PredictionAccuracy,
) -> None:
    from mtrain_cli.commands.simulate_output import brief_remark
    from mtrain_cli.reporting.terminal_width import print_table, say

    def line(text: str, style: str | None = None) -> None:
        say(console, text, _LABEL, style)

    print_table(console, _table(compared), SPARE)
    say(
        console,
        f"ms of a layer, the slowest worker, measured {_how(compared)}; ±: spread of recorded iterations; error: predicted over measured, "
        "less 1; in: measured is inside the predicted bounds; steps: "
        "mean absolute error of attention, each worker and step; ranks: largest error of the time of a rank; ID: imbalance degrees of "
        "time, predicted, and less measured",
    )
    said = document["agreement"]
    line(
        f"time       mean absolute error {together.mape:.1%}, largest of a whole case {together.worst:+.1%}"
        + "".join(f", {name} {error:.1%}" for name, error in together.passes.items())
    )
    line(
        f"common     predictions are x {together.common:.2f} in the median; beside that factor, mean absolute error {together.mape_without_common:.1%}"
    )
    line(f"bounds     hold {together.covered:.0%} of the passes")
    line(
        f"imbalance  degrees off by {together.degree:.3f} in the mean, {together.worst_degree:.3f} at most"
    )
    line(f"work       {together.equal} of {together.cells} counts equal")
    for name, value in said["spearman"].items():
        found = (
            "the fastest was found" if said["fastest_found"][name] else "another was the fastest"
        )
        folder, _, group = name.rpartition(": ")
        pattern, seq, workers = group.rsplit(" ", 2)
        run = f"{Path(folder).name}, " if len(document["runs"]) > 1 else ""
        line(
            f"ranking    {run}{pattern}, {int(seq):,} tokens, {workers} workers: Spearman {value:+.2f}, {found}"
        )
    if not said["spearman"]:
        line("ranking    fewer than three layouts and exchanges of a kind")
    for source, names in document["constants"].items():
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        line(f"{source:<10} {', '.join(names[:_SHOWN])}{more}")
    line(f"{'assumed':<10} {document['assumed']}")
    line(f"kernels    {_kernels(document['calibration'])}")
    for entry in document["predictions"]:
        console.print(f"sha256     {entry['sha256']}  {entry['folder']}/summary.json")
    _say_when(console, document, compared)
    for remark in dict.fromkeys(remark for case in compared for remark in case.remarks):
        line(f"note       {brief_remark(remark)}", style="yellow")
    for text in document["elsewhere"]:
        line(f"note       {text}", style="yellow")
    for label in document["not_predicted"]:
        line(f"note       measured, but not predicted: {label}", style="yellow")


def _kernels(calibration: dict[str, Any] | None) -> str:
    if calibration is None:
        return "by a calibration that the prediction does not tell"
    said = f"{', '.join(calibration['files'])} of {calibration['device']}"
    return f"{said}, another device: scaled by peak FLOP/s" if calibration.get("scaled") else said


def _say_when(
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
            f"when       predicted {written}{order + ' it was measured' if order else ''}, measured {measured}",
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
            of_ranks = predicted / np.maximum(measured, 1e-9) - 1
            degrees = [
                f"{p.degrees[d][1]:.2f} {p.degrees[d][1] - p.degrees[d][0]:+.3f}"
                for d in ("worker", "step")
            ]
            lines.append([
                name, f"{p.measured:.2f} ±{p.std:.2f}", f"{p.predicted:.2f}", f"{p.error:+.1%}", f"{p.low:.4g} - {p.high:.4g}",
                "yes" if p.inside else "no", f"{p.mape:.1%}", f"{of_ranks[np.argmax(np.abs(of_ranks))]:+.1%}", *degrees,
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
        # One row a case: its name wraps beside its passes.
        label = f"{Path(case.run).name}: {case.label}" if several else case.label
        table.add_row(label, *("\n".join(column) for column in zip(*lines, strict=True)))
    return table


def _how(compared: Sequence[CaseComparison]) -> str:
    """By which of the two definitions: what was measured alone without records is not what a report of records shows."""
    kinds = {p.bare is not None for case in compared for p in case.passes.values()}
    bare = "without records, the median (`mtrain report`: bare)"
    recorded = "as recorded, the mean (`mtrain report`: pass ms)"
    return (
        f"{bare}, or, of several layers, {recorded}"
        if len(kinds) == 2
        else bare
        if kinds == {True}
        else recorded
    )
