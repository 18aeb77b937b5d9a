"""Imbalance degrees and computation ratios of a matrix of times or work (MTraining, 3.3 and D.4).

The matrix entry T[r, t] is the attention time, or the number of query-key pairs, of worker r in
step t of a schedule. Steps in which no worker computes do not count. `profiles/definitions.md` has
the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def imbalance(table: ArrayLike) -> Imbalance:
    """Return the imbalance degrees of one table of non-negative numbers, [workers, steps].

    Raises:
        ValueError: the table is empty, or an entry is negative or not finite.
    """
    t = _checked(table, 2)
    return Imbalance(*(float(degree[0]) for degree in degrees(t[None])))


def degrees(tables: ArrayLike, columns: np.ndarray | None = None) -> np.ndarray:
    """Return the imbalance degrees of many tables, [4, samples].

    The first axis has the order of the fields of `Imbalance`. Gathered single columns count as one
    more step in the degrees that compare workers. The degree that compares the steps of a worker
    ignores these columns.

    Args:
        tables: non-negative numbers, [samples, workers, steps].
        columns: the same numbers of gathered single columns, [samples, workers]; None for no
            columns.

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
    """Return the computation ratios of many samples, [2, samples]; 1 is perfect.

    A computation ratio is the share of a duration that attention kernels take:
    - first row: share of a worker's step, averaged over workers and steps
    - second row: share of the whole pass, averaged over workers

    Args:
        attention: time of attention kernels in each step, [samples, workers, steps].
        elapsed: duration of each step, [samples, workers, steps].
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
    return np.stack(
        [step, np.divide(computed.mean(1), wall, out=np.zeros(len(wall)), where=wall > 0)]
    )


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
    """Average the chosen entries over all axes except the first.

    Args:
        counts: bool, whether an entry is chosen.
        empty: result if no entry is chosen.
    """
    axes = tuple(range(1, values.ndim))
    number = counts.sum(axes)
    return np.where(
        number > 0, np.where(counts, values, 0).sum(axes) / np.maximum(number, 1), empty
    )
