"""Mean and spread of samples."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


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
    def of(values: np.ndarray, iterations: np.ndarray | None = None) -> Estimate:
        """Return the estimate from samples.

        Args:
            values: the samples, in any shape.
            iterations: number of the iteration of each sample. `error` is then the standard error
                over iteration means, because the layers of one iteration are correlated. None
                treats all samples as independent.
        """
        values = np.asarray(values, np.float64).reshape(-1)
        if not len(values):
            return Estimate(float("nan"), float("nan"), 0)
        means = values
        if iterations is not None:
            _, owner = np.unique(iterations, return_inverse=True)
            means = np.bincount(owner, values) / np.bincount(owner)
        error = float(means.std(ddof=1)) / len(means) ** 0.5 if len(means) > 1 else float("nan")
        return Estimate(
            float(values.mean()),
            float(values.std(ddof=1)) if len(values) > 1 else 0.0,
            len(values),
            error,
        )
