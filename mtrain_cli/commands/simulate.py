"""`mtrain simulate`: predict training steps on clusters, with any layout and exchange."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from mtrain_cli.commands.completion import (
    complete_clusters,
    complete_exchanges,
    complete_layouts,
    complete_measured,
)
from mtrain_cli.commands.options import (
    MOST_TOKENS,
    MOST_WORKERS,
    Json,
    Overrides,
    argument,
    bounded,
    flag,
    name_list,
    option,
    with_options,
)
from mtrain_cli.commands.simulate_args import DEFAULT_CLUSTER, DEFAULT_LAYOUTS, parse_job
from mtrain_cli.config.schema import ConfigError

# Options of an earlier version, each with the command that replaces it.
_FORMER = {"--sweep": "sweep", "--recommend": "recommend", "--validate": "validate"}
# Typer bundles its own click and does not export this class.
_UsageError: type[Any] = typer.BadParameter.__mro__[1]


class _Group(TyperGroup):
    """A command group in which `mtrain simulate SETTINGS` means `mtrain simulate run SETTINGS`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _refuse_former_options(args, self.commands)
        first = args[0] if args else "="
        is_setting = first.startswith("-") or "=" in first
        # In shell completion, a setting may be split at the equals sign, so it may have none.
        if ctx.resilient_parsing:
            is_setting = bool(args) and first not in self.commands
        if is_setting and first not in ctx.help_option_names:
            for before, word in itertools.pairwise(args):
                if word in self.commands and not before.startswith("-"):
                    raise ConfigError(
                        f"{word}: is a command; type it first: `mtrain simulate {word} ...`"
                    )
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            self._name_owners(error)
            raise

    def _name_owners(self, error: Any) -> None:
        option_name, ctx = getattr(error, "option_name", None), getattr(error, "ctx", None)
        owners = [
            name
            for name, command in self.commands.items()
            if any(option_name in (*p.opts, *p.secondary_opts) for p in command.params)
        ]
        if owners and ctx is not None and ctx.info_name not in owners:
            commands = ", ".join(f"`mtrain simulate {name}`" for name in owners)
            raise ConfigError(f"{option_name}: only an option of {commands}") from error

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        run = self.commands["run"]
        run_ctx = run.make_context("run", [], parent=ctx, resilient_parsing=True)
        settings = next(p for p in run.params if p.param_type_name == "argument")
        return [
            *super().shell_complete(ctx, incomplete),
            *run.shell_complete(run_ctx, incomplete),
            *settings.shell_complete(run_ctx, incomplete),
        ]


def _refuse_former_options(args: Sequence[str], commands: Container[str]) -> None:
    typed = next((word for word in args if word.partition("=")[0] in _FORMER), None)
    if typed is None:
        return
    name = typed.partition("=")[0]
    # The settings were the value of --sweep. The new command replaces a command that was typed.
    words = [
        word.removeprefix(f"{name}=")
        for before, word in itertools.pairwise(["", *args])
        if word not in _FORMER
        and not (word in commands and (before in _FORMER or not before.startswith("-")))
    ]
    line = " ".join(["mtrain simulate", _FORMER[name], *words])
    raise ConfigError(f"{name}: is now a command; type `{line}`")


app = typer.Typer(cls=_Group, rich_markup_mode="rich")

