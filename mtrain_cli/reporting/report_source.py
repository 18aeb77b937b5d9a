"""What can be reported: folders of training runs, profiles and simulations, and the profiles that ship with mtrain."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtrain_cli import resource_dir
from mtrain_cli.config.documents import read_json
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.suggest import did_you_mean
from mtrain_cli.launch import restart
from mtrain_cli.launch.restart import Restart
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.profiling.analysis import CaseAnalysis, analyse
from mtrain_cli.profiling.records import (
    HEAD_ROWS,
    KERNELS,
    PARTS,
    RECORDS,
    SCHEMA,
    SPARSITY,
    STEP,
    SUMMARY,
    SWEEP,
    RecordedFolder,
    open_records,
)
from mtrain_cli.reporting.run_settings import read_settings
from mtrain_cli.reporting.step_tables import damage_of_step
from mtrain_cli.training.evaluation import Evaluation, read_evaluations
from mtrain_cli.training.metrics import METRICS_FILE, StepMetrics, read_metrics

RUNS, MEASUREMENTS, PROFILE = Path("runs"), Path("measurements"), "profile"
RESOLVED, ENVIRONMENT = "resolved.yaml", "environment.json"
SHOWN = 5  # names in a message
LAYER = "layer"  # an older kind of the profiles that ship
SHOWN_FIRST = "real-512k-4xh200"  # of the profiles that ship


@dataclass(frozen=True)
class ReportSource:
    """One thing to report. facts: of run_dir._facts(). shipped: a document of profiles/, of an older kind, which has tables only. step:
    summary of `mtrain profile step`. sparsity: rows of `mtrain profile sparsity`, as its HeadRecord names them. settings: by key.
    damage: what is wrong with a file that is left out.
    """

    name: str
    folder: Path
    facts: dict[str, Any] = field(default_factory=dict)
    recorded: RecordedFolder | None = None
    cases: tuple[CaseAnalysis, ...] = ()
    metrics: tuple[StepMetrics, ...] = ()
    steps_wanted: int | None = None
    shipped: dict[str, Any] | None = None
    evaluations: tuple[Evaluation, ...] = ()
    step: dict[str, Any] | None = None
    sparsity: tuple[dict[str, Any], ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    restarts: tuple[Restart, ...] = ()
    damage: str = ""

    @property
    def tables_only(self) -> bool:
        return self.shipped is not None

    @property
    def kind(self) -> str:
        if self.shipped is not None:
            return "recorded profile"
        if self.step is not None:
            return "recorded step"
        if self.sparsity:
            return "sparsity profile"
        if self.metrics:
            return "training run"
        return (
            str(self.recorded.summary.get("kind") or "profile")
            if self.recorded is not None
            else "training run"
        )

    @property
    def summary(self) -> dict[str, Any]:
        return self.recorded.summary if self.recorded is not None else {}

    @property
    def swept(self) -> list[dict[str, Any]]:
        """Rows of a sweep of `mtrain simulate`."""
        rows = self.summary.get("sweep")
        return rows if isinstance(rows, list) else []

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Whole steps that were predicted, of a sweep or of single configurations, as `sweeps` shows them."""
        predicted = self.summary.get("predicted")
        return self.swept or [
            entry["step"]
            for entry in predicted or []
            if isinstance(entry, dict) and "step" in entry
        ]

    @property
    def where(self) -> str:
        """On what it was measured, or for what it was predicted; empty where that is unknown."""
        cluster = self.summary.get("cluster")
        if isinstance(cluster, dict):
            return f"predicted for {cluster.get('name')}, {cluster.get('gpu')}"
        gpus = self.facts.get("gpus") or []
        return f"{len(gpus)} x {gpus[0]}" if gpus else "CPU" if self.facts else ""

    @property
    def complete(self) -> bool:
        """Whether nothing is missing of what was to be measured, or trained."""
        recorded = self.recorded is None or (
            self.recorded.complete and not any(case.missing for case in self.cases)
        )
        return recorded and not (
            self.metrics and self.steps_wanted and self.metrics[-1].step < self.steps_wanted
        )

    @property
    def remarks(self) -> list[str]:
        """What a reader has to know before the figures: what is missing."""
        found = []
        if self.recorded is not None and not self.recorded.complete:
            done = max((case.iterations for case in self.cases), default=0)
            wanted = self.summary.get("samples_wanted")
            short = [
                f"{case.label}: {case.iterations}" for case in self.cases if case.iterations < done
            ]
            of = f"{done} of {wanted} samples" if wanted else f"{done} samples"
            left_out = len(self.summary.get("cases") or []) - len(self.cases)
            found.append(
                f"partial: {of}; the run did not end"
                + (f" ({', '.join(short)})" if short else "")
                + (
                    f"; {left_out} of {len(self.summary['cases'])} cases have none"
                    if left_out > 0
                    else ""
                )
            )
        missing = {case.missing: case for case in self.cases if case.missing}
        for ranks, case in missing.items():
            of_all = f"{len(ranks)} of {case.workers * case.groups}"
            found.append(
                f"no rows of rank{'s' * (len(ranks) > 1)} {shortened(ranks)} ({of_all}); degrees are over the others"
            )
        cores, workers = self.facts.get("cpu_cores"), self.summary.get("workers")
        if (
            self.cases
            and not self.facts.get("gpus")
            and isinstance(cores, int)
            and isinstance(workers, int)
            and workers > cores
        ):
            found.append(
                f"{workers} workers share {cores} CPU cores: times tell who gets a core, work tells who has more to do"
            )
        if self.cases and all(case.workers == 1 for case in self.cases):
            found.append(
                "one worker: there is nobody to compare it with, and every degree across workers is 1"
            )
        if self.damage:
            found.append(self.damage)
        if self.metrics and self.steps_wanted and self.metrics[-1].step < self.steps_wanted:
            found.append(f"step {self.metrics[-1].step} of {self.steps_wanted}")
        return found


