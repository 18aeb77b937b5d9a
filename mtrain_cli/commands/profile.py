"""`mtrain profile`: measure attention on this machine."""

from __future__ import annotations

import dataclasses
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtrain_cli import install_command
from mtrain_cli.commands.completion import complete_overrides
from mtrain_cli.config.schema import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from mtrain_cli.config.schema import Config
    from mtrain_cli.profiling.kernels import KernelTime
    from mtrain_cli.profiling.sparsity import HeadRecord
    from mtrain_cli.sparsity.pattern import Pattern

app = typer.Typer(help="Measure attention on this machine.", rich_markup_mode="rich", no_args_is_help=True)


@app.command("sparsity")
def sparsity(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OVERRIDES",
            help="As in `mtrain train`; the run uses one worker.",
            autocompletion=complete_overrides,
            show_default=False,
        ),
    ] = None,
    pattern: Annotated[
        str,
        typer.Option(metavar="NAME,...", help="Patterns to measure on the same queries and keys; they need not be the one trained with."),
    ] = "vertical_slash",
    steps: Annotated[int, typer.Option(metavar="N", help="Training steps; the first and the last are measured.", min=1)] = 2,
    every: Annotated[int, typer.Option(metavar="N", help="Also measure every N steps; 0 = only the first and the last.", min=0)] = 0,
    rows: Annotated[int, typer.Option(metavar="N", help="Queries sampled in each layer.", min=1)] = 256,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Parquet file, one row per step, pattern, layer and head.")] = Path(
        "sparsity.parquet"
    ),
) -> None:
    """How much of dense attention patterns keep, layer by layer, on real training steps.

    [bold]Examples[/bold]

      [cyan]mtrain profile sparsity[/cyan]
          the tiny model at its first and second step
      [cyan]mtrain profile sparsity --pattern vertical_slash,moba --steps 100 --every 25 seq=8k sparsity.chunk=512[/cyan]
          two patterns while a model learns; keys of a pattern apply to the pattern that has them
    """
    from rich.console import Console

    from mtrain_cli.profiling.sparsity import profile_sparsity

    if out.suffix != ".parquet":
        raise ConfigError(f"--out {out}: give a file that ends in .parquet")
    config, patterns = _patterns(list(overrides or ()), pattern)
    measured = sorted({1, steps, *range(every, steps + 1, every)} if every else {1, steps})
    console = Console(highlight=False, soft_wrap=True)
    records = profile_sparsity(config, patterns, measured, rows, lambda step, loss: console.print(f"step {step}/{steps}  loss {loss:.4f}"))
    for name in dict.fromkeys(r.pattern for r in records):
        for step in (measured[0], measured[-1])[: len(measured)]:
            console.print(_layers([r for r in records if r.pattern == name and r.step == step], name, step))
    _write_parquet(records, out)
    console.print(f"{len(records)} rows in {out}")


def _patterns(overrides: list[str], names: str) -> tuple[Config, list[Pattern]]:
    """The configuration to train with, and the patterns with the keys of the command line that are theirs.

    A key such as sparsity.chunk goes to the measured pattern that has it, and to the trained one if it has it too.
    """
    from mtrain_cli.config.compose import compose
    from mtrain_cli.config.schema import PATTERNS
    from mtrain_cli.config.suggest import did_you_mean
    from mtrain_cli.config.validate import PATTERN_KEYS
    from mtrain_cli.sparsity.registry import make_pattern

    wanted = [name.strip() for name in names.split(",") if name.strip()]
    allowed = [name for name in PATTERNS if name != "dense"]
    for name in wanted:
        if name not in allowed:
            raise ConfigError(f"--pattern {name}: no such pattern{did_you_mean(name, allowed)}; allowed: {', '.join(allowed)}")
    if not wanted:
        raise ConfigError(f"--pattern {names!r}: names no pattern; allowed: {', '.join(allowed)}")
    trained = next((w.removeprefix("sparsity=") for w in overrides if w.startswith("sparsity=")), "dense")
    keys = [word for word in overrides if word.startswith("sparsity.")]
    rest = [word for word in overrides if not word.startswith(("sparsity.", "topology.workers=", "sparsity="))]
    for word in keys:
        key = word.partition("=")[0].removeprefix("sparsity.")
        if not any(key in PATTERN_KEYS[name] for name in (*wanted, trained) if name in PATTERN_KEYS):
            raise ConfigError(f"{word}: is a key of none of the patterns {', '.join(wanted)}")

    def composed(name: str) -> Config:
        own = [word for word in keys if word.partition("=")[0].removeprefix("sparsity.") in PATTERN_KEYS.get(name, ())]
        return compose([*rest, f"sparsity={name}", "topology.workers=1", *own])

    made = []
    for name in wanted:
        config = composed(name)
        found = make_pattern(config.sparsity, config.seed)
        assert found is not None
        made.append(found)
    return composed(trained), made


def _layers(records: list[HeadRecord], name: str, step: int) -> Table:
    from rich.table import Table

    table = Table(title=f"{name}, step {step}: means over heads, worst query in brackets", title_justify="left")
    for column in ("layer", "recall", "", "density", "of the mask", "slashes", "bars"):
        table.add_column(column, justify="right")
    groups: list[tuple[str, list[HeadRecord]]] = [
        (str(layer), [r for r in records if r.layer == layer]) for layer in sorted({r.layer for r in records})
    ]
    for label, rows in [*groups, ("all", records)]:
        table.add_row(
            label,
            f"{statistics.fmean(r.recall for r in rows):.4f}",
            f"({min(r.worst for r in rows):.3f})",
            f"{statistics.fmean(r.density for r in rows):.2%}",
            f"{statistics.fmean(r.of_mask for r in rows):.2%}",
            f"{statistics.fmean(r.slashes for r in rows):.1f}",
            f"{statistics.fmean(r.bars for r in rows):.0f}",
            end_section=label == groups[-1][0],
        )
    return table


