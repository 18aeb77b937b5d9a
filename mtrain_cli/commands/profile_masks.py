"""The table of `mtrain profile kernels --mask`: dense attention under masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtrain_cli.commands.options import parse_names
from mtrain_cli.commands.profile import KernelColumns, calibrating
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
    shown = _Columns.fitting(limit(console), bench.device, compared=bool(compared))

    def save(times: list[MaskTime], file: Path, command: str) -> None:
        save_times(file, times, command, bench.dtype, bench.device, kind="masks")

    with calibrating(console, out, "masks", shown.header, save) as add:
        sizes: dict[str, dict[int, str]] = {}
        for time in profile_masks(bench, names, cases, flex="flex" in compared):
            add(time, shown.line(time))
            if time.sizes:
                sizes.setdefault(time.mask, {})[time.case.seq] = time.sizes
        for name, by_length in sizes.items():
            listed = "; ".join(f"{text} at seq {seq}" for seq, text in by_length.items())
            say(console, f"{name}: {listed}", indent=2)
        if legend := shown.legend:
            say(console, legend)


@dataclass(frozen=True)
class _Columns(KernelColumns):
    """The columns of the table of masks. A narrow table omits the heads and FLOP/s.

    compared: whether to show the ratio to FlexAttention.
    """

    compared: bool

    @property
    def header(self) -> str:
        heads = "" if self.narrow else f" {'heads':>6}"
        wide = 22 if self.speed and not self.narrow else 12
        header = (
            f"{'mask':<22} {'seq':>8}{heads} {'kernel':<9} {'forward':>{wide}} {'backward':>{wide}}"
        )
        return f"{header} {'to flex':>11}" if self.compared else header

    @property
    def legend(self) -> str:
        parts = []
        if self.compared:
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
