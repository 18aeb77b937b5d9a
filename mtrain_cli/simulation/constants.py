"""The simulator's own constants. No cluster file and no calibration replaces them."""

from __future__ import annotations

from mtrain_cli.config.cluster import Constant
from mtrain_cli.simulation import costs, non_attention_cost, timeline
from mtrain_cli.simulation.calibration import HIGH, LOW, UNKNOWN


def _fixed(value: float, note: str) -> Constant:
    """Return a guess that keeps its value in the best and the worst case of a prediction."""
    return Constant(value, "guess", f"{note}; not varied", value, value)


def _of_index(value: float, note: str) -> Constant:
    note = f"{note}, of {costs.INDEX_HEADS} heads on {costs.INDEX_DEVICE}"
    low, high = costs.INDEX_BOUNDS[LOW], costs.INDEX_BOUNDS[HIGH]
    return Constant(value, "measured", note, low * value, high * value)


def _factor(low: float, high: float, note: str) -> Constant:
    """Return a factor on other times: 1, and ``low`` or ``high`` in the best or worst case."""
    return Constant(1.0, "guess", note, low, high)


_MEASURED, _BEYOND = non_attention_cost.MEASURED, non_attention_cost.BEYOND
CONSTANTS: dict[str, Constant] = {
    "non_attention.eager": non_attention_cost.EAGER,
    "non_attention.launches": non_attention_cost.LAUNCHES,
    "non_attention.measured": _factor(
        _MEASURED[LOW],
        _MEASURED[HIGH],
        "parts other than attention, on another GPU of the measured model or under load",
    ),
    "non_attention.beyond": _factor(
        _BEYOND[LOW],
        _BEYOND[HIGH],
        "parts other than attention, if only a layer of another size was measured",
    ),
    **{
        f"costs.launches.{name}": _fixed(number, "kernels, counted roughly in the code")
        for name, number in costs.LAUNCHES.items()
    },
    "costs.index_alone_us": _of_index(
        costs.INDEX_ALONE_US, "estimating an index on one GPU takes at least this, at any length"
    ),
    "costs.index_per_token_us": _of_index(
        costs.INDEX_PER_TOKEN_US,
        "estimating an index, per token of a GPU; grows with heads and 1 / memory bandwidth",
    ),
    "costs.index_together_us": _of_index(
        costs.INDEX_TOGETHER_US, "estimating an index on several GPUs takes at least this"
    ),
    "costs.least_copy_us": _fixed(costs.LEAST_COPY_US, "the smallest copy"),
    "timeline.least_power": _fixed(
        timeline.LEAST_POWER, "messages leave at least this share of a GPU to computation"
    ),
    "calibration.unknown": _factor(
        *UNKNOWN, "kernel times that were measured on another GPU (scaled by peak) or kernel"
    ),
}
