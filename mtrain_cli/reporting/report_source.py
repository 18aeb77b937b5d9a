"""Find and open the sources of a report: training runs, profiles, simulations."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mtrain_cli import resource_dir
from mtrain_cli.config import documents, keys
from mtrain_cli.config.documents import UnreadableError, reason
from mtrain_cli.config.earlier_versions import renamed
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.sizes import with_count
from mtrain_cli.config.suggest import no_such
from mtrain_cli.console import Console
from mtrain_cli.evaluation import results as evaluation_results
from mtrain_cli.grouping import show_spans, spans
from mtrain_cli.launch import run_dir
from mtrain_cli.launch.restart import Restart
from mtrain_cli.launch.rollbacks import Rollback, read_events
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.launch.run_status import ENDED, RunState, read_state_file
from mtrain_cli.printable import one_line
from mtrain_cli.records.analysis import CaseAnalysis, analyse
from mtrain_cli.records.expert_loads import ExpertAnalysis, analyse_experts
from mtrain_cli.records.metrics import (
    METRICS_FILE,
    StepMetrics,
    is_finite,
    line_on_file,
    loss_remark,
    read_readable_metrics,
    step_remarks,
)
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
from mtrain_cli.reporting.step_tables import step_section
from mtrain_cli.reporting.sweeps import sweep_table
from mtrain_cli.reporting.tables import recording_cost
from mtrain_cli.reporting.terminal import print_section
from mtrain_cli.training.evaluation import EVALUATIONS_FILE, Evaluation, read_evaluations

RUNS, MEASUREMENTS, PROFILE = Path("runs"), Path("measurements"), "profile"
SHOWN = 5  # most names in a message
SHOWN_FIRST = "real-512k-4xh200"  # the shipped profile that a report shows if there is no run
_MOST_CHARACTERS = 10_000  # of a setting that a report shows
# Types of facts. A foreign file may have others.
_FACTS = {"gpus": list, "versions": dict, "started": str}
# Settings that another loop has, too.
_OF_ATTENTION = (
    *("model.name", "model.num_layers", "model.num_heads", "model.num_kv_heads", "model.head_dim"),
    *("seq", "topology.", "mask.", "sparsity.", "train.kernel", "train.dtype"),
    *("train.micro_batch", "train.global_batch"),
)
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
    chosen: choices of the run by dotted key, as its state.json has them.
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
    chosen: dict[str, str] = field(default_factory=dict)
    restarts: tuple[Restart, ...] = ()
    rollbacks: tuple[Rollback, ...] = ()
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
            is_of_folder = candidate.name in (RECORDS, SUMMARY, METRICS_FILE, run_dir.RESOLVED)
            return candidate.parent if is_of_folder else candidate
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
    run = read_run(path)
    others = bool(run.metrics or run.results)
    try:
        places = [place for place in (path, path / PROFILE) if (place / SUMMARY).is_file()]
        if places:
            return _profiled(run, places[0])
    except ConfigError as error:
        if not others:
            raise
        line = f"{error.problems[0]}; the profile is not shown"
        run = replace(run, damage=(*run.damage, line))
    if not others:
        raise ConfigError(*(run.damage or [_nothing(path)]))
    return replace(run, settings=with_choices(run.settings, run.chosen))


def _profiled(run: ReportSource, folder: Path) -> ReportSource:
    try:
        source = _recorded(run, open_records(folder))
        sweep_table([("", source.steps)]).cells()
        recording_cost(source.summary)
        sum(int(case.facts.get("padded_seq") or 0) for case in source.cases)
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


def _recorded(run: ReportSource, recorded: RecordedFolder) -> ReportSource:
    """Add a profile or simulation to the files of its run."""
    summary, folder = recorded.summary, recorded.folder
    command = {"command": summary["command"]} if summary.get("command") else {}
    facts = {**_facts(summary.get("environment") or {}), **command, **run.facts}
    kind = summary.get("kind")
    settings = run.settings or (_of_another_loop(folder) if kind == "profile" else {})
    settings = with_choices(settings, run.chosen or _choices(summary))
    source = replace(run, facts=facts, settings=settings)
    if kind == STEP:
        return _with_experts(replace(source, step=summary), recorded)
    if kind == SPARSITY:
        return replace(source, sparsity=_sparsity(folder), others=read_others(folder))
    recorded.check_schemas()
    cases = tuple(analyse(recorded))
    if not cases and not run.metrics and not summary.get("sweep"):
        why = "no sample yet; the profile still runs or stopped too early"
        if recorded.complete or summary.get("samples"):
            why = f"{RECORDS} is missing or empty, although {SUMMARY} lists samples; measure again"
        raise ConfigError(f"{folder}: {why}")
    return replace(_with_experts(source, recorded), recorded=recorded, cases=cases)


def _of_another_loop(folder: Path) -> dict[str, Any]:
    """Return the settings of attention in a loop that is not mtrain's (`api.context_parallel`)."""
    file = folder / "cases/0.yaml"
    if not file.is_file():
        return {}
    try:
        settings = read_settings(file)
    except (OSError, UnreadableError):
        return {}
    return {name: value for name, value in settings.items() if name.startswith(_OF_ATTENTION)}


def _facts(environment: dict[str, Any]) -> dict[str, Any]:
    return {name: v for name, v in environment.items() if isinstance(v, _FACTS.get(name, object))}


