"""Find and open the sources of a report: training runs, profiles, simulations."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mtrain_cli import resource_dir
from mtrain_cli.config.documents import read_json
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.suggest import no_such
from mtrain_cli.evaluation import results as evaluation_results
from mtrain_cli.grouping import show_spans, spans
from mtrain_cli.launch import run_dir
from mtrain_cli.launch.restart import Restart
from mtrain_cli.printable import one_line
from mtrain_cli.records import other_records
from mtrain_cli.records.analysis import CaseAnalysis, analyse
from mtrain_cli.records.expert_loads import ExpertAnalysis, analyse_experts
from mtrain_cli.records.metrics import METRICS_FILE, StepMetrics
from mtrain_cli.records.record_files import (
    HEAD_ROWS,
    KERNELS,
    PARTS,
    RECORDS,
    SPARSITY,
    STEP,
    SUMMARY,
    SWEEP,
    RecordedFolder,
    open_records,
)
from mtrain_cli.records.record_sums import select
from mtrain_cli.records.study_rows import STUDY, STUDY_ROWS, StudyTable, tables_of
from mtrain_cli.reporting.run_files import (
    CHOICES_LOST,
    FACTS_LOST,
    RunFiles,
    read_run_files,
)
from mtrain_cli.reporting.run_settings import RESOLVED, with_choices
from mtrain_cli.reporting.step_tables import damage_of_step
from mtrain_cli.training.evaluation import Evaluation

RUNS, MEASUREMENTS, PROFILE = Path("runs"), Path("measurements"), "profile"
SHOWN = 5  # most names in a message
LAYER = "layer"  # kind of the older shipped profiles
SHOWN_FIRST = "real-512k-4xh200"  # the shipped profile that a report shows if there is no run
# {key that a case of a profile can choose otherwise: name of the choice in the record of a case}
_CHOSEN = {
    "topology.layout": "layout",
    "topology.exchange": "exchange",
    "train.kernel": "kernel",
    "sparsity.pattern": "pattern",
}


@dataclass(frozen=True)
class ReportSource:
    """One run, profile or simulation to report.

    facts: content of environment.json.
    recorded: the profile or simulation; None if the source has neither.
    cases: analysis of `recorded`.
    steps_wanted: planned number of training steps; None if unknown.
    shipped: content of a shipped profile in the older file format, which has tables only.
    evaluations: held-out losses.
    step: summary of `mtrain profile step`.
    sparsity: rows of `mtrain profile sparsity`, with the keys of `HeadRecord`.
    others: kinds of records of other packages, each with its records.
    study: published tables with predictions, of `mtrain study`.
    settings: resolved configuration by dotted key, with the layout, exchange and kernel of the run
        instead of ``auto``.
    damage: a line on each damaged file, of which the report lacks a part.
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
    results: tuple[evaluation_results.Result, ...] = ()
    others: tuple[tuple[other_records.RecordKind, Any], ...] = ()
    study: tuple[StudyTable, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    restarts: tuple[Restart, ...] = ()
    experts: tuple[ExpertAnalysis, ...] = ()
    damage: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        if self.shipped is not None:
            return "recorded profile"
        if self.step is not None:
            return "recorded step"
        if self.sparsity:
            return "sparsity profile"
        if self.study:
            return "study"
        if self.results and not self.metrics and self.recorded is None:
            return "evaluation"
        if self.metrics or self.recorded is None:
            return "training run"
        return str(self.summary.get("kind") or "profile")

    @property
    def summary(self) -> dict[str, Any]:
        return self.recorded.summary if self.recorded is not None else {}

    @property
    def swept(self) -> list[dict[str, Any]]:
        """Return the rows of an `mtrain simulate` sweep."""
        rows = self.summary.get("sweep")
        return rows if isinstance(rows, list) else []

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Return the predicted training steps, of a sweep or of single cases, as rows."""
        predicted = self.summary.get("predicted")
        return self.swept or [
            entry["step"]
            for entry in predicted or []
            if isinstance(entry, dict) and "step" in entry
        ]

    @property
    def where(self) -> str:
        """Return the hardware that was measured, or the predicted cluster; empty if unknown."""
        cluster = self.summary.get("cluster")
        if isinstance(cluster, dict):
            return f"predicted for {cluster.get('name')}, {cluster.get('gpu')}"
        if self.study:
            return ""  # nothing ran on this machine
        gpus = self.facts.get("gpus") or []
        return f"{len(gpus)} x {gpus[0]}" if gpus else "CPU" if self.facts else ""

    @property
    def complete(self) -> bool:
        """Whether all planned samples, ranks and training steps are present."""
        recorded = self.recorded is None or self.recorded.complete
        return recorded and not any(case.missing for case in self.cases) and not self._stopped

    @property
    def _stopped(self) -> bool:
        wanted = self.steps_wanted or 0
        return bool(self.metrics) and self.metrics[-1].step < wanted

    @property
    def remarks(self) -> list[str]:
        """Return what limits the report, for example that samples are missing."""
        remarks = []
        if self.recorded is not None and not self.recorded.complete:
            remarks.append(self._progress())
        missing = {case.missing: case for case in self.cases if case.missing}
        for ranks, case in missing.items():
            share = f"{len(ranks)} of {case.workers * case.groups}"
            remarks.append(
                f"no rows from rank{'s' * (len(ranks) > 1)} {show_spans(spans(ranks))} ({share}); "
                "imbalance degrees cover the other ranks"
            )
        cores, workers = self.facts.get("cpu_cores"), self.summary.get("workers")
        on_cpu = bool(self.cases) and not self.facts.get("gpus")
        if on_cpu and isinstance(cores, int) and isinstance(workers, int) and workers > cores:
            remarks.append(
                f"{workers} workers share {cores} CPU cores: times depend on the OS scheduler; "
                "compare work instead"
            )
        if self.cases and all(case.workers == 1 for case in self.cases):
            one = "one worker"
            if any(case.groups > 1 for case in self.cases):
                one = "each context group has one worker"
            remarks.append(
                f"{one}: nothing to compare with; imbalance degrees across workers are 1"
            )
        remarks += self.damage
        if self._stopped:
            remarks.append(f"step {self.metrics[-1].step} of {self.steps_wanted}")
        return list(map(one_line, remarks))

    def _progress(self) -> str:
        done = max((case.iterations for case in self.cases), default=0)
        wanted = self.summary.get("samples_wanted")
        behind = [
            f"{case.label}: {case.iterations}" for case in self.cases if case.iterations < done
        ]
        cases = self.summary.get("cases") or []
        left_out = len(cases) - len(self.cases)
        of_wanted = f" of the {wanted} requested" if wanted else ""
        text = f"{done}{of_wanted} iteration{'s' * ((wanted or done) != 1)} recorded"
        text += f" ({', '.join(behind)})" if behind else ""
        text += f"; {left_out} of {len(cases)} cases have no sample" if left_out > 0 else ""
        covered = "this iteration" if done == 1 else "these iterations"
        return f"{text}; all figures cover only {covered}"


def labelled_cases(sources: Sequence[ReportSource]) -> list[tuple[str, ReportSource, CaseAnalysis]]:
    """Return (label, run, case) of each case. With several runs, labels name the run."""
    several = len(sources) > 1
    return [
        (f"{source.name}: {case.label}" if several else case.label, source, case)
        for source in sources
        for case in source.cases
    ]


def typical_rows(
    recorded: RecordedFolder,
    case: CaseAnalysis,
    columns: Sequence[str],
    layers: Sequence[int] | None = None,
) -> dict[str, np.ndarray]:
    """Read the rows of the iteration `CaseAnalysis.typical`, of some layers or of all."""
    parts = []
    for batch in recorded.batches(columns):
        mine = (batch["case"] == case.number) & (batch["iteration"] == case.typical)
        if layers is not None:
            mine &= np.isin(batch["layer"], layers)
        if mine.any():
            parts.append(select(batch, mine))
    return {name: np.concatenate([part[name] for part in parts]) for name in columns}


def find(name: str, holding: str = "") -> Path:
    """Find a folder or file to report, by path or by name under runs/ or measurements/.

    Args:
        holding: list only folders with this file as allowed, if nothing has the name.

    Raises:
        ConfigError: no folder or file has that name.
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

    def is_useful(folder: Path) -> bool:
        return not holding or any((p / holding).is_file() for p in (folder, folder / PROFILE))

    ships = [path.stem for path in shipped() if is_useful(path)]
    most = len(ships) + SHOWN
    root = path.parent if "/" in name else MEASUREMENTS
    studies = [] if holding else [file.parent for file in root.glob(f"*/{run_dir.STUDY}")]
    names = [*ships, *(folder.name for folder in [*known(), *sorted(studies)] if is_useful(folder))]
    if "/" in name:
        names = sorted(str(folder) for folder in {*_dated(root), *studies} if is_useful(folder))
    kind = "run, measurement or shipped profile"
    why = no_such(kind, str(path), names, "the folder of a run or measurement", most)
    raise ConfigError(f"{name}: {why}")


def default() -> list[Path]:
    """Return the newest run or measurement in this folder, or else a shipped profile."""
    return known()[:1] or [path for path in shipped() if path.stem == SHOWN_FIRST]


def ships(path: Path) -> bool:
    """Return whether a path ships with mtrain, so that no command may write to it."""
    return path.resolve().is_relative_to(resource_dir("profiles").resolve())


def shipped() -> list[Path]:
    """Return the recorded profiles that ship with mtrain."""
    return [
        path
        for path in sorted(resource_dir("profiles").iterdir())
        if (path / SUMMARY).is_file()
        or (path.suffix == ".json" and _document(path).get("kind") == LAYER)
    ]


def known() -> list[Path]:
    """Return the folders under runs/ and measurements/ that have something to report.

    The newest folder comes first.
    """
    dated = _dated(RUNS) | _dated(MEASUREMENTS)
    return sorted(dated, key=lambda folder: (-dated[folder], folder.name))


def _dated(root: Path) -> dict[Path, float]:
    """Return when each folder in ``root`` changed, for those that have something to report."""
    dated = {}
    for folder in root.iterdir() if root.is_dir() and os.access(root, os.R_OK) else ():
        with contextlib.suppress(PermissionError):
            # A profile without a sample, or a run without a step, has nothing to report.
            places = [place for place in (folder, folder / PROFILE) if _has_figures(place)]
            files = [folder / METRICS_FILE, *(place / SUMMARY for place in places)]
            files += [
                place / evaluation_results.RESULTS
                for place in (folder, folder / evaluation_results.FOLDER)
            ]
            times = [
                file.stat().st_mtime for file in files if file.is_file() and file.stat().st_size
            ]
            if times and not folder.is_symlink():
                dated[folder] = max(times)
    return dated


def _has_figures(place: Path) -> bool:
    files = RECORDS, SWEEP, KERNELS, HEAD_ROWS, STUDY_ROWS
    return any((place / name).exists() for name in files) or any((place / PARTS).glob("*.parquet"))


def open_source(path: Path) -> ReportSource:
    """Read and analyze a folder, or a shipped file.

    Raises:
        ConfigError: the path holds nothing to report, or a damaged file.
    """
    if path.is_file():
        return _open_file(path)
    files = read_run_files(path)
    others = bool(files.metrics or files.results)
    try:
        places = [place for place in (path, path / PROFILE) if (place / SUMMARY).is_file()]
        if places:
            return _recorded(path, open_records(places[0]), files)
    except ConfigError as error:
        if not others:
            raise
        line = f"{error.problems[0]}; the profile is not shown"
        files = replace(files, damage=(*files.damage, line))
    if not others:
        raise ConfigError(*(files.damage or [_nothing(path)]))
    return _with_files(_bare(path, None, files), files)


def _recorded(path: Path, recorded: RecordedFolder, files: RunFiles) -> ReportSource:
    """Return a source with a profile or simulation."""
    source, kind = _bare(path, recorded, files), recorded.summary.get("kind")
    if kind == STEP:
        if damage := damage_of_step(recorded.summary):
            raise ConfigError(f"{recorded.folder / SUMMARY}: {damage}; measure again")
        return _with_experts(replace(source, step=recorded.summary), recorded)
    if kind == STUDY:
        return replace(source, study=tables_of(recorded.summary, recorded.folder))
    if kind == SPARSITY:
        rows, others = _sparsity(recorded.folder), other_records.read(recorded.folder)
        return replace(source, sparsity=rows, others=others)
    recorded.check_schemas()
    cases = tuple(analyse(recorded))
    if not cases and not files.metrics and not recorded.summary.get("sweep"):
        if recorded.complete or recorded.summary.get("samples"):
            raise ConfigError(
                f"{recorded.folder}: {RECORDS} is missing, although {SUMMARY} lists samples; "
                "measure again"
            )
        raise ConfigError(
            f"{recorded.folder}: no sample yet; the profile still runs or stopped too early"
        )
    source = replace(_with_experts(source, recorded), recorded=recorded, cases=cases)
    return _with_files(source, files)


def _bare(path: Path, recorded: RecordedFolder | None, files: RunFiles) -> ReportSource:
    summary = recorded.summary if recorded is not None else {}
    command = {"command": summary["command"]} if summary.get("command") else {}
    facts = {**(summary.get("environment") or {}), **command, **files.facts}
    damage = tuple(_without_recorded(line, recorded) for line in files.damage)
    settings, name = _settings(recorded, files), os.path.basename(path.resolve()) or str(path)
    return ReportSource(name, path, facts, settings=settings, damage=damage)


def _without_recorded(line: str, recorded: RecordedFolder | None) -> str:
    """Return a line on a lost file, which names the profile if it has what the file had."""
    summary = recorded.summary if recorded is not None else {}
    for lost, has in (
        (CHOICES_LOST, summary.get("cases")),
        (FACTS_LOST, summary.get("environment")),
    ):
        if has and line.endswith(lost):
            return line.replace(lost, lost.replace("not shown", "those of the profile"))
    return line


def _with_files(source: ReportSource, files: RunFiles) -> ReportSource:
    return replace(
        source,
        metrics=files.metrics,
        steps_wanted=files.steps_wanted if files.metrics else None,
        evaluations=files.evaluations,
        results=files.results,
        restarts=files.restarts,
    )


def _with_experts(source: ReportSource, recorded: RecordedFolder) -> ReportSource:
    try:
        return replace(source, experts=tuple(analyse_experts(recorded)))
    except ConfigError as error:
        line = f"{error.problems[0]}; loads of experts are not shown"
        return replace(source, damage=(*source.damage, line))


def _settings(recorded: RecordedFolder | None, files: RunFiles) -> dict[str, Any]:
    """Return `ReportSource.settings`."""
    if files.state is not None and files.state.chosen:
        chosen = {k: str(v) for k, v in files.state.chosen.items() if k in _CHOSEN}
        return with_choices(files.settings, chosen)
    summary = recorded.summary if recorded is not None else {}
    measured = [summary.get("settings"), *(summary.get("cases") or ())]
    cases = [facts for facts in measured if isinstance(facts, dict)]
    used = {}
    for key, fact in _CHOSEN.items():
        if values := dict.fromkeys(str(facts[fact]) for facts in cases if facts.get(fact)):
            used[key] = ", ".join(values)
    return with_choices(files.settings, used)


def _sparsity(folder: Path) -> tuple[dict[str, Any], ...]:
    """Read the rows of `mtrain profile sparsity`."""
    import pyarrow
    import pyarrow.parquet as pq

    file = folder / HEAD_ROWS
    try:
        rows = pq.read_table(file).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(
            f"{file}: cannot be read ({str(error).splitlines()[0]}); measure again"
        ) from None
    wanted = {"step", "pattern", "layer", "head", "density", "of_mask", "recall", "worst"}
    wanted |= {"slashes", "columns"}
    if not rows or not wanted <= rows[0].keys():
        raise ConfigError(f"{file}: not from `mtrain profile sparsity`; measure again")
    return tuple(rows)


def _open_file(path: Path) -> ReportSource:
    if path.suffix == ".json":
        document = _document(path)
        if document.get("kind") == LAYER and isinstance(document.get("cases"), list):
            return ReportSource(path.stem, path.parent, shipped=document)
    raise ConfigError(
        f"{path}: not a profile of mtrain; give the folder of a run, a profile or a simulation"
    )


def _nothing(path: Path) -> str:
    try:
        content = sorted(entry.name for entry in path.iterdir() if entry.name != ".lock")
    except OSError as error:
        return f"{path}: cannot be read ({error.strerror})"
    if not content:
        return f"{path}: empty folder; give the folder of a run, a profile or a simulation"
    if RECORDS in content or PARTS in content:
        return f"{path}: records without {SUMMARY}, which describes them; measure again"
    if RESOLVED in content:
        return f"{path}: a run that has no step and no profile yet"
    if (path / PROFILE).is_dir():
        return f"{path}: no {METRICS_FILE}, and {PROFILE}/ has no {SUMMARY}"
    inside = [
        entry
        for entry in content
        if (path / entry / SUMMARY).is_file() or (path / entry / METRICS_FILE).is_file()
    ]
    if inside:
        listed = f"{', '.join(inside[:SHOWN])}{' and more' * (len(inside) > SHOWN)}"
        return f"{path}: not a run, but contains {listed}; give one of these"
    listed = ", ".join(content[:3]) + " and more" * (len(content) > 3)
    return (
        f"{path}: not a run, profile or simulation "
        f"({SUMMARY} and {METRICS_FILE} are missing; contains {listed})"
    )


def _document(path: Path) -> dict[str, Any]:
    try:
        document = read_json(path)
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
