"""Tables of `mtrain profile step`: the breakdown of a training step."""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from mtrain_cli.console import Console
from mtrain_cli.records.metrics import sound_mfu
from mtrain_cli.records.step_breakdown import HOST, IDLE, LINKS, WAITS
from mtrain_cli.reporting.expert_step_tables import time_table
from mtrain_cli.reporting.table import (
    TOTAL,
    Column,
    Lines,
    Section,
    Table,
    count,
    fixed,
    number,
    percent,
)
from mtrain_cli.reporting.terminal_width import print_section

NAME = 44  # characters of a kernel's name
_STEP, _BARE = "step", "without recording"  # rows that are no parts
_PART = Column("part", itemgetter(0), words=True)
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


def step_section(document: dict[str, Any]) -> Section:
    """Return what a report says about a recorded step; document: content of summary.json."""
    ranks, gpu = document["ranks"], document["gpu"]
    legend = _GPU.format(_WAITS if WAITS in ranks[0]["parts"] else _NO_WAITS) if gpu else _CPU
    parts = (
        Lines([_about(document)], style="bold"),
        parts_table(ranks),
        Lines([legend], style="dim"),
        Lines(lines(document), indent=10),
        time_table([("", document)]),
        top_table(document["top"], gpu),
    )
    return Section("One training step", parts)


def damage_of_step(document: dict[str, Any]) -> str | None:
    """Return why a summary cannot be shown, or None if it can be shown."""
    try:
        if not document["ranks"]:
            return "ranks is empty"
        print_section(Console(file=io.StringIO()), step_section(document))
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
    """Return a table with the time per step of each part that is not 0 on all ranks."""
    several = len(ranks) > 1
    parts = {name: [rank["parts"][name] for rank in ranks] for name in ranks[0]["parts"]}
    rows = [(name, ms) for name, ms in parts.items() if any(ms)]
    rows.append((_STEP, [rank["step_ms"] for rank in ranks]))
    whole = statistics.fmean(rows[-1][1])
    of_ranks = (
        Column("min", lambda row: min(row[1]), _ms, drop=1),
        Column("max", lambda row: max(row[1]), _ms),
        Column("rank", lambda row: row[1].index(max(row[1]))),
    )
    columns = [
        _PART,
        Column("ms", lambda row: statistics.fmean(row[1]), _ms),
        Column("share", lambda row: statistics.fmean(row[1]) / whole, percent),
        *(of_ranks if several else ()),
    ]
    note = f"ms per step, mean of {len(ranks)} ranks" if several else "ms per step"
    title = "Breakdown of one training step"
    return Table(title, columns, rows, note, state=lambda row: TOTAL * (row[0] == _STEP))


def side_by_side(named: Sequence[tuple[str, dict[str, Any]]]) -> Table:
    """Return a table that compares recorded steps: the time of every part, averaged over ranks.

    For two steps, the table also has the ratio of the times.
    """
    every = [document["ranks"] for _, document in named]
    parts = dict.fromkeys(name for ranks in every for name in ranks[0]["parts"])
    means = {
        name: [statistics.fmean(rank["parts"].get(name, 0.0) for rank in ranks) for ranks in every]
        for name in parts
    }
    rows = [(name, ms) for name, ms in means.items() if any(ms)]
    rows.append((_STEP, [statistics.fmean(rank["step_ms"] for rank in ranks) for ranks in every]))
    rows.append((_BARE, [max(rank["plain_ms"] for rank in ranks) for ranks in every]))
    # Earlier versions counted waits as part of the links.
    mixed = len({WAITS in ranks[0]["parts"] for ranks in every}) > 1

    def time(row: tuple[str, list[float]], run: int) -> str:
        if row[0] == WAITS and WAITS not in every[run][0]["parts"]:
            return f"in {LINKS}"
        return _ms(row[1][run])

    def ratio(row: tuple[str, list[float]]) -> float | None:
        name, (first, second) = row
        return second / first if first and not (name in (LINKS, WAITS) and mixed) else None

    columns = [
        _PART,
        *(Column(run, lambda row, i=i: time(row, i)) for i, (run, _) in enumerate(named)),
        *([Column("ratio", ratio, fixed(3))] if len(named) == 2 else []),
    ]
    return Table(
        "Side by side, ms", columns, rows, state=lambda row: TOTAL * (row[0] in (_STEP, _BARE))
    )


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
    columns = [
        Column(kind, lambda row: short_name(row["name"]), words=True),
        Column("calls", itemgetter("calls"), count),
        Column("ms", itemgetter("ms"), _ms),
        Column("part", itemgetter("part"), words=True),
    ]
    note = (
        "ms: self time, including overlapped time; kernels.csv lists all kernels or operators of "
        "every rank"
    )
    return Table(f"Slowest {kind}s", columns, top, note)


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
    """Return the text without brackets and the text inside brackets."""
    depth, kept = 0, []
    for character in text:
        if character == brackets[0]:
            depth += 1
        elif character == brackets[1] and depth:
            depth -= 1
        elif not depth:
            kept.append(character)
    return "".join(kept)
