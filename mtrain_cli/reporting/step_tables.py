"""Show `mtrain profile step` in the terminal: the breakdown of a training step."""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from mtrain_cli.console import Console
from mtrain_cli.records.metrics import sound_mfu
from mtrain_cli.records.step_breakdown import HOST, IDLE, LINKS, WAITS
from mtrain_cli.reporting.expert_step_tables import time_table
from mtrain_cli.reporting.terminal_width import new_table, number, print_table, say

NAME = 44  # characters of a kernel's name
_GPU = (
    "Each instant of the GPU counts once: for a compute kernel, else a copy, else NCCL. If kernels "
    "overlap, the first to start counts. links: exposed NCCL communication{}; idle: nothing runs. "
    "attention, index, router, experts, loss (with its products), weights (FSDP copies), "
    "optimizer: every kernel that this part of the code launches; other parts: by kernel name"
)
_WAITS = (
    "; waits: exposed NCCL time beyond the shortest time of the same message on any rank, spent "
    "waiting for other ranks"
)
_NO_WAITS = ", including waits for other ranks"
_CPU = (
    "Each instant counts once: for the training thread's innermost operator, else for gloo. "
    "links: exposed gloo communication, including waits for other ranks; host: Python, and other "
    "waits. attention, index, router, experts, loss (with its products), weights (FSDP copies), "
    "optimizer: every operator that this part of the code calls; other parts: by operator name"
)


def show_step(console: Console, document: dict[str, Any]) -> None:
    """Print the tables of a recorded step; document: content of summary.json."""
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
    if (experts := time_table(document)) is not None:
        print_table(console, experts, spare=("slowest layer",))
    print_table(console, top_table(document["top"], gpu))
    say(
        console,
        "ms: self time, including overlapped time; kernels.csv lists all kernels or operators of "
        "every rank",
        style="dim",
    )


def damage_of_step(document: dict[str, Any]) -> str | None:
    """Return why a summary cannot be shown, or None if it can be shown."""
    try:
        if not document["ranks"]:
            return "ranks is empty"
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
    """Return a table with the time per step of each part that is not 0, in ms."""
    several = len(ranks) > 1
    table = new_table(
        ("part", "ms", "share", *(("min", "max", "rank") if several else ())),
        title="Breakdown of one training step",
        caption=f"ms per step, mean of {len(ranks)} ranks" if several else "ms per step",
    )
    rows = parts_rows(ranks)
    for name, mean, share, least, most, rank in rows:
        cells = [_ms(mean), f"{share:.1%}"]
        cells += [_ms(least), _ms(most), str(rank)] if several else []
        style = "bold" if name == "step" else None
        table.add_row(name, *cells, end_section=name == rows[-2][0], style=style)
    return table


def parts_rows(
    ranks: Sequence[dict[str, Any]],
) -> list[tuple[str, float, float, float, float, int]]:
    """Return (part, mean ms, share of the step, min ms, max ms, rank with the max).

    Parts that are 0 on all ranks are left out. The last row is the whole step.
    """
    whole = [rank["step_ms"] for rank in ranks]
    parts = {name: [rank["parts"][name] for rank in ranks] for name in ranks[0]["parts"]}
    rows = [*((name, ms) for name, ms in parts.items() if any(ms)), ("step", whole)]
    mean = statistics.fmean
    return [
        (name, mean(ms), mean(ms) / mean(whole), min(ms), max(ms), ms.index(max(ms)))
        for name, ms in rows
    ]


def side_by_side(named: Sequence[tuple[str, dict[str, Any]]]) -> Table:
    """Return a table that compares recorded steps: the time of every part, averaged over ranks.

    For two steps, the table also has the ratio of the times.
    """
    two = len(named) == 2
    headings = ("part", *(name for name, _ in named), *(("ratio",) if two else ()))
    table = new_table(headings, title="Side by side, ms")
    every = [document["ranks"] for _, document in named]
    parts = dict.fromkeys(name for ranks in every for name in ranks[0]["parts"])
    rows = {
        name: [statistics.fmean(rank["parts"].get(name, 0.0) for rank in ranks) for ranks in every]
        for name in parts
    }
    rows = {name: ms for name, ms in rows.items() if any(ms)}
    last = list(rows)[-1]
    rows["step"] = [statistics.fmean(rank["step_ms"] for rank in ranks) for ranks in every]
    rows["without recording"] = [max(rank["plain_ms"] for rank in ranks) for ranks in every]
    in_links = f"in {LINKS}"  # Earlier versions counted waits as part of the links.
    mixed = len({WAITS in ranks[0]["parts"] for ranks in every}) > 1
    for name, ms in rows.items():
        cells = [
            in_links if name == WAITS and WAITS not in ranks[0]["parts"] else _ms(value)
            for ranks, value in zip(every, ms, strict=True)
        ]
        if two:
            comparable = ms[0] and not (name in (LINKS, WAITS) and mixed)
            cells.append(f"{ms[1] / ms[0]:.3f}" if comparable else "-")
        table.add_row(name, *cells, end_section=name == last)
    return table


