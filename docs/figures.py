"""Draw the figures of the documents: `python docs/figures.py [FOLDER]`, by default docs/figures.

The layouts and schedules are those that training follows; times come from a profile that ships.
Every figure brings its own background and switches with the reader's light or dark mode.
Text is at least 12 units high in a figure 480 units wide, so that it stays legible at 400 pixels.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
import pandas as pd

from mtrain_cli import resource_dir
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.composition.compose import compose
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.schedule import OUTER, ScheduleOptions, make_schedule
from mtrain_extras.masks.page import density

WIDTH = 480
WORKERS = 4
BLOCKS = 16
PROFILE = "real-512k-4xh200"
STRIPED, ZIGZAG = 0, 2  # cases of the profile, both of a ring
LAYER = 1  # the first layer also waits for the start of the others

STYLE = """
svg { font-family: system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif }
text { fill: #1f2328; font-size: 13px } .small { font-size: 12px } .title { font-weight: 600 }
text.on { fill: #ffffff; font-weight: 600 } .card { fill: #ffffff; stroke: #d1d9e0 }
.grid { fill: #eef1f4 } .line { stroke: #57606a; fill: none; stroke-width: 1.6 }
.outer { stroke: #c0392b; stroke-width: 2; stroke-dasharray: 5 3 } .head { fill: #57606a }
.outer-head { fill: #c0392b } .frame { stroke: #57606a; fill: none; stroke-dasharray: 3 3 }
.w0 { fill: #2f6fc4 } .w1 { fill: #c26a10 } .w2 { fill: #1f8563 } .w3 { fill: #9a4bb0 }
.attention { fill: #2f6fc4 } .columns { fill: #6f9fe0 } .merge { fill: #1f8563 }
.index { fill: #9a4bb0 } .arrange { fill: #a58a1a } .wait { fill: #d9483b } .gap { fill: #c5cbd2 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .card { fill: #0d1117; stroke: #3d444d } .grid { fill: #21262d }
  .line { stroke: #9ba5b0 } .head { fill: #9ba5b0 } .frame { stroke: #9ba5b0 }
  .outer { stroke: #ff7b72 } .outer-head { fill: #ff7b72 } .gap { fill: #565e68 }
  .wait { fill: #f0655a }
}
"""


class Drawing:
    """An SVG that grows downwards."""

    def __init__(self, title: str, description: str) -> None:
        self._head = f"<title>{escape(title)}</title><desc>{escape(description)}</desc>"
        self._parts: list[str] = []

    def add(self, part: str) -> None:
        self._parts.append(part)

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        self.add(
            f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        kind: str,
        radius: float = 0,
        opacity: float = 1,
    ) -> None:
        self.add(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
            f' rx="{radius:g}" class="{kind}"'
            + (f' fill-opacity="{opacity:.2f}"/>' if opacity < 1 else "/>")
        )

    def arrow(self, start: tuple[float, float], end: tuple[float, float], outer: bool) -> None:
        line, head = ("line outer", "outer-head") if outer else ("line", "head")
        direction = np.subtract(end, start) / np.hypot(*np.subtract(end, start))
        side = np.array([-direction[1], direction[0]])
        tip = np.array(end)
        base = tip - 7 * direction
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (tip, base + 4 * side, base - 4 * side))
        (x1, y1), (x2, y2) = start, base
        self.add(f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" class="{line}"/>')
        self.add(f'<polygon points="{points}" class="{head}"/>')

    def finish(self, height: float) -> str:
        size = f'width="640" height="{round(640 * height / WIDTH)}"'
        card = (
            f'<rect x="1" y="1" width="{WIDTH - 2}" height="{height - 2:g}" rx="8" class="card"/>'
        )
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size} '
            f'viewBox="0 0 {WIDTH} {height:g}">',
            self._head,
            f"<style>{STYLE}</style>",
            card,
            *self._parts,
            "</svg>",
            "",
        ]
        return "\n".join(lines)


def _pairs(layout: str, blocks: int, block: int = 128) -> np.ndarray:
    """Causal query-key pairs that each worker computes."""
    made = make_layout(layout, WORKERS, blocks * block, block)
    mask = SequenceMask.causal(blocks * block, made.padded_seq)
    everything = np.arange(made.padded_seq)
    held = [made.positions(rank) for rank in range(WORKERS)]
    return np.array([mask.spans(positions, everything).pairs for positions in held])


def layouts() -> str:
    """The causal mask coloured by the worker that computes it, and the work of each worker."""
    d = Drawing(
        "Layouts under a causal mask",
        "For contiguous, zigzag and striped layouts: which worker computes which blocks of the"
        " causal mask, and how many query-key pairs each of the four workers computes.",
    )
    cell, top = 8.0, 34.0
    d.text(20, 22, "16 blocks, coloured by worker", "small")
    d.text(230, 22, "pairs of each worker / mean", "small")
    for name in ("contiguous", "zigzag", "striped"):
        made = make_layout(name, WORKERS, BLOCKS * 128, 128)
        owner = np.empty(BLOCKS, int)
        for rank in range(WORKERS):
            owner[np.unique(made.positions(rank) // 128)] = rank
        d.box(20, top, BLOCKS * cell, BLOCKS * cell, "grid")
        for row in range(BLOCKS):
            for column in range(row + 1):
                x, y = 20 + column * cell, top + row * cell
                d.box(x + 0.4, y + 0.4, cell - 0.8, cell - 0.8, f"w{owner[row]}")
        work, long = _pairs(name, BLOCKS), _pairs(name, 1024)
        for rank, pairs in enumerate(work):
            y = top + 24 + 18 * rank
            length = 150 * pairs / work.mean() / 2
            d.text(170, y + 11, f"worker {rank}", "small")
            d.box(230, y, length, 14, f"w{rank}", 2)
            d.text(236 + length, y + 11, f"{pairs / work.mean():.2f}", "small")
        d.text(170, top + 12, name, "title")
        d.text(
            170,
            top + 116,
            f"max / mean {work.max() / work.mean():.2f} here, "
            f"{long.max() / long.mean():.3f} at 128K tokens",
            "small",
        )
        top += BLOCKS * cell + 18
    return d.finish(top)


def _grid(
    d: Drawing, top: float, exchange: str, per_node: int, steps: Sequence[str], title: str
) -> float:
    """Workers down, steps across: the shard that each computes, and an arrow for each message."""
    schedule = make_schedule(exchange, ScheduleOptions(WORKERS, per_node))
    d.text(20, top, title, "title")
    left, wide, high, row, column = 92.0, 64.0, 26.0, 46.0, 96.0
    for at, name in enumerate(steps):
        d.text(left + at * column + wide / 2, top + 22, name, "small", "middle")
    first = top + 32

    def place(rank: int, step: int) -> tuple[float, float]:
        return left + step * column, first + rank * row

    due: dict[tuple[int, int], int] = {}
    for rank in range(WORKERS):
        for at, step in enumerate(schedule.forward[rank]):
            due.update({(rank, number): at for number in step.wait})
    for rank in range(WORKERS):
        for at, step in enumerate(schedule.forward[rank]):
            for transfer in step.post:
                assert transfer.to is not None
                arrives = due[transfer.to, transfer.number]
                (x1, y1), (x2, y2) = place(rank, at), place(transfer.to, arrives)
                d.arrow((x1 + wide, y1 + high / 2), (x2, y2 + high / 2), transfer.channel == OUTER)
    for rank in range(WORKERS):
        d.text(20, place(rank, 0)[1] + 18, f"worker {rank}", "small")
        for at, step in enumerate(schedule.forward[rank]):
            x, y = place(rank, at)
            (shard,) = step.keys
            d.box(x, y, wide, high, f"w{shard}", 4)
            d.text(x + wide / 2, y + 18, f"KV {shard}", "on", "middle")
    return first + WORKERS * row


def ring() -> str:
    """A ring and a hierarchical ring over four workers, from their schedules."""
    d = Drawing(
        "Ring schedules",
        "Which key-value shard each of four workers computes in each step, and which message is"
        " on its way meanwhile, for a flat ring and for rings inside two nodes.",
    )
    steps = [f"step {n}" for n in range(WORKERS)]
    bottom = _grid(d, 24, "ring", WORKERS, steps, "ring: each shard moves on while it is computed")
    bottom = _grid(
        d, bottom + 20, "hierarchical_ring", 2, steps, "hierarchical_ring: nodes {0, 1} and {2, 3}"
    )
    d.arrow((20, bottom + 6), (56, bottom + 6), False)
    d.text(64, bottom + 10, "inside a node", "small")
    d.arrow((190, bottom + 6), (226, bottom + 6), True)
    d.text(234, bottom + 10, "between nodes, posted a round ahead", "small")
    return d.finish(bottom + 26)


def _spans(case: int) -> pd.DataFrame:
    """Forward spans of one layer, in ms from the begin of its first one."""
    records = pd.read_parquet(resource_dir("profiles") / PROFILE / "records.parquet")
    one = records[
        (records.case == case) & (records.layer == LAYER) & (records.direction == "forward")
    ]
    spans = one[one.phase.isin(PHASES)].copy()
    spans["start"] = (spans.start_us - spans.start_us.min()) / 1e3
    spans["ms"] = spans.dur_us / 1e3
    return spans


PHASES = ("attention", "columns", "index", "merge", "arrange", "wait", "gap")


def timeline() -> str:
    """What the four workers of a recorded run do, moment by moment."""
    d = Drawing(
        "Timeline of one layer",
        "Forward attention of one layer at 512K tokens on four H200s under a ring: attention,"
        " single columns, index, merging, waits and gaps of every worker, striped and zigzag.",
    )
    both = {"striped, ring": _spans(STRIPED), "zigzag, ring": _spans(ZIGZAG)}
    longest = max((s.start + s.ms).max() for s in both.values())
    left, wide, top = 74.0, 386.0, 24.0
    for title, spans in both.items():
        last = (spans.start + spans.ms).max()
        d.text(20, top, f"{title}: {last:.0f} ms", "title")
        for rank in range(WORKERS):
            y = top + 10 + 24 * rank
            d.text(20, y + 14, f"worker {rank}", "small")
            d.box(left, y, wide * last / longest, 18, "grid")
            for span in spans[spans["rank"] == rank].sort_values("start").itertuples():
                d.box(
                    left + wide * span.start / longest, y, wide * span.ms / longest, 18, span.phase
                )
        top += 10 + 24 * WORKERS + 26
    x = 20.0
    for phase, width in zip(PHASES, (78, 72, 56, 60, 70, 46, 40), strict=True):
        d.box(x, top - 8, 10, 10, phase, 2)
        d.text(x + 14, top + 2, phase, "small")
        x += width
    return d.finish(top + 18)


def waits() -> str:
    """How long each worker of the same profile waits for which other one."""
    d = Drawing(
        "Who waits for whom",
        "Milliseconds that each of four workers waits for each other one before the other began"
        " to send, forward and backward of four layers, for striped and zigzag rings.",
    )
    records = pd.read_parquet(resource_dir("profiles") / PROFILE / "records.parquet")
    late = records[(records.phase == "wait") & (records.peer >= 0)]
    tables = {
        name: late[late.case == case]
        .pivot_table("late_us", "rank", "peer", "sum", fill_value=0)
        .reindex(index=range(WORKERS), columns=range(WORKERS), fill_value=0)
        / 1e3
        for name, case in (("striped, ring", STRIPED), ("zigzag, ring", ZIGZAG))
    }
    most = max(table.to_numpy().max() for table in tables.values())
    size, top = 38.0, 66.0
    for x, (name, table) in zip((70.0, 300.0), tables.items(), strict=True):
        d.text(x, 24, f"{name}: {table.to_numpy().sum():.0f} ms", "title")
        d.text(x, 44, "waits for worker", "small")
        for peer in range(WORKERS):
            d.text(x + (peer + 0.5) * size, top - 6, str(peer), "small", "middle")
        for rank in range(WORKERS):
            d.text(x - 8, top + (rank + 0.62) * size, str(rank), "small", "end")
            for peer in range(WORKERS):
                at, y = x + peer * size, top + rank * size
                ms = float(table.loc[rank, peer])
                d.box(at + 1, y + 1, size - 2, size - 2, "grid", 3)
                if ms >= 0.05:
                    strength = float(np.sqrt(ms / most))
                    d.box(at + 1, y + 1, size - 2, size - 2, "wait", 3, strength)
                    inside = "on small" if strength > 0.6 else "small"
                    d.text(at + size / 2, y + 0.62 * size, f"{ms:.1f}", inside, "middle")
    d.text(12, top - 6, "worker", "small")
    bottom = top + WORKERS * size + 20
    d.text(
        20, bottom, "ms before the other had begun to send, forward and backward, 4 layers", "small"
    )
    return d.finish(bottom + 16)


BALANCE = "expert-balance-cpu.json"
KINDS = {"none": "no balance", "loss": "balance loss 0.01", "bias": "bias, steps of 0.01"}
CURVES = {
    "load": "largest load of an expert / mean",
    "entropy": "entropy of the router, nats",
    "loss": "loss",
}
CURVE_STYLE = (
    "<style>.c0 { stroke: #2f6fc4 } .c1 { stroke: #c26a10 } .c2 { stroke: #1f8563 } "
    ".c0, .c1, .c2 { fill: none; stroke-width: 1.6 }</style>"
)
PANEL, SMOOTH = 92, 5  # height of a panel; steps of a moving mean


def experts() -> str:
    """Draw loads, entropy and loss of tiny_moe with and without balancing, three seeds each."""
    recorded = json.loads((resource_dir("profiles") / BALANCE).read_text())["curves"]
    drawing = Drawing(
        "Balancing the experts of tiny_moe",
        "Largest load of an expert, entropy of the router and loss over 60 steps, for three seeds "
        "each: without balancing, with a balance loss, and with a bias.",
    )
    drawing.add(CURVE_STYLE)
    drawing.text(20, 28, "tiny_moe, 60 steps, three seeds each", "title")
    for place, label in enumerate(KINDS.values()):
        x = 20 + 150 * place
        drawing.box(x, 41, 18, 6, f"w{place}")
        drawing.text(x + 24, 49, label, "small")
    for row, (name, label) in enumerate(CURVES.items()):
        _panel(drawing, 66 + row * (PANEL + 34), name, label, recorded)
    bottom = 66 + len(CURVES) * (PANEL + 34)
    drawing.text(250, bottom + 8, "step, 1 to 60 (moving mean of 5 steps)", "small", "middle")
    return drawing.finish(bottom + 22)


def _panel(drawing: Drawing, top: float, name: str, label: str, recorded: dict) -> None:
    lines = {
        kind: [np.convolve(run[name], np.ones(SMOOTH) / SMOOTH, "valid") for run in recorded[kind]]
        for kind in KINDS
    }
    low = min(line.min() for runs in lines.values() for line in runs)
    high = max(line.max() for runs in lines.values() for line in runs)
    left, width = 56, WIDTH - 76
    drawing.text(20, top + 12, label, "small")
    drawing.box(left, top + 20, width, PANEL, "grid")
    for value, y in ((high, top + 30), (low, top + 20 + PANEL)):
        drawing.text(left - 6, y, f"{value:.2f}", "small", "end")
    for place, runs in enumerate(lines.values()):
        for line in runs:
            points = " ".join(
                f"{left + width * n / (len(line) - 1):.1f},"
                f"{top + 20 + PANEL * (1 - (value - low) / (high - low)):.1f}"
                for n, value in enumerate(line)
            )
            drawing.add(f'<polyline points="{points}" class="c{place}"/>')


STUDY = "learning/tier-{}.json"  # see docs/study_tables.py
NAMED = {"-dense-layers": "dense layers", "-windows": "windows"}
PANEL_HIGH, LEFT, WIDE, GAP = 190, 66, 380, 13  # GAP: least distance of two labels


def frontier(tier: str = "a") -> str:
    """Loss above dense against the density and the seconds of training, with intervals."""
    data = json.loads((resource_dir("profiles") / STUDY.format(tier)).read_text())
    rows = [
        row
        for row in data["compared"]
        if row["difference"] and row["step_seconds"]
        and (row["attention"] != "dense" or row["variant"] == "dense-again")
    ]  # fmt: skip
    counts = sorted({len(row["seeds"]) for row in rows})
    count = counts[-1]
    drawing = Drawing(
        "Loss against density and seconds of training",
        "Loss of tokens with at least 8K of context, above that of dense training, for each way of "
        "sparse training, against the density and against the seconds of training.",
    )
    drawing.text(20, 26, "nats above dense, tokens with 8K of context or more", "title")
    among = f"{counts[0]} to {count}" if len(counts) > 1 else f"{count}"
    many = f"mean of {among} trainings; bars: 95 % intervals" if count > 1 else "one seed"
    drawing.text(20, 44, many, "small")
    top = 58.0
    for fact, title, scale, unit in (
        ("density", "density of training", 100, "%"),
        ("seconds", "seconds of training", 1, "s"),
    ):
        _points(drawing, top, rows, fact, scale, unit)
        drawing.text(LEFT + WIDE / 2, top + PANEL_HIGH + 32, title, "small", "middle")
        top += PANEL_HIGH + 48
    return drawing.finish(top)


def _points(d: Drawing, top: float, rows: list, fact: str, scale: float, unit: str) -> None:
    """Draw a panel: points with intervals, each with its name."""
    spans = [row["difference"]["long_loss"] for row in rows]
    ends = [
        end for over in spans for end in (over["mean"], over["low"], over["high"])
        if end is not None
    ]  # fmt: skip
    step = 0.02
    low = step * np.floor(min(0, *ends) / step - 0.5)  # room for names below 0
    high = step * np.ceil(max(ends) / step)
    most = 1.12 * max(scale * row[fact] for row in rows)

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + WIDE * x / most, top + PANEL_HIGH * (high - y) / (high - low)

    d.box(LEFT, top, WIDE, PANEL_HIGH, "grid")
    for value in np.arange(low, high + step / 2, step):
        _, y = at(0, value)
        d.text(LEFT - 6, y + 4, f"{value:.2f}".replace("-0.00", "0.00"), "small", "end")
        kind = "line" if abs(value) < step / 2 else "frame"
        d.add(f'<path d="M{LEFT} {y:.1f}h{WIDE}" class="{kind}" stroke-opacity="0.4"/>')
    for value in range(0, int(most) + 1, 20 if most < 150 else 50):
        d.text(at(value, 0)[0], top + PANEL_HIGH + 16, f"{value} {unit}", "small", "middle")
    taken: list[tuple[float, float, float]] = []
    points = [at(scale * row[fact], over["mean"]) for row, over in zip(rows, spans, strict=True)]
    for row, over in sorted(zip(rows, spans, strict=True), key=lambda pair: -pair[1]["mean"]):
        x, y = at(scale * row[fact], over["mean"])
        kind = {"fixed": "wait", "dense-again": "gap"}.get(row["variant"], "w0")
        if over["low"] is not None:
            (_, up), (_, down) = at(0, over["high"]), at(0, over["low"])
            d.add(f'<path d="M{x:.1f} {up:.1f}V{down:.1f}M{x - 3:.1f} {up:.1f}h6'
                  f'M{x - 3:.1f} {down:.1f}h6" class="line"/>')  # fmt: skip
        d.add(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="{kind}"/>')
        _name(d, row["variant"], (x, y), points, taken)


def _name(
    d: Drawing,
    variant: str,
    point: tuple[float, float],
    points: Sequence[tuple[float, float]],
    taken: list[tuple[float, float, float]],
) -> None:
    """Write the name of a point beside it, where no point is, below other names.

    taken: left end, right end and height of the names so far.
    """
    text = variant.removeprefix("vertical_slash-0.6") or "vertical_slash-0.6"
    text = NAMED.get(text, text)
    x, y = point
    width = 7.0 * len(text)
    is_left = x + 10 + width > LEFT + WIDE or any(
        x + 10 < other < x + 10 + width and abs(high - y) < GAP for other, high in points
    )
    begin = x - 10 - width if is_left else x + 10
    for left, right, at in sorted(taken, key=lambda each: each[2]):
        if left < begin + width and begin < right and abs(at - y) < GAP:
            y = at + GAP
    taken.append((begin, begin + width, y))
    d.text(x - 10 if is_left else x + 10, y + 4, text, "small", "end" if is_left else "start")


FIGURES = {
    "frontier": frontier,
    "frontier-b": partial(frontier, "b"),
    "layouts": layouts,
    "ring": ring,
    "timeline": timeline,
    "waits": waits,
    "experts": experts,
}
_WIDTH, _MARGIN, _LINE = 208, 8, 15  # units of a picture of a mask
_CELLS = 64  # rows and columns of a picture of a mask
_LETTERS = 30  # of a title that fit into a line
_STYLE = """
svg { font-family: system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif }
text { fill: #1f2328; font-size: 12px } .card { fill: #ffffff; stroke: #d1d9e0 }
.back { fill: #eef1f4 } .full { fill: #2f6fc4 } .partial { fill: #9cbce4 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .card { fill: #0d1117; stroke: #3d444d }
  .back { fill: #21262d } .full { fill: #5b9be0 } .partial { fill: #35547a }
}
"""
MEANING = "Queries from top to bottom, keys from left to right. Dark: all pairs. Light: some pairs."
# Each mask by the settings of its picture.
MASKS = {
    "causal": (),
    "sliding_window": ("mask.window=12", "mask.global_tokens=4"),
    "full": (),
    "prefix_lm": ("mask.prefix=20",),
    "block_causal": ("mask.block=8",),
    "block_window": ("mask.block=8", "mask.back=1"),
    "chunked": ("mask.chunk=16",),
    "video": ("mask.frames=4", "mask.height=4", "mask.width=4", "mask.window=[3,3,4]"),
    "dilated": ("mask.block=4", "mask.stride=4", "mask.count=3"),
}


def mask_words(name: str) -> list[str]:
    return [f"mask={name}", *MASKS[name], "seq=64"]


def mask_svg(mask: SequenceMask, title: str) -> str:
    """Return an SVG file with the title above the mask, for light and dark pages."""
    lines = textwrap.wrap(title, _LETTERS)
    side = _WIDTH - 2 * _MARGIN
    top = _MARGIN + _LINE * len(lines)
    height = top + side + _MARGIN
    texts = (
        f'<text x="{_MARGIN}" y="{_MARGIN + _LINE * row - 4}">{escape(line)}</text>'
        for row, line in enumerate(lines, 1)
    )
    table = density(mask, _CELLS)
    place = f"translate({_MARGIN} {top}) scale({side / len(table):.6g})"
    paths = "".join(
        f'<path class="{kind}" d="{_runs(flags)}"/>'
        for kind, flags in (("full", table == 1), ("partial", (table > 0) & (table < 1)))
        if flags.any()
    )
    parts = (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}">',
        f"<title>{escape(title)}</title><desc>{MEANING}</desc>",
        f"<style>{_STYLE}</style>",
        f'<rect x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="6" class="card"/>',
        *texts,
        f'<rect x="{_MARGIN}" y="{top}" width="{side}" height="{side}" class="back"/>',
        f'<g transform="{place}" shape-rendering="crispEdges">{paths}</g>',
        "</svg>",
        "",
    )
    return "\n".join(parts)


def _runs(flags: np.ndarray) -> str:
    """Return a path with one rectangle per run of true cells of a row. Each cell is 1 x 1."""
    path = []
    for row, cells in enumerate(flags):
        edges = np.flatnonzero(np.diff(cells.astype(np.int8), prepend=0, append=0)).tolist()
        pairs = zip(edges[::2], edges[1::2], strict=True)
        path += [f"M{a} {row}h{b - a}v1h{a - b}z" for a, b in pairs]
    return "".join(path)


def mask_picture(name: str) -> str:
    config = compose(mask_words(name), plan=True)
    mask = MaskRule.of(config).undivided(config.seq, config.seq)
    return mask_svg(mask, f"{config.mask.describe()}, seq {config.seq}")


def write(folder: Path) -> None:
    for name, draw in FIGURES.items():
        (folder / f"{name}.svg").write_text(draw(), encoding="utf-8")
    for name in MASKS:
        (folder / f"mask_{name}.svg").write_text(mask_picture(name), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "figures")
