"""Where one training step goes, in the terminal: the summary of `mtrain profile step` as tables and lines."""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from mtrain_cli.console import Console
from mtrain_cli.profiling.step_breakdown import HOST, IDLE, LINKS, WAITS
from mtrain_cli.reporting.terminal_width import number, print_table, say
from mtrain_cli.training.metrics import sound_mfu

NAME = 44  # characters of a kernel's name
_GPU = (
    "counted: kernels of the GPU; what computes comes before copies, these before NCCL, and of two kernels at once the earlier one; "
    "links: NCCL beside neither{}; idle: nothing on the GPU. attention, index, loss (with its products), "
    "weights (FSDP's copies) and optimizer: all that is launched there; the rest by name"
)
_WAITS = "; waits: likewise, what a message takes beyond the rank on which it takes least, such as the last one to be there"
_NO_WAITS = ", waits for other ranks among it"
_CPU = (
    "counted: operators of the thread that trains, their own time; links: gloo's messages beside none, waits for other "
    "ranks among them; host: the rest, Python and waiting. "
    "attention, index, loss (with its products), weights (FSDP's copies) and optimizer: all operators called there; the rest by name"
)


def show_step(console: Console, document: dict[str, Any]) -> None:
    """document: summary.json of a recorded step."""
    ranks, gpu = document["ranks"], document["gpu"]
    say(console, _about(document), indent=2, style="bold")
    print_table(console, parts_table(ranks), spare=("least",))
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
        "ms of its own, whatever ran beside it; kernels.csv of a measurement has all, of every rank",
        style="dim",
    )


def damage_of_step(document: dict[str, Any]) -> str | None:
    """Why a summary cannot be shown; None if it can."""
    try:
        show_step(Console(file=io.StringIO()), document)
    except KeyError as error:
        return f"has no {error.args[0]}"
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        return f"holds something else than a recorded step ({error})"
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
    what = f"{s['model']}, seq {s['seq']:,}, {s['pattern']}, {s['layout']}, {s['exchange']}, {s['kernel']}"
    return f"{workers}: {what}; {recorded}"


def parts_table(ranks: Sequence[dict[str, Any]]) -> Table:
    """One row a part that took any time; ms of one step."""
    table = Table(
        title="Where one training step goes", title_justify="left", caption_justify="left", box=SIMPLE, padding=(0, 1, 0, 0),
        caption=f"ms a step, mean of {len(ranks)} ranks" if len(ranks) > 1 else "ms a step",
    )  # fmt: skip
    several = len(ranks) > 1
    table.add_column("part", no_wrap=True)
    for heading in ("ms", "share", *(("least", "most", "rank") if several else ())):
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
    """(part, mean ms, share of the step, least, most, rank of the most) of every part that took any time; the last is the whole step."""
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
    """Several recorded steps: ms of every part, the mean over ranks; of two of them the ratio, too."""
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
    rows += [("without records", [max(rank["plain_ms"] for rank in ranks) for ranks in every])]
    together = f"in {LINKS}"  # where earlier versions counted waits
    mixed = len({WAITS in ranks[0]["parts"] for ranks in every}) > 1
    for name, ms in rows:
        cells = [
            together if name == WAITS and WAITS not in ranks[0]["parts"] else _ms(value)
            for ranks, value in zip(every, ms, strict=True)
        ]
        comparable = ms[0] and not (name in (LINKS, WAITS) and mixed)
        ratio = [] if len(ms) != 2 else [f"{ms[1] / ms[0]:.3f}" if comparable else "-"]
        table.add_row(name, *cells, *ratio, end_section=name in ends)
    return table


