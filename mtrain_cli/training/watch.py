"""What is out of the ordinary in a run that goes on: a loss or gradient norm that jumps, a worker that has become slow.

Both compare with what has been seen, by medians, which a few odd values do not move.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

WINDOW = 64  # steps that make the band
MIN_STEPS = 16  # before which there is none
# 1.4826 x the median absolute deviation of a normal distribution is its standard deviation.
_NORMAL = 1.4826
# The narrowest standard deviation: a share of the loss; for the norm, whose logarithm is watched, as much in that.
_MIN_LOSS_SIGMA, _MIN_NORM_SIGMA = 0.01, 0.05

STRAGGLER_STEPS = 20
STRAGGLER_WARM_UP = 3  # compilation and first communicators


class _Band:
    """The latest values of one quantity."""

    def __init__(self) -> None:
        self.values: deque[float] = deque(maxlen=WINDOW)

    def sigmas(self, value: float, minimum: float) -> float:
        """How many robust standard deviations, of at least ``least``, above the median; 0 while too few are known."""
        if len(self.values) < MIN_STEPS:
            return 0.0
        middle = statistics.median(self.values)
        deviation = _NORMAL * statistics.median(abs(v - middle) for v in self.values)
        return (value - middle) / max(deviation, minimum)


class SpikeWatch:
    """Spikes of loss and gradient norm. Alike on all workers, which give it the same numbers.

    A value is a spike if it lies more than ``sigma`` robust standard deviations above the median of the last 64 steps, spikes included: a
    change that lasts is ordinary once it fills half of them. A robust standard deviation is 1.4826 x the median absolute deviation, at
    least 1 % of the median loss, and for the logarithm of the gradient norm at least 0.05. There are none before 16 steps.
    """

    def __init__(self, sigma: float) -> None:
        """sigma: 0 = never a spike."""
        self._sigma = sigma
        self._loss, self._norm = _Band(), _Band()
        self._since: int | None = None  # first step of the spikes that go on

    def check(self, step: int, loss: float, grad_norm: float) -> tuple[bool, str]:
        """Whether this step is a spike, and a line where that has changed."""
        log_norm = math.log(grad_norm) if grad_norm > 0 else -math.inf
        outliers = []
        before = len(self._loss.values)
        if self._sigma:
            middle = statistics.median(self._loss.values) if self._loss.values else 0.0
            sigmas = self._loss.sigmas(loss, _MIN_LOSS_SIGMA * abs(middle))
            if sigmas > self._sigma:
                outliers.append(f"loss {loss:.4f}, {_format_sigmas(sigmas)} above the median {middle:.4f}")
            sigmas = self._norm.sigmas(log_norm, _MIN_NORM_SIGMA)
            if sigmas > self._sigma:
                middle = math.exp(statistics.median(self._norm.values))
                outliers.append(
                    f"gradient norm {grad_norm:.3g}, {_format_sigmas(sigmas)} above the median {middle:.3g}"
                )
        self._loss.values.append(loss)
        if log_norm > -math.inf:
            self._norm.values.append(log_norm)
        line = ""
        if outliers and self._since is None:
            self._since = step
            line = f"step {step} is a spike: {' and '.join(outliers)} of the {before} steps before"
        elif not outliers and self._since is not None:
            count = step - self._since
            line = f"step {step} is inside the band again, after {count} step{'s' * (count > 1)} outside"
            self._since = None
        return bool(outliers), line

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"loss": list(self._loss.values), "norm": list(self._norm.values)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._loss.values.extend(float(v) for v in state["loss"])
        self._norm.values.extend(float(v) for v in state["norm"])


def _format_sigmas(sigmas: float) -> str:
    return f"{sigmas:.0f} sigma" if sigmas < 1000 else "over 1000 sigma"


class StragglerWatch:
    """Workers that have become slower than the others, for the same work.

    Each step gives every rank's seconds. A rank is slow if it took more than 1 + ``share`` times the median of the other ranks in more than
    half of the last 20 steps. It is named once, and once more when it is as fast as the others again for as long.
    """

    def __init__(self, share: float, places: Sequence[str], work: str) -> None:
        """share: 0 = never. places: host and device of each rank. what: that a slow rank takes longer for."""
        self._share, self._places, self._work = share, places, work
        self._ratios: list[deque[float]] = [deque(maxlen=STRAGGLER_STEPS) for _ in places]
        self._slow: set[int] = set()
        self._seen = 0

    def check(self, seconds: Sequence[float], base: float | None = None) -> list[str]:
        """Lines on ranks of which it has changed whether they are slow. seconds: of each rank, 0 where one did not measure; base: what a
        difference to the others is a share of, None for their median.
        """
        self._seen += 1
        if (
            not self._share
            or len(seconds) < 2
            or self._seen <= STRAGGLER_WARM_UP
            or (base is None and not all(seconds))
        ):
            return []
        lines = []
        for rank, own in enumerate(seconds):
            others = statistics.median([*seconds[:rank], *seconds[rank + 1 :]])
            ratios = self._ratios[rank]
            ratios.append(1 + (own - others) / (others if base is None else base))
            if len(ratios) < STRAGGLER_STEPS:
                continue
            ratio = statistics.median_low(ratios)
            if rank not in self._slow and ratio > 1 + self._share:
                self._slow.add(rank)
                lines.append(
                    f"rank {rank} ({self._places[rank]}) is slow: {self._describe(ratio, base)}, {_LASTING}"
                )
            # Half way back, lest one at the limit is named again and again.
            elif rank in self._slow and ratio < 1 + self._share / 2:
                self._slow.remove(rank)
                lines.append(f"rank {rank} ({self._places[rank]}) is as fast as the others again")
        return lines

    def _describe(self, ratio: float, base: float | None) -> str:
        if base is None:
            return f"it takes {ratio:.2f}x as long as the others for {self._work}"
        return f"it takes longer than the others for {self._work}, by {ratio - 1:.0%} of a step"


_LASTING = f"in most of the last {STRAGGLER_STEPS} steps"
