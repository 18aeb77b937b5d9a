"""Find and open the sources of a report: training runs, profiles, simulations."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mtrain_cli import resource_dir
from mtrain_cli.config.documents import reason
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.suggest import no_such
from mtrain_cli.console import Console
from mtrain_cli.evaluation import results as evaluation_results
from mtrain_cli.grouping import show_spans, spans
from mtrain_cli.launch import run_dir
from mtrain_cli.launch.restart import Restart
from mtrain_cli.printable import one_line
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
    RecordKind,
    open_records,
    read_others,
)
from mtrain_cli.reporting.run_files import RESOLVED, RunFiles, read_run_files, with_choices
from mtrain_cli.reporting.step_tables import step_section
from mtrain_cli.reporting.sweeps import sweep_table
from mtrain_cli.reporting.terminal import print_section
from mtrain_cli.training.evaluation import Evaluation

RUNS, MEASUREMENTS, PROFILE = Path("runs"), Path("measurements"), "profile"
SHOWN = 5  # most names in a message
SHOWN_FIRST = "real-512k-4xh200"  # the shipped profile that a report shows if there is no run
# Types of facts. A foreign file may have others.
_FACTS = {"gpus": list, "versions": dict, "started": str}
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
    recorded: the profile or simulation, which `cases` analyzes.
    steps_wanted: planned number of training steps; None if unknown.
    step: summary of `mtrain profile step`.
    sparsity: rows of `mtrain profile sparsity`, with the keys of `HeadRecord`.
    others: kinds of records of other packages, each with its records.
    settings: resolved configuration by dotted key, with the choices of the run for ``auto``.
    damage: a line on each damaged file, of which the report lacks a part.
    """

    name: str
    folder: Path
    facts: dict[str, Any] = field(default_factory=dict)
    recorded: RecordedFolder | None = None
    cases: tuple[CaseAnalysis, ...] = ()
    metrics: tuple[StepMetrics, ...] = ()
    steps_wanted: int | None = None
    evaluations: tuple[Evaluation, ...] = ()
    step: dict[str, Any] | None = None
    sparsity: tuple[dict[str, Any], ...] = ()
    results: tuple[evaluation_results.Result, ...] = ()
    others: tuple[tuple[RecordKind, Any], ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    restarts: tuple[Restart, ...] = ()
    experts: tuple[ExpertAnalysis, ...] = ()
    damage: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        kinds = {
            "recorded step": self.step,
            "sparsity profile": self.sparsity,
            "evaluation": self.results and not self.metrics and self.recorded is None,
            "training run": self.metrics or self.recorded is None,
        }
        named = (name for name, content in kinds.items() if content)
        return next(named, str(self.summary.get("kind") or "profile"))

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
            done = max((case.iterations for case in self.cases), default=0)
            wanted = self.summary.get("samples_wanted")
            text = f"{done}{f' of the {wanted} requested' if wanted else ''} iterations recorded"
            cases = self.summary.get("cases") or []
            if lost := len(cases) - len(self.cases):
                text += f"; {lost} of {len(cases)} cases have no sample"
            remarks.append(f"{text}; all figures cover only these iterations")
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
            remarks.append("context groups of one worker: imbalance degrees across workers are 1")
        remarks += self.damage
        if self._stopped:
            remarks.append(f"step {self.metrics[-1].step} of {self.steps_wanted}")
        return list(map(one_line, remarks))


def labelled_cases(sources: Sequence[ReportSource]) -> list[tuple[str, ReportSource, CaseAnalysis]]:
    """Return (label, run, case) of each case. With several runs, labels name the run."""
    return [(label_of(s, c.label, sources), s, c) for s in sources for c in s.cases]


def label_of(source: ReportSource, label: object, sources: Sequence[ReportSource]) -> str:
    return f"{source.name}: {label}" if len(sources) > 1 else str(label)


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
        if name == candidate.name:
            return candidate
    if name == "latest" and (newest := known()):
        return newest[0]
    studies = [] if holding else [file.parent for file in MEASUREMENTS.glob(f"*/{run_dir.STUDY}")]
    ships = shipped()
    names = [
        folder.name
        for folder in (*ships, *known(), *sorted(studies))
        if not holding or any((place / holding).is_file() for place in (folder, folder / PROFILE))
    ]
    kind, most = "run, measurement or shipped profile", len(ships) + SHOWN
    why = no_such(kind, path.name, names, "the folder of a run or measurement", most)
    raise ConfigError(f"{name}: {why}")


def default() -> list[Path]:
    """Return the newest run or measurement in this folder, or else a shipped profile."""
    return known()[:1] or [path for path in shipped() if path.name == SHOWN_FIRST]


def ships(path: Path) -> bool:
    """Return whether a path ships with mtrain, so that no command may write to it."""
    return path.resolve().is_relative_to(resource_dir("profiles").resolve())


def shipped() -> list[Path]:
    """Return the recorded profiles that ship with mtrain."""
    return [file.parent for file in sorted(resource_dir("profiles").glob(f"*/{SUMMARY}"))]


def known() -> list[Path]:
    """Return the folders under runs/ and measurements/ that have something to report.

    The newest folder comes first.
    """
    dated = _dated(RUNS) | _dated(MEASUREMENTS)
    return sorted(dated, key=lambda folder: (-dated[folder], folder.name))


def _dated(root: Path) -> dict[Path, float]:
    """Return when each folder in ``root`` changed, for those that have something to report."""
    # A profile without a sample, or a run without a step, has nothing to report.
    measured = RECORDS, SWEEP, KERNELS, HEAD_ROWS, f"{PARTS}/*.parquet"
    dated = {}
    for folder in root.iterdir() if root.is_dir() and os.access(root, os.R_OK) else ():
        with contextlib.suppress(PermissionError):
            places = [
                place
                for place in (folder, folder / PROFILE)
                if any(any(place.glob(pattern)) for pattern in measured)
            ]
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


def open_source(path: Path) -> ReportSource:
    """Read and analyze a folder.

    Raises:
        ConfigError: the path holds nothing to report, or a damaged file.
    """
    if path.is_file():
        raise ConfigError(
            f"{path}: not a profile of mtrain; give the folder of a run, a profile or a simulation"
        )
    files = read_run_files(path)
    others = bool(files.metrics or files.results)
    try:
        places = [place for place in (path, path / PROFILE) if (place / SUMMARY).is_file()]
        if places:
            return _profiled(path, places[0], files)
    except ConfigError as error:
        if not others:
            raise
        line = f"{error.problems[0]}; the profile is not shown"
        files = replace(files, damage=(*files.damage, line))
    if not others:
        raise ConfigError(*(files.damage or [_nothing(path)]))
    return _with_files(_bare(path, None, files), files)


def _profiled(path: Path, folder: Path, files: RunFiles) -> ReportSource:
    try:
        source = _recorded(path, open_records(folder), files)
        sweep_table([("", source.steps)]).cells()
        if source.step is not None:
            print_section(Console(file=io.StringIO()), step_section(source.step))
    except ConfigError:
        raise
    except (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError) as e:
        # A value has another type or size than mtrain writes.
        raise ConfigError(
            f"{folder / SUMMARY}: damaged, or does not fit its records ({reason(e)}); measure again"
        ) from e
    return source


def _recorded(path: Path, recorded: RecordedFolder, files: RunFiles) -> ReportSource:
    """Return a source with a profile or simulation."""
    source, summary, folder = _bare(path, recorded, files), recorded.summary, recorded.folder
    kind = summary.get("kind")
    if kind == STEP:
        return _with_experts(replace(source, step=summary), recorded)
    if kind == SPARSITY:
        return replace(source, sparsity=_sparsity(folder), others=read_others(folder))
    recorded.check_schemas()
    cases = tuple(analyse(recorded))
    if not cases and not files.metrics and not summary.get("sweep"):
        why = "no sample yet; the profile still runs or stopped too early"
        if recorded.complete or summary.get("samples"):
            why = f"{RECORDS} is missing or empty, although {SUMMARY} lists samples; measure again"
        raise ConfigError(f"{folder}: {why}")
    source = replace(_with_experts(source, recorded), recorded=recorded, cases=cases)
    return _with_files(source, files)


def _bare(path: Path, recorded: RecordedFolder | None, files: RunFiles) -> ReportSource:
    summary = recorded.summary if recorded is not None else {}
    command = {"command": summary["command"]} if summary.get("command") else {}
    facts = {**(summary.get("environment") or {}), **command, **files.facts}
    facts = {name: v for name, v in facts.items() if isinstance(v, _FACTS.get(name, object))}
    settings = with_choices(files.settings, _choices(summary, files))
    name = os.path.basename(path.resolve()) or str(path)
    return ReportSource(name, path, facts, settings=settings, damage=files.damage)


def _choices(summary: dict[str, Any], files: RunFiles) -> dict[str, str]:
    """Return the choices of a run, or else those of its cases, by dotted key."""
    if files.state is not None and files.state.chosen:
        return {k: str(v) for k, v in files.state.chosen.items() if k in _CHOSEN}
    measured = [summary.get("settings"), *(summary.get("cases") or ())]
    cases = [facts for facts in measured if isinstance(facts, dict)]
    values = {
        key: dict.fromkeys(str(facts[fact]) for facts in cases if facts.get(fact))
        for key, fact in _CHOSEN.items()
    }
    return {key: ", ".join(own) for key, own in values.items() if own}


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


def _nothing(path: Path) -> str:
    try:
        content = sorted(entry.name for entry in path.iterdir() if entry.name != ".lock")
    except OSError as error:
        return f"{path}: cannot be read ({error.strerror})"
    if RESOLVED in content:
        return f"{path}: a run that has no step and no profile yet"
    listed = ", ".join(content[:SHOWN]) or "nothing"
    return (
        f"{path}: not a run, profile or simulation "
        f"({SUMMARY} and {METRICS_FILE} are missing; contains {listed})"
    )
