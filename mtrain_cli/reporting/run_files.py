"""What a run's folder holds besides records: its files, which of them are damaged, its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtrain_cli.config import documents, keys
from mtrain_cli.config.documents import UnreadableError
from mtrain_cli.config.earlier_versions import renamed
from mtrain_cli.config.sizes import format_size, with_count
from mtrain_cli.evaluation import results as evaluation_results
from mtrain_cli.launch import restart
from mtrain_cli.launch.restart import Restart
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.launch.run_status import ENDED, RunState, read_state_file
from mtrain_cli.records.metrics import (
    StepMetrics,
    is_finite,
    line_on_file,
    loss_remark,
    read_readable_metrics,
    step_remarks,
)
from mtrain_cli.training.evaluation import EVALUATIONS_FILE, Evaluation, read_evaluations

RESOLVED = "resolved.yaml"
_STEPS = "train.steps"
_MOST_CHARACTERS = 10_000  # of a value that a report shows
# Keys that only name a run. They differ between any two runs, so a report leaves them out.
_NAMES = ("run.name", "run.dir")
_OF_MASK = "mask.*"  # the keys of the mask but its kind
# Values that the card leaves out.
_PLAIN = {
    **dict.fromkeys((f"topology.{name}_parallel" for name in ("tensor", "pipeline", "expert")), 1),
    **{"sparsity.dense_layers": 0, "sparsity.dense_steps": 0},
}
_CARD = {
    "model": ("model.name", "model.num_layers", "model.hidden_size"),
    "sequence": ("seq", "train.global_batch", "train.micro_batch"),
    "workers": (
        *("topology.workers", "topology.context_parallel", "topology.tensor_parallel"),
        *("topology.pipeline_parallel", "topology.expert_parallel", "topology.layout"),
        "topology.exchange",
    ),
    "mask": ("data.mask_key", "mask.kind", _OF_MASK, "data.document_mask"),
    "attention": (
        *("sparsity.pattern", "sparsity.dense_layers", "sparsity.dense_steps", "train.kernel"),
        "train.dtype",
    ),
    "optimizer": ("optim.lr", "optim.schedule", "optim.warmup_steps", "optim.clip_norm"),
    "steps": ("train.steps", "seed"),
    "data": ("data.kind", "data.path"),
    "memory": ("train.memory", "train.activation_checkpoint", "train.shard"),
}


@dataclass(frozen=True)
class RunFiles:
    """The content of a run's folder. A damaged file, or a damaged line, is left out.

    settings: resolved configuration by dotted key.
    steps_wanted: the setting train.steps; None if unknown.
    state: None if unknown.
    facts: content of environment.json.
    damage: a line on each damaged or missing file.
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
    restarts, unreadable = restart.read_restarts(run)
    if unreadable:
        damage.append(f"{run.restarts}: {with_count(unreadable, 'unreadable line')} skipped")
    settings = settings or {}
    steps = settings.get(_STEPS)
    if steps is not None and not (isinstance(steps, int) and documents.is_number(steps)):
        damage.append(f"{run.resolved}: {_STEPS}={steps}: expected a whole number")
        steps = None
    if metrics or state is not None:
        damage += [f"{file}: missing; {kinds[file][1]}" for file in kinds if not file.exists()]
    return RunFiles(
        tuple(metrics),
        tuple(evaluations),
        tuple(results),
        tuple(restarts),
        settings,
        steps,
        state,
        facts or {},
        tuple(filter(None, damage)),
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


def attention_lines(settings: Mapping[str, Any]) -> list[str]:
    """Return a line on the mask, and lines on how workers share and compute the attention."""
    rows = dict(card(settings))
    return [f"{name}: {rows[name]}" for name in ("mask", "workers", "attention") if name in rows]


def card(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (heading, values) of the main settings of a run."""
    of_mask = [name for name in settings if name.startswith("mask.") and name != "mask.kind"]
    rows = []
    for heading, names in _CARD.items():
        every = [key for name in names for key in (of_mask if name == _OF_MASK else [name])]
        parts = [
            f"{name.rpartition('.')[2]} {shown(name, value)}"
            for name in every
            if (value := settings.get(name)) is not None and value != _PLAIN.get(name)
        ]
        if parts:
            rows.append((heading, ", ".join(parts)))
    return rows


def differing(runs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return (key, value in each run) of every setting that differs. A missing value is blank."""
    names = dict.fromkeys(name for run in runs for name in run if name not in _NAMES)
    rows = [(n, [shown(n, run[n]) if n in run else "" for run in runs]) for n in names]
    return [row for row in rows if len(set(row[1])) > 1]


def shown(name: str, value: Any) -> str:
    if name == "seq" and isinstance(value, int):
        return format_size(value)
    return keys.show(value)
