"""`mtrain profile`: `sparsity` and `kernels`, and what all profile commands share."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtrain_cli.commands.completion import complete_kernels, complete_overrides
from mtrain_cli.commands.options import (
    MOST_HEAD_DIM,
    MOST_HEADS,
    MOST_SAMPLES,
    MOST_STEPS,
    MOST_THREADS,
    MOST_TOKENS,
    MOST_WORKERS,
    parse_whole_number,
    warn_of_unused_settings,
)
from mtrain_cli.config.schema import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from mtrain_cli.config.schema import Config
    from mtrain_cli.profiling.kernel_benchmark import KernelTime
    from mtrain_cli.profiling.pattern_quality import HeadRecord
    from mtrain_cli.sparsity.pattern import Pattern

app = typer.Typer(
    help="Measure attention, messages and training steps on this machine.",
    rich_markup_mode="rich",
    no_args_is_help=True,
)


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
        typer.Option(
            metavar="NAME,...",
            help="Patterns to measure on the same queries and keys; the model may train with "
            "another one.",
        ),
    ] = "vertical_slash",
    steps: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Number of training steps; the first and the last are measured.",
            min=1,
            max=MOST_STEPS,
        ),
    ] = 2,
    every: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Also measure every N steps; 0 = only the first and the last.",
            min=0,
            max=MOST_STEPS,
        ),
    ] = 0,
    rows: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Sampled queries per layer, outside those that the patterns probe.",
            min=1,
            max=MOST_TOKENS,
        ),
    ] = 256,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Parquet file with one row per step, pattern, layer and head; by default a folder "
            "in measurements/, which `mtrain report` can show.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Measure how much of dense attention the patterns cover on real training steps, per layer.

    Only queries that the patterns did not probe count.

    [bold]Examples[/bold]

      [cyan]mtrain profile sparsity[/cyan]
          Measure the tiny model at its first and second step
      [cyan]mtrain profile sparsity --pattern moba,fixed --steps 99 sparsity.top_k=3[/cyan]
          Compare two patterns as a model learns; a key goes to its own pattern
    """
    from mtrain_cli.console import Console
    from mtrain_cli.profiling.pattern_quality import profile_sparsity
    from mtrain_cli.sparsity.pattern import display_name

    if out is not None and out.suffix != ".parquet":
        raise ConfigError(f"--out {out}: give a file that ends in .parquet")
    words = list(overrides or ())
    config, patterns = _patterns(words, pattern)
    warn_of_unused_settings(words)
    replaced = "" if out is None else check_output(out, _is_sparsity_file, "sparsity profile")
    measured = sorted({1, steps, *range(every, steps + 1, every)} if every else {1, steps})
    console = Console(highlight=False, soft_wrap=True)

    def progress(step: int, loss: float | None) -> None:
        console.print(f"step {step}/{steps}  loss {'n.a.' if loss is None else f'{loss:.4f}'}")

    records = profile_sparsity(config, patterns, measured, rows, progress)
    for name in dict.fromkeys(r.pattern for r in records):
        for step in (measured[0], measured[-1])[: len(measured)]:
            title = f"{next(display_name(p) for p in patterns if p.name == name)}, step {step}"
            console.print(
                _layers([r for r in records if r.pattern == name and r.step == step], title)
            )
    if out is None:
        folder = _save_measurement(
            config,
            words,
            records,
            {"patterns": [p.name for p in patterns], "steps": measured, "rows": rows},
        )
        console.print(
            f"files  {folder}",
            f"draw   mtrain report {shlex.quote(str(folder))}",
            sep="\n",
            markup=False,
        )
        return
    with reporting_write_errors(out):
        _write_parquet(records, out)
    console.print(f"{len(records)} rows in {out}{replaced}", markup=False)


def _save_measurement(
    config: Config, words: list[str], records: list[HeadRecord], about: dict[str, Any]
) -> Path:
    """Save the records as a folder in measurements/ and return it."""
    from mtrain_cli.commands.options import with_measurement_folder
    from mtrain_cli.launch import run_dir
    from mtrain_cli.records.record_files import HEAD_ROWS, SPARSITY, write_summary

    run = run_dir.create(with_measurement_folder(config, SPARSITY), words)
    facts = json.loads(run.environment.read_text()) if run.environment.exists() else {}
    try:
        with reporting_write_errors(run.path / HEAD_ROWS):
            _write_parquet(records, run.path / HEAD_ROWS)
            header = {
                "kind": SPARSITY,
                "complete": True,
                "command": facts.get("command", []),
                "environment": facts,
                "workers": 1,
            }
            write_summary(run.path, {**header, **about})
    finally:
        run.release()
    return run.path


