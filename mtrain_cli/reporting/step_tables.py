"""`mtrain profile step`: tables and a figure of the parts of a training step."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from functools import partial
from html import escape
from operator import itemgetter
from typing import Any

from mtrain_cli.parallel.profiler_labels import HOST, IDLE, LINKS, WAITS
from mtrain_cli.records.metrics import sound_mfu
from mtrain_cli.reporting import plots
from mtrain_cli.reporting.plots import Figure, FigureView
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

NAME = 44  # characters of a kernel's name
RANKS = 64  # most bars in a figure
Named = Sequence[tuple[str, dict[str, Any]]]  # name of a run, and content of its summary.json
_STEP, _BARE = "step", "without recording"  # rows that are no parts
_PART = Column("part", itemgetter(0), words=True)
_OF_CODE = (
    "attention, index, router, experts, loss (with its products), weights (FSDP copies), "
    "optimizer: every {0} that this part of the code {1}; other parts: by {0} name"
)
_GPU = (
    "Each instant of the GPU counts once: for a compute kernel, else a copy, else NCCL. If kernels "
    "overlap, the first to start counts. links: exposed NCCL communication{}; idle: nothing runs. "
) + _OF_CODE.format("kernel", "launches")
_WAITS = (
    "; waits: exposed NCCL time beyond the shortest time of the same message on any rank, spent "
    "waiting for other ranks"
)
_NO_WAITS = ", including waits for other ranks"
_CPU = (
    "Each instant counts once: for the training thread's innermost operator, else for gloo. "
    f"links: exposed gloo communication{_NO_WAITS}; host: Python, and other waits. "
) + _OF_CODE.format("operator", "calls")
_COLOURS = (
    *("#2f6fb5", "#d97706", "#4d9f6f", "#8c6bb1", "#7fb2e5", "#f7c873"),
    *("#a6d19f", "#d26fa5", "#7a5c3e", "#e6b8a2", "#5b5b5b", "#b8b8b8"),
)


def step_section(document: dict[str, Any]) -> Section:
    """Return what a report says about a recorded step; document: content of summary.json."""
    ranks, gpu = document["ranks"], document["gpu"]
    legend = _GPU.format(_WAITS if WAITS in ranks[0]["parts"] else _NO_WAITS) if gpu else _CPU
    parts: list[Table | Lines] = [
        Lines([_about(document)], style="bold"),
        parts_table(ranks),
        Lines([legend], style="dim"),
        Lines(lines(document), indent=10),
    ]
    if sent := document.get("messages"):
        parts.append(messages_table(sent, gpu))
    return Section("One training step", [*parts, top_table(document["top"], gpu)])


def _about(document: dict[str, Any]) -> str:
    s, steps, first = document["settings"], document["steps"], document["warmup"] + 1
    kind = document["device"] if document["gpu"] else "CPU"
    recorded = f"step {first}" if steps == 1 else f"steps {first} to {first + steps - 1}"
    settings = ", ".join(str(s[name]) for name in ("pattern", "layout", "exchange", "kernel"))
    sizes = f"{s['model']}, seq {s['seq']:,}"
    return f"{document['workers']} x {kind}: {sizes}, {settings}; {recorded}"


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
    every = f", mean of {len(ranks)} ranks; rank: the one of max"
    note = "ms per step" + every * several
    title = "Breakdown of one training step"
    return Table(title, columns, rows, note, state=lambda row: TOTAL * (row[0] == _STEP))


def side_by_side(named: Named) -> Table:
    """Return a table of the time of every part in each recorded step, averaged over ranks.

    For two steps, the table also has the ratio of the times.
    """
    every = [document["ranks"] for _, document in named]
    means = list(map(_means, every))
    parts = dict.fromkeys(part for of_run in means for part in of_run)
    rows = [(part, [of_run.get(part, 0.0) for of_run in means]) for part in parts]
    rows = [row for row in rows if any(row[1])]
    rows.append((_STEP, [statistics.fmean(rank["step_ms"] for rank in ranks) for ranks in every]))
    rows.append((_BARE, [max(rank["plain_ms"] for rank in ranks) for ranks in every]))
    # Earlier versions counted waits as part of the links.
    apart = [WAITS in ranks[0]["parts"] for ranks in every]

    def time(row: tuple[str, list[float]], run: int) -> str:
        return f"in {LINKS}" if row[0] == WAITS and not apart[run] else _ms(row[1][run])

    def ratio(row: tuple[str, list[float]]) -> float | None:
        name, (first, second) = row
        comparable = name not in (LINKS, WAITS) or len(set(apart)) == 1
        return second / first if first and comparable else None

    columns = [
        _PART,
        *(Column(run, partial(time, run=i)) for i, (run, _) in enumerate(named)),
        *([Column("ratio", ratio, fixed(3))] if len(named) == 2 else []),
    ]
    return Table(
        "Side by side, ms", columns, rows, state=lambda row: TOTAL * (row[0] in (_STEP, _BARE))
    )


def _means(ranks: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the time of every part, averaged over ranks."""
    parts = dict.fromkeys(part for rank in ranks for part in rank["parts"])
    return {
        part: statistics.fmean(rank["parts"].get(part, 0.0) for rank in ranks) for part in parts
    }


