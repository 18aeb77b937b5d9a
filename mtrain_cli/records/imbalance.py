"""Imbalance degrees and computation ratios (MTraining, 3.3 and D.4), and estimates of samples.

The matrix entry T[r, t] is the attention time, or the number of query-key pairs, of worker r in
step t of a schedule. Steps in which no worker computes do not count. `profiles/definitions.md` has
the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class Imbalance:
    """Imbalance degrees. Each degree is a maximum divided by a mean; 1 is perfect balance.

    worker: maximum / mean over the workers of a step, averaged over steps.
    step: maximum / mean over the steps of a worker, averaged over workers.
    total: maximum / mean over workers of the sum over all steps.
    critical: the time if every step lasted as long as its slowest worker, divided by the time if
        every step were perfectly balanced.
    """

    worker: float
    step: float
    total: float
    critical: float


@dataclass(frozen=True)
class Estimate:
    """Mean and standard deviation of n samples.

    error: standard error of the mean; NaN with only one iteration.
    """

    mean: float
    std: float
    n: int
    error: float = field(default=float("nan"), compare=False)

    @staticmethod
    def of(values: ArrayLike, iterations: np.ndarray | None = None) -> Estimate:
        """Return the estimate from samples in any shape.

        iterations: number of the iteration of each sample. `error` is then the standard error over
            iteration means, because the layers of one iteration are correlated. None treats all
            samples as independent.
        """
        values = np.asarray(values, np.float64).reshape(-1)
        nan, n = float("nan"), len(values)
        if not n:
            return Estimate(nan, nan, 0)
        means = values
        if iterations is not None:
            _, owner = np.unique(iterations, return_inverse=True)
            means = np.bincount(owner, values) / np.bincount(owner)
        error = float(means.std(ddof=1)) / len(means) ** 0.5 if len(means) > 1 else nan
        return Estimate(float(values.mean()), float(values.std(ddof=1)) if n > 1 else 0.0, n, error)

    def to_json(self) -> dict[str, Any]:
        return {"mean": rounded(self.mean), "std": rounded(self.std), "n": self.n}


def rounded(value: float) -> float | None:
    """Return a number for JSON with five digits; None for NaN and infinity."""
    return float(f"{value:.5g}") if np.isfinite(value) else None


def imbalance(table: ArrayLike) -> Imbalance:
    """Return the imbalance degrees of one table of non-negative numbers, [workers, steps].

    Raises:
        ValueError: the table is empty, or an entry is negative or not finite.
    """
    t = _checked(table, 2)
    return Imbalance(*(float(degree[0]) for degree in degrees(t[None])))


def degrees(tables: ArrayLike, columns: np.ndarray | None = None) -> np.ndarray:
    """Return the imbalance degrees of many tables in the order of `Imbalance`, [4, samples].

    Args:
        tables: non-negative numbers, [samples, workers, steps].
        columns: the same numbers of gathered single columns, [samples, workers]. They count as one
            more step in the degrees that compare workers.

    Raises:
        ValueError: a table is empty, or an entry is negative or not finite.
    """
    t = _checked(tables, 3)
    if columns is not None and columns.any():
        worker, _, total, critical = degrees(np.concatenate([t, columns[..., None]], -1))
        return np.stack([worker, degrees(t)[1], total, critical])
    live = t.sum(1) > 0  # [samples, steps]: some worker computes
    busy = t.sum(2) > 0  # [samples, workers]: computes in some step
    largest, mean, totals = t.max(1), t.mean(1), t.sum(2)
    steps = live.sum(1)
    worker = _mean_where(_ratio(largest, mean), live)
    step = _mean_where(_ratio(t.max(2) * steps[:, None], totals), busy)
    total = _ratio(totals.max(1), totals.mean(1))
    critical = _ratio(largest.sum(1), mean.sum(1))
    return np.stack([worker, step, total, critical])


def ratios(
    attention: np.ndarray, elapsed: np.ndarray, computed: np.ndarray, wall: np.ndarray
) -> np.ndarray:
    """Return the shares of time that attention kernels take, [2, samples]; 1 is perfect.

    The first row is the share of a worker's step, averaged over workers and steps; the second is
    the share of the whole pass, averaged over workers.

    Args:
        attention: time of attention kernels in each step, [samples, workers, steps].
        elapsed: duration of each step, in the same shape.
        computed: time of all attention kernels of the pass, including gathered single columns,
            [samples, workers].
        wall: duration of the pass, [samples]. A duration of 0 gives the ratio 0.

    Raises:
        ValueError: the shapes differ.
    """
    if attention.shape != elapsed.shape:
        raise ValueError(
            f"attention has shape {attention.shape}, elapsed has shape {elapsed.shape}: "
            "both must be [samples, workers, steps]."
        )
    counts = (attention.sum(1) > 0)[:, None, :] & (elapsed > 0)
    step = _mean_where(_ratio(attention, elapsed), counts, empty=0.0)
    whole = np.divide(computed.mean(1), wall, out=np.zeros(len(wall)), where=wall > 0)
    return np.stack([step, whole])


def _checked(table: ArrayLike, dimensions: int) -> np.ndarray:
    t = np.asarray(table, np.float64)
    if t.ndim != dimensions or not t.size or not (t >= 0).all() or not np.isfinite(t).all():
        raise ValueError(
            f"Expected finite numbers of at least 0 in {dimensions} dimensions; "
            f"got a table of shape {t.shape}."
        )
    return t


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.ones_like(part), where=whole > 0)


def _mean_where(values: np.ndarray, counts: np.ndarray, empty: float = 1.0) -> np.ndarray:
    """Average the entries that count over all axes but the first; ``empty`` if none counts."""
    axes = tuple(range(1, values.ndim))
    number = counts.sum(axes)
    means = np.where(counts, values, 0).sum(axes) / np.maximum(number, 1)
    return np.where(number > 0, means, empty)
