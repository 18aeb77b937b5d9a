"""`mtrain profile links`: how fast messages are between the workers there are, as a cluster for the simulator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtrain_cli.commands.completion import complete_overrides
from mtrain_cli.commands.options import MOST_SAMPLES, MOST_WORKERS, warn_of_unused_settings
from mtrain_cli.commands.profile import app
from mtrain_cli.commands.profile_imbalance import in_own_folder
from mtrain_cli.config.schema import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

_SIZES = {"cuda": "4k,64k,1m,16m,64m,128m", "cpu": "4k,64k,1m,4m"}
_LEAST, _MOST = 64, 4 << 30  # bytes
_LABEL = len("device  ")  # what lines begin with


@app.command("links")
def links(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OVERRIDES",
            help="topology.workers=, topology.gpus_per_node= (virtual nodes on one host) and topology.device=, as in `mtrain train`.",
            autocompletion=complete_overrides,
            show_default=False,
        ),
    ] = None,
    sizes: Annotated[
        str,
        typer.Option(
            metavar="N,...",
            help="Bytes of a message; of a collective, what a worker receives. auto: 4k to 128m on GPUs, 4k to 4m on a CPU.",
        ),
    ] = "auto",
    repeats: Annotated[
        int, typer.Option(metavar="N", help="Samples of each size.", min=3, max=MOST_SAMPLES)
    ] = 7,
    load: Annotated[
        bool, typer.Option("--load/--no-load", help="Measure again while everybody computes.")
    ] = True,
    cluster_out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Cluster to write, for `mtrain simulate --cluster FILE`.",
            show_default=False,
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Nodes of that cluster, where it has more than took part.",
            min=1,
            max=MOST_WORKERS,
            show_default=False,
        ),
    ] = None,
    per_node: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="GPUs of its nodes, where they have more than took part.",
            min=1,
            max=MOST_WORKERS,
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the measurement as JSON and nothing else.")
    ] = False,
) -> None:
    """Measure messages between workers: hops of a ring, all-gather, reduce-scatter and all-to-all, alone and while everybody computes.

    Links inside a node and between nodes are measured apart. A latency and a bandwidth are fitted to each; with --cluster-out they become
    a cluster whose constants are measured, with bounds that hold all samples. Files are left in measurements/.

    [bold]Examples[/bold]

      [cyan]mtrain profile links --cluster-out my.yaml[/cyan]
          the GPUs of this machine, or two CPU processes
      [cyan]mtrain profile links --sizes 64k,1m,16m topology.workers=4 topology.gpus_per_node=2 --repeats 3[/cyan]
          four workers as two nodes of two
      [cyan]mtrain simulate --cluster my.yaml model=tiny seq=16k[/cyan]
          what the measurement predicts
    """
    from mtrain_cli.config.compose import compose
    from mtrain_cli.launch import run_dir
    from mtrain_cli.launch.environment import resolve_environment
    from mtrain_cli.launch.local import launch

    if cluster_out is not None:
        _check_cluster(cluster_out)
    config = in_own_folder(compose(list(overrides or ())), "links")
    environment = resolve_environment(config)
    warn_of_unused_settings(list(overrides or ()))
    wanted = _sizes(_SIZES[environment.device] if sizes == "auto" else sizes)
    if environment.workers < 2:
        raise ConfigError("topology.workers=1: there are no links to measure; give at least 2")
    if environment.dp > 1:
        raise ConfigError(
            f"topology.context_parallel={environment.cp}: all workers take part; leave it out"
        )
    if nodes is not None and nodes > 1 and environment.nodes == 1:
        raise ConfigError(
            f"--nodes {nodes}: links between nodes were not measured; give topology.gpus_per_node=N, or several nodes"
        )
    # Only now: it takes seconds to import, and most mistakes are told at once.
    from mtrain_cli.profiling import link_benchmark as measuring

    if cluster_out is not None and environment.launcher != "mtrain":
        raise ConfigError(
            f"--cluster-out {cluster_out}: torchrun and srun end each process by itself; copy {measuring.CLUSTER} of the folder"
        )
    run = run_dir.create(config, list(overrides or ()))
    name = (
        cluster_out.stem
        if cluster_out is not None
        else f"measured_{environment.nodes}x{environment.workers_per_node}"
    )
    measuring.LinkBenchmarkPlan(wanted, repeats, load, name, per_node, nodes, quiet=as_json).save(
        run
    )
    code = launch(run, environment, resume=False, target=measuring.TARGET, config=config)
    file = run.path / measuring.FILE
    if code or not file.is_file():
        raise typer.Exit(code)
    document = measuring.read_links(run.path)
    if not document["complete"]:
        raise typer.Exit(1)
    text = measuring.cluster_text(document)
    _write(run.path / measuring.CLUSTER, text)
    if cluster_out is not None:
        _write(cluster_out, text)
    if as_json:
        typer.echo(json.dumps(document, indent=1))
        return
    _show(document, run.path, cluster_out)


def _sizes(text: str) -> tuple[int, ...]:
    from mtrain_cli.config.sizes import parse_size

    found = []
    for word in text.split(","):
        try:
            found.append(parse_size(word.strip()))
        except ValueError:
            raise ConfigError(
                f"--sizes {text}: {word.strip() or 'an empty item'} is no size; give items such as 4k,1m,128m"
            ) from None
        if not _LEAST <= found[-1] <= _MOST:
            raise ConfigError(f"--sizes {word.strip()}: must be from {_LEAST} bytes to 4g")
    if len(set(found)) < 2:
        raise ConfigError(f"--sizes {text}: a latency and a bandwidth need at least two sizes")
    return tuple(sorted(set(found)))


def _check_cluster(path: Path) -> None:
    """It is better known before a long measurement."""
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--cluster-out {path}: give a file that ends in .yaml")
    if path.is_dir():
        raise ConfigError(f"--cluster-out {path}: is a folder; give a file")
    if (
        path.is_file()
        and path.stat().st_size
        and not path.read_text(encoding="utf-8", errors="replace").startswith("# Measured on ")
    ):
        raise ConfigError(
            f"--cluster-out {path}: exists and was not measured by mtrain; give another name, or remove it"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        existed = path.exists()
        with path.open("a"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise ConfigError(
            f"--cluster-out {path}: cannot be written: {error.strerror or error}"
        ) from error


def _write(path: Path, text: str) -> None:
    from mtrain_cli.launch.failures import RunError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path}: could not be written ({error.strerror or error})") from error


def _show(document: dict[str, Any], folder: Path, cluster_out: Path | None) -> None:
    from mtrain_cli.console import Console
    from mtrain_cli.reporting.terminal_width import print_table, say

    console = Console(highlight=False, soft_wrap=True)
    print_table(console, _table(document), ("10-90 %",))
    machine = document["machine"]
    say(
        console,
        f"device  {machine['gpu']}: copy {machine['copy_gbps']:.4g} GB/s, addition {machine['added_gbps']:.4g} GB/s, "
        f"launch {machine['launch_us'][1]:.1f} us",
        _LABEL,
    )
    for link, of in document["fits"].items():
        for what, fit in of.items():
            say(
                console,
                f"fit     {link} {what}: {fit['latency_us']:.1f} us + bytes / {fit['gbps']:.4g} GB/s, mean error {fit['error']:.1%}, "
                f"worst {fit['worst']:.1%}",
                _LABEL,
            )
    if document["virtual_nodes"]:
        console.print(
            "note    nodes are parts of this host: its outer links are no network", style="yellow"
        )
    console.print(f"files   {folder}")
    path = cluster_out or folder / "cluster.yaml"
    console.print(f"cluster {path}\nuse     mtrain simulate --cluster {path}")


def _table(document: dict[str, Any]) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    from mtrain_cli.config.sizes import format_size

    title = f"{document['workers']} workers, {document['nodes']} x {document['per_node']}, {document['backend']}: messages"
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    for name in ("link", "what"):
        table.add_column(name)
    for name in ("bytes", "us", "10-90 %", "GB/s", "us, computing", "computing takes"):
        table.add_column(name, justify="right")
    last = None
    for found in document["times"]:
        label = (found["link"], found["what"])
        slower = found["slowdown"]
        table.add_row(
            *(label if label != last else ("", "")),
            format_size(found["size"]),
            f"{found['us']:.1f}",
            f"{found['low']:.0f} - {found['high']:.0f}",
            f"{found['gbps']:.3f}",
            "" if found["loaded_us"] is None else f"{found['loaded_us']:.1f}",
            "" if slower is None else f"x {slower:.2f}",
        )
        last = label
    return table