def _write_parquet(records: list[HeadRecord], out: Path) -> None:
    try:
        import pandas
        import pyarrow  # noqa: F401 - what pandas writes Parquet with
    except ImportError as error:
        raise ConfigError(f"--out {out}: needs pandas and pyarrow; {install_command('profile')}") from error
    out.parent.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame([dataclasses.asdict(r) for r in records]).to_parquet(out)


@app.command("kernels")
def kernels(
    seq: Annotated[str, typer.Option(metavar="N,...", help="Lengths, such as 32k,128k.")] = "auto",
    density: Annotated[str, typer.Option(metavar="D,...", help="Shares of the causal blocks on diagonals.")] = "0.1,0.05,0.02",
    bars: Annotated[int, typer.Option(metavar="N", help="Single columns a head.", min=0)] = 2048,
    heads: Annotated[str, typer.Option(metavar="Q/KV,...", help="Query and key-value heads.")] = "16/2",
    head_dim: Annotated[int, typer.Option(metavar="N", min=16)] = 128,
    block: Annotated[int, typer.Option(metavar="N", help="Tokens of a block.")] = 128,
    kernel: Annotated[str, typer.Option(metavar="NAME,...", help="Kernels under an index; empty = all that serve.")] = "",
    repeats: Annotated[int, typer.Option(metavar="N", min=1)] = 7,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Calibration to write, as JSON.", show_default=False)] = None,
) -> None:
    """Time the attention kernels of this machine, dense and under synthetic indices, side by side.

    [bold]Examples[/bold]

      [cyan]mtrain profile kernels[/cyan]
          lengths that suit this machine
      [cyan]mtrain profile kernels --seq 32k,128k,256k --out profiles/kernels-h200.json[/cyan]
          a calibration for the simulator
    """
    import torch
    from rich.console import Console

    from mtrain_cli.config.sizes import parse_size
    from mtrain_cli.profiling.kernels import Case, profile_kernels, save_calibration

    device = "cuda" if torch.cuda.is_available() else "cpu"
    lengths = _numbers("--seq", ("32k,128k" if device == "cuda" else "1k,2k") if seq == "auto" else seq, parse_size)
    densities = _numbers("--density", density, float)
    if any(not 0 < d <= 1 for d in densities):
        raise ConfigError(f"--density {density}: each must be above 0 and at most 1")
    if block not in (16, 32, 64, 128):
        raise ConfigError(f"--block {block}: must be 16, 32, 64 or 128")
    shapes = []
    for pair in heads.split(","):
        query, _, kv = pair.partition("/")
        if not (query.isdigit() and kv.isdigit() and int(kv) and int(query) and int(query) % int(kv) == 0):
            raise ConfigError(f"--heads {heads}: expected query heads / key-value heads that divide them, such as 16/2")
        shapes.append((int(query), int(kv)))
    cases = [
        Case(seq=s, heads=h, kv_heads=kv, head_dim=head_dim, block=block, density=d, bars=min(bars, s))
        for h, kv in shapes
        for s in lengths
        for d in densities
    ]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    console = Console(highlight=False, soft_wrap=True)
    names = [name.strip() for name in kernel.split(",") if name.strip()]
    _check_kernels(names)
    console.print(_HEADER)
    times = profile_kernels(cases, names, dtype, device, repeats, lambda found: console.print(_line(found)))
    if out is not None:
        save_calibration(times, out, " ".join(["mtrain", *sys.argv[1:]]), dtype, device)
        console.print(f"{len(times)} times in {out}")


def _check_kernels(names: list[str]) -> None:
    from mtrain_cli.config.schema import KERNELS

    for name in names:
        if name not in KERNELS or name == "auto":
            raise ConfigError(f"--kernel {name}: no such kernel; allowed: {', '.join(k for k in KERNELS if k != 'auto')}")


def _numbers(option: str, text: str, parse):
    values = []
    for part in text.split(","):
        try:
            values.append(parse(part.strip()))
        except ValueError:
            raise ConfigError(
                f"{option} {text}: {part.strip() or 'an empty item'} is no number; give items such as 32k,128k or 0.05"
            ) from None
    return values


_HEADER = f"{'kernel':<10} {'seq':>8} {'heads':>6} {'density':>8} {'bars':>6}  {'forward':>22} {'backward':>22}   ratio to dense"


def _line(found: KernelTime | str) -> str:
    if isinstance(found, str):
        return found
    case = found.case
    what = "dense" if case.density is None else f"{case.density:.1%}"
    parts = [f"{found.kernel:<10} {case.seq:>8} {case.heads:>3}/{case.kv_heads:<2} {what:>8} {case.bars:>6} "]
    for ms, tflops in ((found.forward_ms, found.forward_tflops), (found.backward_ms, found.backward_tflops)):
        parts.append(f"{ms:>10.3f} ms {tflops:>6.1f} TF")
    if found.forward_ratio and found.backward_ratio:
        parts.append(f"  {found.forward_ratio:.2f}x / {found.backward_ratio:.2f}x")
    return " ".join(parts)
