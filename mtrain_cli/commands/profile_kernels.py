"""`mtrain profile kernels`: time this machine's attention kernels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

from mtrain_cli.commands.completion import complete_kernels
from mtrain_cli.commands.options import (
    MOST_HEAD_DIM,
    MOST_HEADS,
    MOST_SAMPLES,
    MOST_TOKENS,
    MOST_WORKERS,
    CalibrationOut,
    Threads,
    bounded,
    flag,
    name_list,
    option,
    parse_items,
    parse_names,
    parse_whole_number,
)
from mtrain_cli.commands.profile import (
    Column,
    Lines,
    app,
    calibrating,
    heads_column,
    pass_columns,
    set_threads,
)
from mtrain_cli.commands.profile_masks import time_masks
from mtrain_cli.config.schema import KERNELS, ConfigError

if TYPE_CHECKING:
    from mtrain_cli.profiling.kernel_benchmark import KernelBench, KernelCase, KernelTime

_BLOCKS = (16, 32, 64, 128)
_LENGTHS = {"cuda": "32k,128k", "cpu": "1k,2k"}
_LENGTHS_OF_MASKS = {"cuda": "4k,8k,16k,32k,64k,128k", "cpu": "1k,2k"}
_DENSITIES = "0.1,0.05,0.02"


@app.command("kernels")
def kernels(
    seq: Annotated[str, option("N,...")] = "auto",
    density: Annotated[str, option("D,...")] = _DENSITIES,
    columns: Annotated[int | None, bounded(0, MOST_TOKENS)] = None,
    heads: Annotated[str, option("Q/KV,...")] = "16/2",
    head_dim: Annotated[int, bounded(16, MOST_HEAD_DIM)] = 128,
    block: Annotated[int | None, option("N")] = None,
    kernel: Annotated[str, name_list(complete_kernels)] = "",
    mask: Annotated[str, name_list()] = "",
    compare: Annotated[str, name_list()] = "",
    workers: Annotated[str, option("N,...")] = "",
    whole: Annotated[bool, flag("--whole/--no-whole")] = True,
    threads: Threads = None,
    repeats: Annotated[int, bounded(1, MOST_SAMPLES)] = 7,
    out: CalibrationOut = None,
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
      [cyan]mtrain profile kernels --mask all --compare flex --out masks.json[/cyan]
          Time dense attention under masks, and FlexAttention in the same run

    Args:
        seq: Sequence lengths, such as 32k,128k. auto = 32k,128k on a GPU (4k to 128k with
            --mask), 1k,2k on a CPU.
        density: Shares of the causal blocks that slashes fill, such as 0.05 or 5%.
        columns: Single key columns per head; by default 2048 on a GPU, 1/64 of the length on a CPU.
        heads: Numbers of query and key-value heads.
        head_dim: Width of one head.
        block: Tokens per block; by default 128 on a GPU, 16 on a CPU.
        kernel: Kernels to time with an index, by default all that support it; or with --mask, by
            default the one that train.kernel=auto takes.
        mask: Time dense attention under these masks instead of indices: full, causal, documents,
            documents_full, documents_block_causal, window, video, shared_question; or all.
        compare: Also time flex, which is PyTorch's FlexAttention, under the same masks.
        workers: Also time the kernel calls of one worker when N workers share the sequence, in a
            ring and in an all-gather; such as 8,32.
        whole: Time whole sequences. --no-whole times only the calls that --workers adds.
        repeats: Samples per measured time.
    """
    import torch

    from mtrain_cli.console import Console
    from mtrain_cli.profiling.kernel_benchmark import KernelBench, profile_kernels
    from mtrain_cli.profiling.timing import ResultFile
    from mtrain_cli.profiling.worker_calls import profile_worker_calls
    from mtrain_cli.reporting.terminal_width import limit, say

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if mask or compare:
        _refuse_with_masks(mask, density, columns, block, workers, whole)
    usual = (_LENGTHS_OF_MASKS if mask else _LENGTHS)[device]
    cases = _parse_cases(
        device, usual if seq == "auto" else seq, density, columns, heads, head_dim, block
    )
    counts = _parse_workers(workers, seq, cases)
    if not whole and not counts:
        raise ConfigError("--no-whole: leaves nothing to time; add --workers N")
    set_threads(threads, device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    names = parse_names("--kernel", kernel, [k for k in KERNELS if k != "auto"]) if kernel else []
    bench = KernelBench(names, dtype, device, repeats)
    if mask:
        time_masks(bench, mask, compare, list(dict.fromkeys(case.dense for case in cases)), out)
        return
    _require_a_kernel(bench, names, cases)
    console = Console(highlight=False, soft_wrap=True)
    lines, legend = _lines(limit(console), device)
    with calibrating(console, out, ResultFile("kernels", device, dtype), lines) as add:
        for time in profile_kernels(bench, cases if whole else []):
            add(time)
        if counts:
            console.print("calls of one worker")
        between = "\n" + " " * 11 if lines.narrow else "  "
        for time in profile_worker_calls(bench, cases, counts):
            add(time, f"{between}1/{time.workers} {time.what}")
        say(console, legend)
        for name, reason, everywhere in bench.unsupported(cases):
            console.print(f"{name}: {reason}" + ("" if everywhere else " (some of the shapes)"))


def _refuse_with_masks(
    mask: str, density: str, columns: int | None, block: int | None, workers: str, whole: bool
) -> None:
    """Raise ConfigError for options that do not go with --mask, and for --compare without it."""
    if not mask:
        raise ConfigError("--compare: needs --mask, such as --mask causal,documents")
    given = {
        "--density": density != _DENSITIES, "--columns": columns is not None,
        "--block": block is not None, "--workers": bool(workers), "--no-whole": not whole,
    }  # fmt: skip
    if wrong := [name for name, is_given in given.items() if is_given]:
        raise ConfigError(
            f"{', '.join(wrong)}: --mask times dense attention over whole sequences; give either"
        )


def _parse_cases(
    device: str,
    seq: str,
    density: str,
    columns: int | None,
    heads: str,
    head_dim: int,
    block: int | None,
) -> list[KernelCase]:
    """Return a case for each shape of heads, length and density."""
    from mtrain_cli.config.sizes import parse_share, parse_size
    from mtrain_cli.profiling.kernel_benchmark import KernelCase

    gpu = device == "cuda"
    lengths = parse_items("--seq", seq, parse_size, "32k,128k")
    if any(not 2 <= length <= MOST_TOKENS for length in lengths):
        raise ConfigError(f"--seq {seq}: each must be at least 2 tokens and at most 64m")
    densities = parse_items("--density", density, parse_share, "0.05 or 5%")
    if any(not 0 < share <= 1 for share in densities):
        raise ConfigError(f"--density {density}: each must be above 0 and at most 1, which is 100%")
    if block is None:
        block = 128 if gpu else 16
    if block not in _BLOCKS:
        raise ConfigError(f"--block {block}: must be 16, 32, 64 or 128")
    shapes = [_parse_heads(heads, pair) for pair in heads.split(",")]

    def columns_at(length: int) -> int:
        usual_columns = 2048 if gpu else length // 64
        return min(usual_columns if columns is None else columns, length)

    return [
        KernelCase(
            seq=length,
            heads=query,
            kv_heads=kv,
            head_dim=head_dim,
            block=block,
            density=share,
            columns=columns_at(length),
        )
        for query, kv in shapes
        for length in lengths
        for share in densities
    ]


def _parse_heads(heads: str, pair: str) -> tuple[int, int]:
    try:
        query, kv = map(parse_whole_number, pair.split("/"))
    except ValueError:
        query, kv = 0, 0
    if not (0 < kv <= query <= MOST_HEADS and query % kv == 0):
        raise ConfigError(
            f"--heads {heads}: expected QUERY/KV heads, where KV divides QUERY, such as 16/2; "
            f"at most {MOST_HEADS:,}"
        )
    return query, kv


def _parse_workers(workers: str, seq: str, cases: list[KernelCase]) -> list[int]:
    """Return the numbers of workers whose calls are timed."""
    counts = parse_items("--workers", workers, parse_whole_number, "8,32") if workers else []
    for count in counts:
        if not 2 <= count <= MOST_WORKERS:
            raise ConfigError(
                f"--workers {workers}: each must be at least 2 workers and at most {MOST_WORKERS:,}"
            )
        if not any(case.seq % (2 * count * case.block) == 0 for case in cases):
            raise ConfigError(
                f"--workers {count}: none of --seq {seq} divides into whole blocks for {count} "
                f"workers; give a multiple of {2 * count * cases[0].block}"
            )
    return counts


def _require_a_kernel(bench: KernelBench, names: list[str], cases: list[KernelCase]) -> None:
    """Raise ConfigError if none of the named kernels supports a case."""
    reasons = {name: reason for name, reason, everywhere in bench.unsupported(cases) if everywhere}
    if names and reasons.keys() >= set(names):
        raise ConfigError(*(f"--kernel {name}: {reason}" for name, reason in reasons.items()))


def _lines(width: int | None, device: str) -> tuple[Lines, str]:
    """Return the table and its legend. A narrow table omits heads, FLOP/s and ratios."""

    def slashes(time: KernelTime) -> str:
        return "dense" if time.case.density is None else f"{time.case.density:.1%}"

    def columns(time: KernelTime) -> str:
        case = time.case
        if case.density is None:
            return ""
        return f"all {case.seq}" if case.columns == case.seq else str(case.columns)

    def pairs(time: KernelTime) -> str:
        return f"{time.pairs / (time.case.heads * math.comb(time.case.seq + 1, 2)):.1%}"

    def ratio(time: KernelTime) -> str:
        if not (time.forward_ratio and time.backward_ratio):
            return ""
        return f"{time.forward_ratio:.2f}x / {time.backward_ratio:.2f}x"

    kernel: list[Column] = [
        ("kernel", "<10", lambda time: time.kernel),
        ("seq", ">8", lambda time: time.case.seq),
    ]
    counts = [("slashes", ">9", slashes), ("columns", ">8", columns), ("pairs", ">7", pairs)]
    # CPU kernels also compute masked pairs, so their FLOP/s would mislead.
    speed = device == "cuda"
    lines = Lines.fitting(
        width,
        [
            *kernel,
            ("heads", ">6", heads_column),
            *counts,
            *pass_columns(speed=speed),
            ("ratio to dense", ">16", ratio),
        ],
        [*kernel, *counts, *pass_columns(speed=False)],
    )
    counted = " and that TF (TFLOP/s) counts" if speed and not lines.narrow else ""
    more = f" A wider terminal also shows heads{', TFLOP/s' if speed else ''} and ratios."
    return lines, (
        "slashes: requested share of the causal blocks; columns: per head; pairs: share of the "
        f"causal pairs that is computed{counted}.{more if lines.narrow else ''}"
    )
