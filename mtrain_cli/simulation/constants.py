"""The simulator's own constants. No cluster file and no calibration replaces them."""

from __future__ import annotations

from mtrain_cli.config.cluster import Constant
from mtrain_cli.simulation import costs, expert_cost, non_attention_cost, timeline
from mtrain_cli.simulation.calibration import HIGH, LOW, PUBLISHED, UNKNOWN


def _fixed(value: float, note: str) -> Constant:
    """Return a guess that keeps its value in the best and the worst case of a prediction."""
    return Constant(value, "guess", f"{note}; not varied", value, value)


def _of_index(value: float, note: str) -> Constant:
    note = f"{note}; measured with {costs.INDEX_HEADS} heads on {costs.INDEX_DEVICE}"
    low, high = costs.INDEX_BOUNDS[LOW], costs.INDEX_BOUNDS[HIGH]
    return Constant(value, "measured", note, low * value, high * value)


def _factor(low: float, high: float, note: str) -> Constant:
    """Return a factor on times: 1 as expected, ``low`` in the best case, ``high`` in the worst."""
    return Constant(1.0, "guess", note, low, high)


_MEASURED, _BEYOND = non_attention_cost.MEASURED, non_attention_cost.BEYOND
CONSTANTS: dict[str, Constant] = {
    "non_attention.eager": non_attention_cost.EAGER,
    "non_attention.launches": non_attention_cost.LAUNCHES,
    "expert_cost.grouped": expert_cost.GROUPED,
    "expert_cost.router": expert_cost.ROUTER,
    "expert_cost.float32": expert_cost.FLOAT32,
    "expert_cost.expert_launches": expert_cost.EXPERT_LAUNCHES,
    "expert_cost.wait_for_numbers": expert_cost.WAIT_FOR_NUMBERS,
    "non_attention.measured": _factor(
        _MEASURED[LOW],
        _MEASURED[HIGH],
        "times other than attention vary between GPUs of one model and under load",
    ),
    "non_attention.beyond": _factor(
        _BEYOND[LOW],
        _BEYOND[HIGH],
        "times other than attention, if only layers of another size were measured",
    ),
    **{
        f"costs.launches.{name}": _fixed(number, "number of kernel launches, counted roughly")
        for name, number in costs.LAUNCHES.items()
    },
    "costs.index_alone_us": _of_index(
        costs.INDEX_ALONE_US, "shortest time to estimate an index on one GPU"
    ),
    "costs.index_per_token_us": _of_index(
        costs.INDEX_PER_TOKEN_US,
        "time to estimate an index, for each token on a GPU; scaled by the number of heads and by "
        "1 / memory bandwidth",
    ),
    "costs.index_together_us": _of_index(
        costs.INDEX_TOGETHER_US, "shortest time to estimate an index on several GPUs"
    ),
    "costs.least_copy_us": _fixed(costs.LEAST_COPY_US, "shortest time of a copy"),
    "timeline.least_power": _fixed(
        timeline.LEAST_POWER, "messages leave at least this share of a GPU to computation"
    ),
    "calibration.published": _factor(
        *PUBLISHED, "kernel times that others published for this GPU; clocks drop in a run"
    ),
    "calibration.unknown": _factor(
        *UNKNOWN, "kernel times measured on another GPU (scaled by peak FLOP/s) or another kernel"
    ),
}
