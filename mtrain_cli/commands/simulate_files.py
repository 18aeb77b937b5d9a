"""The files of `mtrain simulate`: summary.json and records, in the format of a profile."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from mtrain_cli import __version__
from mtrain_cli.commands.options import writing
from mtrain_cli.commands.simulate_args import SimulateJob
from mtrain_cli.config.cluster import Cluster
from mtrain_cli.config.documents import json_text
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.console import Console
from mtrain_cli.parallel.pipeline_schedule import TimedPipeline
from mtrain_cli.records import record_files
from mtrain_cli.records.analysis import analyse
from mtrain_cli.records.pipeline_times import prediction_entry
from mtrain_cli.simulation.calibration import Calibration, describe_source
from mtrain_cli.simulation.constants import CONSTANTS
from mtrain_cli.simulation.prediction import BoundedTime, Prediction
from mtrain_cli.simulation.validation import digest
from mtrain_cli.simulation.workload import AttentionWorkload

_PROBE = ".mtrain"


def deliver(
    job: SimulateJob,
    folder: Path | None,
    content: dict[str, Any],
    predictions: Sequence[Prediction],
    show: Callable[[Console], None],
) -> None:
    """Write the files, and print the result as JSON or as tables.

    Args:
        folder: folder for the files; None to write none.
    """
    if folder is not None:
        write_files(folder, content, predictions)
    if job.typed.as_json:
        typer.echo(json_text(content, indent=1))
        return
    console = Console(highlight=False, soft_wrap=True)
    show(console)
    console.print(f"took   {time.perf_counter() - job.started:.1f} s")
    if folder is not None:
        console.print(f"sha256 {digest(folder / 'summary.json')}  {folder}/summary.json")
        console.print(f"files  {folder}\ndraw   mtrain report {folder}")


def _range(time: BoundedTime) -> dict[str, float]:
    return {name: round(value, 5) for name, value in dataclasses.asdict(time).items()}


def document(cluster: Cluster, calibration: Calibration | None, **more: Any) -> dict[str, Any]:
    """Return the content of summary.json that all simulations share, with ``more`` added.

    calibration: the user's own calibration; None for the shipped calibrations.
    """
    constants = {**cluster.constants(), **CONSTANTS}
    found = [*(more.get("cases") or ()), *(more.get("sweep") or ())]
    kernel = next((one["kernel"] for one in found if one.get("kernel")), None)
    return {
        "kind": "simulation",
        "mode": "attention",
        "complete": True,
        "samples_wanted": 1,
        "samples": 1,
        "command": ["mtrain", *sys.argv[1:]],
        "environment": {
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "versions": {"mtrain": __version__},
            "gpus": [],
        },
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


def prediction_entries(
    problem: AttentionWorkload,
    predictions: Sequence[Prediction],
    steps: Sequence[Mapping[str, Any]] = (),
    pipelines: Sequence[TimedPipeline | None] = (),
) -> dict[str, Any]:
    """Return the entries of summary.json that describe predictions.

    steps: rows of `sweep.row_of`, one per prediction, if whole steps were predicted.
    pipelines: the pipelines of these steps.
    """
    predicted: list[dict[str, Any]] = [
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
    for entry, step in zip(predicted, steps, strict=False):
        entry["step"] = dict(step)
    for entry, timed in zip(predicted, pipelines, strict=False):
        if timed is not None:
            entry["pipeline"] = prediction_entry(timed)
    return {
        "workers": predictions[0].setup.workers,
        "layers": list(problem.layers),
        "cases": [p.facts for p in predictions],
        "predicted": predicted,
        "results": [],
    }


def folder_of(job: SimulateJob) -> Path | None:
    """Return the folder for the files, or None for --no-files.

    Raises:
        ConfigError: the folder holds a profile or simulation already, or cannot be written; or
            --out and --no-files are both given.
    """
    if not job.typed.files:
        require_no_out(job.typed.out)
        return None
    folder = job.typed.out or Path("measurements", f"simulation-{time.strftime('%Y%m%d-%H%M%S')}")
    if (folder / record_files.SUMMARY).exists():
        raise ConfigError(
            f"--out {folder}: already holds a profile or simulation; give a new folder"
        )
    require_writable(folder)
    return folder


def require_no_out(out: Path | None) -> None:
    """Raise ConfigError if --out is given together with --no-files."""
    if out is not None:
        raise ConfigError(f"--out {out}: --no-files writes no files; give one of the two")


def require_writable(folder: Path) -> None:
    """Raise ConfigError if a folder cannot be written. The check leaves no folder or file."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _PROBE).touch()
        (folder / _PROBE).unlink()
    except OSError as error:
        reason = f"cannot be written ({error.strerror or error})"
        raise ConfigError(f"--out {folder}: {reason}; give another folder, or --no-files") from None
    finally:
        for place in missing:
            if place.is_dir():
                place.rmdir()


def write_files(
    folder: Path, content: dict[str, Any], predictions: Sequence[Prediction] = ()
) -> None:
    """Write summary.json and the records."""
    rows = [p.rows for p in predictions if p.rows is not None]
    with writing(folder):
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
