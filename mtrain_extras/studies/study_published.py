"""`mtrain study published`: published tables beside what mtrain predicts and has measured."""

from __future__ import annotations

import csv
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtrain_cli.commands.completion import Candidate
from mtrain_cli.commands.options import Json, argument, flag, option, writing
from mtrain_cli.commands.report import FolderReport
from mtrain_cli.commands.simulate import Calibrations
from mtrain_cli.config.documents import json_text, read_json
from mtrain_cli.config.schema import ConfigError
from mtrain_extras.studies import published
from mtrain_extras.studies.published import COMPUTED, STEP, WORKER, PublishedRow, PublishedTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mtrain_cli.evaluation.results import Result
    from mtrain_cli.simulation.scenario import Scenario
    from mtrain_extras.studies.published_tables import StudyTable

_ALL_PAIRS = "dense"


def complete_published(incomplete: str) -> list[Candidate]:
    """Complete the name of a published table."""
    titles = [(name, published.read(name).title) for name in published.names()]
    groups = [(name, f"all tables of {paper}") for name, paper in published.PAPERS.items()]
    return [(name, text) for name, text in [*titles, *groups] if name.startswith(incomplete)]


def list_tables(as_json: Json = False) -> None:
    """List the published tables, with the paper and the place of each.

    [bold]Examples[/bold]

      [cyan]mtrain study list[/cyan]
          List names for `mtrain study NAME`
    """
    from mtrain_cli.reporting.table import text_table
    from mtrain_cli.reporting.terminal import make_console, print_table

    tables = [published.read(name) for name in published.names()]
    if as_json:
        rows = [
            {"name": each.name, "what": each.title, "paper": each.paper, "where": each.where}
            for each in tables
        ]
        typer.echo(json_text({"tables": rows, "groups": published.PAPERS}, indent=1))
        return
    console = make_console()
    listed = [(each.name, each.title, each.paper, each.where) for each in tables]
    heads = ("name", "what", "paper", "where")
    print_table(console, text_table(heads, listed, 4, spare=("where",)))
    papers = ", ".join(f"{word} ({paper})" for word, paper in published.PAPERS.items())
    console.print(f"groups: {papers}, all", soft_wrap=True)


def compare(
    names: Annotated[list[str], argument("NAME...", complete_published)],
    out: Annotated[Path | None, option("DIR")] = None,
    files: Annotated[bool, flag("--files/--no-files")] = True,
    results: Annotated[Path | None, option("DIR")] = None,
    calibration: Calibrations = None,
    as_json: Json = False,
) -> None:
    """Compare published tables with predictions for the paper's cluster and with measurements.

    Prints a row per published value: value, prediction with bounds, their ratio, and what a profile
    that ships with mtrain measured on other hardware. No constant is fitted to these tables.
    The last table has the errors by quantity.

    [bold]Examples[/bold]

      [cyan]mtrain study table3[/cyan]
          Compare MTraining's imbalance degrees
      [cyan]mtrain study burst[/cyan]
          Compare all tables of BurstEngine, with the mean error of all rows
      [cyan]mtrain study burst --calibration kernels-h200 --no-files[/cyan]
          Take kernel times of an H200 instead, scaled by peak FLOP/s
      [cyan]mtrain study burst-table2 burst-table4 --out ablations && mtrain report ablations[/cyan]
          Write the tables to a folder, and draw them to a page
      [cyan]mtrain study table1 --results runs/latest[/cyan]
          Compare RULER's scores in MTraining's paper with those of your model

    Args:
        names: Names of tables (`mtrain study list`), or burst, mtraining, magi or all.
        out: Folder for the files; by default measurements/study-NAME.
        files: Write summary.json and study.csv.
        results: Run, or folder of results, of `mtrain eval` to show beside published scores.
    """
    chosen = [published.read(name) for name in published.chosen(names)]
    if not files and out is not None:
        raise ConfigError(f"--out {out}: --no-files writes no files; give one of the two")
    folder = _folder(out, names) if files else None
    # Imported late: it takes seconds, and mistakes are reported above.
    from mtrain_extras.studies.published_predictions import predict_table
    from mtrain_extras.studies.published_scores import scored_table

    own = [] if results is None else _results(results, chosen)
    tables = [
        scored_table(table, results, own)
        if table.evaluation
        else predict_table(table, partial(_scenario, table.cluster, calibration), _measured)
        for table in chosen
    ]
    content = _document(tables)
    if folder is not None:
        _write(folder, content, tables)
    if as_json:
        typer.echo(json_text(content, indent=1))
    else:
        _show(tables, f"files  {folder}\ndraw   mtrain report {folder}" if folder else "")