def _patterns(overrides: list[str], names: str) -> tuple[Config, list[Pattern]]:
    """Return the configuration to train with, and the patterns to measure.

    A key such as sparsity.chunk goes to each of these patterns that has it.
    """
    from mtrain_cli.config.compose import compose
    from mtrain_cli.config.schema import PATTERN_KEYS, PATTERNS
    from mtrain_cli.config.suggest import did_you_mean
    from mtrain_cli.sparsity.pattern_registry import make_pattern

    wanted = [name.strip() for name in names.split(",") if name.strip()]
    allowed = [name for name in PATTERNS if name != "dense"]
    for name in wanted:
        if name not in allowed:
            raise ConfigError(
                f"--pattern {name}: no such pattern{did_you_mean(name, allowed)}; "
                f"allowed: {', '.join(allowed)}"
            )
    if not wanted:
        raise ConfigError(f"--pattern {names!r}: names no pattern; allowed: {', '.join(allowed)}")
    trained = next(
        (w.removeprefix("sparsity=") for w in overrides if w.startswith("sparsity=")), "dense"
    )
    keys = [word for word in overrides if word.startswith("sparsity.")]
    rest = [
        word
        for word in overrides
        if not word.startswith(("sparsity.", "topology.workers=", "sparsity="))
    ]
    for word in keys:
        key = word.partition("=")[0].removeprefix("sparsity.")
        if key == "pattern":
            raise ConfigError(
                f"{word}: give the patterns to measure as --pattern NAME,... and the one to train "
                "with as sparsity=NAME"
            )
        if not any(
            key in PATTERN_KEYS[name] for name in (*wanted, trained) if name in PATTERN_KEYS
        ):
            raise ConfigError(f"{word}: none of the patterns {', '.join(wanted)} has this key")

    def compose_with(name: str) -> Config:
        own = [
            word
            for word in keys
            if word.partition("=")[0].removeprefix("sparsity.") in PATTERN_KEYS.get(name, ())
        ]
        return compose([*rest, f"sparsity={name}", "topology.workers=1", *own])

    patterns = []
    for name in wanted:
        config = compose_with(name)
        built = make_pattern(config.sparsity, config.seed)
        assert built is not None
        patterns.append(built)
    return compose_with(trained), patterns


def _layers(records: list[HeadRecord], title: str) -> Table:
    from mtrain_cli.reporting.tables import sparsity_table

    return sparsity_table([dataclasses.asdict(r) for r in records], title)


def _is_sparsity_file(out: Path) -> bool:
    import pyarrow
    import pyarrow.parquet

    from mtrain_cli.profiling.pattern_quality import HeadRecord

    try:
        names = set(pyarrow.parquet.read_schema(out).names)
    except (pyarrow.ArrowException, OSError):
        return False
    return names >= {field.name for field in dataclasses.fields(HeadRecord)}


def is_calibration(out: Path, kind: str = "kernels") -> bool:
    try:
        document = json.loads(out.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(document, dict) and document.get("kind") == kind and "schema" in document


def check_output(out: Path, is_own: Callable[[Path], bool], description: str) -> str:
    """Check before a long measurement that the file can be written, and create its folders.

    Args:
        is_own: whether an existing file is an earlier result, which may be replaced.
        description: what the file holds, for messages.

    Returns:
        A remark that an earlier result will be replaced, or "".

    Raises:
        ConfigError: the file cannot be written, or something else would be lost.
    """
    try:
        if out.is_dir():
            raise ConfigError(f"--out {out}: is a folder; give a file")
        if out.exists():
            with out.open("r+b"):
                pass
            if not out.is_file() or not out.stat().st_size:
                return ""
            if not is_own(out):
                raise ConfigError(
                    f"--out {out}: exists and is not a {description} of mtrain; "
                    "give another name, or remove it"
                )
            return f", in place of the {description} that was there"
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("xb"):
            pass
        out.unlink()
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"--out {out}: a part of the path is a file, not a folder") from error
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror or error}") from error
    return ""


