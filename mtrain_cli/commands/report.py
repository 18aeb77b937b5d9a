"""`mtrain report`: what a run, profile or simulation says, in the terminal, as a page and as CSV."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtrain_cli.commands.completion import complete_measured
from mtrain_cli.config.schema import ConfigError

if TYPE_CHECKING:
    from mtrain_cli.console import Console
    from mtrain_cli.reporting.report_source import ReportSource

PAGE, TABLES = "report.html", "tables"


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="Folders of runs, profiles or simulations, or their names under runs/ and measurements/; the newest by default.",
            autocompletion=complete_measured,
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where the files go; beside the run by default. Needed for several.",
            show_default=False,
        ),
    ] = None,
    html: Annotated[
        bool,
        typer.Option(
            "--html/--no-html", help=f"Write {PAGE}: one file, figures included, no network needed."
        ),
    ] = True,
    csv: Annotated[bool, typer.Option("--csv/--no-csv", help="Write one CSV file a table.")] = True,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the analysis as JSON and nothing else; write no files."),
    ] = False,
    show: Annotated[
        bool, typer.Option("--open", help="Open the page in a browser, if there is one.")
    ] = False,
) -> None:
    """Show who computed how much in which step, who waited and why: of any training run with a profile, measurement or simulation, or of
    several side by side.

    [bold]Examples[/bold]

      [cyan]mtrain report[/cyan]
          the newest run or measurement of this folder; without any, a profile that ships with mtrain
      [cyan]mtrain report my-run[/cyan]
          its name under runs/ or measurements/, or a folder
      [cyan]mtrain report before after --out compared[/cyan]
          two of them, with ratios and what is inside the noise
    """
    from mtrain_cli.reporting import report_source as sources_of
    from mtrain_cli.reporting.terminal import make_console, show_sources

    if as_json and out is not None:
        raise ConfigError(f"--out {out}: --json writes no files; give one of the two")
    paths = [sources_of.find(name) for name in runs or ()] or sources_of.default()
    sources = [sources_of.open_source(path) for path in paths]
    if as_json:
        typer.echo(json.dumps([_document(source) for source in sources], indent=1))
        return
    recorded = [source for source in sources if not source.tables_only]
    ours = all(sources_of.ships(path) for path in paths)
    wanted = bool(recorded) and (html or csv) and not (ours and out is None)
    if out is not None and not recorded:
        raise ConfigError(
            f"--out {out}: {sources[0].name} is of an older kind, a table without figures or files; give no --out"
        )
    if len(recorded) > 1 and out is None and wanted:
        raise ConfigError(
            "--out DIR: needed for several runs, since none of their folders is the place for all; or --no-html --no-csv"
        )
    folder = _folder(out, recorded) if wanted else None
    console = make_console()
    # Files first: a reader of the tables that stops early must not keep them from being written.
    written, page = _write(folder, recorded, html, csv) if folder is not None else ([], None)
    if not runs:
        others = ", ".join(path.stem for path in sources_of.shipped() if path not in paths)
        said = f"nothing in runs/ or measurements/ of this folder; here is a profile that ships with mtrain, as do {others}"
        console.print(said if ours else str(sources[0].folder), soft_wrap=True)
    show_sources(console, sources)
    if ours and recorded and not wanted and (html or csv):
        console.print(
            f"figures  mtrain report {' '.join(path.stem for path in paths)} --out DIR",
            soft_wrap=True,
        )
    for line in written:
        console.print(line, soft_wrap=True)
    if show and page is not None:
        _show(page, console)


def _document(source: ReportSource) -> dict[str, Any]:
    return {
        "name": source.name,
        "folder": str(source.folder),
        "kind": source.kind,
        "remarks": source.remarks,
        "environment": source.facts,
        "cases": [case.to_json() for case in source.cases],
        **(
            {"training": [json.loads(m.to_json()) for m in source.metrics]}
            if source.metrics
            else {}
        ),
        **(
            {"evaluations": [asdict(evaluation) for evaluation in source.evaluations]}
            if source.evaluations
            else {}
        ),
        **({"sweep": source.swept} if source.swept else {}),
        **({"recorded": source.shipped} if source.shipped is not None else {}),
        **({"step": source.step} if source.step is not None else {}),
        **({"sparsity": list(source.sparsity)} if source.sparsity else {}),
    }


def _folder(out: Path | None, sources: list[ReportSource]) -> Path:
    """Where files go; it exists and can be written to.

    Raises:
        ConfigError: it cannot.
    """
    folder = (out or sources[0].folder).expanduser()
    advice = "" if out is not None else "; give another folder as --out DIR, or --no-html --no-csv"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {folder}: is no folder and cannot be made ({error.strerror})"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{folder}: cannot be written to{advice}")
    return folder


def _write(
    folder: Path, sources: list[ReportSource], html: bool, csv: bool
) -> tuple[list[str], Path | None]:
    """-> what to say of the files, and the page."""
    from mtrain_cli.launch.failures import RunError
    from mtrain_cli.reporting.html import write_page
    from mtrain_cli.reporting.sweeps import sheet as sweep_sheet
    from mtrain_cli.reporting.tables import sheets

    said, page = [], None
    try:
        if csv:
            tables = folder / TABLES
            tables.mkdir(exist_ok=True)
            swept = [(source.name, source.swept) for source in sources if source.swept]
            found = [*sheets(sources), *([sweep_sheet(swept)] if swept else [])]
            said.append(f"{tables}: {', '.join(sheet.write(tables).name for sheet in found)}")
        if html:
            page = write_page(folder / PAGE, sources)
            said.append(str(page))
    except OSError as error:
        raise RunError(f"{folder}: could not be written ({error.strerror or error})") from error
    return said, page


def _show(page: Path, console: Console) -> None:
    import webbrowser

    try:
        opened = bool(
            os.environ.get("DISPLAY")
            or os.environ.get("WAYLAND_DISPLAY")
            or os.environ.get("BROWSER")
        ) and webbrowser.open(page.resolve().as_uri())
    except webbrowser.Error:
        opened = False
    if not opened:
        console.print(
            "no browser here; the page is one file, open it on another machine", soft_wrap=True
        )
