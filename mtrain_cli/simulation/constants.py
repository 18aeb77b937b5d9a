"""Constants that no cluster file and no calibration replaces."""

from __future__ import annotations

from mtrain_cli.simulation import costs, non_attention_cost, timeline
from mtrain_cli.simulation.calibration import HIGH, LOW, UNKNOWN
from mtrain_cli.simulation.cluster import Constant


def _fixed(value: float, note: str) -> Constant:
    """Return a guess that is the same in all bounds of a prediction."""
    return Constant(value, "guess", f"{note}; not varied", value, value)


def _of_index(value: float, note: str) -> Constant:
    note = f"{note}, of {costs.INDEX_HEADS} heads on {costs.INDEX_DEVICE}"
    low, high = costs.INDEX_BOUNDS[LOW], costs.INDEX_BOUNDS[HIGH]
    return Constant(value, "measured", note, low * value, high * value)


def _factor(low: float, high: float, note: str) -> Constant:
    """Return a factor on other times, with expected value 1."""
    return Constant(1.0, "guess", note, low, high)


_MEASURED, _BEYOND = non_attention_cost.MEASURED, non_attention_cost.BEYOND
CONSTANTS: dict[str, Constant] = {
    "non_attention.eager": non_attention_cost.EAGER,
    "non_attention.launches": non_attention_cost.LAUNCHES,
    "non_attention.measured": _factor(
        _MEASURED[LOW],
        _MEASURED[HIGH],
        "measured times other than attention, on another such GPU and under load",
    ),
    "non_attention.beyond": _factor(
        _BEYOND[LOW], _BEYOND[HIGH], "the same if a layer of another size was measured"
    ),
    **{
        f"costs.launches.{name}": _fixed(number, "kernels, counted roughly in the code")
        for name, number in costs.LAUNCHES.items()
    },
    "costs.index_alone_us": _of_index(
        costs.INDEX_ALONE_US, "an index on one GPU, whatever the length"
    ),
    "costs.index_per_token_us": _of_index(
        costs.INDEX_PER_TOKEN_US, "each token of a GPU; grows with heads and 1 / memory bandwidth"
    ),
    "costs.index_together_us": _of_index(costs.INDEX_TOGETHER_US, "at least, on several GPUs"),
    "costs.least_copy_us": _fixed(costs.LEAST_COPY_US, "the smallest copy"),
    "timeline.least_power": _fixed(
        timeline.LEAST_POWER, "share of a GPU that messages leave to computation"
    ),
    "calibration.unknown": _factor(*UNKNOWN, "times of another GPU (scaled by peak) or kernel"),
}
