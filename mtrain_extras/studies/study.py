"""`mtrain study`: repeat an experiment, or compare with a published table, with one command."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from mtrain_cli.commands.options import take_help_from_docstrings
from mtrain_cli.commands.report import FolderReport
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.suggest import no_such
from mtrain_extras.studies import published, study_learning, study_published

_PUBLISHED = "published"  # the command that takes names of tables


class _Group(TyperGroup):
    """A command group in which `mtrain study table3` means `mtrain study published table3`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = args[0] if args else ""
        if first and not first.startswith("-") and first not in self.commands:
            tables = published.choices()
            if first not in tables:
                names = [*self.commands, *tables]
                raise ConfigError(f"{first}: {no_such('command or published table', first, names)}")
            args = [_PUBLISHED, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_Group, rich_markup_mode="rich", no_args_is_help=True)


@app.callback()
def study() -> None:
    """Repeat an experiment, or compare with a published table.

    The name of a published table stands for `published` with that name.

    [bold]Examples[/bold]

      [cyan]mtrain study learning --tier a --dry-run[/cyan]
          List the runs that compare sparse with dense training, with their cost
      [cyan]mtrain study list[/cyan]
          List the published tables
      [cyan]mtrain study burst-table2[/cyan]
          Compare an ablation of 32 GPUs with what the simulator predicts
    """


app.command("learning")(study_learning.learning)
app.command("list")(study_published.list_tables)
app.command(_PUBLISHED)(study_published.compare)
take_help_from_docstrings(app)


def report(folder: Path) -> FolderReport | None:
    """Return how `mtrain report` shows the folder of a study; None for others."""
    from mtrain_extras.studies.cells import Study

    if (found := Study.open(folder)) is None:
        return study_published.report_of(folder)
    return FolderReport("a study", "mtrain study learning", partial(study_learning.show, found))
