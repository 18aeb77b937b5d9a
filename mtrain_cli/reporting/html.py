"""Write `report.html`: the whole report in one file, which a browser shows without a network."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from mtrain_cli import __version__, resource_dir
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.config import resolved_file
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.reporting import elements, mask_svg
from mtrain_cli.reporting.comparison import incomparable
from mtrain_cli.reporting.figures import figures
from mtrain_cli.reporting.report_source import RESOLVED, ReportSource
from mtrain_cli.reporting.run_settings import card, differing, shown
from mtrain_cli.reporting.sections import own_sections, shared_sections
from mtrain_cli.reporting.study_tables import study_section
from mtrain_cli.reporting.tables import recording_cost
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
        *(_own(source, len(sources) > 1) for source in sources),
        *map(elements.report_section, shared_sections(sources)),
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
        "recording": recording_cost(source.summary),
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


def _own(source: ReportSource, several: bool) -> str:
    sections = own_sections(source)
    if several:
        named = f": {source.name}"
        sections = [replace(section, title=section.title + named) for section in sections]
    return "".join(map(elements.report_section, sections)) + study_section(source.study)


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
