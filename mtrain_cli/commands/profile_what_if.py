"""`mtrain profile what-if`: replay recorded indices with other layouts, exchanges and workers."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtrain_cli.commands.completion import complete_clusters
from mtrain_cli.commands.options import (
    MOST_WORKERS,
    Json,
    argument,
    bounded,
    name_list,
    option,
    parse_items,
    parse_names,
    parse_whole_number,
)
from mtrain_cli.commands.profile import app
from mtrain_cli.config.cluster import load_cluster
from mtrain_cli.config.documents import json_text
from mtrain_cli.config.exchanges import exchange_names
from mtrain_cli.config.schema import LAYOUTS, ConfigError
from mtrain_cli.config.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mtrain_cli.records.index_file import RecordedIndices
    from mtrain_cli.reporting.table import Table
    from mtrain_cli.simulation.what_if import ReplayedSetup

_MOST_WORKERS = 512  # a schedule holds a step for every pair of workers
# Degrees, by their rank among the columns that a narrow terminal drops.
_DEGREES = {"worker": 0, "step": 5, "total": 2, "critical": 1}


@app.command("what-if")
def what_if(
    run: Annotated[Path, argument("RUN")] = Path("latest"),
    layout: Annotated[str, name_list()] = "contiguous,zigzag,striped",
    exchange: Annotated[str, name_list()] = "ring,all_gather",
    workers: Annotated[str, option("N,...")] = "",
    per_node: Annotated[int | None, bounded(1, MOST_WORKERS)] = None,
    layers: Annotated[str, option("N,...")] = "",
    pattern: Annotated[str, name_list()] = "",
    cluster: Annotated[str | None, option("NAME|FILE", complete=complete_clusters)] = None,
    as_json: Json = False,
) -> None:
    """Replay a profile's dynamic indices with other layouts, exchanges and worker counts.

    Runs without a GPU, counts work exactly, in query-key pairs, and predicts no times. worker,
    step, total and critical are imbalance degrees of work (largest over mean; 1 is perfect).
    largest: the most loaded worker's share of the work, and the share under perfect balance.

    [bold]Examples[/bold]

      [cyan]mtrain profile what-if RUN --workers 8,32 --per-node 8[/cyan]
          Compare the same index on one node and on four

    Args:
        run: A profile: its folder, its name under measurements/ or runs/, or an index.npz. By
            default the newest profile.
        layout: Layouts to compare.
        exchange: Exchanges to compare.
        workers: Numbers of workers that share a sequence; by default the recorded one.
        per_node: Workers per node; by default the cluster's, else the recorded number.
        layers: Layers to replay; all by default.
        pattern: Patterns to replay; all recorded patterns by default.
        cluster: Cluster for which the balanced layout is made; by default H200s.
    """
    from mtrain_cli.console import Console
    from mtrain_cli.records.index_file import load_indices
    from mtrain_cli.reporting.terminal import print_table, say
    from mtrain_cli.simulation.what_if import InvalidSetup, ReplaySetup, replay

    layouts = parse_names("--layout", layout, LAYOUTS)
    exchanges = parse_names("--exchange", exchange, exchange_names())
    counts = parse_items("--workers", workers, parse_whole_number, "8,32") if workers else []
    if not all(1 <= count <= _MOST_WORKERS for count in counts):
        raise ConfigError(f"--workers {workers}: allowed: 1 to {_MOST_WORKERS}")
    wanted = parse_items("--layers", layers, parse_whole_number, "0,5") if layers else []
    recorded = load_indices(_index_file(run))
    patterns = list(recorded.patterns)
    if pattern:
        patterns = parse_names("--pattern", pattern, patterns)
    for name, layer in itertools.product(patterns, wanted):
        if layer not in recorded.layers(name):
            available = ", ".join(map(str, recorded.layers(name)))
            raise ConfigError(
                f"--layers {layers}: layer {layer} of {name} was not recorded; allowed: {available}"
            )
    machine = None if cluster is None else load_cluster(cluster)
    made, counts = recorded.setup, list(dict.fromkeys(counts))
    usual = made.per_node if machine is None else machine.gpus_per_node
    setups = [
        ReplaySetup(of_layout, of_exchange, count, per_node or usual)
        for count in counts or [made.workers]
        for of_layout, of_exchange in itertools.product(layouts, exchanges)
    ]
    numbers = list(dict.fromkeys(wanted)) or None
    try:
        replays = {name: replay(recorded, name, setups, numbers, machine) for name in patterns}
    except InvalidSetup as error:
        option = error.about.replace("_", "-")
        raise ConfigError(f"--{option} {error.value}: {error.reason}") from None
    if as_json:
        typer.echo(json_text(_document(recorded, replays), indent=1))
        return
    console = Console(highlight=False, soft_wrap=True)
    for name, rows in replays.items():
        print_table(console, _table(recorded, name, rows))
    say(console, _LEGEND)


_LEGEND = (
    "worker, step, total, critical: imbalance of work, largest over mean, 1 is perfect; means over "
    "layers. sent: by one worker in both passes of a layer."
)


def _index_file(run: Path) -> Path:
    from mtrain_cli.records.record_files import INDEX
    from mtrain_cli.reporting.report_source import PROFILE, find, known

    if run.is_file():
        return run
    folders = known() if str(run) == "latest" and not run.exists() else [find(str(run), INDEX)]
    files = [
        place / INDEX
        for folder in folders
        for place in (folder, folder / PROFILE)
        if (place / INDEX).is_file()
    ]
    if files:
        # A run continues after its last profile, so the newest folder may hold an older profile.
        return max(files, key=lambda file: file.stat().st_mtime_ns)
    raise ConfigError(
        f"RUN {run}: holds no {INDEX}; `mtrain profile imbalance` and "
        "`mtrain train profile.every=N` write one next to their records"
    )


def _table(recorded: RecordedIndices, pattern: str, rows: Sequence[ReplayedSetup]) -> Table:
    from mtrain_cli.reporting.table import Column, Table, fixed

    setup, layers = recorded.setup, rows[0].layers
    layer_text = f"layer {layers[0]}" if len(layers) == 1 else f"{len(layers)} layers"
    title = (
        f"{pattern}, seq {setup.seq}, {layer_text} of iteration {setup.iteration}, recorded with "
        f"{setup.workers} workers, {setup.layout}; work of both passes"
    )
    columns = [
        Column("layout", lambda row: row.setup.layout, words=True),
        Column("exchange", lambda row: row.exchange.partition(" (")[0], words=True),
        Column("workers", _workers),
        *(
            Column(
                degree,
                lambda row, of=degree: fmean(getattr(p.degrees, of) for p in row.passes.values()),
                fixed(2),
                drop=drop,
            )
            for degree, drop in _DEGREES.items()
        ),
        Column("largest", lambda r: f"{r.shares.max():.1%} / {1 / r.setup.workers:.1%}", drop=4),
        Column("sent", lambda r: sum(p.sent for p in r.passes.values()), format_bytes, drop=3),
    ]
    return Table(title, columns, rows)


def _workers(row: ReplayedSetup) -> str:
    workers, per_node = row.setup.workers, row.setup.per_node
    return f"{workers // per_node}x{per_node}" if workers > per_node else str(workers)


def _document(recorded: RecordedIndices, replays: dict[str, list[ReplayedSetup]]) -> dict[str, Any]:
    cases = [
        {
            "pattern": pattern,
            **asdict(row.setup),
            "exchange_options": row.exchange,
            "padded_seq": row.padded_seq,
            "layers": list(row.layers),
            **{
                name: {
                    **asdict(replayed.degrees),
                    "pairs": replayed.pairs.tolist(),
                    "sent_bytes": round(replayed.sent),
                }
                for name, replayed in row.passes.items()
            },
            "shares": row.shares.round(6).tolist(),
        }
        for pattern, rows in replays.items()
        for row in rows
    ]
    return {
        "schema": 1,
        "kind": "what-if",
        "recorded": {"path": str(recorded.path), **asdict(recorded.setup)},
        "cases": cases,
    }
