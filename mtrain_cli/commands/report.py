"""`mtrain report`: show a run, profile or simulation in the terminal, as a page and as CSV."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtrain_cli.commands.completion import complete_measured
from mtrain_cli.commands.options import Json, argument, bounded, flag, option, writing
from mtrain_cli.config import plugins
from mtrain_cli.config.documents import json_text
from mtrain_cli.config.schema import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mtrain_cli.reporting.report_source import ReportSource

PAGE, TABLES = "report.html", "tables"


@dataclass(frozen=True)
class FolderReport:
    """How another package shows a folder.

    An entry point of the group `mtrain.reports` is a function of a folder that returns this, or
    None for a folder that is not the package's.

    what: what the folder is, such as "a study".
    command: the command that writes it.
    show: prints the report, or with `as_json` only JSON. With `html`, also writes a page.
    """

    what: str
    command: str
    show: Callable[..., object]


def report(
    runs: Annotated[list[str] | None, argument("RUN", complete_measured)] = None,
    out: Annotated[Path | None, option("DIR")] = None,
    html: Annotated[bool, flag("--html/--no-html")] = True,
    csv: Annotated[bool, flag("--csv/--no-csv")] = True,
    as_json: Json = False,
    serve: Annotated[bool, flag("--serve")] = False,
    port: Annotated[int, bounded(0, 65_535)] = 8765,
) -> None:
    """Show how much each worker computed in each step, which workers waited, and why.

    Reads training runs with a profile, measurements and simulations. Given several, compares them.
    Also shows the folder of a `mtrain study`.

    [bold]Examples[/bold]

      [cyan]mtrain report[/cyan]
          Show the newest run or measurement here, or else a shipped profile
      [cyan]mtrain report my-run[/cyan]
          Show a run by its name under runs/ or measurements/, or by its folder
      [cyan]mtrain report before after --out compared[/cyan]
          Compare two runs, with ratios, and mark differences within the noise
      [cyan]mtrain report my-run --serve[/cyan]
          Show a run in a browser while it trains

    Args:
        runs: Folders of runs, profiles or simulations, or their names under runs/ and
            measurements/; by default the newest run or measurement.
        out: Folder for the files; by default the run's own folder. Several runs need --out, or
            both --no-html and --no-csv.
        html: Write report.html, one self-contained file with figures.
        csv: Write one CSV file per table.
        as_json: Print the analysis as JSON only; write no files.
        serve: Serve the page of one run to browsers of this machine, and renew it, until Ctrl-C.
        port: Port of the page; 0 chooses a free one.
    """
    from mtrain_cli.reporting import report_source
    from mtrain_cli.reporting.sections import show_sources
    from mtrain_cli.reporting.terminal import make_console

    if serve:
        if as_json or out is not None or not (html and csv) or len(runs or ()) > 1:
            raise ConfigError("--serve: takes one run and --port, and writes no files")
        pages: dict[str, Callable[..., None]] = plugins.load_by_name(plugins.PAGES)
        if "live" not in pages:
            raise ConfigError("--serve: no installed package serves a page; install mtrain again")
        pages["live"](runs[0] if runs else None, port)
        return
    if as_json and out is not None:
        raise ConfigError(f"--out {out}: --json writes no files; give one of the two")
    paths = [report_source.find(name) for name in runs or ()]
    for name, path in zip(runs or (), paths, strict=True):
        if (other := _opened_elsewhere(path)) is not None:
            if len(paths) > 1:
                raise ConfigError(
                    f"{name}: a report shows {other.what} of `{other.command}` alone; give "
                    f"mtrain report {shlex.quote(name)}, or leave it out"
                )
            if out is not None:
                raise ConfigError(
                    f"--out {out}: the page of {other.what} is in its folder; leave out --out"
                )
            other.show(as_json=as_json, html=html)
            return
    paths = paths or report_source.default()
    sources = [report_source.open_source(path) for path in paths]
    if as_json:
        typer.echo(json_text([_document(source) for source in sources], indent=1))
        return
    all_shipped = all(map(report_source.ships, paths))
    console, written = make_console(), list[str]()
    if html or csv:
        written = [f"figures  mtrain report {' '.join(path.name for path in paths)} --out DIR"]
        if out is not None or not all_shipped:
            # Write the files first: a reader that closes the pipe early must not prevent them.
            written = _write(_folder(out, sources), sources, html, csv)
    if not runs:
        others = ", ".join(path.name for path in report_source.shipped() if path not in paths)
        note = (
            "nothing in runs/ or measurements/ here; showing a profile that ships with mtrain. "
            f"Others: {others}"
        )
        console.print(note if all_shipped else str(sources[0].folder), soft_wrap=True)
    show_sources(console, sources)
    for line in written:
        console.print(line, soft_wrap=True)


def _opened_elsewhere(path: Path) -> FolderReport | None:
    """Return how another package shows a folder; None if the folder is no other package's."""
    opened = plugins.load(plugins.REPORTS, lambda _, open_folder: open_folder(path))
    return next(filter(None, opened), None)


def _document(source: ReportSource) -> dict[str, Any]:
    from mtrain_cli.reporting.evaluations import distinguished

    named = zip(source.results, distinguished(source.results), strict=True)
    optional: dict[str, Any] = {
        "training": [json.loads(m.to_json()) for m in source.metrics],
        "evaluations": list(map(asdict, source.evaluations)),
        "results": [{"name": shown.attention, **asdict(result)} for result, shown in named],
        "sweep": source.swept,
        "step": source.step,
        "sparsity": list(source.sparsity),
        "experts": [{"case": e.case, "label": e.label, **e.to_json()} for e in source.experts],
    }
    for kind, records in source.others:
        optional |= kind.rows(records)
    return {
        "name": source.name,
        "folder": str(source.folder),
        "kind": source.kind,
        "remarks": source.remarks,
        "environment": source.facts,
        "cases": [case.to_json() for case in source.cases],
        **{name: value for name, value in optional.items() if value not in (None, [], ())},
    }


def _folder(out: Path | None, sources: list[ReportSource]) -> Path:
    """Return the folder for the files, and create it if needed."""
    if len(sources) > 1 and out is None:
        raise ConfigError(
            "--out DIR: required for several runs, to say where the files go; "
            "or give --no-html --no-csv"
        )
    folder = (out or sources[0].folder).expanduser()
    advice = "" if out is not None else "; give another folder as --out DIR, or --no-html --no-csv"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {folder}: is not a folder and cannot be created ({error.strerror})"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{folder}: cannot be written to{advice}")
    return folder


def _write(folder: Path, sources: list[ReportSource], html: bool, csv: bool) -> list[str]:
    """Write the page and the tables. Return a line about each file."""
    from mtrain_cli.reporting.html import write_page
    from mtrain_cli.reporting.sections import files

    lines = []
    with writing(folder):
        if csv:
            tables, filled = folder / TABLES, files(sources)
            if filled:
                tables.mkdir(exist_ok=True)
                written = [table.write(tables).name for table in filled]
                lines.append(f"{tables}: {', '.join(written)}")
        if html:
            lines.append(str(write_page(folder / PAGE, sources)))
    return lines
