"""The breakdown of a training step in the terminal: `mtrain profile step` as tables and lines."""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from mtrain_cli.console import Console
from mtrain_cli.records.metrics import sound_mfu
from mtrain_cli.records.step_breakdown import HOST, IDLE, LINKS, WAITS
from mtrain_cli.reporting.terminal_width import number, print_table, say

NAME = 44  # characters of a kernel's name
_GPU = (
    "Each instant of the GPU counts once: computing kernels first, then copies, then NCCL; of "
    "overlapping kernels, the first to start. links: exposed NCCL communication{}; idle: nothing "
    "on the GPU. attention, index, loss (with its products), weights (FSDP's copies) and "
    "optimizer: everything launched there; other parts by kernel name"
)
_WAITS = (
    "; waits: exposed NCCL time spent waiting for stragglers, that is the time of a message beyond "
    "its time on the rank where it is shortest"
)
_NO_WAITS = ", including waits for other ranks"
_CPU = (
    "Each instant counts once: the innermost operator of the training thread first, then gloo. "
    "links: exposed gloo communication, including waits for other ranks; host: the rest, Python "
    "and waiting. attention, index, loss (with its products), weights (FSDP's copies) and "
    "optimizer: every operator called there; other parts by operator name"
)


def show_step(console: Console, document: dict[str, Any]) -> None:
    """Print summary.json of a recorded step."""
    ranks, gpu = document["ranks"], document["gpu"]
    say(console, _about(document), indent=2, style="bold")
    print_table(console, parts_table(ranks), spare=("min",))
    say(
        console,
        _GPU.format(_WAITS if WAITS in ranks[0]["parts"] else _NO_WAITS) if gpu else _CPU,
        style="dim",
    )
    for line in lines(document):
        say(console, line, indent=10)
    print_table(console, top_table(document["top"], gpu))
    say(
        console,
        "ms: own time, overlapped or not; kernels.csv lists all kernels or operators of every rank",
        style="dim",
    )


def damage_of_step(document: dict[str, Any]) -> str | None:
    """Return why a summary cannot be shown, or None."""
    try:
        show_step(Console(file=io.StringIO()), document)
    except KeyError as error:
        return f"{error.args[0]} is missing"
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        return f"not the summary of a recorded step ({error})"
    return None


def _about(document: dict[str, Any]) -> str:
    s, steps = document["settings"], document["steps"]
    workers = (
        f"{document['workers']} x {document['device']}"
        if document["gpu"]
        else f"{document['workers']} CPU process{'es' * (document['workers'] > 1)}"
    )
    number_of = document["warmup"] + 1
    recorded = (
        f"step {number_of}" if steps == 1 else f"steps {number_of} to {number_of + steps - 1}"
    )
    sizes = f"{s['model']}, seq {s['seq']:,}"
    settings = f"{sizes}, {s['pattern']}, {s['layout']}, {s['exchange']}, {s['kernel']}"
    return f"{workers}: {settings}; {recorded}"


