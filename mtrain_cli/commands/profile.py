"""`mtrain profile`: measure attention on this machine."""

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
    warn_of_idle,
    whole_number,
)
from mtrain_cli.config.schema import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from mtrain_cli.config.schema import Config
    from mtrain_cli.profiling.kernel_benchmark import KernelTime
    from mtrain_cli.profiling.pattern_quality import HeadRecord
    from mtrain_cli.sparsity.pattern import Pattern

app = typer.Typer(
    help="Measure on this machine: attention, messages, whole steps.",
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
            help="Patterns to measure on the same queries and keys; they need not be the one trained with.",
        ),
    ] = "vertical_slash",
    steps: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Training steps; the first and the last are measured.",
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
            help="Queries sampled in each layer, outside those that patterns probe.",
            min=1,
            max=MOST_TOKENS,
        ),
    ] = 256,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Parquet file, one row per step, pattern, layer and head; by default it goes into a folder of measurements/, which "
            "`mtrain report` draws.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """How much of dense attention patterns keep, layer by layer, on real training steps: by queries that were not probed.

    [bold]Examples[/bold]

      [cyan]mtrain profile sparsity[/cyan]
          the tiny model at its first and second step
      [cyan]mtrain profile sparsity --pattern vertical_slash,moba --steps 100 --every 25 sparsity.chunk=256 sparsity.top_k=3[/cyan]
          two patterns while a model learns; keys of a pattern apply to the pattern that has them
    """
    from mtrain_cli.console import Console
    from mtrain_cli.profiling.pattern_quality import profile_sparsity
    from mtrain_cli.sparsity.pattern import shown_name

    if out is not None and out.suffix != ".parquet":
        raise ConfigError(f"--out {out}: give a file that ends in .parquet")
    words = list(overrides or ())
    config, patterns = _patterns(words, pattern)
    warn_of_idle(words)
    replaced = "" if out is None else check_out(out, _is_sparsity_file, "sparsity profile")
    measured = sorted({1, steps, *range(every, steps + 1, every)} if every else {1, steps})
    console = Console(highlight=False, soft_wrap=True)

    def progress(step: int, loss: float | None) -> None:
        console.print(f"step {step}/{steps}  loss {'n.a.' if loss is None else f'{loss:.4f}'}")

    records = profile_sparsity(config, patterns, measured, rows, progress)
    for name in dict.fromkeys(r.pattern for r in records):
        for step in (measured[0], measured[-1])[: len(measured)]:
            title = f"{next(shown_name(p) for p in patterns if p.name == name)}, step {step}"
            console.print(
                _layers([r for r in records if r.pattern == name and r.step == step], title)
            )
    if out is None:
        folder = _leave_measurement(
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
    with writing(out):
        _write_parquet(records, out)
    console.print(f"{len(records)} rows in {out}{replaced}", markup=False)


def _leave_measurement(
    config: Config, words: list[str], records: list[HeadRecord], about: dict[str, Any]
) -> Path:
    """A folder in measurements/, as the other measurements leave one."""
    from mtrain_cli.commands.profile_imbalance import in_own_folder
    from mtrain_cli.launch import run_dir
    from mtrain_cli.profiling.records import HEAD_ROWS, SPARSITY, write_summary

    run = run_dir.create(in_own_folder(config, SPARSITY), words)
    facts = json.loads(run.environment.read_text()) if run.environment.exists() else {}
    try:
        with writing(run.path / HEAD_ROWS):
            _write_parquet(records, run.path / HEAD_ROWS)
            told = {
                "kind": SPARSITY,
                "complete": True,
                "command": facts.get("command", []),
                "environment": facts,
                "workers": 1,
            }
            write_summary(run.path, {**told, **about})
    finally:
        run.release()
    return run.path


def _patterns(overrides: list[str], names: str) -> tuple[Config, list[Pattern]]:
    """The configuration to train with, and the patterns with the keys of the command line that are theirs.

    A key such as sparsity.chunk goes to the measured pattern that has it, and to the trained one if it has it too.
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
                f"--pattern {name}: no such pattern{did_you_mean(name, allowed)}; allowed: {', '.join(allowed)}"
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
                f"{word}: give what is measured as --pattern NAME,... and what the model trains with as sparsity=NAME"
            )
        if not any(
            key in PATTERN_KEYS[name] for name in (*wanted, trained) if name in PATTERN_KEYS
        ):
            raise ConfigError(f"{word}: is a key of none of the patterns {', '.join(wanted)}")

    def composed(name: str) -> Config:
        own = [
            word
            for word in keys
            if word.partition("=")[0].removeprefix("sparsity.") in PATTERN_KEYS.get(name, ())
        ]
        return compose([*rest, f"sparsity={name}", "topology.workers=1", *own])

    made = []
    for name in wanted:
        config = composed(name)
        found = make_pattern(config.sparsity, config.seed)
        assert found is not None
        made.append(found)
    return composed(trained), made


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