Calibrations = Annotated[
    str | None,
    option(
        "FILE,...",
        help="Times of your GPU: files that `mtrain profile kernels` and `mtrain profile "
        "non-attention` wrote with --out. Their times replace the shipped times.",
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
Nodes = Annotated[
    int | None, bounded(1, MOST_WORKERS, "Number of nodes; by default the cluster's.")
]
Out = Annotated[
    Path | None, option("DIR", help="Folder for the files; by default a new one in measurements/.")
]
Files = Annotated[bool, flag("--files/--no-files", "Write records for `mtrain report`.")]


@dataclass(frozen=True)
class SimulateOptions:
    """The options of `run`, `sweep` and `recommend`, as typed.

    overrides: As in `mtrain train`, such as model= and seq=.
    workers: Number of GPUs in total; by default all of the cluster.
    exchange: Exchanges to compare. By default ring and all_gather, and their hierarchical
        forms between nodes; in a sweep, only hierarchical_ring between nodes. Under a mask other
        than causal, group casts, too. Except in a sweep, also the exchange of a recipe.
    index: Pairs to compute: a profile's folder or index.npz, the name of a shipped profile,
        dense, or a synthetic family (local, clustered, uniform, drifting). By default the pairs of
        sparsity=; with --density or --columns, the family clustered.
    density: Share of the causal blocks that the slashes of a synthetic index cover, such as
        0.05 or 5%; columns add to this share. By default 5%, within sparsity.min_slashes and
        max_slashes.
    columns: Single key columns per head of a synthetic index; 2048 by default.
    layers: Number of layers to predict, each with its own index; by default 1, or all layers
        of a recorded index.
    kernel: Attention kernel; auto = the kernel of train.kernel, or else the usual kernel of the
        GPU.
    expert_loads: Loads of experts: zipf:X, with which the expert of rank r gets a share ~ 1 / r^X,
        a profile with loads of experts, or a run, whose largest loads are taken; zipf:0 (equal
        loads) by default.
    slow: Stragglers as RANK=X, such as 3=1.5: on rank 3, computation takes 1.5 times as long.
    jitter: Spread of message times: standard deviation of their logarithm.
    tokens: Tokens to train on, such as 20b. Adds the days and dollars of the training run.
    price: Dollars per GPU-hour; by default the price of the cluster.
    """

    overrides: Overrides = None
    cluster: ClusterName = None
    nodes: Nodes = None
    workers: Annotated[int | None, option("N")] = None
    layout: Annotated[
        str | None,
        name_list(complete_layouts, f"Layouts to compare; {DEFAULT_LAYOUTS} by default."),
    ] = None
    exchange: Annotated[str | None, name_list(complete_exchanges)] = None
    index: Annotated[str | None, option("FILE|NAME")] = None
    density: Annotated[str | None, option("X")] = None
    columns: Annotated[int | None, bounded(0, MOST_TOKENS)] = None
    layers: Annotated[int | None, bounded(1, MOST_WORKERS)] = None
    kernel: Annotated[str, option("NAME")] = "auto"
    calibration: Calibrations = None
    expert_loads: Annotated[str | None, option("zipf:X|DIR")] = None
    slow: Annotated[str, option("RANK=X,...")] = ""
    jitter: Annotated[float, option("X")] = 0.0
    tokens: Annotated[str | None, option("N")] = None
    price: Annotated[float | None, option("X")] = None
    out: Out = None
    files: Files = True
    as_json: Json = False


@dataclass(frozen=True)
class RecommendOptions(SimulateOptions):
    """The options of `recommend`, which compares more exchanges by default.

    exchange: Exchanges to compare; by default all, but group casts only under a mask other than
        causal.
    """

    exchange: Annotated[str | None, name_list(complete_exchanges)] = None


@app.callback()
def simulate() -> None:
    """Predict training steps on a cluster, without a GPU.

    Counts work exactly and plans memory as `mtrain train --dry-run` does. Times come from measured
    kernels and from the constants of the cluster, each with its source. best and worst are the
    bounds of a predicted time.

    `run` is the default command. Its options choose the cluster (--cluster, --nodes, --workers),
    the pairs (--density, --columns, --index), what to compare (--layout, --exchange) and more:
    type `mtrain simulate run --help`.

    [bold]Examples[/bold]

      [cyan]mtrain simulate model=qwen3b seq=512k --cluster a100_4x8 --density 5%[/cyan]
          Compare two layouts and four exchanges on 32 GPUs, with a sparse index
      [cyan]mtrain simulate recommend model=qwen3b --cluster h100_4x8[/cyan]
          Recommend a configuration
    """


@app.command()
@with_options(SimulateOptions)
def run(
    typed: SimulateOptions,
    attention_only: Annotated[bool, flag("--attention-only")] = False,
    recompute: Annotated[bool, flag("--recompute")] = False,
) -> None:
    """Predict a training step for every layout and exchange.

    [bold]Examples[/bold]

      [cyan]mtrain simulate run model=qwen3b seq=512k --cluster a100_4x8[/cyan]
          Compare two layouts and four exchanges on 32 GPUs, dense
      [cyan]mtrain simulate run model=qwen3b seq=512k --cluster a100_4x8 --density 5%[/cyan]
          Use a synthetic sparse index
      [cyan]mtrain simulate run seq=256k train.global_batch=4 topology.context_parallel=8[/cyan]
          Train four sequences at a time, each on the eight GPUs of a node
      [cyan]mtrain simulate run --index measurements/imbalance-x --cluster h100_4x8[/cyan]
          Predict the attention of a profile on another cluster
      [cyan]mtrain simulate run model=qwen3b seq=4m --cluster my.yaml --nodes 128[/cyan]
          Use 128 nodes of a cluster that you describe in my.yaml

    Args:
        attention_only: Predict the attention of one layer instead of whole steps. A recorded
            --index without model= implies this option.
        recompute: With --attention-only: add the forward pass of full recomputation.
    """
    job = parse_job(typed)
    if typed.price and job.tokens is None:
        print(
            f"mtrain: warning: --price {typed.price}: has no effect without --tokens",
            file=sys.stderr,
        )
    job.request.check(job.workers)
    alone = attention_only or job.request.without_a_model
    job.require_gpus(alone, "give --attention-only")
    if recompute and not alone:
        raise ConfigError(
            "--recompute: only with --attention-only; for whole steps, set "
            "train.activation_checkpoint"
        )
    # Imported late: it takes seconds, and mistakes are reported above.
    from mtrain_cli.commands.simulate_actions import predict_attention, predict_steps

    if alone:
        predict_attention(job, recompute)
    else:
        predict_steps(job)


@app.command()
@with_options(SimulateOptions, "slow")
def sweep(typed: SimulateOptions) -> None:
    """Predict every combination of lengths, workers, nodes, densities or settings.

    Give several values to settings, or to nodes=, workers=, density= and columns=. To continue an
    interrupted sweep, repeat the command with the same --out DIR.

    [bold]Examples[/bold]

      [cyan]mtrain simulate sweep model=qwen3b seq=512k,1m workers=2,4,8[/cyan]
          Predict how training scales; `mtrain report` plots the result
      [cyan]mtrain simulate sweep model=qwen3b seq=512k density=2%,20% --columns 512[/cyan]
          Predict how time depends on density
    """
    from mtrain_cli.simulation.sweep_axes import OWN, axes, is_axis

    words = typed.overrides or []
    settings = [word for word in words if not is_axis(word)]
    swept = [word for word in words if is_axis(word)]
    values = axes(swept, settings)
    job = parse_job(replace(typed, overrides=settings), swept)
    job.require_gpus(False, "use `mtrain simulate run --attention-only`")
    first = (f"{name}={points[0]}" for name, points in values.items() if name not in OWN)
    job.request.compose([*job.request.words, *first])
    # Imported late: it takes seconds, and mistakes are reported above.
    from mtrain_cli.commands.simulate_actions import predict_sweep

    predict_sweep(job, values, typed.workers)


@app.command()
@with_options(RecommendOptions)
def recommend(typed: RecommendOptions) -> None:
    """Recommend the fastest configuration that fits, and explain why.

    Tries layouts, exchanges, context groups, tensor, pipeline and expert parallelism, recomputation
    and train.keep_mlp.
    The exit code is 1 if nothing fits.

    [bold]Examples[/bold]

      [cyan]mtrain simulate recommend model=qwen3b seq=1m --cluster h100_4x8[/cyan]
          Recommend a configuration, with reasons
      [cyan]mtrain simulate recommend model=qwen3b seq=1m --tokens 20b --price 2[/cyan]
          Also predict training time and cost
    """
    job = parse_job(typed, every_exchange=True)
    job.request.check(job.workers)
    job.require_gpus(False, "use `mtrain simulate run --attention-only`")
    from mtrain_cli.commands.simulate_actions import recommend as search

    search(job)


@app.command()
@with_options(
    SimulateOptions,
    *("layout", "exchange", "index", "density", "columns", "layers", "calibration", "slow"),
    *("jitter", "tokens", "price", "out", "files"),
)
def methods(typed: SimulateOptions) -> None:
    """Compare methods of parallelism: memory, traffic, idle time and limits, each used alone.

    Compares DP, ZeRO-1 to ZeRO-3, TP, TP with SP, PP, Ulysses, ring and zigzag ring. Each method
    gets the largest degree that the model and the GPUs allow.

    [bold]Examples[/bold]

      [cyan]mtrain simulate methods model=qwen7b seq=32k --cluster h100_4x8 --nodes 1[/cyan]
          Compare on the eight GPUs of a node
      [cyan]mtrain simulate methods model=llama8b seq=128k --workers 4 --json[/cyan]
          Print the numbers in bytes, for scripts
    """
    job = parse_job(typed)
    job.request.check(job.workers)
    job.require_gpus(False, "give a cluster of GPUs")
    # Imported late: it takes seconds, and mistakes are reported above.
    from mtrain_cli.commands.simulate_methods import show_methods

    show_methods(job)


@app.command()
def validate(
    runs: Annotated[list[Path], argument("RUN", complete_measured)],
    prediction: Annotated[list[Path] | None, option("DIR")] = None,
    cluster: ClusterName = None,
    nodes: Nodes = None,
    calibration: Calibrations = None,
    out: Out = None,
    files: Files = True,
    as_json: Json = False,
) -> None:
    """Compare predictions with measurements, for every step and worker.

    Predicts the cases of profiles that `mtrain profile imbalance` measured.

    [bold]Examples[/bold]

      [cyan]mtrain simulate validate measurements/imbalance-x --cluster my.yaml[/cyan]
          Predict the cases of a profile now
      [cyan]mtrain simulate validate measurements/after --prediction measurements/before[/cyan]
          Use a prediction that was written before the measurement

    Args:
        runs: Folders of profiles, or names of shipped profiles.
        prediction: Use predictions that `mtrain simulate run --out DIR` saved earlier, instead of
            new predictions. Can be repeated.
    """
    from mtrain_cli.config.cluster import load_cluster
    from mtrain_cli.simulation.calibration_files import calibration_files

    for word in map(str, runs):
        if "=" in word and not Path(word).exists():
            raise ConfigError(
                f"{word}: validate takes no settings; give folders of profiles, and --cluster, "
                "--nodes and --calibration"
            )
    machine = load_cluster(cluster or DEFAULT_CLUSTER, nodes=nodes)
    if calibration is not None:
        calibration_files(calibration)
    # Imported late: it takes seconds, and mistakes are reported above.
    from mtrain_cli.commands.simulate_validate import validate as compare
    from mtrain_cli.simulation.calibration import load_user_calibration

    own = load_user_calibration(calibration)
    compare(runs, prediction or [], machine, own, out, files=files, as_json=as_json)
