"""A report source for each kind of record, by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from records.test_expert_loads import loads, profile
from reporting.test_evaluations import NIAH, ONE, SPARSE, TWO, ruler
from reporting.test_pipeline_page import measured, simulated
from reporting.test_reported_experts import with_experts
from reporting.test_sweeps import ROWS
from reporting.training_runs import trained
from synthetic_records import Play, recorded_once, ring

from mtrain_cli.evaluation.results import NATS, Part, Result
from mtrain_cli.reporting.report_source import ReportSource, open_source, shipped

LOSS = replace(
    NIAH, task="perplexity", unit=NATS, score=2.5, error=0.01, parts=(Part(0, 128, 5, 2.0, 0.1),)
)
LM_EVAL = replace(NIAH, task="lm-eval:arc:acc", length=0, parts=(), note="5-shot")
RULER = (ruler("vt", 80.0), ruler("cwe", 60.0, 4.0), ruler("niah_single_2@book", 0.0))


def _ms(direction: str, rank: int, step: int) -> float:
    return (1 + 0.5 * rank + 0.1 * step) * (2 if direction == "backward" else 1)


def _profile(folder: Path) -> ReportSource:
    play = Play(ring(4), _ms, link={"context": 0.3}, index=0.2, merge=0.05)
    return open_source(recorded_once(folder, play, layers=(0, 3), iterations=3))


def _shipped(name: str) -> ReportSource:
    return open_source(next(path for path in shipped() if path.name == name))


def _sparsity(folder: Path) -> ReportSource:
    rows: list[dict[str, Any]] = [
        {"step": step, "pattern": pattern, "layer": layer, "head": head, "density": 0.2}
        | {"of_mask": 0.2 + 0.05 * layer, "recall": 0.8 + 0.1 * head, "worst": 0.5 + 0.1 * layer}
        | {"slashes": 3, "columns": 9}
        for step in (1, 3, 5)
        for pattern in ("moba", "vertical_slash")
        for layer in (0, 1)
        for head in (0, 1)
    ]
    return ReportSource("sparsity", folder, sparsity=tuple(rows))


def _evaluations(folder: Path, *results: Result) -> ReportSource:
    return ReportSource("evaluations", folder, results=results)


def _sweep(folder: Path) -> ReportSource:
    source = simulated(folder)
    source.summary.update(sweep=ROWS)
    return replace(source, cases=())


def every_kind(folder: Path) -> dict[str, list[ReportSource]]:
    """Return the sources of a report for each kind of record."""
    return {
        "profile": [_profile(folder / "a")],
        "two profiles": [_profile(folder / "b"), _profile(folder / "c")],
        "step": [_shipped("step-128k-4xh200")],
        "two steps": [_shipped("step-1m-4xh200"), _shipped("step-512k-4xh200")],
        "experts": [
            open_source(profile(folder / "d", loads(), loads(step=2))),
            with_experts("run", folder),
        ],
        "pipeline": [measured(folder / "e"), simulated(folder / "f")],
        "training": [trained("one", folder)],
        "two trainings": [trained("one", folder), trained("two", folder, settings={"seq": 8192})],
        "sparsity": [_sparsity(folder)],
        "evaluations": [
            _evaluations(folder, NIAH, SPARSE, *RULER, LOSS, LM_EVAL, replace(NIAH, step=5))
        ],
        "named evaluations": [_evaluations(folder, ONE, TWO)],
        "sweep": [_sweep(folder / "g")],
    }