def lines(document: dict[str, Any]) -> list[str]:
    """A line for everything that is no part."""
    ranks, gpu = document["ranks"], document["gpu"]
    before = document.get(
        "plain"
    )  # not in files of earlier versions, of which plain_ms is the last step before

    def mean(name: str) -> float:
        return statistics.fmean(rank[name] for rank in ranks)

    plain, recorded = (
        max(rank["plain_ms"] for rank in ranks),
        max(rank["recorded_ms"] for rank in ranks),
    )
    # Of one step without records no spread is known, and a step with them that is faster shows no cost.
    slower = recorded / plain - 1
    differs = (
        f"{slower:+.1%}, by records and by chance"
        if slower > 0
        else "within noise: records show no cost"
    )
    which = (
        "the one before"
        if before is None or before["steps"] == 1
        else f"the median of {before['steps']} before"
    )
    if before is not None and before.get("first") == before["steps"] == 1:
        which = "the first of all, which compiles and loads,"
    found = [
        f"step      of the slowest rank {_ms(recorded)} ms, {_ms(plain)} ms {which} without records ({differs})"
    ]
    if before is not None:
        found.append(f"speed     {_speed(before, gpu)}, without records")
    waits = statistics.fmean(
        rank["parts"].get(WAITS, 0.0) for rank in ranks
    )  # not in files of earlier versions
    exposed, hidden = (
        statistics.fmean(rank["parts"][LINKS] for rank in ranks) + waits,
        mean("links_hidden_ms"),
    )
    if exposed or hidden:
        name, beside = ("NCCL", "computation or copies") if gpu else ("gloo", "operators")
        waiting = f", {_ms(waits)} of that waiting for other ranks" if waits else ""
        if lost := statistics.fmean(rank.get("unmatched", 0.0) for rank in ranks):
            waiting += (
                f"; {lost:,.0f} messages could not be found on other ranks, and count as links"
            )
        exposure = f"hidden beside {beside} {_ms(hidden)}, exposed {_ms(exposed)}{waiting}"
        found.append(f"{name:<10}{_ms(exposed + hidden)} ms, of which {exposure}")
    if gpu:
        ahead = [rank["ahead_us"] for rank in ranks if rank["ahead_us"] is not None]
        begins = (
            f"; a kernel begins {_ms(statistics.median(ahead) / 1e3)} ms after its launch (median)"
            if ahead
            else ""
        )
        found.append(
            f"launches  {mean('launches'):,.0f} kernels, {_ms(mean('launching_ms'))} ms of the host{begins}"
        )
        idle = statistics.fmean(rank["parts"][IDLE] for rank in ranks)
        found.append(
            f"syncs     {mean('syncs'):,.0f} waits of the host for the GPU, {_ms(mean('syncing_ms'))} ms; GPU idle {_ms(idle)} ms"
        )
    else:
        found.append(
            f"host      {_ms(statistics.fmean(rank['parts'][HOST] for rank in ranks))} ms in no operator and beside no message"
        )
    return found


def _speed(before: dict[str, Any], gpu: bool) -> str:
    shares = (
        ("MFU", sound_mfu(before["mfu_model"], before["mfu_executed"])),
        ("HFU", before["mfu_executed"]),
    )
    said = [f"{before['tokens_per_second_per_gpu']:,.0f} tokens/s/{'GPU' if gpu else 'worker'}"]
    said += [f"{name} {share:.1%}" for name, share in shares if share is not None]
    said += [f"density {before['density']:.1%}"] if before["density"] < 1 else []
    return ", ".join(
        said
        + (
            [f"{before['peak_memory_gib']:.1f} GiB at most"]
            if before["peak_memory_gib"] is not None
            else []
        )
    )


def top_table(top: Sequence[dict[str, Any]], gpu: bool) -> Table:
    title = f"Most time: {'kernels' if gpu else 'operators'}"
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
    """A kernel's name without what all of its kind have: return type, namespaces, arguments and templates; of an element-wise kernel the
    function that it applies stays. Beginning and end of what is still too long.
    """
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    bare = _without(_without(plain, "<>"), "()").strip()
    bare = bare.rpartition("::")[2] if "at::native" in bare or "cutlass::" in bare else bare
    bare = " ".join(bare.split()) or name
    bare = re.sub(r"^nvjet_sm\d+_", "nvjet_", bare)  # of cuBLAS: what differs stands at its end
    if of_cute := re.match(r"kernel_cutlass_\w*?([A-Z]\w*?)_object_at_", plain):
        bare = of_cute[1]  # the class of the kernel; the rest describes its arguments
    applied = re.search(r"\w*Functor\w*|\w+_kernel_cuda|Gemm\w+", plain.partition("<")[2])
    if applied and (room := width - len(applied[0]) - 1) > 10:
        return f"{bare if len(bare) <= room else bare[: room - 2] + '..'} {applied[0]}"
    end = width // 3
    return bare if len(bare) <= width else f"{bare[: width - end - 2]}..{bare[-end:]}"


def _without(text: str, brackets: str) -> str:
    """text without what stands in brackets of one kind, however deep."""
    depth, kept = 0, []
    for character in text:
        if character == brackets[0]:
            depth += 1
        elif character == brackets[1] and depth:
            depth -= 1
        elif not depth:
            kept.append(character)
    return "".join(kept)
