"""`mtrain profile kernels`: time this machine's attention kernels."""

from __future__ import annotations

import math
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mtrain_cli.commands.completion import in_list
from mtrain_cli.commands.options import (
    MOST_HEAD_DIM,
    MOST_HEADS,
    MOST_SAMPLES,
    MOST_TOKENS,
    bounded,
    name_list,
    option,
    parse_items,
    parse_names,
    parse_whole_number,
)
from mtrain_cli.config.schema import KERNELS, ConfigError
from mtrain_extras.bench.calibration import CalibrationOut, calibrating, pass_columns, ratio_cell

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mtrain_cli.console import Console
    from mtrain_cli.reporting.table import Column
    from mtrain_extras.bench.kernels import KernelBench, KernelCase, KernelTime

_BLOCKS = (16, 32, 64, 128)
_LENGTHS = {"cuda": "32k,128k", "cpu": "1k,2k"}
_LENGTHS_OF_MASKS = {"cuda": "4k,8k,16k,32k,64k,128k", "cpu": "1k,2k"}
_DENSITIES = "0.1,0.05,0.02"


def _complete_kernels(incomplete: str) -> list[str]:
    return in_list([name for name in KERNELS if name != "auto"], incomplete)


def kernels(
    seq: Annotated[str, option("N,...")] = "auto",
    density: Annotated[str, option("D,...")] = _DENSITIES,
    columns: Annotated[int | None, bounded(0, MOST_TOKENS)] = None,
    heads: Annotated[str, option("Q/KV,...")] = "16/2",
    head_dim: Annotated[int, bounded(16, MOST_HEAD_DIM)] = 128,
    block: Annotated[int | None, option("N")] = None,
    kernel: Annotated[str, name_list(_complete_kernels)] = "",
    mask: Annotated[str, name_list()] = "",
    compare: Annotated[str, name_list()] = "",
    repeats: Annotated[int, bounded(1, MOST_SAMPLES)] = 7,
    out: CalibrationOut = None,
) -> None:
    """Time this machine's attention kernels, dense and with synthetic indices.

    [bold]Examples[/bold]

      [cyan]mtrain profile kernels[/cyan]
          Time lengths that suit this machine
      [cyan]mtrain profile kernels --seq 512 --density 20%,5% --columns 8 --heads 4/2[/cyan]
          Try the command on a CPU, in seconds; CPU kernels skip no pairs

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
        repeats: Samples per measured time.
    """
    import torch

    from mtrain_cli.console import Console
    from mtrain_extras.bench.kernels import KernelBench, profile_kernels

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if compare and not mask:
        raise ConfigError("--compare: needs --mask, such as --mask causal,documents")
    given = {"--density": density != _DENSITIES, "--columns": columns is not None}
    given["--block"] = block is not None
    if mask and (wrong := [name for name, is_given in given.items() if is_given]):
        raise ConfigError(
            f"{', '.join(wrong)}: --mask times dense attention over whole sequences; give either"
        )
    usual = (_LENGTHS_OF_MASKS if mask else _LENGTHS)[device]
    cases = _parse_cases(
        device, usual if seq == "auto" else seq, density, columns, heads, head_dim, block
    )
    names = parse_names("--kernel", kernel, [k for k in KERNELS if k != "auto"]) if kernel else []
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    bench = KernelBench(names, dtype, device, repeats)
    console = Console(highlight=False, soft_wrap=True)
    if mask:
        _time_masks(console, bench, mask, compare, list({case.dense: 0 for case in cases}), out)
        return
    unsupported = bench.unsupported(cases)
    reasons = {name: reason for name, reason, everywhere in unsupported if everywhere}
    if names and reasons.keys() >= set(names):
        raise ConfigError(*(f"--kernel {name}: {reason}" for name, reason in reasons.items()))
    with calibrating(
        console, out, _columns(device), kind="kernels", device=device, dtype=dtype
    ) as add:
        for time in profile_kernels(bench, cases):
            add(time)
        console.print(
            "slashes: requested share of the causal blocks; columns: per head; pairs: share of the "
            "causal pairs that is computed; ratio: to dense attention."
        )
        for name, reason, everywhere in unsupported:
            console.print(f"{name}: {reason}" + ("" if everywhere else " (some of the shapes)"))