def _choices(summary: dict[str, Any]) -> dict[str, str]:
    """Return the choices of the cases of a profile, by dotted key."""
    measured = [summary.get("settings"), *(summary.get("cases") or ())]
    cases = [facts for facts in measured if isinstance(facts, dict)]
    values = {
        key: dict.fromkeys(str(facts[fact]) for facts in cases if facts.get(fact))
        for key, fact in _CHOSEN.items()
    }
    return {key: ", ".join(own) for key, own in values.items() if own}


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
    if run_dir.RESOLVED in content:
        return f"{path}: a run that has no step and no profile yet"
    listed = ", ".join(content[:SHOWN]) or "nothing"
    return (
        f"{path}: not a run, profile or simulation "
        f"({SUMMARY} and {METRICS_FILE} are missing; contains {listed})"
    )


# --- files of a run -----


def read_run(path: Path) -> ReportSource:
    """Read the files of a run's folder but its profile. Leave out what is damaged."""
    run = RunDir(path)
    damage: list[str] = []

    def read(file: Path, parse: Callable[[Path], Any], lost: str) -> Any:
        try:
            return parse(file) if file.exists() else None
        except (OSError, ValueError) as error:
            damage.append(f"{file}: cannot be read ({documents.reason(error)}); {lost}")
            return None

    kinds = {
        run.state: (read_state_file, "choices of the run may be missing"),
        run.resolved: (read_settings, "settings are not shown"),
        run.environment: (_object, "command and machine may be missing"),
    }
    state, settings, facts = (read(file, *kind) for file, kind in kinds.items())
    metrics, line = _metrics(run, state)
    damage.append(line)
    evaluations, line = _evaluations(path)
    damage.append(line)
    results, line = evaluation_results.read_whole_results(path)
    damage.append(line)
    restarts, rollbacks, unreadable = read_events(run)
    damage += unreadable
    settings = settings or {}
    steps = settings.get("train.steps")
    if steps is not None and not (isinstance(steps, int) and documents.is_number(steps)):
        damage.append(f"{run.resolved}: train.steps={steps}: expected a whole number")
        steps = None
    if metrics or state is not None:
        damage += [f"{file}: missing; {kinds[file][1]}" for file in kinds if not file.exists()]
    return ReportSource(
        os.path.basename(path.resolve()) or str(path),
        path,
        _facts(facts or {}),
        metrics=tuple(metrics),
        steps_wanted=steps if metrics else None,
        evaluations=tuple(evaluations),
        results=tuple(results),
        settings=settings,
        chosen={k: str(v) for k, v in state.chosen.items() if k in _CHOSEN} if state else {},
        restarts=tuple(restarts),
        rollbacks=tuple(rollbacks),
        damage=tuple(filter(None, damage)),
    )


def _metrics(run: RunDir, state: RunState | None) -> tuple[list[StepMetrics], str]:
    """Return the steps of a run, and a line on damaged lines and on missing steps, or ""."""
    last = state.step if state is not None and state.phase in ENDED else 0
    if not run.metrics.is_file():
        missing = f"{run.metrics}: missing, although the run has done {with_count(last, 'step')}"
        return [], missing if last else ""
    metrics, damaged = read_readable_metrics(run.metrics)
    line = documents.lines_not_shown(run.metrics, damaged, "step")
    remarks = step_remarks(metrics, last) if metrics or last else []
    if not metrics and not damaged and not last and run.metrics.stat().st_size:
        remarks = ["no steps"]
    return metrics, line_on_file(run.metrics, line, remarks)


def _evaluations(path: Path) -> tuple[list[Evaluation], str]:
    """Return the held-out losses of a run, and a line on damaged lines and lost losses, or ""."""
    evaluations, damaged = read_evaluations(path)
    file = path / EVALUATIONS_FILE
    line = documents.lines_not_shown(file, damaged, "evaluation")
    losses = {e.step: [e.loss, *(b.loss for b in e.buckets if b.tokens)] for e in evaluations}
    lossless = [step for step, own in losses.items() if not all(map(is_finite, own))]
    return evaluations, line_on_file(file, line, [loss_remark(lossless)])


def _object(path: Path) -> dict[str, Any]:
    document = documents.read_json(path)
    if not isinstance(document, dict):
        raise UnreadableError("it is not a JSON object")
    return document


def read_settings(file: Path) -> dict[str, Any]:
    """Return the settings in a resolved.yaml by dotted key.

    The file is not checked against the schema, so reports can show runs of other mtrain versions.

    Raises:
        UnreadableError: the file is no YAML, holds no settings, or a value is very long.
        OSError: the file cannot be read.
    """
    document = documents.read_yaml(file)
    if not isinstance(document, Mapping):
        raise UnreadableError("it holds no settings")
    try:
        settings = renamed(keys.flatten(document))
        long = [name for name, v in settings.items() if len(keys.show(v)) > _MOST_CHARACTERS]
    except (ValueError, RecursionError) as error:
        raise UnreadableError(documents.reason(error)) from None
    if long:
        raise UnreadableError(f"{long[0]} is longer than {_MOST_CHARACTERS:,} characters")
    return settings


def with_choices(settings: Mapping[str, Any], chosen: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings with the choices of the run, for example ``ring (auto)`` for ``auto``.

    chosen: what the run used, by dotted key.
    """
    used = {name: value for name, value in chosen.items() if name in settings}
    auto = {name: f"{value} (auto)" for name, value in used.items() if settings[name] == "auto"}
    return {**settings, **used, **auto}