def lines(document: dict[str, Any]) -> list[str]:
    """Return lines about recording, speed, messages and the host."""
    ranks, gpu = document["ranks"], document["gpu"]
    # Files of earlier versions lack `plain`. Their plain_ms is the step before the recorded steps.
    before = document.get("plain")

    def mean(name: str) -> float:
        return statistics.fmean(rank[name] for rank in ranks)

    def part(name: str) -> float:  # files of earlier versions lack waits
        return statistics.fmean(rank["parts"].get(name, 0.0) for rank in ranks)

    plain, recorded = (max(rank[key] for rank in ranks) for key in ("plain_ms", "recorded_ms"))
    # The difference includes noise. If recorded steps are faster, the cost is smaller than that.
    cost = f"{recorded / plain - 1:+.1%}, recording and noise"
    cost = cost if recorded > plain else "no cost of recording beyond noise"
    which = "the step before"
    if before is not None and before["steps"] > 1:
        which = f"median of {before['steps']} steps before"
    elif before is not None and before.get("first") == 1:
        which = "the first step, which compiles and loads"
    result = [
        f"step      slowest rank {_ms(recorded)} ms; without recording {_ms(plain)} ms ({which}): "
        f"{cost}"
    ]
    if before is not None:
        result.append(f"speed     {_speed(before, gpu)}, without recording")
    hidden, waits = mean("links_hidden_ms"), part(WAITS)
    if (exposed := part(LINKS) + waits) or hidden:
        name, work = ("NCCL", "computation or copies") if gpu else ("gloo", "operators")
        waiting = f" (waiting for other ranks: {_ms(waits)} ms)" if waits else ""
        if unmatched := statistics.fmean(rank.get("unmatched", 0.0) for rank in ranks):
            waiting += f"; {unmatched:,.0f} messages, not found on other ranks, count as links"
        result.append(
            f"{name:<10}{_ms(exposed + hidden)} ms: {_ms(hidden)} ms overlapped with {work}, "
            f"{_ms(exposed)} ms exposed{waiting}"
        )
    if not gpu:
        return [*result, f"host      {_ms(part(HOST))} ms outside of operators and messages"]
    ahead = [rank["ahead_us"] / 1e3 for rank in ranks if rank["ahead_us"] is not None]
    start = f"; kernels start {_ms(statistics.median(ahead or [0]))} ms after launch (median)"
    delay = start if ahead else ""
    return [
        *result,
        f"launches  {mean('launches'):,.0f} kernels; launch overhead "
        f"{_ms(mean('launching_ms'))} ms on the host{delay}",
        f"syncs     {mean('syncs'):,.0f} host waits for the GPU, {_ms(mean('syncing_ms'))} ms; "
        f"GPU idle {_ms(part(IDLE))} ms{_of_recording(recorded - plain, part(IDLE) + waits)}",
    ]


def _of_recording(slower: float, unused: float) -> str:
    """Say how much of idle time and waits recording may have caused: it slows the host."""
    share = min(1.0, slower / unused) if unused else 0.0
    return f"; of idle and waits, up to {share:.0%} come from recording" if share > 0.1 else ""


