"""`report.html`: the whole report in one file that needs no network."""

from __future__ import annotations

import base64
import gzip
import json
import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from mtrain_cli import __version__, resource_dir
from mtrain_cli.printable import same_width
from mtrain_cli.reporting.figures import Figure, figures
from mtrain_cli.reporting.report_source import ReportSource
from mtrain_cli.reporting.run_settings import card, differing, shown
from mtrain_cli.reporting.step_tables import lines as step_lines
from mtrain_cli.reporting.step_tables import parts_rows
from mtrain_cli.reporting.sweeps import WORDS, cells
from mtrain_cli.reporting.tables import (
    NO_CAUSES,
    NOISE,
    ONE_WORKER,
    TRAINING,
    comparison,
    incomparable,
    ms,
    recording_cost,
    spread,
    training_row,
)

DEFINITIONS = "definitions.md"
# plotly.js-cartesian-dist-min 4.1.1 from npm, gzipped, with its MIT licence in the same folder.
# plotly.py ships only the full library of 4.8 MB.
_PLOTLY = Path(__file__).parent / "plotly" / "plotly-cartesian.min.js.gz"


def write_page(path: Path, sources: Sequence[ReportSource]) -> Path:
    """Write the page. It appears complete or not at all."""
    drawn = figures(sources)
    body = "\n".join(
        [
            f'<div class="headers">{"".join(map(_header, sources))}</div>',
            _differences(sources),
            _trained(sources),
            _recorded_steps(sources),
            _sparsity(sources),
            *map(_steps, sources),
            _summary(sources),
            _compared(sources),
            _causes(sources),
            *map(_section, drawn),
            _definitions(),
            f"<footer>written by mtrain {escape(__version__)}</footer>",
        ]
    )
    title = escape(", ".join(source.name for source in sources))
    data = json.dumps(
        [_as_json(figure) for figure in drawn], separators=(",", ":"), allow_nan=False
    )
    packed = gzip.compress(data.encode(), mtime=0)
    page = _PAGE.format(
        title=title,
        style=_STYLE,
        body=body,
        plotly=_base64(_PLOTLY.read_bytes()),
        data=_base64(packed),
        script=_SCRIPT,
    )
    page = same_width(page)  # the file may be printed to a terminal
    draft = path.with_name(f".{path.name}.part")
    draft.write_text(page, encoding="utf-8")
    draft.replace(path)
    return path


def _base64(packed: bytes) -> str:
    """Encode for a script element, without characters that could end it."""
    return base64.b64encode(packed).decode()


def _as_json(figure: Figure) -> dict[str, Any]:
    views = [{"labels": v.labels, "data": v.data, "layout": v.layout} for v in figure.views]
    return {"name": figure.name, "together": figure.together, "views": views}


def _header(source: ReportSource) -> str:
    facts = source.facts
    gpus = facts.get("gpus") or []
    versions = facts.get("versions") or {}
    command = facts.get("command") or []
    uncertainty = (source.summary.get("clock") or {}).get("uncertainty_us")
    rows = {
        "where": source.where if "cluster" in source.summary else _host(facts, gpus),
        "when": facts.get("started"),
        "command": _command_line(command) if isinstance(command, list) else str(command),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "revision": facts.get("git_revision"),
        "samples": ", ".join(
            sorted({f"{case.samples} ({case.iterations} iterations)" for case in source.cases})
        ),
        "workers": ", ".join(sorted({_workers(case.workers, case.groups) for case in source.cases}))
        or (source.step or {}).get("workers"),
        "clocks": _clocks(uncertainty),
        "recording": recording_cost(source.summary),
        "restarts": _restarts(source),
        "folder": str(source.folder.resolve()),
    }
    listed = "".join(
        f"<dt>{name}</dt><dd>{escape(str(value))}</dd>" for name, value in rows.items() if value
    )
    state = "complete" if source.complete else "partial"
    remarks = "".join(f'<p class="remark">{escape(remark)}</p>' for remark in source.remarks)
    head = f"<h1>{escape(source.name)} <small>{escape(source.kind)}, {state}</small></h1>"
    return f"<header>{head}{remarks}<dl>{listed}</dl>{_settings(source)}</header>"


