"""The table of `mtrain profile kernels --mask`: dense attention under masks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtrain_cli.commands.options import parse_names
from mtrain_cli.commands.profile import Column, Lines, calibrating, heads_column, pass_columns
from mtrain_cli.config.schema import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mtrain_cli.profiling.kernel_benchmark import KernelBench, KernelCase
    from mtrain_cli.profiling.mask_benchmark import MaskTime

_COMPARED = ("flex",)


def time_masks(
    bench: KernelBench, mask: str, compare: str, cases: Sequence[KernelCase], out: Path | None
) -> None:
    """Time kernels under masks and print a table.

    Args:
        mask: value of ``--mask``.
        compare: value of ``--compare``.
        cases: dense cases.

    Raises:
        ConfigError: an option is wrong, or a kernel cannot compute a case.
    """
    from mtrain_cli.console import Console
    from mtrain_cli.profiling.mask_benchmark import MASKS, profile_masks
    from mtrain_cli.profiling.timing import ResultFile
    from mtrain_cli.reporting.terminal_width import limit, say

    names = list(MASKS) if mask == "all" else parse_names("--mask", mask, [*MASKS])
    compared = parse_names("--compare", compare, _COMPARED) if compare else []
    if reasons := {name: why for name, why, _ in bench.unsupported(cases) if name in bench.names}:
        raise ConfigError(*(f"--kernel {name}: {why}" for name, why in reasons.items()))
    console = Console(highlight=False, soft_wrap=True)
    lines, legend = _lines(limit(console), bench.device, compared=bool(compared))
    with calibrating(console, out, ResultFile("masks", bench.device, bench.dtype), lines) as add:
        sizes: dict[str, dict[int, str]] = {}
        for time in profile_masks(bench, names, cases, flex="flex" in compared):
            add(time)
            if time.sizes:
                sizes.setdefault(time.mask, {})[time.case.seq] = time.sizes
        for name, by_length in sizes.items():
            listed = "; ".join(f"{text} at seq {seq}" for seq, text in by_length.items())
            say(console, f"{name}: {listed}", indent=2)
        if legend:
            say(console, legend)


def _lines(width: int | None, device: str, *, compared: bool) -> tuple[Lines, str]:
    """Return the table and its legend. A narrow table omits the heads and FLOP/s."""

    def ratio(time: MaskTime) -> str:
        if not time.forward_ratio:
            return ""
        backward = f"{time.backward_ratio:.2f}x" if time.backward_ratio else "-"
        return f"{time.forward_ratio:.2f}x/{backward}"

    mask: list[Column] = [
        ("mask", "<22", lambda time: time.mask),
        ("seq", ">8", lambda time: time.case.seq),
    ]
    kernel: Column = ("kernel", "<9", lambda time: time.kernel)
    to_flex: list[Column] = [("to flex", ">11", ratio)] if compared else []
    speed = device == "cuda"
    lines = Lines.fitting(
        width,
        [
            *mask,
            ("heads", ">6", heads_column),
            kernel,
            *pass_columns(speed=speed, missing="none on CPU"),
            *to_flex,
        ],
        [*mask, kernel, *pass_columns(speed=False, missing="none on CPU"), *to_flex],
    )
    parts = []
    if compared:
        parts.append("to flex: time of FlexAttention divided by this time, forward/backward.")
    if lines.narrow:
        parts.append(f"A wider terminal also shows heads{' and TFLOP/s' if speed else ''}.")
    elif speed:
        parts.append("TF (TFLOP/s) counts the pairs that the mask allows.")
    return lines, " ".join(parts)