def shortened(ranks: Sequence[int]) -> str:
    """1, 4-7, 9"""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(words[:12]) + (" and more" if len(words) > 12 else "")


def find(name: str) -> Path:
    """The folder or file of something to report, by its path or by its name under runs/ or measurements/.

    Raises:
        ConfigError: there is none.
    """
    path = Path(name).expanduser()
    for candidate in (path, RUNS / name, MEASUREMENTS / name):
        if candidate.is_dir():
            return candidate
        if candidate.is_file():
            return (
                candidate.parent
                if candidate.name in (RECORDS, SUMMARY, METRICS_FILE, RESOLVED)
                else candidate
            )
    for candidate in shipped():
        if name == candidate.stem:
            return candidate
    if name == "latest" and (newest := known()):
        return newest[0]
    names = [folder.name for folder in known()]
    if "/" in name:
        near = [str(entry) for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        hint = did_you_mean(str(path), near)
    else:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        listed = (
            f"; here are, newest first: {', '.join(names[:SHOWN])}{more}"
            if names
            else "; there is nothing in runs/ or measurements/"
        )
        hint = did_you_mean(name, names) or listed
    raise ConfigError(f"{name}: no such folder, and no run or measurement of that name{hint}")


def default() -> list[Path]:
    """The newest run or measurement of this folder; without any, one of the profiles that ship."""
    return known()[:1] or [path for path in shipped() if path.stem == SHOWN_FIRST]


def ships(path: Path) -> bool:
    """Whether it is part of mtrain, where nothing is to be written."""
    return path.resolve().is_relative_to(resource_dir("profiles").resolve())


def shipped() -> list[Path]:
    """Recorded profiles in mtrain's own profiles/."""
    found = []
    root = resource_dir("profiles")
    for path in sorted(root.iterdir()):
        if (path.is_dir() and (path / SUMMARY).is_file()) or (
            path.suffix == ".json" and _document(path).get("kind") == LAYER
        ):
            found.append(path)
    return found


def known() -> list[Path]:
    """Folders under runs/ and measurements/ that hold anything to report, newest first."""
    found = []
    for root in (RUNS, MEASUREMENTS):
        for folder in root.iterdir() if root.is_dir() else ():
            # A profile that was ended before its first sample, or a run before its first step, says nothing.
            places = [place for place in (folder, folder / PROFILE) if _has_figures(place)]
            files = [folder / METRICS_FILE, *(place / SUMMARY for place in places)]
            times = [
                file.stat().st_mtime for file in files if file.is_file() and file.stat().st_size
            ]
            if times and not folder.is_symlink():
                found.append((max(times), folder))
    return [folder for _, folder in sorted(found, key=lambda pair: (-pair[0], pair[1].name))]


def _has_figures(place: Path) -> bool:
    return any((place / name).exists() for name in (RECORDS, SWEEP, KERNELS, HEAD_ROWS)) or any(
        (place / PARTS).glob("*.parquet")
    )


def open_source(path: Path) -> ReportSource:
    """Reads and analyses everything that a folder holds.

    Raises:
        ConfigError: it holds nothing that can be reported, or something damaged.
    """
    if path.is_file():
        return _open_file(path)
    recorded = next(
        (open_records(folder) for folder in (path, path / PROFILE) if (folder / SUMMARY).is_file()),
        None,
    )
    metrics, damaged = _metrics(path, alone=recorded is None)
    if recorded is None and not metrics:
        raise ConfigError(_nothing(path))
    cases: tuple[CaseAnalysis, ...] = ()
    if recorded is not None:
        if recorded.summary.get("kind") == STEP:
            if damage := damage_of_step(recorded.summary):
                raise ConfigError(f"{recorded.folder / SUMMARY}: {damage}; measure again")
            return ReportSource(
                _name(path),
                path,
                _facts(path, recorded),
                step=recorded.summary,
                settings=read_settings(path),
            )
        if recorded.summary.get("kind") == SPARSITY:
            return ReportSource(
                _name(path),
                path,
                _facts(path, recorded),
                sparsity=_sparsity(recorded.folder),
                settings=read_settings(path),
            )
        _check_schema(recorded)
        cases = tuple(analyse(recorded))
        if not cases and not metrics and not recorded.summary.get("sweep"):
            if recorded.complete or recorded.summary.get("samples"):
                raise ConfigError(
                    f"{recorded.folder}: {RECORDS} is missing, and {SUMMARY} says that there were samples; measure again"
                )
            raise ConfigError(
                f"{recorded.folder}: has no sample yet; the profile was ended before its first, or still runs"
            )
    facts = _facts(path, recorded)
    wanted = _steps_wanted(path) if metrics else None
    return ReportSource(
        _name(path), path, facts, recorded, cases, metrics, wanted, evaluations=tuple(read_evaluations(path)),
        settings=read_settings(path), restarts=tuple(restart.read(RunDir(path))), damage=damaged,
    )  # fmt: skip


def _metrics(path: Path, *, alone: bool) -> tuple[tuple[StepMetrics, ...], str]:
    """The steps of a run, and what is wrong with their file. alone: nothing else of the run can be shown.

    Raises:
        ConfigError: the file is damaged and the run has nothing else.
    """
    file = path / METRICS_FILE
    if not file.is_file():
        return (), ""
    try:
        found = tuple(read_metrics(path))
    except ConfigError as error:
        if alone:
            raise
        return (), f"{error.problems[0]}; the steps are left out"
    return (
        found,
        f"{file}: holds no step" if not found and not alone and file.stat().st_size else "",
    )


def _sparsity(folder: Path) -> tuple[dict[str, Any], ...]:
    """Rows of `mtrain profile sparsity`.

    Raises:
        ConfigError: they are missing, damaged or something else.
    """
    import pyarrow
    import pyarrow.parquet as pq

    file = folder / HEAD_ROWS
    try:
        rows = pq.read_table(file).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(
            f"{file}: cannot be read ({str(error).splitlines()[0]}); measure again"
        ) from None
    wanted = {
        "step",
        "pattern",
        "layer",
        "head",
        "density",
        "of_mask",
        "recall",
        "worst",
        "slashes",
        "columns",
    }
    if not rows or not wanted <= rows[0].keys():
        raise ConfigError(f"{file}: holds no rows of `mtrain profile sparsity`; measure again")
    return tuple(rows)


def _open_file(path: Path) -> ReportSource:
    if path.suffix == ".json":
        document = _document(path)
        if document.get("kind") == LAYER and isinstance(document.get("cases"), list):
            return ReportSource(path.stem, path.parent, shipped=document)
    raise ConfigError(
        f"{path}: is a file, and no profile of mtrain; give the folder of a run, a profile or a simulation"
    )


def _nothing(path: Path) -> str:
    try:
        content = sorted(entry.name for entry in path.iterdir() if entry.name != ".lock")
    except OSError as error:
        return f"{path}: cannot be read ({error.strerror})"
    if not content:
        return f"{path}: is empty; give the folder of a run, a profile or a simulation"
    if RECORDS in content or PARTS in content:
        return (
            f"{path}: holds records without {SUMMARY}, which says what they are of; measure again"
        )
    if RESOLVED in content:
        return f"{path}: is a run that has no step yet, and no profile"
    if (path / PROFILE).is_dir():
        return f"{path}: holds a folder {PROFILE}/ without {SUMMARY}, and no {METRICS_FILE}"
    inside = [
        entry
        for entry in content
        if (path / entry / SUMMARY).is_file() or (path / entry / METRICS_FILE).is_file()
    ]
    if inside:
        return f"{path}: is no run itself, but holds {', '.join(inside[:SHOWN])}{' and more' * (len(inside) > SHOWN)}; give one of these"
    some = ", ".join(content[:3]) + " and more" * (len(content) > 3)
    return f"{path}: holds no run, profile or simulation ({SUMMARY} and {METRICS_FILE} are missing; there are {some})"


def _check_schema(recorded: RecordedFolder) -> None:
    """Every file of rows says which schema it has.

    Raises:
        ConfigError: one is of another schema than the summary, or no parquet file.
    """
    import pyarrow.parquet as pq

    for part in recorded.parts:
        try:
            found = (pq.read_schema(part).metadata or {}).get(b"mtrain_schema")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{part}: not a parquet file, or damaged ({str(error).splitlines()[0]})"
            ) from error
        if found is not None and found != str(SCHEMA).encode():
            raise ConfigError(
                f"{part}: has schema {found.decode()}, and {SUMMARY} beside it {SCHEMA}; measure again into a new folder"
            )


def _name(path: Path) -> str:
    return os.path.basename(path.resolve()) or str(path)


def _facts(path: Path, recorded: RecordedFolder | None) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if (path / ENVIRONMENT).is_file():
        facts = _document(path / ENVIRONMENT)
    if recorded is not None:
        said = recorded.summary
        facts = {
            **(said.get("environment") or {}),
            **({"command": said["command"]} if said.get("command") else {}),
            **facts,
        }
    return facts


def _steps_wanted(path: Path) -> int | None:
    """train.steps of the run; None where its configuration cannot be read."""
    from mtrain_cli.config import compose

    try:
        return compose.load(path / RESOLVED).train.steps
    except ConfigError:
        return None


def _document(path: Path) -> dict[str, Any]:
    try:
        document = read_json(path)
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