def _restarts(source: ReportSource) -> str | None:
    if not source.restarts:
        return None
    listed = "; ".join(
        f"from step {r.step}, after step {r.reached}: {r.reason}" for r in source.restarts[:5]
    )
    return f"{len(source.restarts)}: {listed}{' and more' if len(source.restarts) > 5 else ''}"


def _settings(source: ReportSource) -> str:
    """Return the main settings of a run, and all settings in a fold."""
    if not source.settings:
        return ""
    described = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in card(source.settings)
    )
    rows = "".join(
        f"<dt>{escape(key)}</dt><dd>{escape(shown(key, value))}</dd>"
        for key, value in source.settings.items()
    )
    summary = f"<summary>all {len(source.settings)} settings</summary>"
    every = f"<details>{summary}<dl>{rows}</dl></details>"
    return f"<h3>Settings</h3><dl>{described}</dl>{every}"


def _differences(sources: Sequence[ReportSource]) -> str:
    """Return how several runs differ: warnings first, then settings."""
    if len(sources) < 2:
        return ""
    warnings = "".join(f'<p class="remark">{escape(line)}</p>' for line in incomparable(sources))
    described = [source for source in sources if source.settings]
    table = ""
    if len(described) > 1:
        rows = [
            [key, *values] for key, values in differing([source.settings for source in described])
        ]
        heads = ("setting", *(source.name for source in described))
        note = "<p class=note>Without run.name and run.dir.</p>"
        table = (
            f'<div class="settings">{_table(heads, rows)}</div>{note}'
            if rows
            else "<p>All settings are the same.</p>"
        )
    return (
        f"<section><h2>Settings that differ</h2>{warnings}{table}</section>"
        if warnings or table
        else ""
    )


def _host(facts: dict[str, Any], gpus: list[Any]) -> str:
    host = facts.get("host", "an unknown host")
    return f"{len(gpus)} x {gpus[0]} on {host}" if gpus else f"CPU of {host}"


def _clocks(uncertainty: Any) -> str | None:
    if not isinstance(uncertainty, int | float):
        return None
    return f"agree within {uncertainty:.3g} µs" if uncertainty else "one clock for all ranks"


def _command_line(command: list[Any]) -> str:
    """Return the command as typed: `mtrain` instead of the file that Python ran."""
    first, *rest = map(str, command) if command else [""]
    return shlex.join([Path(first).name.replace("__main__.py", "mtrain"), *rest]) if first else ""


def _workers(workers: int, groups: int) -> str:
    return f"{workers}" if groups == 1 else f"{groups} groups of {workers}"


def _summary(sources: Sequence[ReportSource]) -> str:
    rows = []
    for source in sources:
        for case in source.cases:
            name = f"{source.name}: {case.label}" if len(sources) > 1 else case.label
            links = ", ".join(f"{link} {ms(value)}" for link, value in case.exposed.items()) or "0"
            steps = list(case.passes.values())
            rows.append(
                [
                    name,
                    *(
                        spread(d)
                        for d in (
                            case.time.worker,
                            case.work.worker,
                            case.time.step,
                            case.work.step,
                        )
                    ),
                    spread(case.computation.step),
                    spread(case.computation.total),
                    ms(case.bin_ms("late")),
                    links,
                    " / ".join(
                        ms(value)
                        for value in (
                            *(fmean(getattr(p, name) for p in steps) for name in ("p50", "p95")),
                            max(p.longest for p in steps),
                        )
                    ),
                    " / ".join(
                        ms(case.passes[d].duration.mean) if d in case.passes else "-"
                        for d in ("forward", "backward")
                    ),
                    str(case.samples),
                ]
            )
    if not rows:
        return ""
    heads = (
        *("case", "worker imbalance, time", "worker imbalance, work"),
        *("step imbalance, time", "step imbalance, work"),
        *("computation ratio, per step", "computation ratio, total"),
        *("waiting for late peers, ms", "exposed communication, ms"),
        *("step p50 / p95 / max, ms", "pass forward / backward, ms", "n"),
    )
    note = (
        "Imbalance degree: max over mean, across the workers of a step or the steps of a worker; "
        "1 is perfect; mean ± standard deviation over n samples. Computation ratio: share of time "
        "in attention. Waits: one iteration of a worker. Pass: one layer."
    )
    table = _table(heads, rows)
    return f"<section><h2>Load balance</h2>{table}<p class='note'>{note}</p></section>"


