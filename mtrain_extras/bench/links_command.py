"""`mtrain profile links`: measure the links between workers, as a cluster for the simulator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtrain_cli.commands.options import (
    MOST_SAMPLES,
    Json,
    Overrides,
    bounded,
    option,
    parse_items,
    with_measurement_folder,
    writing,
)
from mtrain_cli.commands.profile import check_output
from mtrain_cli.config.documents import json_text
from mtrain_cli.config.schema import ConfigError

if TYPE_CHECKING:
    from mtrain_cli.reporting.table import Table

_SIZES = {"cuda": "4k,64k,1m,16m,64m,128m", "cpu": "4k,64k,1m,4m"}
_LEAST, _MOST = 64, 4 << 30  # bytes
_LABEL = len("device  ")  # width of the label that begins each line


def links(
    overrides: Overrides = None,
    sizes: Annotated[str, option("N,...")] = "auto",
    repeats: Annotated[int, bounded(3, MOST_SAMPLES)] = 7,
    cluster_out: Annotated[Path | None, option("FILE")] = None,
    as_json: Json = False,
) -> None:
    """Measure messages between workers: ring hops and collectives.

    Measures links within a node and between nodes separately, with idle and with computing workers,
    and fits a latency and a bandwidth to each link. --cluster-out writes the fits as a cluster,
    and its bounds contain all samples. The measurement is saved in measurements/.

    [bold]Examples[/bold]

      [cyan]mtrain profile links --cluster-out my.yaml[/cyan]
          Measure the GPUs of this machine, or two CPU processes
      [cyan]mtrain profile links topology.workers=4 topology.gpus_per_node=2[/cyan]
          Measure four workers as two nodes of two

    Args:
        overrides: topology.workers=, topology.gpus_per_node= (virtual nodes on one host) and
            topology.device=, as in `mtrain train`.
        sizes: Bytes per message; for a collective, the bytes that each worker receives. auto = 4k
            to 128m on GPUs, 4k to 4m on CPUs.
        repeats: Samples per size.
        cluster_out: Cluster file to write, for `mtrain simulate --cluster FILE`.
        as_json: Print the measurement as JSON only.
    """
    from mtrain_cli.composition.compose import compose
    from mtrain_cli.launch import run_dir
    from mtrain_cli.launch.environment import resolve_environment
    from mtrain_cli.launch.local import launch

    if cluster_out is not None and cluster_out.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--cluster-out {cluster_out}: give a file that ends in .yaml")
    check_output(cluster_out, _is_measured, "measured cluster", "--cluster-out")
    words = list(overrides or ())
    config = with_measurement_folder(compose(words), "links")
    environment = resolve_environment(config)
    message_sizes = _parse_sizes(_SIZES[environment.device] if sizes == "auto" else sizes)
    dims = environment.dims
    if dims.workers < 2:
        raise ConfigError("topology.workers=1: there are no links to measure; give at least 2")
    if dims.dp > 1:
        raise ConfigError(
            f"topology.context_parallel={dims.cp}: links are measured among all workers; leave it "
            "out"
        )
    if cluster_out is not None and environment.launcher != "mtrain":
        raise ConfigError(
            f"--cluster-out {cluster_out}: only works without torchrun or srun; copy cluster.yaml "
            "from the measurement's folder instead"
        )
    # Imported late: it takes seconds, and mistakes are reported above.
    from mtrain_extras.bench.links import FILE, TARGET, LinkBenchmarkPlan, cluster_text

    name = f"measured_{environment.nodes}x{environment.workers_per_node}"
    name = name if cluster_out is None else cluster_out.stem
    run = run_dir.create(config, words)
    LinkBenchmarkPlan(message_sizes, repeats, name, quiet=as_json).save(run)
    code = launch(run, environment, resume=False, target=TARGET, config=config, saves=False)
    if code or not (run.path / FILE).is_file():
        raise typer.Exit(code)
    document = json.loads((run.path / FILE).read_text())
    if not document["complete"]:
        raise typer.Exit(1)
    if cluster_out is not None:
        with writing(cluster_out):
            cluster_out.write_text(cluster_text(document), encoding="utf-8")
    if as_json:
        typer.echo(json_text(document, indent=1))
    else:
        _show(document, run.path, cluster_out)


def _parse_sizes(text: str) -> tuple[int, ...]:
    from mtrain_cli.config.sizes import parse_size

    sizes = sorted(set(parse_items("--sizes", text, parse_size, "4k,1m,128m")))
    if not _LEAST <= sizes[0] <= sizes[-1] <= _MOST:
        raise ConfigError(f"--sizes {text}: each must be from {_LEAST} bytes to 4g")
    if len(sizes) < 2:
        raise ConfigError(f"--sizes {text}: a latency and a bandwidth need at least two sizes")
    return tuple(sizes)


def _is_measured(path: Path) -> bool:
    return path.read_text(encoding="utf-8", errors="replace").startswith("# Measured on ")


def _show(document: dict[str, Any], folder: Path, cluster_out: Path | None) -> None:
    from mtrain_cli.console import Console
    from mtrain_cli.reporting.terminal import print_table, say

    console = Console(highlight=False, soft_wrap=True)
    print_table(console, _table(document))
    machine = document["machine"]
    for line in (
        f"device  {machine['gpu']}: copy {machine['copy_gbps']:.4g} GB/s, "
        f"addition {machine['added_gbps']:.4g} GB/s, launch {machine['launch_us'][1]:.1f} us",
        *(
            f"fit     {link} {operation}: {fit['latency_us']:.1f} us + bytes / "
            f"{fit['gbps']:.4g} GB/s, mean error {fit['error']:.1%}, worst {fit['worst']:.1%}"
            for link, fits in document["fits"].items()
            for operation, fit in fits.items()
        ),
    ):
        say(console, line, _LABEL)
    if document["virtual_nodes"]:
        console.print(
            "note    all nodes are parts of this host, so links between nodes use no network",
            style="yellow",
        )
    console.print(f"files   {folder}")
    path = cluster_out or folder / "cluster.yaml"
    console.print(f"cluster {path}\nuse     mtrain simulate --cluster {path}")


def _table(document: dict[str, Any]) -> Table:
    from operator import itemgetter

    from mtrain_cli.config.sizes import format_size
    from mtrain_cli.reporting.table import Column, Table, fixed

    title = (
        f"{document['workers']} workers, {document['nodes']} x {document['per_node']}, "
        f"{document['backend']}: messages"
    )
    columns = [
        Column("link", itemgetter("link"), words=True, once=True),
        Column("operation", itemgetter("what"), words=True, once=True),
        Column("bytes", itemgetter("size"), format_size),
        Column("us", itemgetter("us"), fixed(1)),
        Column("10-90 %", lambda row: f"{row['low']:.0f} - {row['high']:.0f}", drop=1),
        Column("GB/s", itemgetter("gbps"), fixed(3)),
        Column("us under load", itemgetter("loaded_us"), fixed(1), missing=""),
        Column("compute time", itemgetter("slowdown"), "x {:.2f}".format, missing=""),
    ]
    return Table(title, columns, document["times"])
