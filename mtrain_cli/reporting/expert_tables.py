"""Tables of the experts of a model: their recorded loads, and the routing over the steps of a run.

`profiles/definitions.md` defines every number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mtrain_cli.console import Console
from mtrain_cli.records.expert_loads import DEALT, ExpertAnalysis
from mtrain_cli.reporting.report_source import ReportSource
from mtrain_cli.reporting.tables import CELLS, fixed, fold, ms, shaded, spread
from mtrain_cli.reporting.terminal_width import new_table, print_table

HEADS = (
    *("case", "ep", "worker imbalance", "step imbalance", "largest load"),
    f"if dealt over {' / '.join(map(str, DEALT))}",
    *("worker imbalance, by time", "ms forward / backward", "dropped", "n"),
)
# The headings in the terminal, where lines must break at good places.
_BROKEN = (
    *("case", "ep", "worker\nimbalance", "step\nimbalance", "largest\nload"),
    f"if dealt over\n{' / '.join(map(str, DEALT))}",
    *("by time", "ms forward\n/ backward", "dropped", "n"),
)
SPARE = ("n", "ep", _BROKEN[7], "dropped", "by time")  # a narrow terminal drops them
NOTE = (
    "max over mean of the tokens that experts compute, 1 is perfect: worker imbalance across the "
    "workers of a layer, step imbalance across the experts of a worker, largest load across all "
    "experts of a layer; if dealt over N: the worker imbalance that these loads would have with "
    "expert parallelism over N workers; by time: worker imbalance of the time of the experts; mean "
    "± standard deviation over n layers of steps; ms: of one layer's experts, backward without the "
    "second forward pass. In a recorded step, times have no waits for messages"
)
ROUTING_HEADS = (
    *("run", "balance loss, first", "last", "largest load, first", "last"),
    *("entropy, first", "last", "even", "z, last", "dropped"),
)
ROUTING_SPARE = ("z, last", "even", "dropped")
ROUTING_NOTE = (
    "balance loss: without its coefficient, 1 is perfect; largest load: tokens of the expert with "
    "the most over the mean, of the worst layer; entropy of the router's scores in nats, and that "
    "of even scores; z: mean of logsumexp^2; dropped: tokens beyond an expert's capacity, of all "
    "steps"
)
MOST_MAPS = 3  # heat maps in the terminal; report.html has all
_FIELDS = ("balance_loss", "expert_load", "router_entropy", "router_z")


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


def expert_cells(sources: Sequence[ReportSource]) -> list[list[str]]:
    """Return a row per recorded case, with the cells of `HEADS`."""
    rows = []
    for label, _, each in labelled_experts(sources):
        dealt = (each.dealt.get(workers) for workers in DEALT)
        times = [each.ms.get(name) for name in ("forward", "backward")]
        rows.append(
            [
                label,
                str(each.parallel),
                spread(each.worker),
                spread(each.step),
                spread(each.largest),
                " / ".join("-" if value is None else f"{value.mean:.2f}" for value in dealt),
                "-" if each.time is None else spread(each.time),
                " / ".join("-" if value is None else ms(value) for value in times),
                f"{each.dropped:.1%}",
                str(each.worker.n),
            ]
        )
    return rows


def routing_cells(sources: Sequence[ReportSource]) -> list[list[str]]:
    """Return a row per training run with experts, with the cells of `ROUTING_HEADS`."""
    rows = []
    for source in routed(sources):
        steps = [step for step in source.metrics if step.expert_load is not None]
        first, last = steps[0], steps[-1]
        experts = source.settings.get("model.moe.experts")
        even = float(np.log(experts)) if isinstance(experts, int) and experts > 0 else None
        rows.append(
            [
                source.name,
                *(fixed(step.balance_loss, 3) for step in (first, last)),
                *(fixed(step.expert_load, 2) for step in (first, last)),
                *(fixed(step.router_entropy, 3) for step in (first, last)),
                fixed(even, 3),
                fixed(last.router_z, 3),
                f"{sum(step.dropped or 0 for step in steps):,}",
            ]
        )
    return rows


def show_experts(console: Console, sources: Sequence[ReportSource]) -> None:
    """Print the tables, and heat maps of the first cases."""
    if routings := routing_cells(sources):
        table = new_table(ROUTING_HEADS, title="Routing", caption=ROUTING_NOTE)
        _fill(table, routings)
        print_table(console, table, ROUTING_SPARE)
    rows = expert_cells(sources)
    if not rows:
        return
    table = new_table(_BROKEN, title="Experts", caption=NOTE)
    _fill(table, rows)
    print_table(console, table, SPARE)
    maps = labelled_experts(sources)
    for label, _, each in maps[:MOST_MAPS]:
        console.print(share_map(each, label))
        console.print()
    if len(maps) > MOST_MAPS:
        more = f"showing {MOST_MAPS} of {len(maps)} heat maps of experts; report.html has all"
        console.print(more, style="dim", soft_wrap=True)


def _fill(table: Table, rows: Sequence[Sequence[str]]) -> None:
    for label, *cells in rows:
        table.add_row(Text(label), *cells)


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


def share_rows(sources: Sequence[ReportSource]) -> Iterator[dict[str, Any]]:
    """Yield the rows of experts.csv: one per case, layer and expert. Means over steps."""
    for source in sources:
        for each in source.experts:
            shares, tokens = each.shares.mean(0), each.by_rank.sum(1)
            for (i, layer), expert in (
                (at, expert) for at in enumerate(each.layers) for expert in range(each.experts)
            ):
                yield {
                    **_names(source, each),
                    "layer": layer,
                    "expert": expert,
                    "tokens": float(tokens[i, expert]),
                    "share": float(shares[i, expert]),
                    "load": float(shares[i, expert]) * each.experts,
                }


def balance_rows(sources: Sequence[ReportSource]) -> Iterator[dict[str, Any]]:
    """Yield the rows of expert_balance.csv: one per case and layer. Means over steps."""
    for source in sources:
        for each in source.experts:
            for layer, degrees in zip(each.layers, each.by_layer, strict=True):
                named = zip(("worker_id", "step_id", "largest_load"), degrees, strict=True)
                yield {**_names(source, each), "layer": layer, **{k: float(v) for k, v in named}}


def _names(source: ReportSource, each: ExpertAnalysis) -> dict[str, Any]:
    return {"run": source.name, "case": each.label, "steps": len(each.steps)}


def routing_rows(sources: Sequence[ReportSource]) -> Iterator[dict[str, Any]]:
    """Yield the rows of routing.csv: one per training step of a model with experts."""
    for source in routed(sources):
        for step in source.metrics:
            values = {name: getattr(step, name) for name in (*_FIELDS, "dropped")}
            yield {"run": source.name, "step": step.step, **values}
