"""`mtrain mask`: show what a mask allows, before training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtrain_cli.commands.options import (
    ConfigDir,
    Overrides,
    option,
    take_help_from_docstrings,
    writing,
)
from mtrain_cli.config.schema import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mtrain_cli.config.schema import Config
    from mtrain_cli.data.dataset import Sample
    from mtrain_extras.masks.page import MaskView

app = typer.Typer(rich_markup_mode="rich", no_args_is_help=True)

_WORKERS = 8  # if topology.context_parallel and topology.workers are auto


@app.callback()
def mask() -> None:
    """Show what a mask allows, and how layouts share its work.

    [bold]Examples[/bold]

      [cyan]mtrain mask show mask=sliding_window mask.window=4k seq=128k[/cyan]
          Count the pairs of a sliding window, and compare the layouts
      [cyan]mtrain mask show mask=video seq=4k --plot video.html[/cyan]
          Draw a mask
    """


@app.command("show")
def show(
    overrides: Overrides = None,
    plot: Annotated[Path | None, option("FILE")] = None,
    config_dir: ConfigDir = None,
) -> None:
    """Show the pairs of a mask, its labels, and the work of each layout.

    The sequence is one document. With data.mask_key, it is the first sequence of the data.

    [bold]Examples[/bold]

      [cyan]mtrain mask show mask=prefix_lm mask.prefix=1k seq=8k[/cyan]
          Count pairs and labels of a prefix-LM
      [cyan]mtrain mask show mask=sliding_window seq=512k topology.workers=32[/cyan]
          Compare layouts for 32 workers

    Args:
        plot: Also draw the mask, and which worker holds which rows, to this .html file.
        config_dir: Folder with your own option files, such as DIR/mask/mine.yaml. mtrain searches
            it before the shipped groups.
    """
    from mtrain_cli.commands.profile import check_output
    from mtrain_cli.composition.compose import compose
    from mtrain_cli.console import Console
    from mtrain_cli.reporting.terminal import print_table, say
    from mtrain_extras.masks.page import layouts_note, layouts_table, views, write

    config = compose(list(overrides or ()), config_dir, plan=True)
    if plot is not None and not plot.is_dir() and plot.suffix != ".html":
        raise ConfigError(f"--plot {plot}: give a file that ends in .html")
    check_output(plot, _is_picture, "picture", "--plot")
    topology, console = config.topology, Console()
    given = topology.context_workers
    workers = given if isinstance(given, int) else _WORKERS
    per_node = topology.gpus_per_node if isinstance(topology.gpus_per_node, int) else None
    if per_node is not None:
        per_node = max(1, per_node // topology.tensor_parallel)
    masks = views(config, workers, per_node, _first_of_data(config))
    for view in masks:
        console.print(_facts(config, view))
        print_table(console, layouts_table(view, f"{workers} workers"))
    say(console, layouts_note(masks[0].shares[0].prices, topology.cluster))
    if plot is not None:
        shown = masks[0].title if config.data.mask_key else config.mask.describe()
        with writing(f"--plot {plot}"):
            write(plot, f"{shown}, seq {config.seq:,}", masks, topology.cluster)
        console.print(f"drawn to {plot}", highlight=False)


def _first_of_data(config: Config) -> Sample | None:
    """Return the first sequence of data that bring masks; None if `mask` gives the mask."""
    from mtrain_cli.data.open_dataset import open_dataset

    data = config.data
    if data.mask_key is None:
        return None
    if data.path is None and data.mix is None:
        raise ConfigError(
            f"data.mask_key={data.mask_key}: the masks are in the data, but data.path is not set; "
            "give data.path=FOLDER, or data.mask_key=null for mask=causal"
        )
    return open_dataset(config)[0]


def _is_picture(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(15).lower() == b"<!doctype html>"


def _facts(config: Config, view: MaskView) -> RenderableType:
    from mtrain_cli.console import grid
    from mtrain_cli.training.flops import causal_pairs

    seq, mask = config.seq, view.mask
    keys = (mask.high - mask.low).sum(0)
    sparse = config.mask.keeps_causal_intervals and not config.mask.is_mixed
    sparse = sparse and config.data.mask_key is None
    fits = "with sparse patterns" if sparse else "dense attention only"
    return grid(
        [
            ("mask", f"{view.title}; seq {seq:,}"),
            ("pairs", f"{mask.pairs:,}, {mask.pairs / causal_pairs(seq):.3g} of causal"),
            ("keys per query", f"{keys.mean():,.0f} on average, {keys.max():,} at most"),
            ("intervals", f"{mask.intervals} per query at most; {fits}"),
            ("labels", f"{view.labels:,} of {seq:,} count"),
        ]
    )


take_help_from_docstrings(app)
