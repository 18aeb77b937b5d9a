"""What a report shows: the sections of terminal and page, and the CSV files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mtrain_cli.evaluation.results import Part, Result
from mtrain_cli.records.study_rows import sheet_rows
from mtrain_cli.reporting import tables, training_tables
from mtrain_cli.reporting.comparison import compare_table
from mtrain_cli.reporting.evaluation_names import distinguished, named_settings
from mtrain_cli.reporting.evaluation_tables import evaluation_tables
from mtrain_cli.reporting.expert_step_tables import time_rows
from mtrain_cli.reporting.expert_tables import expert_files, expert_section
from mtrain_cli.reporting.pipeline_page import pipeline_table, stages_data
from mtrain_cli.reporting.program_figure import program_table
from mtrain_cli.reporting.report_source import ReportSource
from mtrain_cli.reporting.step_tables import side_by_side, step_section
from mtrain_cli.reporting.sweeps import sweep_table, why_not
from mtrain_cli.reporting.table import Lines, Section, Table, data

Row = dict[str, Any]
_TRAINING = (
    *("step", "loss", "lr", "tokens", "tokens_per_second_per_gpu", "mfu_model", "mfu_executed"),
    *("density", "peak_memory_gib", "seconds", "targets_per_second_per_gpu"),
)


def own_sections(source: ReportSource) -> list[Section]:
    """Return what a report says about one run, without the study's tables."""
    sections = []
    if source.shipped is not None:
        command = Lines([f"recorded by {source.shipped.get('command', '')}"], style="dim")
        sections.append(Section("Recorded", [tables.shipped_table(source.shipped), command]))
    if source.step is not None:
        sections.append(step_section(source.step))
    if source.steps:
        impossible = [f"impossible: {reason}" for reason in why_not(source.steps)]
        predicted = sweep_table([(source.name, source.steps)])
        sections.append(Section(predicted.title, [predicted, Lines(impossible, style="dim")]))
    sections.append(Section("Patterns", tables.sparsity_tables(source.sparsity)))
    names = [
        f"{each.task}: {each.name}: {'; '.join(each.settings)}"
        for each in named_settings(source.results)
    ]
    legend = [Lines(names, "Names in these tables and in figures")] if names else []
    sections.append(Section("Evaluations", [*evaluation_tables(source.results), *legend]))
    sections += [table.section for kind, records in source.others for table in kind.tables(records)]
    return sections


def shared_sections(sources: Sequence[ReportSource]) -> list[Section]:
    """Return what a report says about all runs together."""
    steps = [(source.name, source.step) for source in sources if source.step is not None]
    trained = [source for source in sources if source.metrics]
    cases = [(source.name, case) for source in sources for case in source.cases]
    measured, names = [case for _, case in cases], [run for run, _ in cases if len(sources) > 1]
    together = [
        *([side_by_side(steps)] if len(steps) > 1 else []),
        *([training_tables.training_table(trained)] if trained else []),
        training_tables.positions_table(sources),
        expert_section(sources),
        pipeline_table(sources),
        *([tables.balance_section(measured, names)] if cases else []),
    ]
    if len(cases) == 1:
        (source,) = (source for source in sources if source.cases)
        together.append(program_table(source, measured[0]))
    together += [tables.causes_section(measured, names), compare_table(sources)]
    return [
        part if isinstance(part, Section) else Section(part.title, [part])
        for part in together
        if part is not None
    ]


def files(sources: Sequence[ReportSource]) -> list[Table]:
    """Return the CSV files that have rows."""
    swept = [(source.name, source.swept) for source in sources if source.swept]
    steps = [(source.name, source.step) for source in sources if source.step is not None]
    training = [
        {"run": source.name, **{name: getattr(metrics, name) for name in _TRAINING}}
        for source in sources
        for metrics in source.metrics
    ]
    study = [{"run": source.name, **row} for source in sources for row in sheet_rows(source.study)]
    written = [
        *tables.details([(source.name, case) for source in sources for case in source.cases]),
        data("training", training),
        data("positions", [row for source in sources for row in _positions(source)]),
        data("evaluations", [row for source in sources for row in _results(source)]),
        *_others(sources),
        data("study", study),
        stages_data(sources),
        *expert_files(sources),
        data("expert_times", list(time_rows(steps))),
        compare_table(sources),
        *([sweep_table(swept)] if swept else []),
    ]
    return [table for table in written if table.rows]


def _others(sources: Sequence[ReportSource]) -> list[Table]:
    """Return the files of records of other packages."""
    rows_of: dict[str, list[Row]] = {}
    for source in sources:
        for kind, records in source.others:
            for name, rows in kind.rows(records).items():
                rows_of.setdefault(name, []).extend({"run": source.name, **row} for row in rows)
    return [data(name, rows) for name, rows in rows_of.items()]


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
