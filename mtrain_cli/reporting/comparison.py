"""Compare runs with the first run: ratios and their noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mtrain_cli.records.analysis import CaseAnalysis
from mtrain_cli.records.imbalance import Estimate
from mtrain_cli.records.metrics import rate_unit, steady_steps, timed_steps
from mtrain_cli.reporting.report_source import ReportSource
from mtrain_cli.reporting.table import Column, Table

NOISE = (
    "noise: twice the standard error of the difference, from the spread over iterations; "
    "smaller differences are not significant"
)
SAME = 5e-4  # ratios closer to 1 than this are equal


@dataclass(frozen=True)
class RatioComparison:
    """One quantity of a run, compared with the first run.

    noise: twice the standard error of the ratio. A ratio within 1 ± noise is not significant.
    """

    run: str
    case: str
    what: str
    first: float
    other: float
    noise: float

    @property
    def ratio(self) -> float:
        return self.other / self.first

    @property
    def difference(self) -> str:
        """Return the change as text, or why the change is not significant."""
        change = self.ratio - 1
        if not np.isfinite(self.noise):
            return "unknown"
        if abs(change) <= max(self.noise, SAME):
            return "equal" if abs(change) < SAME else "within noise"
        return f"{self.ratio:.2f}x" if self.ratio >= 2 else f"{change:+.1%}"

    @property
    def spread(self) -> str:
        return f"±{self.noise:.1%}" if np.isfinite(self.noise) else "too few samples"


def comparison(sources: Sequence[ReportSource]) -> list[RatioComparison]:
    """Compare every later run with the first run, in each quantity that both have.

    Compare cases with equal labels or, without any, the only cases of both runs.
    """
    first = sources[0]
    rows: list[RatioComparison] = []

    def compare(
        run: str, case: str, before: dict[str, Estimate], after: dict[str, Estimate]
    ) -> None:
        for what, a in before.items():
            b = after.get(what)
            if b is not None and a.n and b.n and not a.mean <= 0:  # NaN has a row
                noise = 2 * float(np.hypot(a.error, b.error)) / a.mean
                rows.append(RatioComparison(run, case, what, a.mean, b.mean, noise))

    for other in sources[1:]:
        pairs = [(a, b) for a in first.cases for b in other.cases if a.label == b.label]
        if not pairs and len(first.cases) == len(other.cases) == 1:
            pairs = [(first.cases[0], other.cases[0])]
        for a, b in pairs:
            label = a.label if a.label == b.label else f"{b.label} vs. {a.label}"
            compare(other.name, label, _figures(first, a), _figures(other, b))
        if first.metrics and other.metrics:
            unit = rate_unit([*first.metrics, *other.metrics])
            of_runs = _training_figures(first, unit), _training_figures(other, unit)
            compare(other.name, "training", *of_runs)
    return rows


def _figures(source: ReportSource, case: CaseAnalysis) -> dict[str, Estimate]:
    figures = {
        **{f"{name} ms": p.duration for name, p in case.passes.items()},
        "worker imbalance, time": case.time.worker,
        "step imbalance, time": case.time.step,
        "worker imbalance, work": case.work.worker,
        "step imbalance, work": case.work.step,
        "computation ratio, per step": case.computation.step,
        "computation ratio, total": case.computation.total,
        "iteration ms": case.iteration_ms,
    }
    for loads in source.experts:
        if loads.case == case.number:
            figures |= {
                "experts: worker imbalance": loads.worker,
                "experts: step imbalance": loads.step,
                "experts: largest load": loads.largest,
                **({} if loads.time is None else {"experts: worker imbalance, time": loads.time}),
            }
    return figures


def _training_figures(source: ReportSource, unit: str) -> dict[str, Estimate]:
    """Return the quantities of a training run. Only the losses include warm-up steps."""
    metrics = source.metrics
    rest = timed_steps(steady_steps(metrics, [restart.step for restart in source.restarts]))
    last = metrics[-max(1, len(metrics) // 10) :]

    def final(name: str) -> Estimate:
        return Estimate.of([value for m in last if (value := getattr(m, name)) is not None])

    rates = np.array([m.tokens_per_second_per_gpu for m in rest])
    seconds = np.array([m.seconds for m in rest])
    whole = seconds.sum()
    # Total tokens / total time: a mean of rates gives slow steps too little weight.
    rate = float((rates * seconds).sum() / whole) if whole > 0 else np.nan
    losses = np.array([e.loss for e in source.evaluations[-1:]], float)
    return {
        "loss, last tenth of the steps": final("loss"),
        "held-out loss, last": Estimate.of(losses),
        "s / step, mean": Estimate.of(seconds),
        f"{unit}, mean": replace(Estimate.of(rates), mean=rate),
        # Only runs with experts have these.
        "balance loss, last tenth": final("balance_loss"),
        "largest expert load, last tenth": final("expert_load"),
        "routing entropy, last tenth": final("router_entropy"),
    }


def compare_table(sources: Sequence[ReportSource]) -> Table:
    """Return a table that compares every run with the first; no rows if they share no quantity."""
    four_digits = "{:.4g}".format
    columns = [
        Column("run", lambda row: row.run, key="run", words=True, once=True),
        Column("case", lambda row: row.case, key="case", words=True, once=True),
        Column("what", lambda row: row.what, key="what", words=True),
        Column("first", lambda row: row.first, four_digits, "first", drop=1),
        Column("this", lambda row: row.other, four_digits, "this"),
        Column("difference", lambda row: row.difference),
        Column("", lambda row: row.ratio, key="ratio"),
        Column("", lambda row: row.noise, key="noise"),
        Column("noise", lambda row: row.spread),
    ]
    title = f"Compared with {sources[0].name}"
    return Table(title, columns, comparison(sources), NOISE, "compare")