def lines(document: dict[str, Any]) -> list[str]:
    """Return lines about recording, speed, messages and the host."""
    ranks, gpu = document["ranks"], document["gpu"]
    # Files of earlier versions lack `plain`. Their plain_ms is the step before the recorded steps.
    before = document.get("plain")

    def mean(name: str) -> float:
        return statistics.fmean(rank[name] for rank in ranks)

    def part_ms(name: str) -> str:
        return _ms(statistics.fmean(rank["parts"][name] for rank in ranks))

    result = [_cost_of_recording(ranks, before)]
    if before is not None:
        result.append(f"speed     {_speed(before, gpu)}, without recording")
    result += _message_line(ranks, mean("links_hidden_ms"), gpu)
    if not gpu:
        return [*result, f"host      {part_ms(HOST)} ms outside of operators and messages"]
    ahead = [rank["ahead_us"] for rank in ranks if rank["ahead_us"] is not None]
    start = statistics.median(ahead) / 1e3 if ahead else 0
    delay = f"; kernels start {_ms(start)} ms after launch (median)" if ahead else ""
    return [
        *result,
        f"launches  {mean('launches'):,.0f} kernels; launch overhead "
        f"{_ms(mean('launching_ms'))} ms on the host{delay}",
        f"syncs     {mean('syncs'):,.0f} host waits for the GPU, {_ms(mean('syncing_ms'))} ms; "
        f"GPU idle {part_ms(IDLE)} ms",
    ]


def _message_line(ranks: Sequence[dict[str, Any]], hidden: float, gpu: bool) -> list[str]:
    """Return a line about messages, or no line without messages."""
    # Files of earlier versions lack waits and unmatched messages.
    waits = statistics.fmean(rank["parts"].get(WAITS, 0.0) for rank in ranks)
    exposed = statistics.fmean(rank["parts"][LINKS] for rank in ranks) + waits
    if not (exposed or hidden):
        return []
    name, work = ("NCCL", "computation or copies") if gpu else ("gloo", "operators")
    waiting = f" (waiting for other ranks: {_ms(waits)} ms)" if waits else ""
    if unmatched := statistics.fmean(rank.get("unmatched", 0.0) for rank in ranks):
        waiting += f"; {unmatched:,.0f} messages, not found on other ranks, count as links"
    return [
        f"{name:<10}{_ms(exposed + hidden)} ms: {_ms(hidden)} ms overlapped with {work}, "
        f"{_ms(exposed)} ms exposed{waiting}"
    ]


def _cost_of_recording(ranks: Sequence[dict[str, Any]], before: dict[str, Any] | None) -> str:
    plain, recorded = (max(rank[key] for rank in ranks) for key in ("plain_ms", "recorded_ms"))
    # The difference includes noise. If recorded steps are faster, the cost is smaller than that.
    cost = "no cost of recording beyond noise"
    if recorded > plain:
        cost = f"{recorded / plain - 1:+.1%}, recording and noise"
    which = "the step before"
    if before is not None and before["steps"] > 1:
        which = f"median of {before['steps']} steps before"
    elif before is not None and before.get("first") == 1:
        which = "the first step, which compiles and loads"
    return (
        f"step      slowest rank {_ms(recorded)} ms; without recording {_ms(plain)} ms ({which}): "
        f"{cost}"
    )


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
    kind = "kernel" if gpu else "operator"
    table = new_table((kind, "calls", "ms", "part"), title=f"Slowest {kind}s")
    table.columns[-1].justify = "left"
    for row in top:
        name, calls = short_name(row["name"]), f"{row['calls']:,.0f}"
        table.add_row(name, calls, _ms(row["ms"]), row["part"])
    return table


def _ms(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return "0" if value == 0 else number(value, 4) if abs(value) >= 0.01 else f"{value:.2g}"


def short_name(name: str, width: int = NAME) -> str:
    """Return a kernel's name without return type, namespaces, arguments and template parameters.

    The name keeps the function that an element-wise kernel applies. If the name is still longer
    than ``width``, its middle is cut out.
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
    """Return the text without brackets and the text inside brackets.

    brackets: "<>" or "()".
    """
    depth, kept = 0, []
    for character in text:
        if character == brackets[0]:
            depth += 1
        elif character == brackets[1] and depth:
            depth -= 1
        elif not depth:
            kept.append(character)
    return "".join(kept)