def check_out(out: Path, is_own: Callable[[Path], bool], what: str) -> str:
    """What to say of an earlier result that will be replaced, if there is one. Makes the folders above.

    Raises:
        ConfigError: nothing can be written there, or something else would be lost. It is better known before a long measurement.
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
                    f"--out {out}: exists and is no {what} of mtrain; give another name, or remove it"
                )
            return f", in place of the {what} that was there"
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
def within_memory() -> Iterator[None]:
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
            "The next of these shapes does not fit the memory; give shorter --seq, fewer --heads or a smaller --head-dim"
        ) from error


@contextlib.contextmanager
def kept_beside(
    out: Path | None, save: Callable[[list[Any], Path], None]
) -> Iterator[Callable[[Any], None]]:
    """For times as they are taken: each is saved at once beside ``out``, whose place they take when all are there. Until then an earlier
    file stays, and what ends the measurement before says where they are. out: None keeps nothing.
    """
    so_far: list[Any] = []
    draft = None if out is None else out.with_name(f"{out.name}.partial")

    def keep(time: Any) -> None:
        so_far.append(time)
        if draft is not None:
            with writing(draft):
                save(so_far, draft)

    try:
        yield keep
    except BaseException:
        if draft is not None and so_far:
            print(f"stopped: {len(so_far)} times are kept in {draft}", file=sys.stderr)
        raise
    if draft is not None and out is not None:
        with writing(out):
            draft.replace(out)


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
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
    seq: Annotated[str, typer.Option(metavar="N,...", help="Lengths, such as 32k,128k.")] = "auto",
    density: Annotated[
        str,
        typer.Option(
            metavar="D,...",
            help="Shares of the causal blocks that diagonals fill, such as 0.05 or 5%.",
        ),
    ] = "0.1,0.05,0.02",
    columns: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Single columns a head; 2048 on a GPU and 1/64 of the length on a CPU.",
            min=0,
            max=MOST_TOKENS,
            show_default=False,
        ),
    ] = None,
    heads: Annotated[
        str, typer.Option(metavar="Q/KV,...", help="Query and key-value heads.")
    ] = "16/2",
    head_dim: Annotated[int, typer.Option(metavar="N", min=16, max=MOST_HEAD_DIM)] = 128,
    block: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Tokens of a block; 128 on a GPU and 16 on a CPU.", show_default=False
        ),
    ] = None,
    kernel: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Kernels under an index; empty = all that serve.",
            autocompletion=complete_kernels,
        ),
    ] = "",
    workers: Annotated[
        str,
        typer.Option(
            metavar="N,...",
            help="Also time the calls of one worker of so many, such as 8,32: steps of a ring, gathered keys.",
            show_default=False,
        ),
    ] = "",
    whole: Annotated[
        bool,
        typer.Option(
            "--whole/--no-whole", help="Whole sequences; with --workers they may be left out."
        ),
    ] = True,
    threads: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Threads on a CPU, as workers have them: cores / workers.",
            min=1,
            max=MOST_THREADS,
            show_default=False,
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, max=MOST_SAMPLES)] = 7,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Calibration to write, as JSON.", show_default=False),
    ] = None,
) -> None:
    """Time the attention kernels of this machine, dense and under synthetic indices, side by side.

    [bold]Examples[/bold]

      [cyan]mtrain profile kernels[/cyan]
          lengths that suit this machine
      [cyan]mtrain profile kernels --seq 512 --density 20%,5% --columns 8 --heads 4/2 --head-dim 32 --repeats 3[/cyan]
          a few seconds on a CPU, which shows the table and no speed: there nothing is skipped
      [cyan]mtrain profile kernels --seq 32k,128k,256k --out profiles/kernels-h200.json[/cyan]
          a calibration for the simulator
      [cyan]mtrain profile kernels --seq 128k --density 5% --workers 4,8 --out mine.json[/cyan]
          the same with the small calls that workers of a ring make
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
    lengths = numbers(
        "--seq", ("32k,128k" if device == "cuda" else "1k,2k") if seq == "auto" else seq, parse_size
    )
    if any(not 2 <= s <= MOST_TOKENS for s in lengths):
        raise ConfigError(f"--seq {seq}: each must be at least 2 tokens and at most 64m")
    densities = numbers("--density", density, parse_share)
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
    of_so_many = numbers("--workers", workers, whole_number) if workers else []
    for n in of_so_many:
        if not 2 <= n <= MOST_WORKERS:
            raise ConfigError(
                f"--workers {workers}: each must be at least 2 workers and at most {MOST_WORKERS:,}"
            )
        if not any(s % (2 * n * block) == 0 for s in lengths):
            raise ConfigError(
                f"--workers {n}: none of --seq {seq} can be dealt to so many in whole blocks: a multiple of {2 * n * block}"
            )
    if not whole and not of_so_many:
        raise ConfigError("--no-whole: leaves nothing to time; give --workers N, too")
    if threads is not None:
        if device == "cuda":
            raise ConfigError(f"--threads {threads}: is for CPUs; leave it out")
        torch.set_num_threads(threads)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    names = [name.strip() for name in kernel.split(",") if name.strip()]
    _check_kernels(names)
    absent = [
        (name, reason)
        for name, reason, everywhere in unsupported_kernels(cases, names, dtype, device)
        if everywhere
    ]
    if names and {name for name, _ in absent} >= set(names):
        raise ConfigError(*(f"--kernel {name}: {reason}" for name, reason in absent))
    replaced = "" if out is None else check_out(out, is_calibration, "calibration")
    console = Console(highlight=False, soft_wrap=True)
    width = limit(console)
    narrow = width is not None and width < len(_header(False, device == "cuda"))
    # A CPU computes whole products and masks them, so FLOP/s would say nothing of the kernel.
    speed = device == "cuda"
    console.print(_header(narrow, speed))
    command = " ".join(["mtrain", *sys.argv[1:]])
    with (
        within_memory(),
        kept_beside(
            out, lambda times, file: save_calibration(times, file, command, dtype, device)
        ) as keep,
    ):

        def whole_one(found: KernelTime) -> None:
            console.print(_line(found, narrow, speed))
            keep(found)

        def share_of_one(found: KernelTime) -> None:
            console.print(
                _line(found, narrow, speed)
                + (_NEXT if narrow else "  ")
                + f"1/{found.workers} {found.what}"
            )
            keep(found)

        times = profile_kernels(cases if whole else [], names, dtype, device, repeats, whole_one)
        if of_so_many:
            from mtrain_cli.profiling.worker_calls import profile_worker_calls

            console.print("one worker's calls")
            times += profile_worker_calls(
                cases, of_so_many, names, dtype, device, repeats, share_of_one
            )
    say(
        console,
        f"{_LEGEND}{_LEGEND_OF_SPEED if speed and not narrow else ''}.{_left_out(speed) if narrow else ''}",
    )
    for name, reason, everywhere in unsupported_kernels(cases, names, dtype, device):
        console.print(f"{name}: {reason}" + ("" if everywhere else " (some of the shapes)"))
    if out is not None:
        console.print(f"{len(times)} times in {out}{replaced}")


