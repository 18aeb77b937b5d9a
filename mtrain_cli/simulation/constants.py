"""Constants of the simulator itself: no cluster file or calibration replaces them."""

from __future__ import annotations

from mtrain_cli.simulation import calibration, costs, non_attention_cost, timeline
from mtrain_cli.simulation.cluster import Constant


def _fixed(value: float, note: str) -> Constant:
    """A guess that is the same in all bounds of a prediction."""
    return Constant(value, "guess", f"{note}; not varied", value, value)


def _of_index(value: float, note: str) -> Constant:
    low, high = (costs.INDEX_BOUNDS[bound] for bound in (calibration.LOW, calibration.HIGH))
    return Constant(
        value,
        "measured",
        f"{note}, of {costs.INDEX_HEADS} heads on {costs.INDEX_DEVICE}",
        low * value,
        high * value,
    )


CONSTANTS: dict[str, Constant] = {
    "non_attention.eager": non_attention_cost.EAGER,
    "non_attention.launches": non_attention_cost.LAUNCHES,
    **{
        f"non_attention.{name}": Constant(
            1.0, "guess", note, by_bound[calibration.LOW], by_bound[calibration.HIGH]
        )
        for name, by_bound, note in (
            (
                "measured",
                non_attention_cost.MEASURED,
                "what was measured beside attention, on another such GPU and under load",
            ),
            (
                "beyond",
                non_attention_cost.BEYOND,
                "the same where a layer of another size was measured",
            ),
        )
    },
    **{
        f"costs.launches.{name}": _fixed(number, "kernels, counted roughly in the code")
        for name, number in costs.LAUNCHES.items()
    },
    "costs.index_alone_us": _of_index(
        costs.INDEX_ALONE_US, "an index on one GPU, whatever the length"
    ),
    "costs.index_per_token_us": _of_index(
        costs.INDEX_PER_TOKEN_US, "each token of a GPU; by heads, elsewhere by bandwidth of memory"
    ),
    "costs.index_together_us": _of_index(costs.INDEX_TOGETHER_US, "the least on several GPUs"),
    "costs.least_copy_us": _fixed(costs.LEAST_COPY_US, "a copy, however small"),
    "timeline.least_power": _fixed(
        timeline.LEAST_POWER, "share of a GPU that messages leave to computation"
    ),
    "calibration.unknown": Constant(
        1.0,
        "guess",
        "times of another GPU or kernel, beside the peak",
        calibration.UNKNOWN[0],
        calibration.UNKNOWN[1],
    ),
}