def _trained(sources: Sequence[ReportSource]) -> str:
    rows = [[source.name, *training_row(source)] for source in sources if source.metrics]
    note = "Medians of all steps but the first."
    if not rows:
        return ""
    table = _table(("run", *TRAINING), rows)
    return f"<section><h2>Training</h2>{table}<p class='note'>{note}</p></section>"


def _recorded_steps(sources: Sequence[ReportSource]) -> str:
    """Return the results of `mtrain profile step`: the parts, and facts that are not parts."""
    sections = []
    for source in (source for source in sources if source.step is not None):
        assert source.step is not None
        rows = [
            [part, f"{mean:.4g}", f"{share:.1%}", f"{least:.4g}", f"{most:.4g}", str(rank)]
            for part, mean, share, least, most, rank in parts_rows(source.step["ranks"])
        ]
        facts = "".join(
            f"<li>{escape(' '.join(line.split()))}</li>" for line in step_lines(source.step)
        )
        title = f"<h3>{escape(source.name)}</h3>" if len(sources) > 1 else ""
        table = _table(("part", "ms", "share", "min", "max", "rank of max"), rows)
        sections.append(f"{title}{table}<ul>{facts}</ul>")
    if not sections:
        return ""
    note = "<p class=note>ms per step, mean of ranks; min and max over ranks.</p>"
    return f"<section><h2>One training step</h2>{''.join(sections)}{note}</section>"


def _sparsity(sources: Sequence[ReportSource]) -> str:
    """Return the results of `mtrain profile sparsity`, one row per pattern and measured step."""
    rows = []
    for source in sources:
        for pattern, step in sorted({(row["pattern"], row["step"]) for row in source.sparsity}):
            mine = [
                row for row in source.sparsity if (row["pattern"], row["step"]) == (pattern, step)
            ]
            means = {
                key: fmean(row[key] for row in mine)
                for key in ("recall", "density", "of_mask", "slashes", "columns")
            }
            numbers = [
                f"{means['recall']:.4f}",
                f"{min(row['worst'] for row in mine):.3f}",
                f"{means['density']:.2%}",
            ]
            numbers += [
                f"{means['of_mask']:.2%}",
                f"{means['slashes']:.1f}",
                f"{means['columns']:.0f}",
            ]
            rows.append(
                [f"{source.name}: {pattern}" if len(sources) > 1 else pattern, str(step), *numbers]
            )
    if not rows:
        return ""
    heads = (
        *("pattern", "step", "recall", "worst query"),
        *("density", "density in mask", "diagonals", "columns"),
    )
    note = (
        "<p class=note>Means over layers and heads. Density: share of all causal pairs; in mask: "
        "of the pairs inside documents.</p>"
    )
    return f"<section><h2>Patterns</h2>{_table(heads, rows)}{note}</section>"


def _steps(source: ReportSource) -> str:
    """Return the predicted whole steps."""
    if not source.steps:
        return ""
    heads, rows, states = cells(source.steps)
    head = "".join(
        f"<th{' class=words' if name in WORDS else ''}>{escape(name)}</th>" for name in heads
    )
    body = "".join(
        f'<tr class="{state}">'
        + "".join(
            f"<td{' class=words' if name in WORDS else ''}>{escape(cell)}</td>"
            for name, cell in zip(heads, row, strict=True)
        )
        + "</tr>"
        for row, state in zip(rows, states, strict=True)
    )
    note = (
        "One optimizer step; best and worst: all constants at their best or worst bound. Bold: the "
        "fastest that fits, among equal settings and GPUs."
    )
    table = _scrolling(head, body)
    return f"<section><h2>Predicted steps</h2>{table}<p class='note'>{note}</p></section>"


def _compared(sources: Sequence[ReportSource]) -> str:
    if len(sources) < 2 or not (compared := comparison(sources)):
        return ""
    rows = [
        [
            *(
                ("", "")
                if i and (r.run, r.case) == (compared[i - 1].run, compared[i - 1].case)
                else (r.run, r.case)
            ),
            r.what,
            f"{r.first:.4g}",
            f"{r.other:.4g}",
            r.difference,
            r.spread,
        ]
        for i, r in enumerate(compared)
    ]
    heads = ("run", "case", "what", sources[0].name, "this", "difference", "noise")
    title, table = f"Compared with {escape(sources[0].name)}", _table(heads, rows, text=3)
    return f"<section><h2>{title}</h2>{table}<p class='note'>{NOISE}.</p></section>"


