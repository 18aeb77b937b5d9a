"""How evenly attention is spread over workers and steps (MTraining, sections 3.3 and D.4), as figures of a matrix of times or of work.

T[r, t] is what worker r computes in step t of a schedule: seconds of attention, or query-key pairs. Steps in which nobody computes say
nothing about balance and are left out.
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


def imbalance(table: ArrayLike) -> Imbalance:
    """table: [workers, steps], not negative.

    Raises:
        ValueError: the table is empty, or has a negative or undefined entry.
    """
    t = np.asarray(table, np.float64)
    if t.ndim != 2 or not t.size or not (t >= 0).all() or not np.isfinite(t).all():
        raise ValueError(f"Expected finite numbers of at least 0, [workers, steps]; got a table of shape {t.shape}.")
    steps = t[:, t.sum(0) > 0]
    workers = steps[t.sum(1) > 0]
    if not steps.size:
        return Imbalance(1.0, 1.0, 1.0, 1.0)
    largest, mean = steps.max(0), steps.mean(0)
    return Imbalance(
        worker=float((largest / mean).mean()),
        step=float((workers.max(1) / workers.mean(1)).mean()),
        total=float(t.sum(1).max() / t.sum(1).mean()),
        critical=float(largest.sum() / mean.sum()),
    )
