"""Write `report.html`: the whole report in one file, which a browser shows without a network."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from mtrain_cli import __version__, resource_dir
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.config import resolved_file
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.evaluation.results import Result
from mtrain_cli.reporting import (
    elements,
    expert_step_tables,
    expert_tables,
    mask_svg,
    tables,
)
from mtrain_cli.reporting import training_tables as runs
from mtrain_cli.reporting.comparison import NOISE, comparison, comparison_cells, incomparable
from mtrain_cli.reporting.evaluation_names import named_settings
from mtrain_cli.reporting.evaluation_tables import evaluation_tables
from mtrain_cli.reporting.figures import figures
from mtrain_cli.reporting.pipeline_page import HEADS, NOTE, pipeline_cells
from mtrain_cli.reporting.report_source import RESOLVED, ReportSource, labelled_cases
from mtrain_cli.reporting.run_settings import card, differing, shown
from mtrain_cli.reporting.step_tables import lines as step_lines
from mtrain_cli.reporting.step_tables import parts_rows
from mtrain_cli.reporting.study_tables import study_section
from mtrain_cli.reporting.sweeps import WORDS, cells
from mtrain_cli.training.dry_run import mask_rows

DEFINITIONS = "definitions.md"
_MASK_SIDE = 128  # pixels
_MOST_BOUNDS = 1 << 25  # intervals of all queries, which take seconds to make


def write_page(path: Path, sources: Sequence[ReportSource]) -> Path:
    """Write the page atomically."""
    drawn = figures(sources)
    body = [
        f'<div class="headers">{"".join(map(_header, sources))}</div>',
        _differences(sources),
        _trained(sources),
        _recorded_steps(sources),
        _experts(sources),
        _sparsity(sources),
        _evaluations(sources),
        *(study_section(source.study) for source in sources),
        *map(_attention, sources),
        *map(_steps, sources),
        _pipelines(sources),
        _summary(sources),
        _compared(sources),
        _causes(sources),
        *map(elements.figure, drawn),
        _definitions(),
        f"<footer>written by mtrain {escape(__version__)}</footer>",
    ]
    title = ", ".join(source.name for source in sources)
    elements.write(path, title, body, drawn)
    return path


def _header(source: ReportSource) -> str:
    facts, cases = source.facts, source.cases
    versions = facts.get("versions") or {}
    command = facts.get("command") or []
    uncertainty = (source.summary.get("clock") or {}).get("uncertainty_us")
    samples = {
        f"{case.samples} ({case.iterations} iteration{'s' * (case.iterations != 1)})"
        for case in cases
    }
    workers = {
        f"{case.workers}" if case.groups == 1 else f"{case.groups} groups of {case.workers}"
        for case in cases
    }
    rows = {
        "where": source.where if "cluster" in source.summary else _host(facts),
        "when": facts.get("started"),
        "command": _command_line(command) if isinstance(command, list) else str(command),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "revision": facts.get("git_revision"),
        "samples": ", ".join(sorted(samples)),
        "workers": ", ".join(sorted(workers)) or (source.step or {}).get("workers"),
        "clocks": _clocks(uncertainty),
        "recording": tables.recording_cost(source.summary),
        "restarts": _restarts(source),
        "folder": str(source.folder.resolve()),
    }
    # The remarks say what an incomplete source lacks.
    kind = escape(source.kind) + (", complete" if source.complete else "")
    head = f"<h1>{escape(source.name)} <small>{kind}</small></h1>"
    listed = elements.definition_list([(name, value) for name, value in rows.items() if value])
    described = f"{listed}{_mask(source)}{_settings(source)}"
    return f"<header>{head}{elements.remarks(source.remarks)}{described}</header>"


def _mask(source: ReportSource) -> str:
    """Return the mask of a run with its picture; "" if it is causal or unknown, or is too large."""
    try:
        config = resolved_file.load(source.folder / RESOLVED)
    except ConfigError:
        return ""
    if config.seq * config.mask.intervals(config.seq) > _MOST_BOUNDS:
        return ""
    rows = mask_rows(config)
    if not rows:
        return ""
    picture = ""
    if config.data.mask_key is None:  # the masks of the data differ from sequence to sequence
        picture = mask_svg.inline(MaskRule.of(config).undivided(config.seq, config.seq), _MASK_SIDE)
    return f"<h3>Mask</h3>{elements.definition_list(rows)}{picture}"


def _restarts(source: ReportSource) -> str | None:
    if not source.restarts:
        return None
    listed = "; ".join(
        f"from step {r.step}, after step {r.reached}: {r.reason}" for r in source.restarts[:5]
    )
    return f"{len(source.restarts)}: {listed}{' and more' if len(source.restarts) > 5 else ''}"


def _settings(source: ReportSource) -> str:
    if not source.settings:
        return ""
    every = elements.definition_list(
        [(key, shown(key, value)) for key, value in source.settings.items()]
    )
    fold = f"<details><summary>all {len(source.settings)} settings</summary>{every}</details>"
    return f"<h3>Settings</h3>{elements.definition_list(card(source.settings))}{fold}"


def _differences(sources: Sequence[ReportSource]) -> str:
    if len(sources) < 2:
        return ""
    content = elements.remarks(incomparable(sources))
    described = [source for source in sources if source.settings]
    if len(described) > 1:
        rows = differing([source.settings for source in described])
        table = elements.table(
            ("setting", *(source.name for source in described)),
            [(key, *values) for key, values in rows],
        )
        left_out = elements.note("run.name and run.dir are left out.")
        content += (
            f'<div class="settings">{table}</div>{left_out}'
            if rows
            else "<p>All settings are the same.</p>"
        )
    return elements.section("Settings that differ", content)


def _host(facts: dict[str, Any]) -> str:
    gpus, host = facts.get("gpus") or [], facts.get("host", "an unknown host")
    return f"{len(gpus)} x {gpus[0]} on {host}" if gpus else f"CPU of {host}"


def _clocks(uncertainty: Any) -> str | None:
    if not isinstance(uncertainty, int | float):
        return None
    return f"agree within {uncertainty:.3g} µs" if uncertainty else "one clock for all ranks"


def _command_line(command: list[Any]) -> str:
    """Return the command as the user typed it: `mtrain` replaces the path of the program."""
    first, *rest = map(str, command) if command else [""]
    return shlex.join([Path(first).name.replace("__main__.py", "mtrain"), *rest]) if first else ""


def _summary(sources: Sequence[ReportSource]) -> str:
    shown = [
        (label if each is case else f"{label}, {each.kind} layers", each)
        for label, _, case in labelled_cases(sources)
        for each in case.with_kinds
    ]
    rows = [
        [
            label,
            *tables.degree_cells(case),
            tables.spread(case.computation.step),
            tables.spread(case.computation.total),
            tables.ms(case.bin_ms("late")),
            "\n".join(tables.exposed_cells(case)) or "0",
            " / ".join(tables.step_cells(case)),
            " / ".join(
                tables.ms(case.passes[d].duration.mean) if d in case.passes else "-"
                for d in ("forward", "backward")
            ),
            str(case.samples),
        ]
        for label, case in shown
    ]
    heads = (
        *("case", "worker imbalance, time", "worker imbalance, work"),
        *("step imbalance, time", "step imbalance, work"),
        *("computation ratio, per step", "computation ratio, total"),
        *("waiting for late peers, ms", "exposed communication, ms"),
        *("step p50 / p95 / max, ms", "pass forward / backward, ms", "n"),
    )
    note = (
        "Imbalance degree: max over mean, across the workers of a step or the steps of a worker. "
        "1 is perfect. Values are mean ± standard deviation over n samples. Computation ratio: "
        "share of the time that attention kernels take. Waits are per worker and iteration, "
        "passes per layer."
    )
    return elements.section("Load balance", elements.table(heads, rows), note)


def _trained(sources: Sequence[ReportSource]) -> str:
    trained = [source for source in sources if source.metrics]
    rows = [[source.name, *runs.training_row(source), *runs.totals(source)] for source in trained]
    table = elements.table(("run", *runs.training_headings(trained), "tokens", "took"), rows)
    note = f"{runs.medians_note(trained).capitalize()}. Took: all steps, no evaluations."
    return elements.section("Training", table, note)


def _recorded_steps(sources: Sequence[ReportSource]) -> str:
    content = ""
    for source in sources:
        if source.step is None:
            continue
        rows = [
            [part, f"{mean:.4g}", f"{share:.1%}", f"{least:.4g}", f"{most:.4g}", str(rank)]
            for part, mean, share, least, most, rank in parts_rows(source.step["ranks"])
        ]
        named = (line.split(maxsplit=1) for line in step_lines(source.step))
        facts = [f"<li>{name}: {escape(text)}</li>" for name, text in named]
        title = f"<h3>{escape(source.name)}</h3>" if len(sources) > 1 else ""
        table = elements.table(("part", "ms", "share", "min", "max", "rank of max"), rows)
        content += f"{title}{table}<ul>{''.join(facts)}</ul>"
    note = "ms per step: mean, min and max over ranks."
    return elements.section("One training step", content, note)


def _experts(sources: Sequence[ReportSource]) -> str:
    steps = [(source.name, source.step) for source in sources if source.step is not None]
    tables_of = (
        (
            expert_tables.ROUTING_NOTE,
            elements.table(expert_tables.ROUTING_HEADS, expert_tables.routing_cells(sources)),
        ),
        (
            expert_step_tables.NOTE,
            elements.table(expert_step_tables.HEADS, expert_step_tables.time_cells(steps)),
        ),
        (
            expert_tables.NOTE,
            elements.table(expert_tables.HEADS, expert_tables.expert_cells(sources)),
        ),
    )
    content = "".join(
        f"{table}{elements.note(elements.sentence(note))}" for note, table in tables_of if table
    )
    return elements.section("Experts", content)


def _sparsity(sources: Sequence[ReportSource]) -> str:
    rows = []
    for source in sources:
        for pattern, step in sorted({(row["pattern"], row["step"]) for row in source.sparsity}):
            mine = [r for r in source.sparsity if (r["pattern"], r["step"]) == (pattern, step)]
            name = f"{source.name}: {pattern}" if len(sources) > 1 else pattern
            rows.append([name, str(step), *tables.sparsity_cells(mine)])
    heads = (
        *("pattern", "step", "recall", "worst query"),
        *("density", "density in mask", "slashes", "columns"),
    )
    note = (
        "Means over layers and heads. Density: computed share of all causal pairs. Density in "
        "mask: computed share of the pairs inside documents."
    )
    return elements.section("Patterns", elements.table(heads, rows), note)


def _evaluations(sources: Sequence[ReportSource]) -> str:
    content = ""
    for source in sources:
        if source.results and len(sources) > 1:
            content += f"<h3>{escape(source.name)}</h3>"
        for each in evaluation_tables(source.results):
            table = elements.table(each.heads, each.rows, range(each.words))
            content += f"<h4>{escape(each.title)}</h4>{table}{elements.note(each.note)}"
        content += _legend(source.results)
    return elements.section("Evaluations", content)


def _legend(results: Sequence[Result]) -> str:
    named = named_settings(results)
    listed = elements.definition_list(
        [(f"{one.task}: {one.name}", "; ".join(one.settings)) for one in named]
    )
    return f"<h4>Names in these tables and in figures</h4>{listed}" if named else ""


def _attention(source: ReportSource) -> str:
    return "".join(
        elements.section(
            f"{table.title}: {source.name}",
            elements.table(table.heads, table.rows, range(table.words)),
            elements.sentence(table.note),
        )
        for kind, records in source.others
        for table in kind.tables(records)
    )


def _steps(source: ReportSource) -> str:
    if not source.steps:
        return ""
    heads, rows, states = cells(source.steps)
    words = [i for i, name in enumerate(heads) if name in WORDS]
    note = (
        "Times are of one optimizer step. Best and worst: all constants of the prediction at their "
        "best or worst bound. Bold: the fastest row that fits into memory, among rows with equal "
        "settings and the same number of GPUs."
    )
    return elements.section("Predicted steps", elements.table(heads, rows, words, states), note)


def _pipelines(sources: Sequence[ReportSource]) -> str:
    table = elements.table(HEADS, pipeline_cells(sources), words=(0, 1))
    return elements.section("Pipeline", table, elements.sentence(NOTE))


def _compared(sources: Sequence[ReportSource]) -> str:
    rows = comparison_cells(comparison(sources))
    heads = ("run", "case", "what", sources[0].name, "this", "difference", "noise")
    title = f"Compared with {sources[0].name}"
    return elements.section(title, elements.table(heads, rows, words=range(3)), f"{NOISE}.")


def _causes(sources: Sequence[ReportSource]) -> str:
    content = ""
    for label, _, case in labelled_cases(sources):
        causes = "".join(f"<li>{escape(cause.text)}</li>" for cause in case.causes)
        text = f"<ol>{causes}</ol>" if causes else f"<p>{tables.no_causes(case)}</p>"
        content += f"<h3>{escape(label)}</h3>{text}"
    return elements.section("Why workers wait", content)


def _definitions() -> str:
    path = resource_dir("profiles") / DEFINITIONS
    if not path.is_file():
        return ""
    text = _markdown(path.read_text(encoding="utf-8"))
    return f"<details class=definitions><summary>Definitions</summary>{text}</details>"


def _markdown(text: str) -> str:
    """Convert Markdown to HTML, with headings two levels down."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    parser.add_render_rule("table_open", lambda *_: elements.TABLE)
    parser.add_render_rule("table_close", lambda *_: elements.TABLE_END)
    tokens = parser.parse(text)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{int(token.tag[1:]) + 2}"
    return parser.renderer.render(tokens, parser.options, {})