def _causes(sources: Sequence[ReportSource]) -> str:
    parts = []
    for source in sources:
        for case in source.cases:
            name = f"{source.name}: {case.label}" if len(sources) > 1 else case.label
            if case.workers == 1:
                text = f"<p>{ONE_WORKER}</p>"
            elif not case.causes:
                text = f"<p>{NO_CAUSES}</p>"
            else:
                text = (
                    "<ol>"
                    + "".join(f"<li>{escape(cause.text)}</li>" for cause in case.causes)
                    + "</ol>"
                )
            parts.append(f"<h3>{escape(name)}</h3>{text}")
    return f"<section><h2>Why workers wait</h2>{''.join(parts)}</section>" if parts else ""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], text: int = 1) -> str:
    """Return a table; the first ``text`` columns are words."""
    head = "".join(
        f"<th{' class=words' if i < text else ''}>{escape(name)}</th>"
        for i, name in enumerate(heads)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=words' if i < text else ''}>{escape(cell)}</td>"
            for i, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return _scrolling(head, body)


def _scrolling(head: str, body: str) -> str:
    """Return a table in a box that scrolls sideways; head: its cells, body: its rows."""
    table = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table>{table}</table></div>'


def _section(figure: Figure) -> str:
    selectors = "".join(
        f'<label>{escape(name)} <select data-figure="{figure.name}" data-at="{i}"></select></label>'
        for i, name in enumerate(figure.selectors)
    )
    note = f'<p class="note">{escape(figure.note)}</p>' if figure.note else ""
    panels = "".join(
        f'<div class="panel"><h3>{escape(", ".join(view.labels))}</h3>'
        f'<div class="figure" data-panel="{i}"></div></div>'
        for i, view in enumerate(figure.views if figure.together else ())
    )
    place = (
        f'<div class="{"panels" if panels else "figure"}" id="figure-{figure.name}">{panels}</div>'
    )
    chosen = "" if panels else f'<div class="selectors">{selectors}</div>'
    return f"<section><h2>{escape(figure.title)}</h2>{chosen}{place}{note}</section>"


def _definitions() -> str:
    path = resource_dir("profiles") / DEFINITIONS
    if not path.is_file():
        return ""
    text = _markdown(path.read_text(encoding="utf-8"))
    return f"<details class=definitions><summary>Definitions</summary>{text}</details>"


def _markdown(text: str) -> str:
    """Convert headings, lists, tables, code and paragraphs: all that definitions.md uses."""
    result: list[str] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("#"):
            level = len(line) - len(line.lstrip("#"))
            result.append(f"<h{level + 2}>{_inline(line[level:].strip())}</h{level + 2}>")
            at += 1
        elif line.startswith("```"):
            end = next(
                (i for i in range(at + 1, len(lines)) if lines[i].startswith("```")), len(lines)
            )
            result.append("<pre>" + escape("\n".join(lines[at + 1 : end])) + "</pre>")
            at = end + 1
        elif line.startswith("|"):
            end = next(
                (i for i in range(at, len(lines)) if not lines[i].startswith("|")), len(lines)
            )
            cells = [
                [_inline(cell.strip()) for cell in row.strip().strip("|").split("|")]
                for row in lines[at:end]
            ]
            head = "".join(f"<th>{cell}</th>" for cell in cells[0])
            body = "".join(
                "<tr>" + "".join(f"<td class=words>{cell}</td>" for cell in row) + "</tr>"
                for row in cells[2:]
            )
            result.append(_scrolling(head, body))
            at = end
        elif line.startswith("- "):
            items: list[str] = []
            while at < len(lines) and (lines[at].startswith("- ") or lines[at].startswith("  ")):
                if lines[at].startswith("- "):
                    items.append(lines[at][2:])
                else:
                    items[-1] += " " + lines[at].strip()
                at += 1
            result.append("<ul>" + "".join(f"<li>{_inline(item)}</li>" for item in items) + "</ul>")
        elif line.strip():
            end = next(
                (
                    i
                    for i in range(at, len(lines))
                    if not lines[i].strip() or (lines[i][:1] in "#|-`" and i > at)
                ),
                len(lines),
            )
            result.append(f"<p>{_inline(' '.join(lines[at:end]))}</p>")
            at = end
        else:
            at += 1
    return "\n".join(result)


def _inline(text: str) -> str:
    """Convert code and bold."""
    parts = escape(text).split("`")
    marked = "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))
    bold = marked.split("**")
    return "".join(f"<b>{part}</b>" if i % 2 else part for i, part in enumerate(bold))


_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1b1b1b; --faint: #666; --line: #ddd;
  --soft: #f5f5f5; --head: #444; --warn: #fff4e0; --edge: #bbb; }
@media (prefers-color-scheme: dark) {
  :root { --back: #16181c; --text: #e4e4e4; --faint: #9aa0a8; --line: #33373e; --soft: #22262c;
    --head: #c4c8ce; --warn: #3a2c12; --edge: #555b64; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem 1.6rem 3rem; max-width: 1360px;
  background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial,
    sans-serif; }
h1 { font-size: 1.5rem; margin: .4rem 0; overflow-wrap: anywhere; }
h1 small { font-weight: 400; color: var(--faint); font-size: 1rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; border-bottom: 1px solid var(--line);
  padding-bottom: .2rem; overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 1rem 0 .2rem; overflow-wrap: anywhere; }
h4, h5 { margin: .9rem 0 .2rem; }
.headers { display: grid; gap: 0 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: .6rem 0;
  font-size: .9rem; }
dt { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; }
.remark { background: var(--warn); border-left: 4px solid #d97706; margin: .4rem 0;
  padding: .3rem .7rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .35rem; border-bottom: 1px solid var(--line); text-align: right;
  vertical-align: top; white-space: nowrap; }
th { white-space: normal; color: var(--head); border-bottom: 2px solid var(--edge);
  vertical-align: bottom; }
th.words, td.words { text-align: left; }
details td.words, details th { text-align: left; white-space: normal; }
.settings td, .settings th { white-space: normal; overflow-wrap: anywhere; text-align: left; }
.settings td.words { white-space: nowrap; }
tr.best { font-weight: 600; } tr.not { color: var(--faint); }
.note { color: var(--faint); font-size: .85rem; margin: .3rem 0; }
ol { margin: .2rem 0; padding-left: 1.4rem; } li { margin: .15rem 0; }
.selectors { display: flex; flex-wrap: wrap; gap: .4rem 1rem; }
label { color: var(--faint); font-size: .9rem; }
select { font: inherit; color: inherit; background: var(--back); border: 1px solid var(--edge);
  border-radius: 4px; padding: .15rem .3rem; max-width: 80vw; }
.figure { width: 100%; min-height: 200px; }
.panels { display: grid; gap: .4rem 1.6rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); }
.panel { min-width: 0; } .panel h3 { font-weight: 500; color: var(--head); }
details { margin-top: 1rem; } summary { cursor: pointer; font-weight: 600; }
details.definitions { margin-top: 2rem; }
details.definitions > summary { font-size: 1.15rem; }
code, pre { font: .88em ui-monospace, Menlo, Consolas, monospace; background: var(--soft);
  padding: 0 .2em; }
pre { padding: .6rem; overflow-x: auto; }
footer { margin-top: 2.5rem; color: var(--faint); font-size: .85rem; }
@media (max-width: 640px) {
  td.words { white-space: normal; overflow-wrap: anywhere; min-width: 8rem; }
  body { padding: .8rem .7rem 2rem; }
  dl { grid-template-columns: 1fr; gap: 0; } dt { margin-top: .35rem; }
}
@media print { .selectors { display: none; } }
"""

_SCRIPT = """
"use strict";
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const narrow = () => window.innerWidth < 640;
async function unpack(id) {
  const base64 = document.getElementById(id).textContent;
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}
function colours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["--back", "--text", "--line", "--edge"];
  const [back, text, line, edge] = names.map((name) => style.getPropertyValue(name).trim());
  const family = "system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif";
  return {
    page: {paper_bgcolor: back, plot_bgcolor: back, font: {family, size: 13, color: text},
      hoverlabel: {bgcolor: back, bordercolor: edge, font: {color: text}}},
    axis: {gridcolor: line, zerolinecolor: edge, linecolor: edge, ticks: "outside",
      tickcolor: edge},
  };
}
// Dark lines would not show on a dark page.
const LIGHTER = {"#333333": "#d0d0d0", "#5b5b5b": "#a8a8a8", "#2f6fb5": "#5b9be0",
  "#7a5c3e": "#c19a6b", "#8c6bb1": "#b394d6"};