@contextlib.contextmanager
def reporting_out_of_memory() -> Iterator[None]:
    import torch

    from mtrain_cli.launch.failures import RunError

    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if (
            isinstance(error, RuntimeError)
            and not isinstance(error, torch.OutOfMemoryError)
            and "allocate memory" not in str(error)
        ):
            raise
        raise RunError(
            "The next of these shapes does not fit in memory; give shorter --seq, fewer --heads "
            "or a smaller --head-dim"
        ) from error


@contextlib.contextmanager
def saving_partial_results(
    out: Path | None, save: Callable[[list[Any], Path], None]
) -> Iterator[Callable[[Any], None]]:
    """Yield a function that saves each measured time at once, to a file next to ``out``.

    It replaces ``out`` when the measurement is complete. If it stops early, an earlier ``out``
    stays, and a message names the partial file. With out=None nothing is saved.
    """
    times: list[Any] = []
    draft = None if out is None else out.with_name(f"{out.name}.partial")

    def add(time: Any) -> None:
        times.append(time)
        if draft is not None:
            with reporting_write_errors(draft):
                save(times, draft)

    try:
        yield add
    except BaseException:
        if draft is not None and times:
            print(f"stopped: {len(times)} times are kept in {draft}", file=sys.stderr)
        raise
    if draft is not None and out is not None:
        with reporting_write_errors(out):
            draft.replace(out)


@contextlib.contextmanager
def reporting_write_errors(out: Path) -> Iterator[None]:
    from mtrain_cli.launch.failures import RunError

    try:
        yield
    except OSError as error:
        raise RunError(f"--out {out}: could not be written: {error.strerror or error}") from error


def _write_parquet(records: list[HeadRecord], out: Path) -> None:
    import pandas

    pandas.DataFrame([dataclasses.asdict(r) for r in records]).to_parquet(out)


