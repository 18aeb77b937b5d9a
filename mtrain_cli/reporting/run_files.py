"""What a run's folder holds besides records, and which of its files are damaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtrain_cli.config import documents
from mtrain_cli.config.sizes import with_count
from mtrain_cli.evaluation import results as evaluation_results
from mtrain_cli.launch import restart
from mtrain_cli.launch.restart import Restart
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.launch.run_status import ENDED, RunState, read_state_file
from mtrain_cli.records.metrics import StepMetrics, read_readable_metrics
from mtrain_cli.records.step_remarks import is_finite, line_on_file, loss_remark, step_remarks
from mtrain_cli.reporting.run_settings import read_settings
from mtrain_cli.training.evaluation import EVALUATIONS_FILE, Evaluation, read_evaluations

_STEPS = "train.steps"
# What a report without the file lacks.
CHOICES_LOST = "choices of the run are not shown"
FACTS_LOST = "command and machine are not shown"
_SETTINGS_LOST = "settings are not shown"


@dataclass(frozen=True)
class RunFiles:
    """The content of a run's folder. A damaged file, or a damaged line, is left out.

    settings: resolved configuration by dotted key.
    steps_wanted: the setting train.steps; None if unknown.
    state: None if unknown.
    facts: content of environment.json.
    damage: a line on each damaged or missing file, which names the file and what is not shown.
    """

    metrics: tuple[StepMetrics, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    results: tuple[evaluation_results.Result, ...] = ()
    restarts: tuple[Restart, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    steps_wanted: int | None = None
    state: RunState | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    damage: tuple[str, ...] = ()


def read_run_files(path: Path) -> RunFiles:
    """Read the files of a run's folder."""
    run = RunDir(path)
    damage: list[str] = []
    state = _whole(run.state, read_state_file, CHOICES_LOST, damage)
    metrics, lines = _metrics(run, state)
    damage.append(lines)
    evaluations, lines = _evaluations(path)
    damage.append(lines)
    results, unread = evaluation_results.read_whole_results(path)
    damage.append(unread)
    if unreadable := restart.count_unreadable_lines(run):
        damage.append(f"{run.restarts}: {with_count(unreadable, 'unreadable line')} skipped")
    settings = _whole(run.resolved, read_settings, _SETTINGS_LOST, damage) or {}
    steps = settings.get(_STEPS)
    if steps is not None and not (isinstance(steps, int) and documents.is_number(steps)):
        damage.append(f"{run.resolved}: {_STEPS}={steps}: expected a whole number")
        steps = None
    facts = _whole(run.environment, _object, FACTS_LOST, damage) or {}
    if metrics or state is not None:
        damage += _missing(run)
    return RunFiles(
        tuple(metrics), tuple(evaluations), tuple(results), tuple(restart.read_restarts(run)),
        settings, steps, state, facts, tuple(filter(None, damage)),
    )  # fmt: skip


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
    lossless = [
        e.step
        for e in evaluations
        if not all(map(is_finite, (e.loss, *(b.loss for b in e.buckets if b.tokens))))
    ]
    return evaluations, line_on_file(file, line, [loss_remark(lossless)])


def _missing(run: RunDir) -> list[str]:
    lost = {
        run.state: CHOICES_LOST, run.resolved: _SETTINGS_LOST, run.environment: FACTS_LOST,
    }  # fmt: skip
    return [f"{path}: missing; {what}" for path, what in lost.items() if not path.exists()]


def _whole(path: Path, read: Callable[[Path], Any], lost: str, damage: list[str]) -> Any:
    """Return what `read` makes of a file; None for a missing or damaged file."""
    if path.is_dir():
        damage.append(f"{path}: is a folder; {lost}")
    if not path.is_file():
        return None
    try:
        return read(path)
    except (OSError, ValueError) as error:
        damage.append(f"{path}: cannot be read ({documents.reason(error)}); {lost}")
        return None


def _object(path: Path) -> dict[str, Any]:
    document = documents.read_json(path)
    if not isinstance(document, dict):
        raise documents.UnreadableError("it is not a JSON object")
    return document