function themed(data) {
  if (!dark.matches) return data;
  const change = (style) => style && LIGHTER[style.color]
    ? Object.assign({}, style, {color: LIGHTER[style.color]}) : style;
  return data.map((trace) => {
    const result = Object.assign({}, trace);
    for (const part of ["line", "marker"]) if (trace[part]) result[part] = change(trace[part]);
    return result;
  });
}
function merged(layout, entries) {
  const {page, axis} = colours();
  const legend = {orientation: "h", traceorder: "normal", y: 1, yanchor: "bottom", x: 0,
    xanchor: "left"};
  const base = {margin: {l: 62, r: 12, t: 76, b: 48}, autosize: true, legend};
  const margin = Object.assign({}, base.margin, layout.margin);
  const result = Object.assign({}, base, page, layout, {margin});
  if (narrow()) {
    // One legend entry per line, below the figure, which grows accordingly.
    result.legend = Object.assign({}, legend, {yref: "container", y: 0, yanchor: "bottom"});
    if (entries > 1 && layout.showlegend !== false) result.height = layout.height + 20 * entries;
    result.margin.t = Math.min(30, result.margin.t);
  }
  for (const name of ["xaxis", "yaxis"]) {
    // plotly's larger default font cuts axis titles off on narrow pages.
    const title = Object.assign({font: {size: 13}}, layout[name].title);
    result[name] = Object.assign({automargin: true}, axis, layout[name], {title});
  }
  return result;
}
function draw(place, view) {
  const entries = view.data.filter((trace) => trace.showlegend !== false).length;
  Plotly.react(place, themed(view.data), merged(view.layout, entries), {
    responsive: true, displaylogo: false, showTips: false, plotlyServerURL: "",
    modeBarButtonsToRemove: ["sendDataToCloud", "sendChartToCloud", "select2d", "lasso2d"]});
}
function setUp(figure) {
  const place = document.getElementById("figure-" + figure.name);
  if (figure.together) {
    const panels = Array.from(place.querySelectorAll("[data-panel]"));
    const all = () => panels.forEach((panel, at) => draw(panel, figure.views[at]));
    all();
    return all;
  }
  const selects = Array.from(document.querySelectorAll(`select[data-figure="${figure.name}"]`));
  const chosen = figure.views[0].labels.slice();
  function options(at) {
    const seen = new Set();
    for (const view of figure.views) {
      const matches = chosen.slice(0, at).every((label, i) => view.labels[i] === label);
      if (matches) seen.add(view.labels[at]);
    }
    return Array.from(seen);
  }
  function refresh() {
    selects.forEach((select, at) => {
      const names = options(at);
      if (!names.includes(chosen[at])) chosen[at] = names[0];
      const entries = names.map((name) => new Option(name, name, false, name === chosen[at]));
      select.replaceChildren(...entries);
      select.parentElement.hidden = names.length < 2;
      select.parentElement.style.display = names.length < 2 ? "none" : "";
    });
    draw(place, figure.views.find((one) => one.labels.every((label, i) => label === chosen[i])));
  }
  selects.forEach((select, at) => select.addEventListener("change", () => {
    chosen[at] = select.value;
    refresh();
  }));
  refresh();
  return refresh;
}
async function begin() {
  const [library, data] = await Promise.all(["plotly", "figures"].map(unpack));
  const script = document.createElement("script");
  script.textContent = library;
  document.head.append(script);
  const redraws = JSON.parse(data).map(setUp);
  dark.addEventListener("change", () => redraws.forEach((redraw) => redraw()));
}
begin().catch((error) => {
  const line = document.createElement("p");
  line.className = "remark";
  line.textContent = "The figures could not be drawn (" + error + "). "
    + "They need a browser of 2023 or later. The tables are complete.";
  document.body.prepend(line);
});
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
<script type="text/plain" id="plotly">{plotly}</script>
<script type="text/plain" id="figures">{data}</script>
<script>{script}</script>
</body>
</html>
"""
