"""The table of `mtrain profile kernels --mask`: dense attention under masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtrain_cli.commands.options import parse_names
from mtrain_cli.commands.profile import calibrating
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
    from mtrain_cli.profiling.kernel_benchmark import save_times
    from mtrain_cli.profiling.mask_benchmark import MASKS, profile_masks
    from mtrain_cli.reporting.terminal_width import limit, say

    names = list(MASKS) if mask == "all" else parse_names("--mask", mask, [*MASKS])
    compared = parse_names("--compare", compare, _COMPARED) if compare else []
    if reasons := {name: why for name, why, _ in bench.unsupported(cases) if name in bench.names}:
        raise ConfigError(*(f"--kernel {name}: {why}" for name, why in reasons.items()))
    console = Console(highlight=False, soft_wrap=True)
    shown = _Columns.fitting(limit(console), bench.device)

    def save(times: list[MaskTime], file: Path, command: str) -> None:
        save_times(file, times, command, bench.dtype, bench.device, kind="masks")

    with calibrating(console, out, "masks", shown.header, save) as add:
        for time in profile_masks(bench, names, cases, flex="flex" in compared):
            add(time, shown.line(time))
        if legend := shown.legend(bool(compared)):
            say(console, legend)


@dataclass(frozen=True)
class _Columns:
    """The columns of the table that fit the terminal.

    narrow: whether to omit the heads and FLOP/s.
    speed: whether to show FLOP/s. CPU kernels also compute masked pairs, so their FLOP/s would
        mislead.
    """

    narrow: bool
    speed: bool

    @staticmethod
    def fitting(width: int | None, device: str) -> _Columns:
        wide = _Columns(narrow=False, speed=device == "cuda")
        return _Columns(width is not None and width < len(wide.header), wide.speed)

    @property
    def header(self) -> str:
        heads = "" if self.narrow else f" {'heads':>6}"
        wide = 22 if self.speed and not self.narrow else 12
        return (
            f"{'mask':<22} {'seq':>8}{heads} {'kernel':<9} {'forward':>{wide}} "
            f"{'backward':>{wide}} {'to flex':>11}"
        )

    def legend(self, compared: bool) -> str:
        parts = []
        if compared:
            parts.append("to flex: time of FlexAttention divided by this time, forward/backward.")
        if self.speed and not self.narrow:
            parts.append("TF (TFLOP/s) counts the pairs that the mask allows.")
        elif self.narrow:
            speed = " and TFLOP/s" if self.speed else ""
            parts.append(f"A wider terminal also shows heads{speed}.")
        return " ".join(parts)

    def line(self, time: MaskTime) -> str:
        case = time.case
        heads = "" if self.narrow else f" {case.heads:>3}/{case.kv_heads:<2}"
        parts = [f"{time.mask:<22} {case.seq:>8}{heads} {time.kernel:<9}"]
        for ms, tflops in (
            (time.forward_ms, time.forward_tflops),
            (time.backward_ms, time.backward_tflops),
        ):
            if ms is None:
                parts.append(f"{'none on CPU':>12}")
                continue
            speed = f" {tflops:>6.1f} TF" if self.speed and not self.narrow else ""
            parts.append(f"{ms:>9.3f} ms{speed}")
        if time.forward_ratio:
            backward = f"{time.backward_ratio:.2f}x" if time.backward_ratio else "-"
            parts.append(f"{f'{time.forward_ratio:.2f}x/{backward}':>11}")
        return " ".join(parts)