@app.command("kernels")
def kernels(
    seq: Annotated[
        str,
        typer.Option(
            metavar="N,...",
            help="Sequence lengths, such as 32k,128k. auto = 32k,128k on a GPU, 1k,2k on a CPU.",
        ),
    ] = "auto",
    density: Annotated[
        str,
        typer.Option(
            metavar="D,...",
            help="Shares of the causal blocks that slashes fill, such as 0.05 or 5%.",
        ),
    ] = "0.1,0.05,0.02",
    columns: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Columns per head; by default 2048 on a GPU, 1/64 of the length on a CPU.",
            min=0,
            max=MOST_TOKENS,
            show_default=False,
        ),
    ] = None,
    heads: Annotated[
        str, typer.Option(metavar="Q/KV,...", help="Numbers of query and key-value heads.")
    ] = "16/2",
    head_dim: Annotated[
        int, typer.Option(metavar="N", help="Width of one head.", min=16, max=MOST_HEAD_DIM)
    ] = 128,
    block: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Tokens per block; by default 128 on a GPU, 16 on a CPU.",
            show_default=False,
        ),
    ] = None,
    kernel: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Kernels to time with an index; by default all that support it.",
            autocompletion=complete_kernels,
        ),
    ] = "",
    workers: Annotated[
        str,
        typer.Option(
            metavar="N,...",
            help="Also time the calls of one worker among N, such as 8,32: ring steps and gathered "
            "keys.",
            show_default=False,
        ),
    ] = "",
    whole: Annotated[
        bool,
        typer.Option(
            "--whole/--no-whole",
            help="Time whole sequences; --no-whole times only the calls of --workers.",
        ),
    ] = True,
    threads: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="CPU threads; a worker has cores / workers.",
            min=1,
            max=MOST_THREADS,
            show_default=False,
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option(metavar="N", help="Samples per time.", min=1, max=MOST_SAMPLES)
    ] = 7,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Calibration file to write (JSON).", show_default=False),
    ] = None,
) -> None:
    """Time this machine's attention kernels, dense and with synthetic indices.

    [bold]Examples[/bold]

      [cyan]mtrain profile kernels[/cyan]
          Time lengths that suit this machine
      [cyan]mtrain profile kernels --seq 512 --density 20%,5% --columns 8 --heads 4/2[/cyan]
          Try the command on a CPU, in seconds; CPU kernels skip no pairs
      [cyan]mtrain profile kernels --seq 32k,128k,256k --out profiles/kernels-h200.json[/cyan]
          Write a calibration for the simulator
      [cyan]mtrain profile kernels --seq 128k --density 5% --workers 8 --out mine.json[/cyan]
          Include the smaller calls of ring workers
    """
    import torch

    from mtrain_cli.config.sizes import parse_share, parse_size
    from mtrain_cli.console import Console
    from mtrain_cli.profiling.kernel_benchmark import (
        KernelCase,
        profile_kernels,
        save_calibration,
        unsupported_kernels,
    )
    from mtrain_cli.reporting.terminal_width import limit, say

    device = "cuda" if torch.cuda.is_available() else "cpu"
    lengths = parse_numbers(
        "--seq", ("32k,128k" if device == "cuda" else "1k,2k") if seq == "auto" else seq, parse_size
    )
    if any(not 2 <= s <= MOST_TOKENS for s in lengths):
        raise ConfigError(f"--seq {seq}: each must be at least 2 tokens and at most 64m")
    densities = parse_numbers("--density", density, parse_share)
    if any(not 0 < d <= 1 for d in densities):
        raise ConfigError(f"--density {density}: each must be above 0 and at most 1, which is 100%")
    if block is None:
        block = 128 if device == "cuda" else 16
    if block not in (16, 32, 64, 128):
        raise ConfigError(f"--block {block}: must be 16, 32, 64 or 128")
    shapes = []
    for pair in heads.split(","):
        query, _, kv = pair.partition("/")
        shapes.append(_heads(heads, query, kv))

    def columns_at(length: int) -> int:
        return min(
            columns if columns is not None else 2048 if device == "cuda" else length // 64, length
        )

    cases = [
        KernelCase(
            seq=s,
            heads=h,
            kv_heads=kv,
            head_dim=head_dim,
            block=block,
            density=d,
            columns=columns_at(s),
        )
        for h, kv in shapes
        for s in lengths
        for d in densities
    ]
    worker_counts = parse_numbers("--workers", workers, parse_whole_number) if workers else []
    for n in worker_counts:
        if not 2 <= n <= MOST_WORKERS:
            raise ConfigError(
                f"--workers {workers}: each must be at least 2 workers and at most {MOST_WORKERS:,}"
            )
        if not any(s % (2 * n * block) == 0 for s in lengths):
            raise ConfigError(
                f"--workers {n}: none of --seq {seq} divides into whole blocks for {n} workers; "
                f"give a multiple of {2 * n * block}"
            )
    if not whole and not worker_counts:
        raise ConfigError("--no-whole: leaves nothing to time; add --workers N")
    if threads is not None:
        if device == "cuda":
            raise ConfigError(f"--threads {threads}: only for CPUs; leave it out")
        torch.set_num_threads(threads)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    names = [name.strip() for name in kernel.split(",") if name.strip()]
    _check_kernels(names)
    unsupported = [
        (name, reason)
        for name, reason, everywhere in unsupported_kernels(cases, names, dtype, device)
        if everywhere
    ]
    if names and {name for name, _ in unsupported} >= set(names):
        raise ConfigError(*(f"--kernel {name}: {reason}" for name, reason in unsupported))
    replaced = "" if out is None else check_output(out, is_calibration, "calibration")
    console = Console(highlight=False, soft_wrap=True)
    width = limit(console)
    narrow = width is not None and width < len(_header(False, device == "cuda"))
    # CPU kernels compute whole products and mask them, so their FLOP/s would be meaningless.
    speed = device == "cuda"
    console.print(_header(narrow, speed))
    command = " ".join(["mtrain", *sys.argv[1:]])
    with (
        reporting_out_of_memory(),
        saving_partial_results(
            out, lambda times, file: save_calibration(times, file, command, dtype, device)
        ) as add,
    ):

        def add_whole(time: KernelTime) -> None:
            console.print(_line(time, narrow, speed))
            add(time)

        def add_worker_call(time: KernelTime) -> None:
            console.print(
                _line(time, narrow, speed)
                + (_NEXT if narrow else "  ")
                + f"1/{time.workers} {time.what}"
            )
            add(time)

        times = profile_kernels(cases if whole else [], names, dtype, device, repeats, add_whole)
        if worker_counts:
            from mtrain_cli.profiling.worker_calls import profile_worker_calls

            console.print("calls of one worker")
            times += profile_worker_calls(
                cases, worker_counts, names, dtype, device, repeats, add_worker_call
            )
    legend = _LEGEND + (_LEGEND_OF_SPEED if speed and not narrow else "") + "."
    say(console, legend + (_left_out(speed) if narrow else ""))
    for name, reason, everywhere in unsupported_kernels(cases, names, dtype, device):
        console.print(f"{name}: {reason}" + ("" if everywhere else " (some of the shapes)"))
    if out is not None:
        console.print(f"{len(times)} times in {out}{replaced}")