def _speed(before: dict[str, Any], gpu: bool) -> str:
    hfu = before["mfu_executed"]
    shares = {"MFU": sound_mfu(before["mfu_model"], hfu), "HFU": hfu}
    facts = [f"{before['tokens_per_second_per_gpu']:,.0f} tokens/s/{'GPU' if gpu else 'worker'}"]
    facts += [f"{name} {share:.1%}" for name, share in shares.items() if share is not None]
    facts += [f"density {before['density']:.1%}"] if before["density"] < 1 else []
    if before["peak_memory_gib"] is not None:
        facts.append(f"peak {before['peak_memory_gib']:.1f} GiB")
    return ", ".join(facts)


def messages_table(sent: Sequence[dict[str, Any]], gpu: bool) -> Table:
    """Return a table of the kinds of messages, by the part of the step that sent them on GPUs."""
    columns = [
        Column("message", lambda row: short_name(row["name"]), words=True),
        *([Column("sent by", itemgetter("part"), words=True)] if gpu else []),
        Column("calls", itemgetter("calls"), count),
        Column("ms", itemgetter("ms"), _ms),
        *([Column("waits", itemgetter("waits_ms"), _ms)] if gpu else []),
        Column("exposed", itemgetter("exposed_ms"), _ms),
        Column("of ms", lambda row: row["exposed_ms"] / row["ms"] if row["ms"] else None, percent),
    ]
    note = (
        "ms per step, mean of ranks, from start to end of each message; exposed: meanwhile, "
        f"{'nothing computes or copies' if gpu else 'the training thread runs no operator'}"
    )
    return Table("Messages", columns, sent, note)


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


def short_name(name: str) -> str:
    """Return a kernel's name without return type, namespaces, arguments and template parameters.

    The name keeps the function that an element-wise kernel applies. If the name is still longer
    than `NAME`, its middle is cut out.
    """
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    bare, before = plain, ""
    while bare != before:  # from the innermost brackets
        bare, before = re.sub(r"<[^<>]*>|\([^()]*\)", "", bare), bare
    bare = bare.strip()
    bare = bare.rpartition("::")[2] if "at::native" in bare or "cutlass::" in bare else bare
    bare = " ".join(bare.split()) or name
    bare = re.sub(r"^nvjet_sm\d+_", "nvjet_", bare)  # cuBLAS: the end of the name differs
    if of_cute := re.match(r"kernel_cutlass_\w*?([A-Z]\w*?)_object_at_", plain):
        bare = of_cute[1]  # the kernel's class; the rest describes its arguments
    applied = re.search(r"\w*Functor\w*|\w+_kernel_cuda|Gemm\w+", plain.partition("<")[2])
    if applied and (room := NAME - len(applied[0]) - 1) > 10:
        return f"{bare if len(bare) <= room else bare[: room - 2] + '..'} {applied[0]}"
    end = NAME // 3
    return bare if len(bare) <= NAME else f"{bare[: NAME - end - 2]}..{bare[-end:]}"


# --- figure -----


def step_figure(named: Named) -> Figure:
    """Draw the parts of recorded steps, by rank and, for several runs, by run."""
    every = [rank["parts"] for _, document in named for rank in document["ranks"]]
    parts = list(dict.fromkeys(part for own in every for part in own))

    def view(label: str, places: list[str], rows: Sequence[dict[str, float]]) -> FigureView:
        data = []
        for i, part in enumerate(parts):
            values = plots.numbers([row.get(part, 0.0) for row in rows])
            colour = "#c8352b" if part == WAITS else _COLOURS[i % len(_COLOURS)]
            if any(values):
                name = escape(part)
                hover = f"%{{y}}: {name} %{{x:.4g}} ms"
                data.append(plots.bar(values, places, colour, hover, name=name))
        x, y = plots.from_zero("ms per step"), {"autorange": "reversed", "automargin": True}
        height = 170 + 30 * min(len(places), 24)
        shape = plots.layout(height, x, y, barmode="stack", margin={"l": 10})
        return FigureView((label,), data, shape)

    views = []
    if len(named) > 1:
        means = [_means(document["ranks"]) for _, document in named]
        views.append(view("all runs", [escape(name) for name, _ in named], means))
    for name, document in named:
        shown = document["ranks"][:: -(-len(document["ranks"]) // RANKS)]
        places = [f"rank {rank['rank']}" for rank in shown]
        views.append(view(name, places, [rank["parts"] for rank in shown]))
    note = "Means over the recorded steps. The parts add up to the step."
    return Figure("step", "Breakdown of one training step", ("run",), views, note)