def _heads(heads: str, query: str, kv: str) -> tuple[int, int]:
    try:
        found = whole_number(query), whole_number(kv)
    except ValueError:
        found = 0, 0
    if not (0 < found[1] <= found[0] <= MOST_HEADS and found[0] % found[1] == 0):
        raise ConfigError(
            f"--heads {heads}: expected query heads / key-value heads that divide them, such as 16/2; at most {MOST_HEADS:,}"
        )
    return found


def _check_kernels(names: list[str]) -> None:
    from mtrain_cli.config.schema import KERNELS

    for name in names:
        if name not in KERNELS or name == "auto":
            raise ConfigError(
                f"--kernel {name}: no such kernel; allowed: {', '.join(k for k in KERNELS if k != 'auto')}"
            )


def numbers(option: str, text: str, parse):
    values = []
    for part in text.split(","):
        try:
            values.append(parse(part.strip()))
        except ValueError:
            example = {"--seq": "32k,128k", "--workers": "8,32"}.get(option, "0.05 or 5%")
            raise ConfigError(
                f"{option} {text}: {part.strip() or 'an empty item'} is no number; give items such as {example}"
            ) from None
    return values


_NEXT = "\n" + " " * 11
_LEGEND = "diagonals: share of the causal blocks asked for; columns: single ones a head; pairs: share of the causal pairs that is computed"
_LEGEND_OF_SPEED = ", for which TF (TFLOP/s) counts"