def _heads(heads: str, query: str, kv: str) -> tuple[int, int]:
    try:
        parsed = parse_whole_number(query), parse_whole_number(kv)
    except ValueError:
        parsed = 0, 0
    if not (0 < parsed[1] <= parsed[0] <= MOST_HEADS and parsed[0] % parsed[1] == 0):
        raise ConfigError(
            f"--heads {heads}: expected QUERY/KV heads, where KV divides QUERY, such as 16/2; "
            f"at most {MOST_HEADS:,}"
        )
    return parsed


def _check_kernels(names: list[str]) -> None:
    from mtrain_cli.config.schema import KERNELS

    allowed = [name for name in KERNELS if name != "auto"]
    for name in names:
        if name not in allowed:
            raise ConfigError(f"--kernel {name}: no such kernel; allowed: {', '.join(allowed)}")


def parse_numbers(option: str, text: str, parse):
    values = []
    for part in text.split(","):
        try:
            values.append(parse(part.strip()))
        except ValueError:
            example = {"--seq": "32k,128k", "--workers": "8,32"}.get(option, "0.05 or 5%")
            raise ConfigError(
                f"{option} {text}: {part.strip() or 'an empty item'} is not a number; "
                f"give items such as {example}"
            ) from None
    return values


_NEXT = "\n" + " " * 11
_LEGEND = (
    "slashes: requested share of the causal blocks; columns: per head; pairs: share of the causal "
    "pairs that is computed"
)
_LEGEND_OF_SPEED = " and that TF (TFLOP/s) counts"


def _header(narrow: bool, speed: bool) -> str:
    if narrow:
        return (
            f"{'kernel':<10} {'seq':>8} {'slashes':>9} {'columns':>8} {'pairs':>7} "
            f"{'forward':>13} {'backward':>13}"
        )
    times = f"{'forward':>23} {'backward':>23}" if speed else f"{'forward':>13} {'backward':>13}"
    return (
        f"{'kernel':<10} {'seq':>8} {'heads':>6} {'slashes':>9} {'columns':>8} {'pairs':>7} "
        f"{times}   ratio to dense"
    )


def _left_out(speed: bool) -> str:
    columns = f"heads{', TFLOP/s' if speed else ''} and ratios"
    return f" A wider terminal also shows {columns}."


def _line(time: KernelTime, narrow: bool, speed: bool) -> str:
    """Return a table row. speed: whether to show TFLOP/s."""
    case = time.case
    slashes = "dense" if case.density is None else f"{case.density:.1%}"
    columns = (
        ""
        if case.density is None
        else f"all {case.seq}"
        if case.columns == case.seq
        else str(case.columns)
    )
    share = time.pairs / (case.heads * math.comb(case.seq + 1, 2))
    counts = f"{slashes:>9} {columns:>8} {share:>7.1%}"
    if narrow:
        times = f"{time.forward_ms:>10.3f} ms {time.backward_ms:>10.3f} ms"
        return f"{time.kernel:<10} {case.seq:>8} {counts} {times}"
    parts = [f"{time.kernel:<10} {case.seq:>8} {case.heads:>3}/{case.kv_heads:<2} {counts}"]
    for ms, tflops in (
        (time.forward_ms, time.forward_tflops),
        (time.backward_ms, time.backward_tflops),
    ):
        parts.append(f"{ms:>10.3f} ms" + (f" {tflops:>6.1f} TF" if speed else ""))
    if time.forward_ratio and time.backward_ratio:
        parts.append(f"  {time.forward_ratio:.2f}x / {time.backward_ratio:.2f}x")
    return " ".join(parts)
