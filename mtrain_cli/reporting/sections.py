"""What a report shows: main settings, sections of terminal and page, figures, and CSV files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mtrain_cli.config import keys
from mtrain_cli.config.sizes import format_size, with_count
from mtrain_cli.console import Console
from mtrain_cli.parallel.pipeline_schedule import BACKWARD, FORWARD, Pipeline
from mtrain_cli.records.analysis import BINS, CaseAnalysis, PassAnalysis
from mtrain_cli.records.pipeline_times import PipelineTimes, predicted_pipeline
from mtrain_cli.records.record_files import by_kind
from mtrain_cli.records.record_sums import EXPOSED, LATE
from mtrain_cli.reporting import evaluations, experts, plots, step_tables, tables, training
from mtrain_cli.reporting.comparison import compare_table
from mtrain_cli.reporting.program_figure import program_figure, program_table
from mtrain_cli.reporting.report_source import ReportSource, label_of, labelled_cases
from mtrain_cli.reporting.sparsity import sparsity_tables
from mtrain_cli.reporting.sweeps import sweep_table, why_not
from mtrain_cli.reporting.table import Column, Lines, Section, Table, data, fixed, ms, percent
from mtrain_cli.reporting.terminal import print_section, say

Row = dict[str, Any]
_TRAINING = (
    *("step", "loss", "lr", "tokens", "tokens_per_second_per_gpu", "mfu_model", "mfu_executed"),
    *("density", "peak_memory_gib", "seconds", "targets_per_second_per_gpu"),
)


# Most cells in all heat maps of a page together. This limit and those of the other figures keep the
# page, with the plotly library, under 1.5 MB.
HEAT_NUMBERS = 60_000
Cases = Sequence[tuple[str, ReportSource, CaseAnalysis]]  # (label, run, case)
_HEATS = (
    ("attention, ms", "attention", "ms"),
    ("whole step, ms", "elapsed", "ms"),
    (f"{plots.LATE_LABEL}, ms", LATE, "ms"),
    (f"{plots.EXPOSED_LABEL}, ms", EXPOSED, "ms"),
    ("work: pairs", "pairs", "pairs"),
    ("work: blocks", "blocks", "blocks"),
)


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


def own_sections(source: ReportSource) -> list[Section]:
    """Return what a report says about one run."""
    sections = []
    if source.step is not None:
        sections.append(step_tables.step_section(source.step))
    if source.steps:
        impossible = [f"impossible: {reason}" for reason in why_not(source.steps)]
        predicted = sweep_table([(source.name, source.steps)])
        sections.append(Section(predicted.title, [predicted, Lines(impossible, style="dim")]))
    sections.append(Section("Patterns", sparsity_tables(source.sparsity)))
    names = evaluations.named_settings(source.results)
    legend = [Lines(names, "Names in these tables and in figures")] if names else []
    sections.append(
        Section("Evaluations", [*evaluations.evaluation_tables(source.results), *legend])
    )
    sections += [table.section for kind, records in source.others for table in kind.tables(records)]
    return sections


def shared_sections(sources: Sequence[ReportSource]) -> list[Section]:
    """Return what a report says about all runs together."""
    steps = [(source.name, source.step) for source in sources if source.step is not None]
    trained = [source for source in sources if source.metrics]
    cases = [
        (source.name * (len(sources) > 1), case) for source in sources for case in source.cases
    ]
    of_experts = [experts.routing_table(sources), experts.expert_table(sources)]
    together: list[Section | Table | None] = [
        step_tables.side_by_side(steps) if len(steps) > 1 else None,
        training.training_table(trained) if trained else None,
        training.positions_table(sources),
        Section("Experts", of_experts),
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


def show_sources(console: Console, sources: Sequence[ReportSource]) -> None:
    """Print the tables of all sources, and why workers wait."""
    for source in sources:
        about = filter(None, (source.where, source.facts.get("started"), _samples(source)))
        line = f"{source.name}: {', '.join([source.kind, *about])}"
        say(console, line, indent=2, style="bold")
        for line in attention_lines(source.settings):
            say(console, f"  {line}", indent=4, style="dim")
        for remark in source.remarks:
            say(console, f"  {remark}", indent=2, style="yellow")
        for section in own_sections(source):
            print_section(console, section)
    for section in shared_sections(sources):
        print_section(console, section)


def _samples(source: ReportSource) -> str:
    if not source.cases:
        return ""
    most = max(source.cases, key=lambda case: case.samples)
    layers = max(1, len(most.layers))
    of_layers = f" of {layers} layers" * (layers > 1)
    times = with_count(most.samples // layers, "sample")
    return f"{times}{of_layers}{' of each case' * (len(source.cases) > 1)}"


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


def files(sources: Sequence[ReportSource]) -> list[Table]:
    """Return the CSV files that have rows."""
    swept = [(source.name, source.swept) for source in sources if source.swept]
    rows: dict[str, list[Row]] = {"training": [], "positions": [], "evaluations": []}
    for source in sources:
        run = {"run": source.name}
        for metrics in source.metrics:
            rows["training"].append(run | {name: getattr(metrics, name) for name in _TRAINING})
        for e in source.evaluations:
            names = {**run, "step": e.step, "attention": e.attention}
            rows["positions"] += [names | vars(bucket) for bucket in e.buckets]
        rows["evaluations"] += [run | row for row in _results(source)]
        for kind, records in source.others:
            for name, own in kind.rows(records).items():
                rows.setdefault(name, []).extend({**run, **row} for row in own)
    written = [
        *tables.details([(source.name, case) for source in sources for case in source.cases]),
        *(data(name, own) for name, own in rows.items()),
        experts.expert_file(sources),
        compare_table(sources),
        *([sweep_table(swept)] if swept else []),
    ]
    return [table for table in written if table.rows]


def _results(source: ReportSource) -> Iterator[Row]:
    """Yield a row per result of `mtrain eval`, then a row per part of it."""
    for r, named in zip(source.results, evaluations.distinguished(source.results), strict=True):
        place = {name: getattr(r, name) for name in ("step", "task", "length", "attention", "unit")}
        # The name in tables and figures, all settings, and the key in results.jsonl.
        settings = "; ".join((*r.settings, *filter(None, r.details)))
        about = {"name": named.attention, "settings": settings, "key": r.key}
        whole = {"begin": None, "end": None, "count": r.samples}
        yield {**place, **whole, "score": r.score, "error": r.error, **about}
        for part in r.parts:
            yield {**place, **vars(part), **about}


# --- figures -----


def figures(sources: Sequence[ReportSource]) -> list[plots.Figure]:
    """Return the figures that have something to show, in the order of the page."""
    cases = labelled_cases(sources)
    trained = [source for source in sources if source.metrics]
    drawn = [
        training.held_out_figure(trained),
        training.training_figure(trained),
        training.layers_over_steps(
            *("density", "Density by layer"),
            trained,
            "density_by_layer",
            "density",
            "step %{x}, layer %{y}: %{z:.2%}",
        ),
        *experts.expert_figures(sources),
        *evaluations.evaluation_figures([(source.name, source.results) for source in sources]),
        step_tables.step_figure([(s.name, s.step) for s in sources if s.step is not None]),
    ]
    for kind, named in by_kind([(source.name, source.others) for source in sources]):
        drawn += kind.figures(named)
    drawn += [
        pipeline_figure(sources),
        heat_map_figure(cases),
        rank_figure(cases),
        program_figure(cases),
    ]
    return [figure for figure in drawn if figure.views]


def _passes(cases: Cases) -> Iterator[tuple[str, str, PassAnalysis]]:
    for label, _, case in cases:
        for direction, analysis in case.passes.items():
            yield label, direction, analysis


def heat_map_figure(cases: Cases) -> plots.Figure:
    tables = [
        ((label, direction, quantity), unit, table)
        for label, direction, analysis in _passes(cases)
        for quantity, key, unit in _HEATS
        if (table := getattr(analysis, key)).any() or unit == "ms"
    ]
    side = max(16, int((HEAT_NUMBERS / max(1, len(tables))) ** 0.5))
    views = [
        plots.heat_view(
            labels,
            table,
            ("step of the schedule", range(table.shape[1])),
            ("worker", range(len(table))),
            unit,
            f"worker %{{y}}, step %{{x}}: %{{z:.4g}} {unit}",
            side=side,
            colorscale="YlOrRd" if unit == "ms" else "YlGnBu",
        )
        for labels, unit, table in tables
    ]
    note = "Means over samples."
    if any(max(table.shape) > side for _, _, table in tables):
        note += f" Larger tables shrink to {side} x {side} cells, each the maximum of its group."
    selectors = ("case", "pass", "quantity")
    return plots.Figure("heat", "Attention by worker and step", selectors, views, note)


def rank_figure(cases: Cases) -> plots.Figure:
    """Draw a stacked bar per rank with the time of each of `BINS`."""
    views = []
    for label, _, case in cases:
        ranks = case.present
        choices = {name: [i] for i, name in enumerate(case.directions)}
        if len(choices) > 1:
            choices = {"all passes": list(range(len(choices))), **choices}
        for passes, chosen in choices.items():
            bars = zip(BINS, case.bins[chosen].sum(0)[ranks].T, strict=True)
            shape = plots.layout(
                380,
                plots.axis("rank", **plots.whole(len(ranks))),
                plots.from_zero("ms per iteration"),
                barmode="stack",
                bargap=0.15 if len(ranks) < 40 else 0,
            )
            data = [_bin(name, ms, ranks) for name, ms in bars if ms.any()]
            views.append(plots.FigureView((label, passes), data, shape))
    return plots.Figure("ranks", "Time breakdown by rank", ("case", "passes"), views)


def _bin(name: str, ms: Any, ranks: Sequence[int]) -> plots.Trace:
    """Return the bars of one of `BINS`: a bar for each rank."""
    kind, _, link = name.partition(" ")
    label, colour = name, plots.COLOURS[kind]
    if kind == EXPOSED:
        label = f"exposed ({link} link)" if link else plots.EXPOSED_LABEL
        colour = plots.link_colour(link)
    elif name == LATE:
        label = plots.LATE_LABEL
    hover, more = f"%{{x}}: {label} %{{y:.4g}} ms", {"name": label, "orientation": "v"}
    return plots.bar(list(ranks), plots.numbers(ms), colour, hover, **more)


NOTE = (
    "ms: from the first pass to the end of the last; idle: share of this time without a pass, mean "
    "over stages; played: idle share of the schedule with the mean times of its passes and free "
    "messages; formula: (p - 1) / (v m + p - 1); stage imbalance: work of the busiest stage "
    "divided by the mean; late: waits for other stages that still compute; hops: waits for "
    "messages under way; both per step, of the stage that waits most"
)
BARS = 6_000  # most passes in all figures of a page together
_COLOURS = {
    FORWARD: ("#2f6fb5", "#7fb2e5", "#1d4673", "#a9cbee"),
    BACKWARD: ("#d97706", "#f7c873", "#8a4b04", "#fbe2b3"),
}


def _pipelines(sources: Sequence[ReportSource]) -> list[tuple[str, PipelineTimes]]:
    """Return (label, times) of each measured pipeline, then of each predicted one."""
    measured = [
        (label_of(source, case.label, sources), case.pipeline)
        for source in sources
        for case in source.cases
        if case.pipeline is not None
    ]
    predicted = [
        (label_of(source, f"{entry.get('label')}, predicted", sources), times)
        for source in sources
        for entry in source.summary.get("predicted") or ()
        if isinstance(entry, dict) and (times := predicted_pipeline(entry.get("pipeline")))
    ]
    return [*measured, *predicted]


def pipeline_table(sources: Sequence[ReportSource]) -> Table:
    """Return a table with a row per pipeline."""

    def schedule(pipeline: Pipeline) -> str:
        virtual = f" x {pipeline.virtual_stages} virtual" * (pipeline.virtual_stages > 1)
        count = pipeline.micro_batches
        micro = f"{count} micro-batch{'es' * (count != 1)}"
        return f"{pipeline.schedule}, {pipeline.stages}{virtual} stages, {micro}"

    def most(waits: np.ndarray) -> str:
        return ms(float(waits.max()))

    columns = [
        Column("case", lambda row: row[0], words=True),
        Column("schedule", lambda row: schedule(row[1].pipeline), words=True),
        Column("ms", lambda row: row[1].makespan, ms),
        Column("idle", lambda row: row[1].bubble, percent),
        Column("played", lambda row: row[1].timed.played.bubble, percent, drop=3),
        Column("formula", lambda row: row[1].pipeline.bubble, percent),
        Column("stage imbalance", lambda row: row[1].imbalance, fixed(2)),
        Column("work of each stage, ms", lambda row: ", ".join(map(ms, row[1].work)), drop=4),
        Column("late ms", lambda row: row[1].late, most, drop=2),
        Column("hops ms", lambda row: row[1].hops, most, drop=1),
    ]
    return Table("Pipeline, one step", columns, _pipelines(sources), NOTE)


def pipeline_figure(sources: Sequence[ReportSource]) -> plots.Figure:
    """Draw the passes of each stage, as the schedule plays them with their mean times."""
    views: list[plots.FigureView] = []
    left = BARS
    for label, times in _pipelines(sources):
        left -= len(times.timed.played.spans)
        if left < 0:
            break
        views.append(_view(label, times))
    note = "A bar is one pass of a micro-batch, with its mean time."
    title = "Time line of a pipeline's stages"
    return plots.Figure("pipeline", title, (), views, note, together=True)


def _view(label: str, times: PipelineTimes) -> plots.FigureView:
    data = []
    stages, parts = times.pipeline.stages, times.pipeline.virtual_stages
    for kind, part in ((kind, part) for kind in _COLOURS for part in range(parts)):
        spans = [
            span
            for span in times.timed.played.spans
            if span.action.kind == kind and span.action.virtual_stage // stages == part
        ]
        numbers = [span.action.micro_batch for span in spans]
        trace = plots.bar(
            plots.numbers([span.end - span.begin for span in spans]),
            [span.stage for span in spans],
            _COLOURS[kind][part % 4],
            f"{kind}, micro-batch %{{customdata}}: %{{x:.4g}} ms",
            name=kind if parts == 1 else f"{kind}, part {part + 1}",
            base=plots.numbers([span.begin for span in spans], 6),
            width=0.7,
            customdata=numbers,
        )
        data.append(trace | {"text": list(map(str, numbers)), "textposition": "inside"})
    shape = plots.layout(
        130 + 34 * stages,
        plots.from_zero("ms since the first pass"),
        plots.downward("stage", **plots.whole(stages)),
        barmode="overlay",
        bargap=0,
    )
    return plots.FigureView((label,), data, shape)