def parts_table(ranks: Sequence[dict[str, Any]]) -> Table:
    """One row per part that took any time; ms of one step."""
    table = Table(
        title="Breakdown of one training step",
        title_justify="left",
        caption=f"ms per step, mean of {len(ranks)} ranks" if len(ranks) > 1 else "ms per step",
        caption_justify="left",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )
    several = len(ranks) > 1
    table.add_column("part", no_wrap=True)
    for heading in ("ms", "share", *(("min", "max", "rank") if several else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    rows = parts_rows(ranks)
    for i, (name, mean, share, least, most, rank) in enumerate(rows):
        cells = [
            _ms(mean),
            f"{share:.1%}",
            *((_ms(least), _ms(most), str(rank)) if several else ()),
        ]
        table.add_row(
            name, *cells, end_section=i == len(rows) - 2, style="bold" if name == "step" else None
        )
    return table


def parts_rows(
    ranks: Sequence[dict[str, Any]],
) -> list[tuple[str, float, float, float, float, int]]:
    """Return (part, mean ms, share of the step, min, max, rank of the max) of each nonzero part.

    The last row is the whole step.
    """
    whole = statistics.fmean(rank["step_ms"] for rank in ranks)
    rows = [(name, [rank["parts"][name] for rank in ranks]) for name in ranks[0]["parts"]]
    rows = [
        *((name, ms) for name, ms in rows if any(ms)),
        ("step", [rank["step_ms"] for rank in ranks]),
    ]
    return [
        (
            name,
            statistics.fmean(ms),
            statistics.fmean(ms) / whole,
            min(ms),
            max(ms),
            ms.index(max(ms)),
        )
        for name, ms in rows
    ]


def side_by_side(named: Sequence[tuple[str, dict[str, Any]]]) -> Table:
    """Compare recorded steps: mean ms of every part over ranks; for two steps also the ratio."""
    table = Table(title="Side by side, ms", title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("part", no_wrap=True)
    for name, _ in named:
        table.add_column(name, justify="right")
    if len(named) == 2:
        table.add_column("ratio", justify="right", no_wrap=True)
    every = [document["ranks"] for _, document in named]
    parts = list(dict.fromkeys(name for ranks in every for name in ranks[0]["parts"]))
    rows = [
        (
            name,
            [statistics.fmean(rank["parts"].get(name, 0.0) for rank in ranks) for ranks in every],
        )
        for name in parts
    ]
    rows = [(name, ms) for name, ms in rows if any(ms)]
    ends = {rows[-1][0]}
    rows += [("step", [statistics.fmean(rank["step_ms"] for rank in ranks) for ranks in every])]
    rows += [("without recording", [max(rank["plain_ms"] for rank in ranks) for ranks in every])]
    in_links = f"in {LINKS}"  # where earlier versions counted waits
    mixed = len({WAITS in ranks[0]["parts"] for ranks in every}) > 1
    for name, ms in rows:
        cells = [
            in_links if name == WAITS and WAITS not in ranks[0]["parts"] else _ms(value)
            for ranks, value in zip(every, ms, strict=True)
        ]
        comparable = ms[0] and not (name in (LINKS, WAITS) and mixed)
        ratio = [] if len(ms) != 2 else [f"{ms[1] / ms[0]:.3f}" if comparable else "-"]
        table.add_row(name, *cells, *ratio, end_section=name in ends)
    return table


def lines(document: dict[str, Any]) -> list[str]:
    """Return a line for each fact that is not a part of the step."""
    ranks, gpu = document["ranks"], document["gpu"]
    # Absent in files of earlier versions, where plain_ms is the step before the recorded ones.
    before = document.get("plain")

    def mean(name: str) -> float:
        return statistics.fmean(rank[name] for rank in ranks)

    plain, recorded = (
        max(rank["plain_ms"] for rank in ranks),
        max(rank["recorded_ms"] for rank in ranks),
    )
    # A single step without recording has no spread, and a faster step with it shows no cost.
    slower = recorded / plain - 1
    difference = (
        f"{slower:+.1%}, recording and noise" if slower > 0 else "no cost of recording beyond noise"
    )
    which = (
        "the step before"
        if before is None or before["steps"] == 1
        else f"median of {before['steps']} steps before"
    )
    if before is not None and before.get("first") == before["steps"] == 1:
        which = "the first step, which compiles and loads"
    result = [
        f"step      slowest rank {_ms(recorded)} ms; without recording {_ms(plain)} ms ({which}): "
        f"{difference}"
    ]
    if before is not None:
        result.append(f"speed     {_speed(before, gpu)}, without recording")
    # Absent in files of earlier versions.
    waits = statistics.fmean(rank["parts"].get(WAITS, 0.0) for rank in ranks)
    exposed, hidden = (
        statistics.fmean(rank["parts"][LINKS] for rank in ranks) + waits,
        mean("links_hidden_ms"),
    )
    if exposed or hidden:
        name, work = ("NCCL", "computation or copies") if gpu else ("gloo", "operators")
        waiting = f" (waiting for other ranks: {_ms(waits)} ms)" if waits else ""
        if unmatched := statistics.fmean(rank.get("unmatched", 0.0) for rank in ranks):
            waiting += f"; {unmatched:,.0f} messages unmatched on other ranks count as links"
        result.append(
            f"{name:<10}{_ms(exposed + hidden)} ms: {_ms(hidden)} ms overlapped with {work}, "
            f"{_ms(exposed)} ms exposed{waiting}"
        )
    if gpu:
        ahead = [rank["ahead_us"] for rank in ranks if rank["ahead_us"] is not None]
        delay = (
            f"; kernels start {_ms(statistics.median(ahead) / 1e3)} ms after launch (median)"
            if ahead
            else ""
        )
        result.append(
            f"launches  {mean('launches'):,.0f} kernels; launch overhead "
            f"{_ms(mean('launching_ms'))} ms on the host{delay}"
        )
        idle = statistics.fmean(rank["parts"][IDLE] for rank in ranks)
        result.append(
            f"syncs     {mean('syncs'):,.0f} host waits for the GPU, {_ms(mean('syncing_ms'))} ms; "
            f"GPU idle {_ms(idle)} ms"
        )
    else:
        host = statistics.fmean(rank["parts"][HOST] for rank in ranks)
        result.append(f"host      {_ms(host)} ms outside of operators and messages")
    return result


def _speed(before: dict[str, Any], gpu: bool) -> str:
    shares = (
        ("MFU", sound_mfu(before["mfu_model"], before["mfu_executed"])),
        ("HFU", before["mfu_executed"]),
    )
    facts = [f"{before['tokens_per_second_per_gpu']:,.0f} tokens/s/{'GPU' if gpu else 'worker'}"]
    facts += [f"{name} {share:.1%}" for name, share in shares if share is not None]
    facts += [f"density {before['density']:.1%}"] if before["density"] < 1 else []
    if before["peak_memory_gib"] is not None:
        facts.append(f"peak {before['peak_memory_gib']:.1f} GiB")
    return ", ".join(facts)


def top_table(top: Sequence[dict[str, Any]], gpu: bool) -> Table:
    title = f"Slowest {'kernels' if gpu else 'operators'}"
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("kernel" if gpu else "operator", no_wrap=True)
    for heading in ("calls", "ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("part", no_wrap=True)
    for kind in top:
        table.add_row(
            short_name(kind["name"]), f"{kind['calls']:,.0f}", _ms(kind["ms"]), kind["part"]
        )
    return table


def _ms(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return "0" if value == 0 else number(value, 4) if abs(value) >= 0.01 else f"{value:.2g}"


def short_name(name: str, width: int = NAME) -> str:
    """Shorten a kernel's name: drop return type, namespaces, arguments and templates.

    Keeps the function that an element-wise kernel applies. Cuts the middle of a name that is still
    too long.
    """
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    bare = _without(_without(plain, "<>"), "()").strip()
    bare = bare.rpartition("::")[2] if "at::native" in bare or "cutlass::" in bare else bare
    bare = " ".join(bare.split()) or name
    bare = re.sub(r"^nvjet_sm\d+_", "nvjet_", bare)  # cuBLAS: the end of the name differs
    if of_cute := re.match(r"kernel_cutlass_\w*?([A-Z]\w*?)_object_at_", plain):
        bare = of_cute[1]  # the kernel's class; the rest describes its arguments
    applied = re.search(r"\w*Functor\w*|\w+_kernel_cuda|Gemm\w+", plain.partition("<")[2])
    if applied and (room := width - len(applied[0]) - 1) > 10:
        return f"{bare if len(bare) <= room else bare[: room - 2] + '..'} {applied[0]}"
    end = width // 3
    return bare if len(bare) <= width else f"{bare[: width - end - 2]}..{bare[-end:]}"


def _without(text: str, brackets: str) -> str:
    """Drop text inside brackets of one kind, however deep."""
    depth, kept = 0, []
    for character in text:
        if character == brackets[0]:
            depth += 1
        elif character == brackets[1] and depth:
            depth -= 1
        elif not depth:
            kept.append(character)
    return "".join(kept)
