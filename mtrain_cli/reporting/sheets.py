"""The CSV files of a report. Numbers have six significant digits."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtrain_cli.config.atomic_files import replacing
from mtrain_cli.evaluation.results import Part, Result
from mtrain_cli.records.analysis import BINS, DEGREES, CaseAnalysis, Estimate, PassAnalysis
from mtrain_cli.records.study_rows import sheet_rows
from mtrain_cli.reporting.comparison import comparison
from mtrain_cli.reporting.evaluation_names import distinguished
from mtrain_cli.reporting.expert_step_tables import time_rows
from mtrain_cli.reporting.expert_tables import balance_rows, routing_rows, share_rows
from mtrain_cli.reporting.pipeline_page import pipeline_rows
from mtrain_cli.reporting.report_source import ReportSource

Row = dict[str, Any]
_FACTS = ("layout", "exchange", "pattern", "kernel", "seq")
_COUNTS = ("workers", "groups", "samples", "iterations", "partial")
_CAUSE = ("ms", "kind", "direction", "rank", "step", "text")
_TRAINING = (
    *("step", "loss", "lr", "tokens", "tokens_per_second_per_gpu", "mfu_model", "mfu_executed"),
    *("density", "peak_memory_gib", "seconds", "targets_per_second_per_gpu"),
)


@dataclass(frozen=True)
class Sheet:
    """One CSV file.

    rows: rows by column name. All rows have the same columns in the same order.
    """

    name: str
    rows: Sequence[Row]

    def write(self, folder: Path) -> Path:
        path = folder / f"{self.name}.csv"
        with replacing(path) as draft, draft.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(self.rows[0])
            writer.writerows([_cell(value) for value in row.values()] for row in self.rows)
        return path


def _cell(value: Any) -> Any:
    if isinstance(value, float | np.floating):
        return f"{value:.6g}" if np.isfinite(value) else ""
    return "" if value is None else value


def sheets(sources: Sequence[ReportSource]) -> list[Sheet]:
    """Return the CSV files that have rows."""
    cases = [
        ({"run": source.name, "case": case.label}, case)
        for source in sources
        for case in source.cases
    ]
    passes = [
        ({**names, "direction": direction}, analysis)
        for names, case in cases
        for direction, analysis in case.passes.items()
    ]
    rows = {
        "summary": [row for names, case in cases for row in _summary(names, case)],
        "steps": [row for names, analysis in passes for row in _steps(names, analysis)],
        "time_by_rank": [row for names, case in cases for row in _time_by_rank(names, case)],
        "layers": [row for names, analysis in passes for row in _layers(names, analysis)],
        "causes": [
            {**names, **{name: getattr(cause, name) for name in _CAUSE}}
            for names, case in cases
            for cause in case.causes
        ],
        "training": [
            {"run": source.name, **{name: getattr(metrics, name) for name in _TRAINING}}
            for source in sources
            for metrics in source.metrics
        ],
        "positions": [row for source in sources for row in _positions(source)],
        "evaluations": [row for source in sources for row in _results(source)],
        **_others(sources),
        "study": [
            {"run": source.name, **row} for source in sources for row in sheet_rows(source.study)
        ],
        "pipeline": pipeline_rows(sources),
        "experts": list(share_rows(sources)),
        "expert_balance": list(balance_rows(sources)),
        "expert_times": list(time_rows([(s.name, s.step) for s in sources if s.step is not None])),
        "routing": list(routing_rows(sources)),
        "compare": _compare(sources),
    }
    return [Sheet(name, mine) for name, mine in rows.items() if mine]


def _summary(names: Row, case: CaseAnalysis) -> Iterator[Row]:
    """Yield a row per direction, and one named `both` with the means of forward and backward."""

    def row(direction: str, analysis: CaseAnalysis | PassAnalysis, last: Row) -> Row:
        degrees = {"time": analysis.time, "work": analysis.work}
        ratio = analysis.computation
        return {
            **names,
            "direction": direction,
            **{name: case.facts.get(name) for name in _FACTS},
            **{name: getattr(case, name) for name in _COUNTS},
            **{
                key: value
                for kind, of_kind in degrees.items()
                for name in DEGREES
                for key, value in _with_std(f"{kind}_{name}_id", getattr(of_kind, name)).items()
            },
            **_with_std("computed_step", ratio.step),
            **_with_std("computed_total", ratio.total),
            **last,
        }

    whole = sum(p.duration.mean for p in case.passes.values())
    last = ("pass_ms_std", "step_ms_p50", "step_ms_p95", "step_ms_max")
    yield row("both", case, {"pass_ms": whole, **dict.fromkeys(last)})
    for direction, p in case.passes.items():
        steps = {"step_ms_p50": p.p50, "step_ms_p95": p.p95, "step_ms_max": p.longest}
        yield row(direction, p, {**_with_std("pass_ms", p.duration), **steps})


def _with_std(name: str, value: Estimate) -> Row:
    return {name: value.mean, f"{name}_std": value.std}


def _steps(names: Row, analysis: PassAnalysis) -> Iterator[Row]:
    tables = {
        "attention_ms": analysis.attention,
        "step_ms": analysis.elapsed,
        "late_ms": analysis.late,
        "exposed_ms": analysis.exposed,
        "pairs": analysis.pairs,
        "blocks": analysis.blocks,
    }
    for worker, step in np.ndindex(analysis.attention.shape):
        values = {name: float(table[worker, step]) for name, table in tables.items()}
        yield {**names, "worker": worker, "step": step, **values}


def _time_by_rank(names: Row, case: CaseAnalysis) -> Iterator[Row]:
    """Yield the time of each category per iteration, in ms: a row per direction and rank.

    The categories of a row add up to pass_ms.
    """
    columns = [f"{name.replace(' ', '_')}_ms" for name in BINS]
    for d, direction in enumerate(case.directions):
        for rank in case.present:
            bins = dict(zip(columns, case.bins[d, rank], strict=True))
            times = {"pass_ms": case.passes_ms[d, rank], **bins}
            yield {**names, "direction": direction, "rank": rank, **times}


def _layers(names: Row, analysis: PassAnalysis) -> Iterator[Row]:
    """Yield a row per layer: pass_ms of the slowest worker, and times averaged over workers."""
    for layer in analysis.layers:
        means = {name: layer[name] for name in ("attention_ms", "late_ms", "exposed_ms")}
        yield {**names, "layer": int(layer["layer"]), "pass_ms": layer["ms"], **means}


def _positions(source: ReportSource) -> Iterator[Row]:
    for e in source.evaluations:
        for bucket in e.buckets:
            names = {"run": source.name, "step": e.step, "attention": e.attention}
            span = {"begin": bucket.begin, "end": bucket.end}
            yield {**names, **span, "tokens": bucket.tokens, "loss": bucket.loss}


def _results(source: ReportSource) -> Iterator[Row]:
    """Yield a row per result of `mtrain eval`, then a row per part of it."""
    for r, named in zip(source.results, distinguished(source.results), strict=True):
        names = {"run": source.name, "step": r.step, "task": r.task, "length": r.length}
        names |= {"attention": r.attention, "unit": r.unit}
        # The name in tables and figures, all settings, and the key in results.jsonl.
        settings = "; ".join((*r.settings, *filter(None, r.details)))
        about = {"name": named.attention, "settings": settings, "key": r.key}
        whole = {"begin": None, "end": None, "count": r.samples}
        yield {**names, **whole, **_with_error(r), **about}
        for part in r.parts:
            span = {"begin": part.begin, "end": part.end, "count": part.count}
            yield {**names, **span, **_with_error(part), **about}


def _with_error(scored: Result | Part) -> Row:
    return {"score": scored.score, "error": scored.error}


def _others(sources: Sequence[ReportSource]) -> dict[str, list[Row]]:
    """Return the rows of records of other packages, by the name of their sheet."""
    sheets: dict[str, list[Row]] = {}
    for source in sources:
        for kind, records in source.others:
            for name, rows in kind.rows(records).items():
                sheets.setdefault(name, []).extend({"run": source.name, **row} for row in rows)
    return sheets


def _compare(sources: Sequence[ReportSource]) -> list[Row]:
    return [
        {
            **{"run": r.run, "case": r.case, "what": r.what, "first": r.first, "this": r.other},
            **{"ratio": r.ratio, "noise": r.noise, "verdict": r.verdict},
        }
        for r in comparison(sources)
    ]
