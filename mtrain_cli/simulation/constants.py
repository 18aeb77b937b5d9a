"""The simulator's own constants. No cluster file and no calibration replaces them."""

from __future__ import annotations

from mtrain_cli.config.cluster import Constant
from mtrain_cli.simulation import costs, expert_cost, non_attention_cost, timeline
from mtrain_cli.simulation.calibration import HIGH, LOW, PUBLISHED, UNKNOWN


def _fixed(value: float, note: str) -> Constant:
    """Return a guess that keeps its value in the best and the worst case of a prediction."""
    return Constant(value, "guess", f"{note}; not varied", value, value)


def _factor(low: float, high: float, note: str) -> Constant:
    """Return a factor on times: 1 as expected, ``low`` in the best case, ``high`` in the worst."""
    return Constant(1.0, "guess", note, low, high)


_MEASURED, _BEYOND = non_attention_cost.MEASURED, non_attention_cost.BEYOND
_INDEX_TIMES = {
    "index_alone_us": "shortest time to estimate an index on one GPU",
    "index_per_token_us": "time to estimate an index, for each token on a GPU; scaled by the "
    "number of heads and by 1 / memory bandwidth",
    "index_together_us": "shortest time to estimate an index on several GPUs",
}
_OF_INDEX = f"measured with {costs.INDEX_HEADS} heads on {costs.INDEX_DEVICE}"
_EXPERTS = ("GROUPED", "ROUTER", "FLOAT32", "EXPERT_LAUNCHES", "WAIT_FOR_NUMBERS")
CONSTANTS: dict[str, Constant] = {
    "non_attention.eager": non_attention_cost.EAGER,
    "non_attention.launches": non_attention_cost.LAUNCHES,
    **{f"expert_cost.{name.lower()}": getattr(expert_cost, name) for name in _EXPERTS},
    "non_attention.measured": _factor(
        _MEASURED[LOW], _MEASURED[HIGH], "other times vary between GPUs of one model and under load"
    ),
    "non_attention.beyond": _factor(
        _BEYOND[LOW], _BEYOND[HIGH], "other times, if only layers of another size were measured"
    ),
    **{
        f"costs.launches.{name}": _fixed(number, "number of kernel launches, counted roughly")
        for name, number in costs.LAUNCHES.items()
    },
    **{
        f"costs.{name}": Constant(
            value := getattr(costs, name.upper()),
            "measured",
            f"{note}; {_OF_INDEX}",
            costs.INDEX_BOUNDS[LOW] * value,
            costs.INDEX_BOUNDS[HIGH] * value,
        )
        for name, note in _INDEX_TIMES.items()
    },
    "costs.least_copy_us": _fixed(costs.LEAST_COPY_US, "shortest time of a copy"),
    "timeline.least_power": _fixed(
        timeline.LEAST_POWER, "messages leave at least this share of a GPU to computation"
    ),
    "calibration.published": _factor(*PUBLISHED, "kernel times that others published for this GPU"),
    "calibration.unknown": _factor(
        *UNKNOWN, "kernel times measured on another GPU (scaled by peak FLOP/s) or another kernel"
    ),
}
