"""`mtrain simulate`: predict training steps on clusters, with any layout and exchange."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from mtrain_cli.commands.completion import (
    complete_clusters,
    complete_exchanges,
    complete_layouts,
)
from mtrain_cli.commands.options import (
    Json,
    Overrides,
    flag,
    name_list,
    option,
    with_options,
)
from mtrain_cli.commands.simulate_request import DEFAULT_CLUSTER, Job, parse_job
from mtrain_cli.config.schema import ConfigError


class _Group(TyperGroup):
    """A command group in which `mtrain simulate SETTINGS` means `mtrain simulate run SETTINGS`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = args[0] if args else "="
        is_setting = first.startswith("-") or "=" in first
        # In shell completion, a setting may be split at the equals sign, so it may have none.
        if ctx.resilient_parsing:
            is_setting = bool(args) and first not in self.commands
        if is_setting and first not in ctx.help_option_names:
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        run = self.commands["run"]
        run_ctx = run.make_context("run", [], parent=ctx, resilient_parsing=True)
        settings = next(p for p in run.params if p.param_type_name == "argument")
        return [
            *super().shell_complete(ctx, incomplete),
            *run.shell_complete(run_ctx, incomplete),
            *settings.shell_complete(run_ctx, incomplete),
        ]


app = typer.Typer(cls=_Group, rich_markup_mode="rich")

Calibrations = Annotated[
    str | None,
    option(
        "FILE,...",
        help="Times of your GPU instead of the shipped ones: files that `mtrain profile kernels` "
        "and `mtrain profile non-attention` wrote with --out.",
    ),
]
ClusterName = Annotated[
    str | None,
    option(
        "NAME|FILE",
        complete=complete_clusters,
        help="Name of a shipped cluster, or a YAML file in the same form. By default the cluster "
        f"of topology=, or {DEFAULT_CLUSTER}.",
    ),
]
Out = Annotated[
    Path | None, option("DIR", help="Folder for the files; by default a new one in measurements/.")
]
Files = Annotated[bool, flag("--files/--no-files", "Write records for `mtrain report`.")]


@dataclass(frozen=True)
class SimulateOptions:
    """The keys of a prediction besides the settings of `mtrain train`, each also an option.

    overrides: As in `mtrain train`, such as model= and seq=. Options with a value are settings,
        too: cluster=a100_4x8 means --cluster a100_4x8.
    nodes: Number of nodes; by default the cluster's.
    workers: Number of GPUs in total; by default all of the cluster.
    layout: Layouts to compare; by default zigzag, striped, that of a recipe, and balanced under a
        mask other than causal.
    exchange: Exchanges to compare; by default rings and gathers, and under a mask other than causal
        group casts. `recommend` compares all.
    index: Pairs to compute: a profile's folder or index.npz, or the name of a shipped profile. By
        default the pairs of sparsity=; with density or columns, a synthetic index.
    density: Share of the causal blocks that the slashes of a synthetic index cover, such as
        0.05 or 5%; by default 5%. Columns add to it.
    columns: Single key columns per head of a synthetic index; 2048 by default. For block_topk,
        tokens in blocks that all later queries see; by default a twelfth of the density.
    layers: Number of layers to predict, each with its own index; by default 1, or all recorded.
    expert_loads: Loads of experts: zipf:X, with which the expert of rank r gets a share ~ 1 / r^X,
        or a profile with loads of experts; zipf:0 (equal loads) by default.
    slow: Stragglers, such as 3=1.5: on rank 3, computation takes 1.5 times as long.
    """

    overrides: Overrides = None
    cluster: ClusterName = None
    nodes: Annotated[str | None, option("N")] = None
    workers: Annotated[str | None, option("N")] = None
    layout: Annotated[str | None, name_list(complete_layouts)] = None
    exchange: Annotated[str | None, name_list(complete_exchanges)] = None
    index: Annotated[str | None, option("FILE|NAME")] = None
    density: Annotated[str | None, option("X")] = None
    columns: Annotated[str | None, option("N")] = None
    layers: Annotated[str | None, option("N")] = None
    calibration: Calibrations = None
    expert_loads: Annotated[str | None, option("zipf:X|DIR")] = None
    slow: Annotated[str | None, option("RANK=X,...")] = None
    out: Out = None
    files: Files = True
    as_json: Json = False


@app.callback()
def simulate() -> None:
    """Predict training steps on a cluster, without a GPU.

    Counts work exactly, plans memory as `mtrain train --dry-run` does, and takes times from
    measured kernels and the constants of the cluster. best and worst are the bounds of a time.
    `run` is the default command; `mtrain simulate run --help` shows its options.

    [bold]Examples[/bold]

      [cyan]mtrain simulate model=qwen3b seq=512k cluster=a100_4x8 density=5%[/cyan]
          Compare layouts and exchanges on 32 GPUs, with a sparse index
      [cyan]mtrain simulate recommend model=qwen3b cluster=h100_4x8[/cyan]
          Recommend a configuration
    """


@app.command()
@with_options(SimulateOptions)
def run(
    typed: SimulateOptions,
    attention_only: Annotated[bool, flag("--attention-only")] = False,
    recompute: Annotated[bool, flag("--recompute")] = False,
) -> None:
    """Predict a training step for every layout, exchange and combination of settings.

    nodes, workers, density, columns and settings may have several values.

    [bold]Examples[/bold]

      [cyan]mtrain simulate run index=measurements/imbalance-x cluster=h100_4x8[/cyan]
          Predict the attention of a profile on another cluster
      [cyan]mtrain simulate run model=qwen3b seq=512k,1m cluster=my.yaml nodes=2,128[/cyan]
          Predict how training scales on a cluster of your own; `mtrain report` shows the result

    Args:
        attention_only: Predict the attention of one layer instead of whole steps. A recorded
            --index without model= implies this option.
        recompute: With --attention-only: add the forward pass of full recomputation.
    """
    job = parse_job(typed)
    alone = attention_only or job.request.without_a_model
    if recompute and not alone:
        raise ConfigError("--recompute: only with --attention-only")
    if not alone:
        job.require_gpus()
    elif job.axes:
        raise ConfigError(f"{next(iter(job.axes))}: --attention-only takes one value")
    # Imported late: it takes seconds, and mistakes are reported above.
    from mtrain_cli.commands import simulate_actions as actions

    if alone:
        actions.predict_attention(job, recompute)
    else:
        actions.predict_steps(job)


def single(typed: SimulateOptions, **more: bool) -> Job:
    """Return the job of a command that takes no sweep."""
    job = parse_job(typed, **more)
    job.require_gpus()
    if job.axes:
        name, values = next(iter(job.axes.items()))
        why = "one value; `mtrain simulate run` takes several"
        raise ConfigError(f"{name}={','.join(values)}: {why}")
    return job


@app.command()
@with_options(SimulateOptions)
def recommend(typed: SimulateOptions) -> None:
    """Recommend the fastest configuration that fits, and explain why; exit code 1 if nothing fits.

    Tries layouts, exchanges, context groups, tensor, pipeline and expert parallelism, recomputation
    and train.keep_mlp.

    [bold]Examples[/bold]

      [cyan]mtrain simulate recommend model=qwen3b seq=1m[/cyan]
          Recommend a configuration, with reasons
    """
    job = single(typed, every_exchange=True)
    from mtrain_cli.commands.simulate_actions import recommend as search

    search(job)