def _header(narrow: bool, speed: bool) -> str:
    if narrow:
        return f"{'kernel':<10} {'seq':>8} {'diagonals':>9} {'columns':>8} {'pairs':>7} {'forward':>13} {'backward':>13}"
    times = f"{'forward':>23} {'backward':>23}" if speed else f"{'forward':>13} {'backward':>13}"
    return f"{'kernel':<10} {'seq':>8} {'heads':>6} {'diagonals':>9} {'columns':>8} {'pairs':>7} {times}   ratio to dense"


def _left_out(speed: bool) -> str:
    return f" For want of width without heads{', TFLOP/s' if speed else ''} and ratios; a wider terminal has them."


def _line(found: KernelTime, narrow: bool, speed: bool) -> str:
    """speed: whether TFLOP/s are shown."""
    case = found.case
    what = "dense" if case.density is None else f"{case.density:.1%}"
    columns = (
        ""
        if case.density is None
        else f"all {case.seq}"
        if case.columns == case.seq
        else str(case.columns)
    )
    share = found.pairs / (case.heads * math.comb(case.seq + 1, 2))
    if narrow:
        times = f"{found.forward_ms:>10.3f} ms {found.backward_ms:>10.3f} ms"
        return f"{found.kernel:<10} {case.seq:>8} {what:>9} {columns:>8} {share:>7.1%} {times}"
    parts = [
        f"{found.kernel:<10} {case.seq:>8} {case.heads:>3}/{case.kv_heads:<2} {what:>9} {columns:>8} {share:>7.1%}"
    ]
    for ms, tflops in (
        (found.forward_ms, found.forward_tflops),
        (found.backward_ms, found.backward_tflops),
    ):
        parts.append(f"{ms:>10.3f} ms" + (f" {tflops:>6.1f} TF" if speed else ""))
    if found.forward_ratio and found.backward_ratio:
        parts.append(f"  {found.forward_ratio:.2f}x / {found.backward_ratio:.2f}x")
    return " ".join(parts)
