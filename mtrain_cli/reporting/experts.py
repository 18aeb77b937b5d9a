"""The experts of a model in a report: their recorded loads, and the routing over a run's steps.

`profiles/definitions.md` defines every number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mtrain_cli.records.expert_loads import DEALT, ExpertAnalysis
from mtrain_cli.records.metrics import StepMetrics
from mtrain_cli.reporting import plots
from mtrain_cli.reporting.plots import Figure
from mtrain_cli.reporting.report_source import ReportSource, label_of
from mtrain_cli.reporting.table import Column, Table, data, fixed, ms, spread
from mtrain_cli.reporting.training import curves, layers_over_steps

NOTE = (
    "max over mean of the tokens that experts compute, 1 is perfect: worker imbalance across the "
    "workers of a layer, step imbalance across the experts of a worker, largest load across all "
    "experts of a layer; if dealt over N: the worker imbalance that these loads would have with "
    "expert parallelism over N workers; by time: worker imbalance of the time of the experts; mean "
    "± standard deviation over n layers of steps; ms: of one layer's experts, backward without the "
    "second forward pass"
)
ROUTING_NOTE = (
    "balance loss: without its coefficient, 1 is perfect; largest load: tokens of the expert with "
    "the most over the mean, of the worst layer; entropy of the router's scores in nats, and that "
    "of even scores; z: mean of logsumexp^2"
)
_SIDE = 256  # most experts or layers on an axis
_CURVES = (
    ("largest load, times the mean", "expert_load", True),
    ("balance loss, 1 = even", "balance_loss", False),
    ("entropy of routing, nats", "router_entropy", False),
    ("z: mean of logsumexp^2", "router_z", False),
)


def _labelled(sources: Sequence[ReportSource]) -> list[tuple[str, ExpertAnalysis]]:
    return [(label_of(s, loads.label, sources), loads) for s in sources for loads in s.experts]


def expert_table(sources: Sequence[ReportSource]) -> Table:
    """Return a table with a row per recorded case."""

    def dealt(loads: ExpertAnalysis) -> str:
        degrees = map(loads.dealt.get, DEALT)
        return " / ".join("-" if value is None else f"{value.mean:.2f}" for value in degrees)

    def times(loads: ExpertAnalysis) -> str:
        both = map(loads.ms.get, ("forward", "backward"))
        return " / ".join("-" if value is None else ms(value) for value in both)

    columns = [
        Column("case", lambda row: row[0], words=True),
        Column("ep", lambda row: row[1].parallel, drop=2),
        Column("worker imbalance", lambda row: row[1].worker, spread),
        Column("step imbalance", lambda row: row[1].step, spread),
        Column("largest load", lambda row: row[1].largest, spread),
        Column(f"if dealt over {' / '.join(map(str, DEALT))}", lambda row: dealt(row[1])),
        Column("worker imbalance, by time", lambda row: row[1].time, spread, drop=5),
        Column("ms forward / backward", lambda row: times(row[1]), drop=3),
        Column("n", lambda row: row[1].worker.n, drop=1),
    ]
    return Table("Experts", columns, _labelled(sources), NOTE)


def routing_table(sources: Sequence[ReportSource]) -> Table:
    """Return a table with a row per training run with experts."""

    def ends(group: str, name: str, digits: int) -> tuple[Column, Column]:
        return (
            Column("first", lambda row: getattr(row[1][0], name), fixed(digits), group=group),
            Column("last", lambda row: getattr(row[1][-1], name), fixed(digits), group=group),
        )

    def even(row: tuple[ReportSource, list[StepMetrics]]) -> float | None:
        experts = row[0].settings.get("model.moe.experts")
        return float(np.log(experts)) if isinstance(experts, int) and experts > 0 else None

    columns = [
        Column("run", lambda row: row[0].name, words=True),
        *ends("balance loss", "balance_loss", 3),
        *ends("largest load", "expert_load", 2),
        *ends("entropy", "router_entropy", 3),
        Column("even", even, fixed(3), drop=2),
        Column("last", lambda row: row[1][-1].router_z, fixed(3), group="z", drop=1),
    ]
    routed = [(s, [m for m in s.metrics if m.expert_load is not None]) for s in sources]
    return Table("Routing", columns, [row for row in routed if row[1]], ROUTING_NOTE)


def expert_file(sources: Sequence[ReportSource]) -> Table:
    """Return experts.csv, with a row per case, layer and expert: means over steps."""
    rows = [
        {"run": source.name, "case": loads.label, "steps": len(loads.steps), "layer": layer}
        | {"expert": expert, "share": float(share), "load": float(share) * loads.experts}
        for source in sources
        for loads in source.experts
        for layer, shares in zip(loads.layers, loads.shares.mean(0), strict=True)
        for expert, share in enumerate(shares)
    ]
    return data("experts", rows)


def expert_figures(sources: Sequence[ReportSource]) -> list[Figure]:
    """Draw the routing over training steps, and the shares of experts by layer."""
    # With dense runs, too, so that a run has the same color in all curves.
    trained = [source for source in sources if source.metrics]
    shares = [
        plots.heat_view(
            (label, f"mean of {len(loads.steps)} steps"),
            loads.shares.mean(0),
            ("expert", range(loads.experts)),
            ("layer", loads.layers),
            "share",
            "layer %{y}, expert %{x}: %{z:.2%} of the tokens",
            side=_SIDE,
        )
        for label, loads in _labelled(sources)
    ]
    note = (
        "Share of the layer's tokens that each expert computes. Larger tables shrink to "
        f"{_SIDE} x {_SIDE} cells, each the maximum of its group."
    )
    return [
        curves("routing", "Routing", trained, _CURVES),
        layers_over_steps(
            *("expert-load", "Largest load of an expert by layer"),
            trained,
            "expert_load_by_layer",
            "load",
            "step %{x}, layer %{y}: %{z:.3g} times the mean",
        ),
        Figure("experts", "Tokens by expert and layer", ("case", "steps"), shares, note),
    ]
