"""How evenly attention is spread over workers and steps (MTraining, sections 3.3 and D.4), as figures of a matrix of times or of work.

T[r, t] is what worker r computes in step t of a schedule: seconds of attention, or query-key pairs. Steps in which nobody computes say
nothing about balance and are left out. `profiles/definitions.md` has the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class Imbalance:
    """Imbalance degrees, largest over mean; 1 is perfect.

    worker: across the workers of a step, averaged over steps. step: across the steps of a worker, averaged over workers. total: across
    workers, of all their steps together. critical: if every step ended with its slowest worker, over perfect balance.
    """

    worker: float
    step: float
    total: float
    critical: float


@dataclass(frozen=True)
class ComputationRatios:
    """Computation ratios: the share of time in which attention is computed; 1 is perfect.

    step: in a step of a worker, averaged over workers and steps. total: of all steps of a worker in the time of the whole pass, averaged
    over workers.
    """

    step: float
    total: float


def imbalance(table: ArrayLike) -> Imbalance:
    """table: [workers, steps], not negative.

    Raises:
        ValueError: the table is empty, or has a negative or undefined entry.
    """
    t = _checked(table, 2)
    return Imbalance(*(float(degree[0]) for degree in degrees(t[None])))


def degrees(tables: ArrayLike) -> np.ndarray:
    """Of many tables at once: [samples, workers, steps] -> [4, samples], in the order of `Imbalance`.

    Raises:
        ValueError: a table is empty, or has a negative or undefined entry.
    """
    t = _checked(tables, 3)
    live = t.sum(1) > 0  # [samples, steps]: somebody computes
    busy = t.sum(2) > 0  # [samples, workers]: computes at all
    largest, mean, totals = t.max(1), t.mean(1), t.sum(2)
    steps = live.sum(1)
    worker = _mean_where(_ratio(largest, mean), live)
    step = _mean_where(_ratio(t.max(2) * steps[:, None], totals), busy)
    total = _ratio(totals.max(1), totals.mean(1))
    critical = _ratio(largest.sum(1), mean.sum(1))
    return np.stack([worker, step, total, critical])


def computation(
    attention: ArrayLike, elapsed: ArrayLike, wall: float | None = None
) -> ComputationRatios:
    """attention: T[workers, steps]. elapsed: all time of the same steps: attention, waits and everything else. wall: of the whole pass,
    which may hold more than its steps; None for the longest sum of a worker's steps.

    Raises:
        ValueError: the tables do not fit together, or have a negative or undefined entry.
    """
    a, e = _checked(attention, 2), _checked(elapsed, 2)
    step, total = ratios(
        a[None], e[None], a.sum(1)[None], np.array([e.sum(1).max() if wall is None else wall])
    )
    return ComputationRatios(float(step[0]), float(total[0]))


def ratios(
    attention: np.ndarray, elapsed: np.ndarray, computed: np.ndarray, wall: np.ndarray
) -> np.ndarray:
    """Computation ratios of many samples: attention, elapsed [samples, workers, steps], computed [samples, workers] (steps and what is
    computed outside of them), wall [samples] -> [2, samples], in the order of `ComputationRatios`. A pass without time has 0.

    Raises:
        ValueError: the tables do not fit together.
    """
    if attention.shape != elapsed.shape:
        raise ValueError(
            f"Attention of shape {attention.shape} is no part of time of shape {elapsed.shape}."
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
            f"Expected finite numbers of at least 0, [workers, steps]; got a table of shape {t.shape}."
        )
    return t


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """1 where there is nothing to divide: what nobody computes is balanced."""
    return np.divide(part, whole, out=np.ones_like(part), where=whole > 0)


def _mean_where(values: np.ndarray, counts: np.ndarray, empty: float = 1.0) -> np.ndarray:
    """Means over all axes but the first of the entries that count; ``empty`` where none does."""
    axes = tuple(range(1, values.ndim))
    number = counts.sum(axes)
    return np.where(
        number > 0, np.where(counts, values, 0).sum(axes) / np.maximum(number, 1), empty
    )
