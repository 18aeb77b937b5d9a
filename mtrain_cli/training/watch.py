"""Warn about spikes of the loss or the gradient norm, and about stragglers.

Both watches compare with a median, which a few outliers do not move.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mtrain_cli.training.callback import Callback, FinishedStep

WINDOW = 64  # number of latest steps to compare with
MIN_STEPS = 16  # number of steps before the first comparison
# For a normal distribution, 1.4826 x the median absolute deviation is the standard deviation.
_NORMAL = 1.4826
_MIN_LOSS_SIGMA = 0.01  # smallest standard deviation of the loss, as a share of its median
_MIN_NORM_SIGMA = 0.05  # smallest standard deviation of the logarithm of the gradient norm

STRAGGLER_STEPS = 20  # number of latest steps to compare
STRAGGLER_WARM_UP = 3  # first steps to ignore: compilation and first communicators


def _sigmas(values: deque[float], value: float, minimum: float) -> float:
    """Return how many robust deviations, at least `minimum`, `value` lies above the median."""
    if len(values) < MIN_STEPS:
        return 0.0
    middle = statistics.median(values)
    deviation = _NORMAL * statistics.median(abs(v - middle) for v in values)
    return (value - middle) / max(deviation, minimum)


class SpikeWatch:
    """Detect spikes of the loss and of the gradient norm, with the same result on all workers.

    A step is a spike if its loss, or the logarithm of its gradient norm, exceeds the median of the
    last 64 steps by more than `sigma` robust standard deviations. The first 16 steps are never
    spikes. The median includes spikes, so a lasting change stops being a spike after 32 steps.
    """

    def __init__(self, sigma: float) -> None:
        """sigma: threshold in robust standard deviations. 0 disables the watch."""
        self._sigma = sigma
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._norms: deque[float] = deque(maxlen=WINDOW)  # their logarithms
        self._since: int | None = None  # first step of the current spike

    def check(self, step: int, loss: float, grad_norm: float) -> tuple[bool, str]:
        """Return whether this step is a spike, and a line if a spike starts or ends, else ""."""
        log_norm = math.log(grad_norm) if grad_norm > 0 else -math.inf
        before = len(self._losses)
        outliers = self._outliers(loss, grad_norm, log_norm) if self._sigma else []
        self._losses.append(loss)
        if log_norm > -math.inf:
            self._norms.append(log_norm)
        line = ""
        if outliers and self._since is None:
            self._since = step
            line = f"step {step} is a spike: {' and '.join(outliers)} of the last {before} steps"
        elif not outliers and self._since is not None:
            count = step - self._since
            lasted = f"the spike lasted {count} step{'s' * (count > 1)}"
            line = f"step {step} is back to normal; {lasted}"
            self._since = None
        return bool(outliers), line

    def _outliers(self, loss: float, grad_norm: float, log_norm: float) -> list[str]:
        outliers = []
        middle = statistics.median(self._losses) if self._losses else 0.0
        sigmas = _sigmas(self._losses, loss, _MIN_LOSS_SIGMA * abs(middle))
        if sigmas > self._sigma:
            outliers.append(
                f"loss {loss:.4f}, {_format_sigmas(sigmas)} above the median {middle:.4f}"
            )
        sigmas = _sigmas(self._norms, log_norm, _MIN_NORM_SIGMA)
        if sigmas > self._sigma:
            middle = math.exp(statistics.median(self._norms))
            distance = f"{_format_sigmas(sigmas)} above the median {middle:.3g}"
            outliers.append(f"gradient norm {grad_norm:.3g}, {distance}")
        return outliers

    def state(self) -> dict[str, Any]:
        return {"loss": list(self._losses), "norm": list(self._norms)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._losses.extend(float(v) for v in state["loss"])
        self._norms.extend(float(v) for v in state["norm"])


def _format_sigmas(sigmas: float) -> str:
    return f"{sigmas:.0f} sigma" if sigmas < 1000 else "over 1000 sigma"


class StragglerWatch(Callback):
    """Warn of workers that have become slower than the others. Runs on the first worker.

    A rank is a straggler if it takes more than 1 + `share` times as long as the median of the other
    ranks for the same part of a layer (`ComputeTimer`), in more than half of the last 20 steps. It
    is reported once, and when it has caught up. A share of 0 disables the watch.
    """

    def __init__(
        self, share: float | str, device: str, places: Sequence[str], warn: Callable[[str], None]
    ) -> None:
        """share: ``auto`` is 0.1 on GPUs, 0.5 on CPUs that share cores."""
        self._share = (0.1 if device == "cuda" else 0.5) if isinstance(share, str) else share
        self._places, self._warn = places, warn
        self._ratios: list[deque[float]] = [deque(maxlen=STRAGGLER_STEPS) for _ in places]
        self._slow: set[int] = set()
        self._seen = 0

    def after_step(self, step: FinishedStep) -> None:
        for line in self.check([report.compute_seconds for report in step.result.reports]):
            self._warn(line)

    def check(self, seconds: Sequence[float]) -> list[str]:
        """Return a line for each rank that has become a straggler or has caught up.

        seconds: time that each rank took. 0 if not measured.
        """
        self._seen += 1
        is_measured = len(seconds) > 1 and all(seconds)
        if not self._share or self._seen <= STRAGGLER_WARM_UP or not is_measured:
            return []
        lines = []
        for rank, own in enumerate(seconds):
            ratios = self._ratios[rank]
            ratios.append(own / statistics.median([*seconds[:rank], *seconds[rank + 1 :]]))
            if len(ratios) < STRAGGLER_STEPS:
                continue
            ratio, name = statistics.median_low(ratios), f"rank {rank} ({self._places[rank]})"
            if rank not in self._slow and ratio > 1 + self._share:
                self._slow.add(rank)
                lines.append(
                    f"{name} is a straggler: it takes {ratio:.2f}x as long as the others for the "
                    f"same part of a layer, in most of the last {STRAGGLER_STEPS} steps"
                )
            # It catches up only below half the threshold, so as not to be reported repeatedly.
            elif rank in self._slow and ratio < 1 + self._share / 2:
                self._slow.remove(rank)
                lines.append(f"{name} has caught up with the others")
        return lines
