"""`mtrain study learning`: does sparse training lose anything, and where."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtrain_cli.commands.completion import Candidate, in_list
from mtrain_cli.commands.options import MOST_STEPS, Json, bounded, flag, name_list, option, writing
from mtrain_cli.config.documents import json_text
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.printable import printable

if TYPE_CHECKING:
    from mtrain_cli.console import Console
    from mtrain_extras.studies.cells import Study
    from mtrain_extras.studies.tiers import Cell, Tier

_MOST_MINUTES = 10**6


def complete_tiers(incomplete: str) -> list[Candidate]:
    """Complete a tier of `mtrain study learning`."""
    from mtrain_extras.studies.tiers import TIERS

    about = {name: " ".join(tier.model[:2]) for name, tier in TIERS.items()}
    return [(name, text) for name, text in about.items() if name.startswith(incomplete)]


def complete_cells(incomplete: str) -> list[str]:
    """Complete a comma-separated list of cells of `mtrain study learning`, of any tier."""
    from mtrain_extras.studies.tiers import TIERS

    return in_list(list(dict.fromkeys(n for t in TIERS.values() for n in t.names)), incomplete)


def learning(
    tier: Annotated[str, option("tiny|a|b", complete=complete_tiers)] = "tiny",
    out: Annotated[Path | None, option("DIR")] = None,
    only: Annotated[str | None, name_list(complete_cells)] = None,
    seeds: Annotated[str | None, option("N,...")] = None,
    budget_minutes: Annotated[float, option("N")] = 0.0,
    base_steps: Annotated[int, bounded(0, MOST_STEPS)] = 0,
    below_gate: Annotated[bool, flag("--below-gate")] = False,
    packages: Annotated[Path | None, option("DIR")] = None,
    dry_run: Annotated[bool, flag("--dry-run")] = False,
    as_json: Json = False,
) -> None:
    """Compare models that were trained with sparse and with dense attention, over several seeds.

    Each seed has a base, a dense model of short sequences. Cells continue it on long sequences:
    dense, sparse in several ways, with random keys (a control), and not at all. Each is measured
    with dense attention and with its own: loss by context, loss of key tokens, and needles by depth
    and by place of the question. The text is the code of installed packages, with needles.

    Finished cells are kept. Stop at any time; the same command continues.

    [bold]Examples[/bold]

      [cyan]mtrain study learning[/cyan]
          Run all parts in a few minutes on a CPU, at a size that shows nothing about attention
      [cyan]mtrain study learning --tier a --dry-run[/cyan]
          List the runs of the real experiment, with FLOP and estimated time
      [cyan]mtrain study learning --tier a --budget-minutes 25 --seeds 0[/cyan]
          Compute what fits 25 minutes; the same command later continues
      [cyan]mtrain study learning --tier a --only vertical_slash-0.6,moba[/cyan]
          Compute two cells and those that they need

    Args:
        tier: tiny: a toy for two CPU cores. a: 24.3M parameters on bytes, 8k to 64k tokens, three
            seeds. b: 88M parameters with a BPE, one seed.
        out: Folder of the study; by default measurements/learning-TIER.
        only: Names of cells, as --dry-run lists them; by default all.
        seeds: Some of the tier's seeds.
        budget_minutes: Begin no cell after this time; 0 = no limit.
        base_steps: Steps of a base, if those of the tier do not pass its gate.
        below_gate: Continue with a base that misses its gate. The report says so.
        packages: Folder of Python packages to train on; by default those of this Python.
        dry_run: List the cells with FLOP and time, and exit.
    """
    from mtrain_extras.studies.cells import Study
    from mtrain_extras.studies.tiers import cells_of

    chosen = _tier(tier, base_steps)
    folder = out or Path("measurements", f"learning-{chosen.name}")
    if (known := _check_folder(folder, chosen)) is not None:
        if base_steps not in (0, known.base_steps):
            raise ConfigError(
                f"--base-steps {base_steps}: the study in {folder} has {known.base_steps}; give "
                "another --out"
            )
        chosen = known
    if not 0 <= budget_minutes <= _MOST_MINUTES:
        raise ConfigError(
            f"--budget-minutes {budget_minutes:g}: must be from 0 to {_MOST_MINUTES:,}"
        )
    if packages is not None and not packages.is_dir():
        why = "is a file; give a folder" if packages.is_file() else "no such folder"
        raise ConfigError(f"--packages {packages}: {why}")
    names = [] if only is None else _names(only, chosen)
    cells = cells_of(chosen, names, [] if seeds is None else _seeds(seeds, chosen))
    study = Study(folder, chosen)
    from mtrain_cli.reporting.terminal import make_console

    console = make_console()
    if dry_run:
        from mtrain_extras.studies import package_corpus
        from mtrain_extras.studies.learning_tables import show_plan

        if (facts := package_corpus.read(study.texts)) is not None:
            study = replace(study, sha256=facts.sha256)
        show_plan(console, study, cells)
        return
    try:
        with _on_stderr() if as_json else nullcontext():
            study = _prepare(study, packages, console)
            _compute(study, cells, budget_minutes, console, below_gate=below_gate)
    except KeyboardInterrupt:  # outside of a training, which handles it itself
        typer.echo(f"stopped; continue the study: {printable(shlex.join(_command()))}", err=True)
        raise
    show(study, as_json=as_json)


@contextmanager
def _on_stderr() -> Iterator[None]:
    """Write what goes to standard output, also by processes that start here, to standard error."""
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def _command() -> list[str]:
    return ["mtrain", *sys.argv[1:]]


def _check_folder(folder: Path, tier: Tier) -> Tier | None:
    from mtrain_cli.config.keys import path_problem
    from mtrain_extras.studies.cells import Study

    # Trainings get the path without symbolic links, which may be longer or hold other characters.
    for path in (str(folder.absolute()), os.path.realpath(folder)):
        if problem := path_problem(path):
            raise ConfigError(f"--out {folder}: {problem}")
        if "${" in path:
            raise ConfigError(
                f"--out {folder}: holds ${{, which begins the name of a setting; give another "
                "folder"
            )
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            what = "is" if place == folder else f"{place} is"
            raise ConfigError(f"--out {folder}: {what} a file; give a folder")
    if not folder.is_dir() or not any(folder.iterdir()):
        return None
    try:
        found = Study.open(folder)
    except ConfigError:
        return None  # it is a study, whose file `study.json` this command writes again
    if found is not None and found.tier.name != tier.name:
        raise ConfigError(
            f"--out {folder}: holds a study of tier {found.tier.name}; give --tier "
            f"{found.tier.name}, or another folder"
        )
    if found is None and not any(any((folder / name).glob("seed-*")) for name in tier.names):
        raise ConfigError(f"--out {folder}: is not empty and holds no study; give a new folder")
    return None if found is None else found.tier


def _tier(name: str, base_steps: int) -> Tier:
    from mtrain_extras.studies.tiers import TIERS

    if name not in TIERS:
        raise ConfigError(f"--tier {name}: expected {', '.join(TIERS)}")
    return replace(TIERS[name], base_steps=base_steps) if base_steps else TIERS[name]


def _names(text: str, tier: Tier) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--only {text!r}: names no cell; allowed: {', '.join(tier.names)}")
    return names


def _seeds(text: str, tier: Tier) -> list[int]:
    from mtrain_cli.commands.options import parse_whole_number

    try:
        return [parse_whole_number(item.strip()) for item in text.split(",")]
    except ValueError:
        allowed = ", ".join(map(str, tier.seeds))
        shown = text if text.strip() else repr(text)
        raise ConfigError(f"--seeds {shown}: expected whole numbers; allowed: {allowed}") from None


def _prepare(study: Study, packages: Path | None, console: Console) -> Study:
    """Write predictions and texts before anything is trained."""
    from mtrain_cli.commands.data_output import progress_lines
    from mtrain_extras.studies import package_corpus
    from mtrain_extras.studies.outcomes import predictions_file

    def mark() -> None:
        study.folder.mkdir(parents=True, exist_ok=True)
        study.save(_command())
        written = study.folder / predictions_file().name
        if not written.exists():
            written.write_text(predictions_file().read_text())

    with writing(f"--out {study.folder}"):
        facts = package_corpus.build(study.texts, study.tier, packages, mark, progress_lines())
    console.print(
        f"text    {facts.packages} packages, {facts.bytes:,} bytes to train on; held out: "
        f"{', '.join(facts.held_out)}, {facts.held_out_bytes:,} bytes; {facts.dropped} of "
        f"{facts.dropped + facts.kept} held-out files share a block with them and were dropped",
        soft_wrap=True,
    )
    return replace(study, sha256=facts.sha256)


def _compute(
    study: Study, cells: list[Cell], budget: float, console: Console, *, below_gate: bool = False
) -> None:
    from mtrain_extras.studies import cells as computed

    started = time.monotonic()
    missing = computed.unfinished(study, cells)
    for number, cell in enumerate(missing, 1):
        used = time.monotonic() - started
        if budget and number > 1 and used > 60 * budget:
            console.print(
                f"budget  {used / 60:.1f} minutes used; {len(missing) - number + 1} cells are "
                "left. The same command continues.",
                soft_wrap=True,
            )
            return
        console.print(f"cell    {number} of {len(missing)}: {cell.key}", soft_wrap=True)
        if study.done(cell) is not None:
            console.print(f"        {cell.key} is trained again: its weights are gone")
        with writing(study.folder):
            computed.compute(study, cell, _train, below_gate=below_gate)
        _free_gpu()


def _train(words: list[str]) -> None:
    from mtrain_cli.commands.train import train
    from mtrain_cli.launch.failures import RunError
    from mtrain_cli.launch.local import KILLED_CODE, TERMINATED, WARNED

    try:
        train(words, resume="auto")
    except typer.Exit as end:
        if end.exit_code in (KILLED_CODE, TERMINATED):
            raise
        if end.exit_code == WARNED:
            raise typer.Exit(TERMINATED) from None
        if end.exit_code:
            raise RunError(f"training ended with exit code {end.exit_code}") from None


def _free_gpu() -> None:
    """Return the memory of an evaluation to the GPU, for the workers of the next training."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def show(study: Study, *, as_json: bool, html: bool = True) -> Path | None:
    """Print what is known of a study, and write its page. Return the page, if written."""
    from mtrain_cli.reporting.terminal import make_console
    from mtrain_extras.studies import learning_page, learning_tables
    from mtrain_extras.studies.outcomes import summarize

    summary = summarize(study)
    if as_json:
        typer.echo(json_text(learning_tables.document(summary), indent=1))
        return None
    page = None
    if html:
        with writing(study.folder):
            page = learning_page.write_page(study, summary)
    console = make_console()
    learning_tables.show_summary(console, summary)
    if page is not None:
        console.print(f"page    {page}", soft_wrap=True)
    return page
