"""Tables of the experts of a model: their recorded loads, and the routing over the steps of a run.

`profiles/definitions.md` defines every number.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from mtrain_cli.records.expert_loads import DEALT, ExpertAnalysis
from mtrain_cli.records.metrics import StepMetrics
from mtrain_cli.reporting.report_source import ReportSource
from mtrain_cli.reporting.table import (
    Column,
    Lines,
    Map,
    Part,
    Section,
    Table,
    count,
    data,
    fixed,
    ms,
    percent,
    spread,
)
from mtrain_cli.reporting.tables import CELLS, fold, shaded

NOTE = (
    "max over mean of the tokens that experts compute, 1 is perfect: worker imbalance across the "
    "workers of a layer, step imbalance across the experts of a worker, largest load across all "
    "experts of a layer; if dealt over N: the worker imbalance that these loads would have with "
    "expert parallelism over N workers; by time: worker imbalance of the time of the experts; mean "
    "± standard deviation over n layers of steps; ms: of one layer's experts, backward without the "
    "second forward pass. In a recorded step, times have no waits for messages"
)
ROUTING_NOTE = (
    "balance loss: without its coefficient, 1 is perfect; largest load: tokens of the expert with "
    "the most over the mean, of the worst layer; entropy of the router's scores in nats, and that "
    "of even scores; z: mean of logsumexp^2; dropped: tokens beyond an expert's capacity, of all "
    "steps"
)
MOST_MAPS = 3  # heat maps in the terminal; report.html has all
Row = dict[str, Any]
_FIELDS = ("balance_loss", "expert_load", "router_entropy", "router_z", "dropped")


def labelled_experts(
    sources: Sequence[ReportSource],
) -> list[tuple[str, ReportSource, ExpertAnalysis]]:
    """Return (label, run, loads) of each case. With several runs, labels name the run."""
    several = len(sources) > 1
    return [
        (f"{source.name}: {each.label}" if several else each.label, source, each)
        for source in sources
        for each in source.experts
    ]


def routed(sources: Sequence[ReportSource]) -> list[ReportSource]:
    """Return the runs whose metrics describe a routing."""
    return [
        source for source in sources if any(step.expert_load is not None for step in source.metrics)
    ]


def expert_table(sources: Sequence[ReportSource]) -> Table:
    """Return a table with a row per recorded case."""
    columns = [
        Column("case", lambda row: row[0], words=True),
        Column("ep", lambda row: row[2].parallel, drop=2),
        Column("worker imbalance", lambda row: row[2].worker, spread),
        Column("step imbalance", lambda row: row[2].step, spread),
        Column("largest load", lambda row: row[2].largest, spread),
        Column(f"if dealt over {' / '.join(map(str, DEALT))}", _dealt),
        Column("worker imbalance, by time", lambda row: row[2].time, spread, drop=5),
        Column("ms forward / backward", _times, drop=3),
        Column("dropped", lambda row: row[2].dropped, percent, drop=4),
        Column("n", lambda row: row[2].worker.n, drop=1),
    ]
    return Table("Experts", columns, labelled_experts(sources), NOTE)


def _dealt(row: tuple[str, ReportSource, ExpertAnalysis]) -> str:
    dealt = (row[2].dealt.get(workers) for workers in DEALT)
    return " / ".join("-" if value is None else f"{value.mean:.2f}" for value in dealt)


def _times(row: tuple[str, ReportSource, ExpertAnalysis]) -> str:
    times = [row[2].ms.get(name) for name in ("forward", "backward")]
    return " / ".join("-" if value is None else ms(value) for value in times)


def routing_table(sources: Sequence[ReportSource]) -> Table:
    """Return a table with a row per training run with experts."""

    def ends(group: str, name: str, digits: int) -> tuple[Column, Column]:
        return (
            Column("first", lambda s: getattr(_steps(s)[0], name), fixed(digits), group=group),
            Column("last", lambda s: getattr(_steps(s)[-1], name), fixed(digits), group=group),
        )

    columns = [
        Column("run", lambda source: source.name, words=True),
        *ends("balance loss", "balance_loss", 3),
        *ends("largest load", "expert_load", 2),
        *ends("entropy", "router_entropy", 3),
        Column("even", _even, fixed(3), drop=2),
        Column("last", lambda s: _steps(s)[-1].router_z, fixed(3), group="z", drop=1),
        Column("dropped", lambda s: sum(step.dropped or 0 for step in _steps(s)), count, drop=3),
    ]
    return Table("Routing", columns, routed(sources), ROUTING_NOTE)


def _steps(source: ReportSource) -> list[StepMetrics]:
    return [step for step in source.metrics if step.expert_load is not None]


def _even(source: ReportSource) -> float | None:
    experts = source.settings.get("model.moe.experts")
    return float(np.log(experts)) if isinstance(experts, int) and experts > 0 else None


def expert_section(sources: Sequence[ReportSource]) -> Section:
    """Return the tables, and heat maps of the first cases."""
    maps = labelled_experts(sources)
    more = f"showing {MOST_MAPS} of {len(maps)} heat maps of experts; report.html has all"
    parts: list[Part] = [routing_table(sources), expert_table(sources)]
    parts += [Map(share_map(each, label)) for label, _, each in maps[:MOST_MAPS]]
    parts += [Lines([more], style="dim")] if len(maps) > MOST_MAPS else []
    return Section("Experts", parts)


def share_map(each: ExpertAnalysis, label: str, *, cells: int = CELLS) -> RenderableType:
    """Return a heat map of the experts' shares, with a line per layer and a column per expert.

    cells: largest number of lines, and of columns.
    """
    whole = each.shares.mean(0)
    table, folded = fold(whole, cells)
    top = float(table.max(initial=0)) or 1.0
    of_line = -(-len(whole) // len(table))
    lines = [Text(f"{label}: share of tokens by layer and expert", style="bold")]
    for first, row in zip(range(0, len(whole), of_line), table, strict=True):
        last = min(first + of_line, len(whole)) - 1
        numbers = dict.fromkeys((each.layers[first], each.layers[last]))
        most = float(whole[first : last + 1].max()) * each.experts
        lines.append(shaded("-".join(map(str, numbers)), row, top).append(f" {most:.2f}"))
    steps = f"step {each.steps[0]}" if len(each.steps) == 1 else f"mean of {len(each.steps)} steps"
    caption = (
        f"{'':>8} experts 0-{each.experts - 1} across, {steps}; darkest = {top:.1%} of a layer's "
        f"tokens; right: largest load"
    )
    if folded:
        caption += f"\n{'':>8} each cell is the maximum of several experts or layers"
    return Group(*lines, Text(caption, style="dim"))


def expert_files(sources: Sequence[ReportSource]) -> list[Table]:
    """Return experts.csv, expert_balance.csv and routing.csv. The first two are means over steps.

    Their rows are a case, layer and expert; a case and layer; and a training step.
    """
    shares, degrees = [], []
    for source in sources:
        for each in source.experts:
            names: Row = {"run": source.name, "case": each.label, "steps": len(each.steps)}
            tokens, share = each.by_rank.sum(1), each.shares.mean(0)
            for (i, layer), expert in product(enumerate(each.layers), range(each.experts)):
                values: Row = {"tokens": float(tokens[i, expert]), "share": float(share[i, expert])}
                load = float(share[i, expert]) * each.experts
                shares.append({**names, "layer": layer, "expert": expert, **values, "load": load})
            for layer, of_layer in zip(each.layers, each.by_layer, strict=True):
                named = zip(("worker_id", "step_id", "largest_load"), of_layer, strict=True)
                degrees.append({**names, "layer": layer, **{k: float(v) for k, v in named}})
    routing = [
        {"run": source.name, "step": step.step, **{name: getattr(step, name) for name in _FIELDS}}
        for source in routed(sources)
        for step in source.metrics
    ]
    return [data("experts", shares), data("expert_balance", degrees), data("routing", routing)]
