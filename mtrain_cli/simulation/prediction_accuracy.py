"""How accurate predictions are: their errors over all compared cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mtrain_cli.grouping import grouped
from mtrain_cli.simulation.validation import CaseComparison, Key

_LEAST_RANKED = 3


@dataclass(frozen=True)
class PredictionAccuracy:
    """Errors over all cases.

    mape: mean absolute relative error of a case's time.
    worst: relative error of a case's time with the largest absolute value.
    passes: mean absolute relative error of the time of each pass.
    covered: share of passes whose measured time is within the bounds.
    degree, worst_degree: mean and largest absolute error of the imbalance degrees of time.
    rank: Spearman correlation of measured and predicted times, for each group of three cases or
        more.
    cells, equal: sums of the fields of the same name in `PassComparison`.
    chosen: by group, whether the case with the shortest predicted time also has the shortest
        measured time.
    common: median over cases of predicted / measured time. It differs from 1 if, for example, the
        whole machine was slower than at calibration.
    mape_without_common: mean absolute relative error of all predictions divided by ``common``.
    """

    mape: float
    worst: float
    passes: dict[str, float]
    covered: float
    degree: float
    worst_degree: float
    rank: dict[Key, float]
    cells: int
    equal: int
    chosen: dict[Key, bool] = field(default_factory=dict)
    common: float = 1.0
    mape_without_common: float = 0.0

    def to_json(self) -> dict[str, Any]:
        def by_group(values: dict[Key, Any]) -> dict[str, Any]:
            return {f"{g[0]}: {' '.join(map(str, g[1:]))}": value for g, value in values.items()}

        return {
            "mape": self.mape,
            "common_factor": self.common,
            "mape_beside_common_factor": self.mape_without_common,
            "worst_error": self.worst,
            "mape_of_passes": self.passes,
            "inside_bounds": self.covered,
            "degree_mean_error": self.degree,
            "degree_worst_error": self.worst_degree,
            "work_cells": self.cells,
            "work_cells_equal": self.equal,
            "spearman": by_group(self.rank),
            "fastest_found": by_group(self.chosen),
        }


def accuracy(cases: Sequence[CaseComparison]) -> PredictionAccuracy:
    """Summarize the errors of all cases."""
    errors = np.array([case.error for case in cases])
    every = [(name, p) for case in cases for name, p in case.passes.items()]
    degrees = np.abs([p - m for _, one_pass in every for m, p in one_pass.degrees.values()])
    times = {
        group: [np.array([getattr(c, of) for c in members]) for of in ("measured", "predicted")]
        for group, members in grouped(cases, lambda case: case.group).items()
        if len(members) >= _LEAST_RANKED
    }
    common = float(np.median(errors + 1))
    return PredictionAccuracy(
        mape=float(np.abs(errors).mean()),
        worst=float(errors[np.argmax(np.abs(errors))]),
        passes={
            name: float(np.mean([abs(p.error) for n, p in every if n == name]))
            for name in dict.fromkeys(n for n, _ in every)
        },
        covered=float(np.mean([p.inside for _, p in every])),
        degree=float(degrees.mean()),
        worst_degree=float(degrees.max()),
        rank={group: spearman(*pair) for group, pair in times.items()},
        cells=sum(p.cells for _, p in every),
        equal=sum(p.equal for _, p in every),
        common=common,
        mape_without_common=float(np.abs((errors + 1) / common - 1).mean()),
        chosen={
            group: int(pair[0].argmin()) == int(pair[1].argmin()) for group, pair in times.items()
        },
    )


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Return the Spearman correlation; NaN if an input is constant. Ties get their mean rank."""
    ranks = [_ranks(np.asarray(values, np.float64)) for values in (a, b)]
    if any(np.ptp(r) == 0 for r in ranks):
        return float("nan")
    return float(np.corrcoef(np.stack(ranks))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[where]