def _results(folder: Path, tables: Sequence[PublishedTable]) -> list[Result]:
    """Return the results in a folder. Raises ConfigError if no table compares any of them."""
    from mtrain_cli.evaluation.results import read_results

    kinds = {table.evaluation for table in tables} - {""}
    if not kinds:
        known = (name for name in published.names() if published.read(name).evaluation)
        raise ConfigError(
            f"--results {folder}: these tables hold no scores; give one of {', '.join(known)}"
        )
    results = [r for r in read_results(folder) if r.task.partition(":")[0] in kinds]
    if not results:
        commands = " or ".join(f"`mtrain eval {kind}`" for kind in sorted(kinds))
        why = f"holds no results of {commands}" if folder.is_dir() else "no such folder"
        raise ConfigError(f"--results {folder}: {why}")
    return results


def _scenario(cluster: str, calibration: str | None, row: PublishedRow) -> Scenario:
    from mtrain_cli.commands.simulate_request import Request

    drawn = row.index != _ALL_PAIRS
    scenario = Request(
        row.words,
        index=row.index if drawn and row.index != "clustered" else None,
        density=row.density if drawn else None,
        columns=row.columns if drawn else None,
        calibration=calibration,
        cluster=cluster,
    ).scenario()
    return replace(scenario, variant=row.hops)


def _measured(row: PublishedRow, quantity: str) -> tuple[float, str] | None:
    """Return what a shipped profile measured for a row, and on which hardware."""
    if not row.measured or quantity not in (WORKER, STEP, COMPUTED):
        return None
    from mtrain_cli.reporting import report_source

    source = report_source.open_source(report_source.find(row.measured["profile"]))
    for case in source.cases:
        facts = case.facts["layout"], case.facts["exchange"]
        if facts != (row.measured["layout"], row.measured["exchange"]):
            continue
        passes = [case.passes[name] for name in ("forward", "backward")]
        means = {
            WORKER: [one.time.worker.mean for one in passes],
            STEP: [one.time.step.mean for one in passes],
            COMPUTED: [one.computation.total.mean for one in passes],
        }
        return statistics.fmean(means[quantity]), source.where
    raise ConfigError(f"{row.measured['profile']}: has no case of {row.name}")


def _folder(out: Path | None, names: Sequence[str]) -> Path:
    from mtrain_cli.records.record_files import SUMMARY, open_records
    from mtrain_extras.studies.published_tables import STUDY

    name = names[0] if len(names) == 1 else "tables"
    folder = (out or Path("measurements", f"study-{name}")).expanduser()
    if folder.is_file():
        raise ConfigError(f"--out {folder}: is a file; give a folder")
    if (folder / SUMMARY).is_file() and open_records(folder).summary.get("kind") != STUDY:
        raise ConfigError(f"--out {folder}: holds another measurement; give a new folder")
    return folder


def _document(tables: Sequence[StudyTable]) -> dict[str, Any]:
    from mtrain_cli.records.record_files import computed_summary
    from mtrain_extras.studies.published_tables import STUDY, errors

    return {
        **computed_summary(STUDY),
        "tables": [table.to_json() for table in tables],
        "errors": [vars(error) for error in errors(tables)],
    }


def _write(folder: Path, content: dict[str, Any], tables: Sequence[StudyTable]) -> None:
    from mtrain_cli.records.record_files import write_summary
    from mtrain_extras.studies.published_tables import STUDY_ROWS, sheet_rows

    rows = sheet_rows(tables)
    with writing(f"--out {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / STUDY_ROWS).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        write_summary(folder, content)


def _show(tables: Sequence[StudyTable], lines: str) -> None:
    from mtrain_cli.reporting.terminal import make_console, print_section
    from mtrain_extras.studies.published_tables import study_sections

    console = make_console()
    for section in study_sections(tables):
        print_section(console, section)
    if lines:
        console.print(lines, soft_wrap=True)


def report_of(folder: Path) -> FolderReport | None:
    """Return how `mtrain report` shows the folder of `mtrain study published`; None for others."""
    from mtrain_cli.records.record_files import SUMMARY
    from mtrain_extras.studies.published_tables import STUDY

    try:
        summary = read_json(folder / SUMMARY)
    except (OSError, ValueError):
        return None
    if not isinstance(summary, dict) or summary.get("kind") != STUDY:
        return None
    return FolderReport("a study", "mtrain study published", partial(_report, folder, summary))


def _report(folder: Path, summary: dict[str, Any], *, as_json: bool, html: bool) -> None:
    from mtrain_extras.studies.published_tables import tables_of, write_page

    tables = tables_of(summary, folder)
    if as_json:
        typer.echo(json_text(summary, indent=1))
        return
    page = ""
    if html:
        with writing(folder):
            page = f"page   {write_page(folder, tables)}"
    _show(tables, page)
