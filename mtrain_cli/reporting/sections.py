"""What a report shows: the sections of terminal and page, and the CSV files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mtrain_cli.records.study_rows import sheet_rows
from mtrain_cli.reporting import tables
from mtrain_cli.reporting.comparison import compare_table
from mtrain_cli.reporting.evaluations import distinguished, evaluation_tables, named_settings
from mtrain_cli.reporting.experts import expert_files, expert_table, routing_table
from mtrain_cli.reporting.pipeline_page import pipeline_table, stages_data
from mtrain_cli.reporting.program_figure import program_table
from mtrain_cli.reporting.report_source import ReportSource
from mtrain_cli.reporting.sparsity import sparsity_tables
from mtrain_cli.reporting.step_tables import side_by_side, step_section
from mtrain_cli.reporting.study_tables import study_sections
from mtrain_cli.reporting.sweeps import sweep_table, why_not
from mtrain_cli.reporting.table import Lines, Section, Table, data
from mtrain_cli.reporting.training import positions_table, training_table

Row = dict[str, Any]
_TRAINING = (
    *("step", "loss", "lr", "tokens", "tokens_per_second_per_gpu", "mfu_model", "mfu_executed"),
    *("density", "peak_memory_gib", "seconds", "targets_per_second_per_gpu"),
)


def own_sections(source: ReportSource) -> list[Section]:
    """Return what a report says about one run."""
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
    sections.append(Section("Patterns", sparsity_tables(source.sparsity)))
    names = named_settings(source.results)
    legend = [Lines(names, "Names in these tables and in figures")] if names else []
    sections.append(Section("Evaluations", [*evaluation_tables(source.results), *legend]))
    sections += [table.section for kind, records in source.others for table in kind.tables(records)]
    return [*sections, *study_sections(source.study)]


def shared_sections(sources: Sequence[ReportSource]) -> list[Section]:
    """Return what a report says about all runs together."""
    steps = [(source.name, source.step) for source in sources if source.step is not None]
    trained = [source for source in sources if source.metrics]
    cases = [
        (source.name * (len(sources) > 1), case) for source in sources for case in source.cases
    ]
    experts = [routing_table(sources), expert_table(sources)]
    together: list[Section | Table | None] = [
        side_by_side(steps) if len(steps) > 1 else None,
        training_table(trained) if trained else None,
        positions_table(sources),
        Section("Experts", experts),
        pipeline_table(sources),
        tables.balance_section(cases) if cases else None,
    ]
    if len(cases) == 1:
        (source,) = (source for source in sources if source.cases)
        together.append(program_table(source, cases[0][1]))
    together += [tables.causes_section(cases), compare_table(sources)]
    return [
        part if isinstance(part, Section) else Section(part.title, [part])
        for part in together
        if part is not None
    ]


def files(sources: Sequence[ReportSource]) -> list[Table]:
    """Return the CSV files that have rows."""
    swept = [(source.name, source.swept) for source in sources if source.swept]
    rows: dict[str, list[Row]] = {"training": [], "positions": [], "evaluations": [], "study": []}
    for source in sources:
        run = {"run": source.name}
        for metrics in source.metrics:
            rows["training"].append(run | {name: getattr(metrics, name) for name in _TRAINING})
        for e in source.evaluations:
            names = {**run, "step": e.step, "attention": e.attention}
            rows["positions"] += [names | vars(bucket) for bucket in e.buckets]
        rows["evaluations"] += [run | row for row in _results(source)]
        rows["study"] += [run | row for row in sheet_rows(source.study)]
        for kind, records in source.others:
            for name, own in kind.rows(records).items():
                rows.setdefault(name, []).extend({**run, **row} for row in own)
    written = [
        *tables.details([(source.name, case) for source in sources for case in source.cases]),
        *(data(name, own) for name, own in rows.items()),
        stages_data(sources),
        *expert_files(sources),
        compare_table(sources),
        *([sweep_table(swept)] if swept else []),
    ]
    return [table for table in written if table.rows]


def _results(source: ReportSource) -> Iterator[Row]:
    """Yield a row per result of `mtrain eval`, then a row per part of it."""
    for r, named in zip(source.results, distinguished(source.results), strict=True):
        place = {name: getattr(r, name) for name in ("step", "task", "length", "attention", "unit")}
        # The name in tables and figures, all settings, and the key in results.jsonl.
        settings = "; ".join((*r.settings, *filter(None, r.details)))
        about = {"name": named.attention, "settings": settings, "key": r.key}
        whole = {"begin": None, "end": None, "count": r.samples}
        yield {**place, **whole, "score": r.score, "error": r.error, **about}
        for part in r.parts:
            yield {**place, **vars(part), **about}
