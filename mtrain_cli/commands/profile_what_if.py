"""`mtrain profile what-if`: replay recorded indices with other layouts, exchanges and workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtrain_cli.commands.options import MOST_DIGITS, MOST_WORKERS, parse_names
from mtrain_cli.commands.profile import app
from mtrain_cli.config.schema import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from mtrain_cli.records.index_file import RecordedIndices
    from mtrain_cli.simulation.what_if import ReplayedSetup, ReplaySetup

_MOST_WORKERS = 512  # a schedule holds a step for every pair of workers
_BAR = 32  # characters


@app.command("what-if")
def what_if(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="A profile: its folder, its name under measurements/ or runs/, or an index.npz.",
        ),
    ] = Path("latest"),
    layout: Annotated[
        str, typer.Option(metavar="NAME,...", help="Layouts to compare.")
    ] = "contiguous,zigzag,striped",
    exchange: Annotated[
        str, typer.Option(metavar="NAME,...", help="Exchanges to compare.")
    ] = "ring,all_gather",
    workers: Annotated[
        str,
        typer.Option(
            metavar="N,...",
            help="Numbers of workers that share a sequence; as recorded by default.",
            show_default=False,
        ),
    ] = "",
    per_node: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Workers per node; as recorded by default.",
            min=1,
            max=MOST_WORKERS,
            show_default=False,
        ),
    ] = None,
    layers: Annotated[
        str,
        typer.Option(metavar="N,...", help="Layers to replay; all by default.", show_default=False),
    ] = "",
    pattern: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Patterns to replay; all recorded ones by default.",
            show_default=False,
        ),
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Replay a profile's dynamic indices with other layouts, exchanges and worker counts.

    Runs on this machine without a GPU. Counts work exactly, in query-key pairs, and predicts no
    times. worker, step, total and critical are imbalance degrees of work (largest over mean,
    forward and backward; 1 is perfect). largest: share of the worker with most work, and of perfect
    balance. sent: bytes from the worker that sends most, in both passes of a layer. The bar shows
    the work of every worker.

    [bold]Examples[/bold]

      [cyan]mtrain profile what-if measurements/imbalance-20260101-120000[/cyan]
          Compare three layouts and two exchanges on the recorded workers
      [cyan]mtrain profile what-if RUN --workers 8,32 --per-node 8[/cyan]
          Compare the same index on one node and on four
    """
    from mtrain_cli.config.schema import EXCHANGES, LAYOUTS
    from mtrain_cli.console import Console
    from mtrain_cli.records.index_file import load_indices
    from mtrain_cli.reporting.terminal_width import print_table, say
    from mtrain_cli.simulation.what_if import setups_of

    layouts, exchanges = (
        parse_names("--layout", layout, LAYOUTS),
        parse_names("--exchange", exchange, EXCHANGES),
    )
    worker_counts = _parse_whole_numbers("--workers", workers)
    for n in worker_counts:
        if not 1 <= n <= _MOST_WORKERS:
            raise ConfigError(
                f"--workers {workers}: {n} is out of range; allowed: 1 to {_MOST_WORKERS}"
            )
    layer_numbers = _parse_whole_numbers("--layers", layers)
    recorded = load_indices(_index_file(run))
    patterns = (
        parse_names("--pattern", pattern, recorded.patterns) if pattern else list(recorded.patterns)
    )
    for name in patterns:
        for layer in layer_numbers:
            if layer not in recorded.layers(name):
                available = ", ".join(map(str, recorded.layers(name)))
                raise ConfigError(
                    f"--layers {layers}: layer {layer} of {name} was not recorded; "
                    f"allowed: {available}"
                )
    setups = list(
        setups_of(
            layouts,
            exchanges,
            worker_counts or [recorded.setup.workers],
            per_node or recorded.setup.per_node,
        )
    )
    console = Console(highlight=False, soft_wrap=True)
    replays = {name: _replay(recorded, name, setups, layer_numbers or None) for name in patterns}
    if as_json:
        typer.echo(json.dumps(_document(recorded, replays), indent=1))
        return
    for name, rows in replays.items():
        print_table(console, _table(recorded, name, rows), _SPARE)
    say(console, _LEGEND)


# Columns that a narrow terminal omits, in this order.
_SPARE = ("\ncritical", "\ntotal", "\nsent", "\nlargest", "\nstep")
_LEGEND = (
    "worker, step, total, critical: imbalance of work, largest over mean, 1 is perfect; means over "
    "layers. sent: by one worker in both passes of a layer."
)


