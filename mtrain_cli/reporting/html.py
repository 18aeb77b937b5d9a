"""Write `report.html`: the whole report in one file, which a browser shows without a network."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from mtrain_cli import __version__
from mtrain_cli.config.sizes import with_count
from mtrain_cli.records.metrics import skipped_updates
from mtrain_cli.reporting import elements
from mtrain_cli.reporting.report_source import ReportSource
from mtrain_cli.reporting.sections import (
    card,
    differing,
    figures,
    own_sections,
    shared_sections,
    shown,
)
from mtrain_cli.reporting.tables import recording_cost


def write_page(path: Path, sources: Sequence[ReportSource]) -> Path:
    """Write the page atomically."""
    drawn = figures(sources)
    several = len(sources) > 1
    sections = [
        replace(section, title=section.title + f": {source.name}" * several)
        for source in sources
        for section in own_sections(source)
    ]
    body = [
        f'<div class="headers">{"".join(map(_header, sources))}</div>',
        _differences(sources),
        *map(elements.report_section, [*sections, *shared_sections(sources)]),
        *map(elements.figure, drawn),
        f"<footer>written by mtrain {escape(__version__)}</footer>",
    ]
    elements.write(path, ", ".join(source.name for source in sources), body, drawn)
    return path


def _header(source: ReportSource) -> str:
    # The remarks say what an incomplete source lacks.
    kind = escape(source.kind) + (", complete" if source.complete else "")
    head = f"<h1>{escape(source.name)} <small>{kind}</small></h1>"
    return f"<header>{head}{elements.remarks(source.remarks)}{about(source)}</header>"


def about(source: ReportSource) -> str:
    """Return where, when and how a source was made, and its settings."""
    facts, cases = source.facts, source.cases
    versions, command = facts.get("versions") or {}, facts.get("command") or []
    uncertainty = (source.summary.get("clock") or {}).get("uncertainty_us")
    samples = {f"{case.samples} ({with_count(case.iterations, 'iteration')})" for case in cases}
    workers = {
        f"{case.workers}" if case.groups == 1 else f"{case.groups} groups of {case.workers}"
        for case in cases
    }
    restarts = [
        f"from step {r.step}, after step {r.reached}: {r.reason}" for r in source.restarts[:5]
    ]
    more = f" and {len(source.restarts) - 5} more" * (len(source.restarts) > 5)
    rows = {
        "where": source.where,
        "host": facts.get("host"),
        "when": facts.get("started"),
        "command": _command_line(command) if isinstance(command, list) else str(command),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "revision": facts.get("git_revision"),
        "samples": ", ".join(sorted(samples)),
        "workers": ", ".join(sorted(workers)) or (source.step or {}).get("workers"),
        "clocks": f"agree within {uncertainty:.3g} µs" if uncertainty else None,
        "recording": recording_cost(source.summary),
        "restarts": "; ".join(restarts) + more,
        "rollbacks": "; ".join(rollback.describe() for rollback in source.rollbacks),
        "skipped": "; ".join(skipped_updates(source.metrics)),
        "folder": str(source.folder.resolve()),
    }
    listed = elements.definition_list([(name, value) for name, value in rows.items() if value])
    return f"{listed}{_settings(source)}"


def _settings(source: ReportSource) -> str:
    if not source.settings:
        return ""
    every = elements.definition_list(
        [(key, shown(key, value)) for key, value in source.settings.items()]
    )
    fold = f"<details><summary>all {len(source.settings)} settings</summary>{every}</details>"
    return f"<h3>Settings</h3>{elements.definition_list(card(source.settings))}{fold}"


def _differences(sources: Sequence[ReportSource]) -> str:
    described = [source for source in sources if source.settings]
    if len(described) < 2:
        return ""
    heads = ("setting", *(source.name for source in described))
    rows = differing([source.settings for source in described])
    table = elements.table(heads, [(key, *values) for key, values in rows])
    content = (
        f'<div class="settings">{table}</div>' if rows else "<p>All settings are the same.</p>"
    )
    return elements.section("Settings that differ", content, "run.name and run.dir are left out.")


def _command_line(command: list[Any]) -> str:
    """Return the command as the user typed it: `mtrain` replaces the path of the program."""
    first, *rest = map(str, command) if command else [""]
    return shlex.join([Path(first).name.replace("__main__.py", "mtrain"), *rest]) if first else ""
