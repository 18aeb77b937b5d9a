"""`mtrain mask`: show what a mask allows, before training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtrain_cli.commands.options import ConfigDir, Overrides, option, writing

if TYPE_CHECKING:
    from rich.table import Table

    from mtrain_cli.attention.mask import SequenceMask
    from mtrain_cli.attention.mask_rule import MaskRule
    from mtrain_cli.config.schema import Config

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

    Each sequence is one document.

    [bold]Examples[/bold]

      [cyan]mtrain mask show mask=prefix_lm mask.prefix=1k seq=8k[/cyan]
          Count pairs and labels of a prefix-LM
      [cyan]mtrain mask show mask=sliding_window seq=512k topology.workers=32[/cyan]
          Compare layouts for 32 workers

    Args:
        plot: Also draw the mask to this HTML file.
        config_dir: Folder with your own option files, such as DIR/mask/mine.yaml. mtrain searches
            it before the shipped groups.
    """
    from mtrain_cli.attention.mask_rule import MaskRule
    from mtrain_cli.commands.profile import check_output
    from mtrain_cli.composition.compose import compose
    from mtrain_cli.console import Console

    config = compose(list(overrides or ()), config_dir, plan=True)
    check_output(plot, _is_page, "picture", "--plot")
    console = Console()
    if (name := config.data.mask_key) is not None:
        console.print(f"data.mask_key={name}: masks from the data are not shown; mask=causal is")
    layers, drawn = config.model.num_layers, []
    rules = MaskRule.of(config).by_layers(layers)
    for rule, count in rules:
        title = rule.mask.describe()
        if len(rules) > 1:
            title = f"{title}, {count} of {layers} layers"
        whole = rule.undivided(config.seq, config.seq)
        console.print(_facts(f"{title}; seq {config.seq:,}", config, whole))
        console.print(_layouts(config, rule))
        drawn.append((f"{title}, seq {config.seq:,}", whole))
    if plot is not None:
        from mtrain_cli.reporting.mask_view import picture

        with writing(plot):
            plot.write_text(picture(drawn), encoding="utf-8")
        console.print(f"drawn to {plot}", highlight=False)


def _is_page(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(15).lower() == b"<!doctype html>"


def _facts(title: str, config: Config, whole: SequenceMask) -> Table:
    from mtrain_cli.console import two_columns
    from mtrain_cli.training.flops import causal_pairs

    seq = config.seq
    keys = (whole.high - whole.low).sum(0)
    counted = seq - int(whole.shows_later_keys().sum())
    sparse = config.mask.keeps_causal_intervals and not config.mask.full_every
    fits = "with sparse patterns" if sparse else "dense attention only"
    return two_columns(
        [
            ("mask", title),
            ("pairs", f"{whole.pairs:,}, {whole.pairs / causal_pairs(seq):.3g} of causal"),
            ("keys per query", f"{keys.mean():,.0f} on average, {keys.max():,} at most"),
            ("intervals", f"{whole.intervals} per query at most; {fits}"),
            ("labels", f"{counted:,} of {seq:,} count"),
        ]
    )


def _layouts(config: Config, rule: MaskRule) -> Table:
    from rich.table import Table

    from mtrain_cli.config.schema import LAYOUTS
    from mtrain_cli.reporting.mask_view import share_of
    from mtrain_cli.training.layout_choice import choose_layout

    topology = config.topology
    given = (topology.context_parallel, topology.workers, _WORKERS)
    workers = next(number for number in given if isinstance(number, int))
    table = Table(title=f"{workers} workers", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("layout")
    for name in ("pairs, most", "most/mean", "slices, most", "remote keys"):
        table.add_column(name, justify="right")
    for name in LAYOUTS:
        named = config.changed(topology={"layout": name})
        layout = choose_layout(named, workers, workers).layout
        mask = rule.undivided(config.seq, layout.padded_seq)
        share = share_of(mask, layout, config.sparsity.block)
        table.add_row(
            name,
            f"{share.traffic.pairs.max():,}",
            f"{share.traffic.imbalance:.2f}",
            f"{max(share.slices):,}",
            f"{share.remote:.0%}",
        )
    return table