def _parse_whole_numbers(option: str, text: str) -> list[int]:
    """Parse a comma-separated list of whole numbers; "" gives an empty list."""
    parts = [part.strip() for part in text.split(",")] if text else []
    for part in parts:
        if not (part.isascii() and part.isdigit() and len(part) <= MOST_DIGITS):
            raise ConfigError(
                f"{option} {text}: {part or 'an empty item'} is not a whole number of at least 0; "
                "give numbers such as 8,32"
            )
    return list(dict.fromkeys(map(int, parts)))


def _index_file(run: Path) -> Path:
    from mtrain_cli.records.record_files import INDEX
    from mtrain_cli.reporting.report_source import PROFILE, find, known

    if run.is_file():
        return run
    folders = known() if str(run) == "latest" and not run.exists() else [find(str(run))]
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


def _replay(
    recorded: RecordedIndices,
    pattern: str,
    setups: Sequence[ReplaySetup],
    layers: Sequence[int] | None,
) -> list[ReplayedSetup]:
    from mtrain_cli.simulation.what_if import InvalidSetup, replay

    try:
        return replay(recorded, pattern, setups, layers)
    except InvalidSetup as error:
        option = "--" + error.about.replace("_", "-")
        raise ConfigError(f"{option} {error.value}: {error}") from None


def _table(recorded: RecordedIndices, pattern: str, rows: Sequence[ReplayedSetup]) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    setup, layers = recorded.setup, rows[0].layers
    layer_text = f"layer {layers[0]}" if len(layers) == 1 else f"{len(layers)} layers"
    title = (
        f"{pattern}, seq {setup.seq}, {layer_text} of iteration {setup.iteration}, recorded with "
        f"{setup.workers} workers, {setup.layout}"
    )
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    for column in ("layout", "exchange"):
        table.add_column(f"\n{column}")
    table.add_column("\nworkers", justify="right")
    # Show both passes once where they have the same work, as they mostly have.
    same = all(
        len({tuple(vars(replayed.degrees).values()) for replayed in row.passes.values()}) == 1
        for row in rows
    )
    for name in ("both passes",) if same else ("forward", "backward"):
        for i, degree in enumerate(("worker", "step", "total", "critical")):
            table.add_column(f"{name if not i else ''}\n{degree}", justify="right")
    table.add_column("\nlargest", justify="right")
    table.add_column("\nsent", justify="right")
    table.add_column("work of\neach worker")
    for row in rows:
        passes = list(row.passes.values())[: 1 if same else None]
        degrees = [
            getattr(replayed.degrees, name)
            for replayed in passes
            for name in ("worker", "step", "total", "critical")
        ]
        per_node = row.setup.per_node
        nodes = (
            f"{row.setup.workers // per_node}x{per_node}"
            if row.setup.workers > per_node
            else str(row.setup.workers)
        )
        table.add_row(
            row.setup.layout,
            row.exchange.partition(" (")[0],
            nodes,
            *(f"{degree:.2f}" for degree in degrees),
            f"{row.shares.max():.1%} / {1 / row.setup.workers:.1%}",
            _readable(sum(replayed.sent for replayed in row.passes.values())),
            _bar(row.shares.tolist()),
        )
    return table


def _readable(size: float) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} B"


def _bar(shares: Sequence[float]) -> str:
    """Return a character per worker, as high as its share of the largest.

    Where workers outnumber the characters, each shows the largest share of several neighbors.
    """
    group = -(-len(shares) // _BAR)
    heights = [max(shares[i : i + group]) for i in range(0, len(shares), group)]
    largest = max(heights) or 1.0
    return "".join(" ▁▂▃▄▅▆▇█"[min(8, round(8 * height / largest))] for height in heights)


def _document(recorded: RecordedIndices, replays: dict[str, list[ReplayedSetup]]) -> dict[str, Any]:
    import dataclasses

    setup = recorded.setup
    cases = []
    for pattern, rows in replays.items():
        for row in rows:
            passes = {
                name: {
                    **dataclasses.asdict(replayed.degrees),
                    "pairs": replayed.pairs.tolist(),
                    "sent_bytes": round(replayed.sent),
                }
                for name, replayed in row.passes.items()
            }
            case = {
                "pattern": pattern,
                **dataclasses.asdict(row.setup),
                "exchange_options": row.exchange,
                "padded_seq": row.padded_seq,
            }
            cases.append(
                {
                    **case,
                    "layers": list(row.layers),
                    **passes,
                    "shares": row.shares.round(6).tolist(),
                }
            )
    return {
        "schema": 1,
        "kind": "what-if",
        "recorded": {"path": str(recorded.path), **dataclasses.asdict(setup)},
        "cases": cases,
    }