def _time_masks(
    console: Console,
    bench: KernelBench,
    mask: str,
    compare: str,
    cases: Sequence[KernelCase],
    out: Path | None,
) -> None:
    """Time dense attention under masks. mask, compare: values of the options."""
    from mtrain_cli.reporting.table import Column
    from mtrain_extras.bench.masks import FLEX, MASKS, profile_masks

    names = list(MASKS) if mask == "all" else parse_names("--mask", mask, [*MASKS])
    flex = bool(compare and parse_names("--compare", compare, [FLEX]))
    if reasons := {name: why for name, why, _ in bench.unsupported(cases) if name in bench.names}:
        raise ConfigError(*(f"--kernel {name}: {why}" for name, why in reasons.items()))
    kernel, *shape = _shape_columns()
    columns = [
        Column(f"{'mask':22}", attrgetter("mask"), words=True),
        *shape,
        kernel,
        *pass_columns(speed=bench.device == "cuda"),
        *([Column("to flex", ratio_cell, missing="")] if flex else []),
    ]
    about = {"kind": "masks", "device": bench.device, "dtype": bench.dtype}
    with calibrating(console, out, columns, **about) as add:
        sizes: dict[tuple[str, int], str] = {}
        for time in profile_masks(bench, names, cases, flex=flex):
            add(time)
            sizes[time.mask, time.case.seq] = time.sizes
        for (name, seq), text in sizes.items():
            if text:
                console.print(f"{name}, {seq}: {text}")


def _parse_cases(
    device: str, seq: str, density: str, columns: int | None, heads: str, head_dim: int,
    block: int | None,
) -> list[KernelCase]:  # fmt: skip
    from mtrain_cli.config.sizes import parse_share, parse_size
    from mtrain_extras.bench.kernels import KernelCase

    gpu = device == "cuda"
    lengths = parse_items("--seq", seq, parse_size, "32k,128k")
    if any(not 2 <= length <= MOST_TOKENS for length in lengths):
        raise ConfigError(f"--seq {seq}: each must be at least 2 tokens and at most 64m")
    densities = parse_items("--density", density, parse_share, "0.05 or 5%")
    if any(not 0 < share <= 1 for share in densities):
        raise ConfigError(f"--density {density}: each must be above 0 and at most 1, which is 100%")
    block = (128 if gpu else 16) if block is None else block
    if block not in _BLOCKS:
        raise ConfigError(f"--block {block}: must be 16, 32, 64 or 128")
    shapes = [_parse_heads(heads, pair) for pair in heads.split(",")]

    def columns_at(length: int) -> int:
        return min(length, columns if columns is not None else 2048 if gpu else length // 64)

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


def _shape_columns() -> list[Column]:
    from mtrain_cli.reporting.table import Column

    return [
        Column("kernel", attrgetter("kernel"), words=True),
        Column("seq", attrgetter("case.seq")),
        Column("heads", lambda time: f"{time.case.heads}/{time.case.kv_heads}"),
    ]


def _columns(device: str) -> list[Column]:
    from mtrain_cli.reporting.table import Column, percent

    def pairs(time: KernelTime) -> float:
        return time.pairs / (time.case.heads * math.comb(time.case.seq + 1, 2))

    def columns(time: KernelTime) -> int | None:
        return None if time.case.density is None else time.case.columns

    return [
        *_shape_columns(),
        Column("slashes", attrgetter("case.density"), percent, missing="dense"),
        Column("columns", columns, missing=""),
        Column("pairs", pairs, percent),
        # CPU kernels also compute masked pairs, so their FLOP/s would mislead.
        *pass_columns(speed=device == "cuda"),
        Column("ratio", ratio_cell, missing=""),
    ]
