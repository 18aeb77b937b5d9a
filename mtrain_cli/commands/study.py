"""`mtrain study`: repeat an experiment with one command."""

from __future__ import annotations

import typer

app = typer.Typer(rich_markup_mode="rich", no_args_is_help=True)


@app.callback()
def study() -> None:
    """Repeat an experiment with one command.

    [bold]Examples[/bold]

      [cyan]mtrain study learning --tier a --dry-run[/cyan]
          List the runs that compare sparse with dense training, with their cost
    """
