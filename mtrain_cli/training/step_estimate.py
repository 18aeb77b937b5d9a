"""What a step computes and how long it takes, for plan, banner and status.

`simulation.scenario.estimate_step` makes the estimate; training imports no simulation.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepEstimate:
    """The prediction of a step.

    density: mean share of the pairs of a causal mask; None if it is unknown before training.
    drawn: which pairs are assumed, if the pattern depends on the data; else "".
    cluster: name of the cluster whose constants give the time.
    seconds: (expected, best, worst); None if not predicted, for the reason ``problem``.
    """

    density: float | None
    drawn: str = ""
    cluster: str = ""
    seconds: tuple[float, float, float] | None = None
    problem: str = ""

    def describe(self) -> str:
        """Return one line on the time, with density and source; "" on a CPU."""
        if self.seconds is None:
            return self.problem and f"not predicted: {self.problem}"
        expected, best, worst = self.seconds
        at = f" at density {self.density:.1%} ({self.drawn})" if self.drawn else ""
        bounds = f"between {duration(best)} and {duration(worst)}"
        return (
            f"{exact(expected)} per step{at}, predicted as by `mtrain simulate` on {self.cluster}; "
            f"{bounds} within the bounds of the constants"
        )


def duration(seconds: float) -> str:
    """Format seconds, for example as 41 s, 9.2 min or 2.5 h."""
    unit, scale = ("s", 1) if seconds < 120 else ("min", 60) if seconds < 7200 else ("h", 3600)
    return f"{seconds / scale:,.3g} {unit}"


def exact(seconds: float) -> str:
    """Format a predicted time as the tables of `mtrain simulate` do."""
    return f"{seconds:.4g} s" if seconds < 9999.5 else f"{seconds:,.0f} s"
