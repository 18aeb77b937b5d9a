"""Draw the program of an exchange: what each rank computes, moves and holds in one layer.

A program has an order but no times. So the x axis counts operations: a kernel call is one unit
wide, the other operations are narrower, and a step begins at the same x position on all ranks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from mtrain_cli.config.exchanges import EXCHANGE_TRAITS
from mtrain_cli.config.sizes import format_bytes
from mtrain_cli.parallel.cast_rows import whole_shares
from mtrain_cli.parallel.exchange_selection import parse_label
from mtrain_cli.parallel.lowering import Traits, lower
from mtrain_cli.parallel.operations import Arrange
from mtrain_cli.parallel.program import (
    Begin,
    Compute,
    ComputeColumns,
    Operation,
    Post,
    Program,
    Shard,
    ShardSizes,
    Stage,
    Wait,
)
from mtrain_cli.parallel.recording import ARRANGE, COLUMNS
from mtrain_cli.parallel.schedule import GRADIENTS, OUTER, ScheduleOptions, make_schedule
from mtrain_cli.records.analysis import CaseAnalysis
from mtrain_cli.records.record_sums import LATE
from mtrain_cli.reporting import plots
from mtrain_cli.reporting.plots import Figure, FigureView, Trace
from mtrain_cli.reporting.report_source import ReportSource
from mtrain_cli.reporting.table import Column, Table

RANKS = 8  # most ranks in the figure
BARS = 6_000  # most bars in all views together
MOST_STEPS = 8  # most steps of a pass in the table of the terminal
DIRECTIONS = ("forward", "backward")
_WAIT, _OTHER, _COLUMNS = 0.2, 0.3, 0.6  # widths; a kernel call has 1
# Colors of shards, unlike the colors of waits and copies.
_SHARDS = ("#2f6fb5", "#7fb2e5", "#8c6bb1", "#b9a3d6", "#d26fa5", "#7a5c3e", "#5b5b5b", "#3a8fa3")


@dataclass(frozen=True)
class DrawnExchange:
    """An exchange, and the sizes that its figure needs."""

    name: str
    options: ScheduleOptions
    traits: Traits
    sizes: ShardSizes

    @staticmethod
    def of(source: ReportSource, case: CaseAnalysis) -> DrawnExchange | None:
        """Return the exchange of a case; None for one worker, or an unknown exchange."""
        facts = case.facts
        names = ("seq", "num_heads", "num_kv_heads", "head_dim", "cp", "per_node")
        numbers = [n for name in names if isinstance(n := facts.get(name), int) and n > 0]
        if len(numbers) < len(names):
            return None
        seq, heads, kv_heads, head_dim, workers, per_node = numbers
        parsed = parse_label(str(facts.get("exchange")), workers, per_node)
        if parsed is None or workers == 1:
            return None
        name, options = parsed
        batch = int(facts.get("micro_batch") or 1)
        dtype = source.settings.get("train.dtype", "auto")
        on_gpu = bool(source.facts.get("gpus")) or "cluster" in source.summary
        dtype_bytes = 4 if dtype == "float32" or (dtype == "auto" and not on_gpu) else 2
        # Profiles of older versions lack the padded length and the width of the columns.
        tokens = -(-int(facts.get("padded_seq") or seq) // workers) * batch
        width = int(facts.get("column_width") or 0)
        shape = heads, kv_heads, head_dim, dtype_bytes
        # A profile does not record which rows a group cast moves. Draw the sizes of whole shards.
        casts = whole_shares(make_schedule(name, options))
        sizes = ShardSizes(tokens, *shape, column_width=width, sequences=batch, casts=casts)
        columns = facts.get("columns") or any(p.columns.any() for p in case.passes.values())
        gathered = bool(columns) and not EXCHANGE_TRAITS[name].gathers
        return DrawnExchange(name, options, Traits(columns=gathered), sizes)

    def programs(self, direction: str, ranks: int) -> list[Program]:
        """Return the programs of ranks 0 to ``ranks`` - 1 in a direction."""
        schedule = make_schedule(self.name, self.options)
        return [
            lower(schedule, rank, backward=direction == "backward", traits=self.traits)
            for rank in range(min(ranks, schedule.workers))
        ]


@dataclass(frozen=True)
class PlacedOperation:
    """An operation and its range on the x axis.

    held: size in bytes of each buffer that exists during the operation, by name.
    """

    operation: Operation
    begin: float
    end: float
    held: dict[str, int | float]


def place(
    programs: Sequence[Program], sizes: ShardSizes
) -> tuple[list[list[PlacedOperation]], list[float]]:
    """Return the placed operations of each rank, and the x position at which each step begins."""
    own = np.zeros((len(programs), max(program.steps for program in programs)))
    for rank, program in enumerate(programs):
        for op in program.operations:
            own[rank, op.step] += _width(op)
    begins = [0.0, *np.cumsum(own.max(0)).tolist()][:-1]
    lanes = []
    for program in programs:
        at, lane = list(begins), []
        bytes_of = {b: size.of(sizes, program.sharing) for b, size in program.sizes.items()}
        for op, live in program.live():
            begin, at[op.step] = at[op.step], at[op.step] + _width(op)
            held = {str(b): bytes_of[b] for b in sorted(live, key=str) if bytes_of[b]}
            lane.append(PlacedOperation(op, begin, at[op.step], held))
        lanes.append(lane)
    return lanes, begins


def _width(op: Operation) -> float:
    if isinstance(op, Begin | Post) or (isinstance(op, Arrange) and not op.timed):
        return 0.0
    if isinstance(op, Compute):
        return 1.0
    if isinstance(op, ComputeColumns):
        return _COLUMNS
    return _WAIT if isinstance(op, Wait) else _OTHER


def describe(op: Operation, sizes: ShardSizes, sharing: int) -> str:
    """Return what an operation does, in a few words."""
    if isinstance(op, Compute):
        part = f", part {op.part[0] + 1} of {op.part[1]} of the heads" if op.part[1] > 1 else ""
        return f"compute: queries of {op.queries.number}, {_keys(op)}{part}"
    if isinstance(op, Post):
        t, (moved, peers) = op.transfer, _message(op, sizes, sharing)
        arrives = "" if t.to is None else f", receive {t.receives[0] // sharing} from {t.source}"
        return f"{moved} {peers}{arrives}, on channel {t.channel}"
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(op).__name__).lower()
    return f"arrange: {name}" if isinstance(op, Arrange) else name


def _message(post: Post, sizes: ShardSizes, sharing: int) -> tuple[str, str]:
    t, moved = post.transfer, format_bytes(float(post.sends.of(sizes, sharing)))
    if t.to is None:
        kind = t.kind.replace("_", "-")
        return f"{kind} {t.payload}, {moved},", f"among {len(t.peers)} ranks"
    return f"send {t.payload} {t.sends[0] // sharing}, {moved},", f"to rank {t.to}"


def _keys(op: Compute) -> str:
    if isinstance(op.keys, Stage):
        return f"received keys of stage {op.keys.number}"
    return f"keys of {op.keys.number}" if isinstance(op.keys, Shard) else "all keys"


def transfers(
    lane: Sequence[PlacedOperation],
) -> Iterator[tuple[Post, PlacedOperation, PlacedOperation]]:
    """Yield the `Post`, the placed `Post` and the placed `Wait` of each transfer of a rank."""
    waits = {p.operation.number: p for p in lane if isinstance(p.operation, Wait)}
    for placed in lane:
        if isinstance(placed.operation, Post):
            number = placed.operation.transfer.number
            yield placed.operation, placed, waits[number]


def program_figure(shown: Sequence[tuple[str, ReportSource, CaseAnalysis]]) -> Figure:
    """Draw each distinct exchange of (label, run, case) once, with a view per pass."""
    drawn: dict[DrawnExchange, str] = {}
    for label, source, case in shown:
        if (exchange := DrawnExchange.of(source, case)) is not None:
            drawn.setdefault(exchange, label)
    views, left = [], BARS
    for exchange, label in drawn.items():
        for direction in DIRECTIONS:
            first = exchange.programs(direction, 1)[0]
            ranks = min(RANKS, left // (3 * len(first.operations)))
            if ranks:
                programs = exchange.programs(direction, ranks)
                views.append(_view((label, direction), programs, exchange.sizes))
                left -= sum(len(trace["x"]) for trace in views[-1].data)
    note = (
        "The order of operations, not their times. Each rank has three rows. Top: what the rank "
        "computes. The number is the shard of the keys, or of the queries if queries circulate; "
        "* stands for all keys, *1 and *2 for the received keys of a stage. Middle: messages, from "
        "post to wait. Bottom: bytes that the rank holds. Hover for names, peers and sizes."
    )
    return Figure("program", "What each rank does in one layer", ("case", "pass"), views, note)


def _view(labels: tuple[str, ...], programs: Sequence[Program], sizes: ShardSizes) -> FigureView:
    lanes, begins = place(programs, sizes)
    most = max(sum(p.held.values()) for lane in lanes for p in lane) or 1
    # By entry of the legend: (width, begin, y, height, text, hover text, color).
    bars: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
    for rank, (lane, program) in enumerate(zip(lanes, programs, strict=True)):
        for p in (p for p in lane if p.end > p.begin):
            place_on_x, held = (p.end - p.begin, p.begin), sum(p.held.values())
            what = f"step {p.operation.step}, {describe(p.operation, sizes, program.sharing)}"
            group, colour, text = _look(p.operation, program)
            bars[group].append((*place_on_x, rank - 0.24, 0.34, text, what, colour))
            buffers = "<br>".join(f"{name}: {format_bytes(b)}" for name, b in p.held.items())
            hover, height = f"{what}<br>holds {format_bytes(held)}<br>{buffers}", 0.26 * held / most
            bottom = rank + 0.46 - height / 2
            bars["bytes held"].append((*place_on_x, bottom, height, "", hover, "#c9d3dd"))
        for post, begin, end in transfers(lane):
            t = post.transfer
            y = rank + 0.055 * (2 * (t.payload in GRADIENTS) + (t.channel == OUTER))
            hover = f"step {post.step}, {describe(post, sizes, program.sharing)}"
            at = end.end - begin.end, begin.end, y, 0.045, "", hover, plots.link_colour(t.channel)
            bars[f"message, {t.channel}"].append(at)
    ranks, steps = list(range(len(lanes))), plots.evenly(range(len(begins)), 16)
    at_ranks = {"tickvals": ranks, "ticktext": [f"rank {rank}" for rank in ranks]}
    at_steps = {"tickvals": [begins[step] for step in steps], "ticktext": list(map(str, steps))}
    shape = plots.layout(
        130 + 62 * len(lanes),
        plots.axis("step of the schedule", **at_steps),
        {**at_ranks, "range": [len(lanes) - 0.45, -0.5]},
        barmode="overlay",
        bargap=0,
    )
    return FigureView(labels, [_trace(group, of_group) for group, of_group in bars.items()], shape)


def _look(op: Operation, program: Program) -> tuple[str, str, str]:
    if isinstance(op, Compute):
        if isinstance(op.keys, Stage):
            return "compute", _SHARDS[op.keys.number], f"*{op.keys.number}"
        if not isinstance(op.keys, Shard):
            return "compute", _SHARDS[0], "*"
        shard = (op.queries if queries_travel(program) else op.keys).number
        return "compute", _SHARDS[shard % len(_SHARDS)], str(shard)
    if isinstance(op, ComputeColumns):
        return "compute columns", plots.COLOURS[COLUMNS], ""
    if isinstance(op, Wait):
        return "wait", plots.COLOURS[LATE], ""
    return "copy, merge, reduce", plots.COLOURS[ARRANGE], ""


def queries_travel(program: Program) -> bool:
    """Return whether this rank computes its own keys with queries of other shards."""
    return len({op.queries for op in program.computes}) > 1


def _trace(group: str, bars: Sequence[tuple[Any, ...]]) -> Trace:
    x, base, y, width, text, hover, colours = map(list, zip(*bars, strict=True))
    return {
        **plots.bar(plots.numbers(x), plots.numbers(y), colours[0], "%{customdata}", name=group),
        **{"base": plots.numbers(base), "width": plots.numbers(width), "text": text},
        **{"textposition": "inside", "insidetextanchor": "middle", "textangle": 0},
        "marker": {"color": colours if len(set(colours)) > 1 else colours[0]},
        "customdata": hover,
    }


def program_table(source: ReportSource, case: CaseAnalysis) -> Table | None:
    """Return a table of rank 0's steps in one layer; None without exchange, or for many steps."""
    exchange = DrawnExchange.of(source, case)
    if exchange is None:
        return None
    rows = []
    for direction in DIRECTIONS:
        (program,) = exchange.programs(direction, 1)
        if program.steps > MOST_STEPS:
            return None
        (lane,), _ = place([program], exchange.sizes)
        moving = list(transfers(lane))
        for p, op in ((p, p.operation) for p in lane):
            if not isinstance(op, Compute):
                continue
            shards = f"queries of {op.queries.number}" if queries_travel(program) else _keys(op)
            meanwhile = [
                " ".join(_message(post, exchange.sizes, program.sharing))
                for post, begin, end in moving
                if begin.end <= p.begin and end.begin >= p.end
            ]
            held = format_bytes(sum(p.held.values()))
            rows.append((direction, op.step, shards, "\n".join(meanwhile), held))
    columns = [
        Column("pass", itemgetter(0), words=True),
        Column("step", itemgetter(1)),
        Column("computes", itemgetter(2), words=True),
        Column("sends meanwhile", itemgetter(3), words=True),
        Column("holds", itemgetter(4)),
    ]
    return Table(f"{case.label}: one layer of rank 0", columns, rows)
