"""Count the work of a layer's experts: grouped products, the router and element-wise kernels.

Each expert's product is limited by FLOP/s or by memory bandwidth. An expert with few tokens still
reads its whole matrix, so uneven loads take longer, though the FLOP are the same.

Symbols: T own tokens of a worker, K experts of a token, S = T K pairs, E experts, C hidden size, I
width of an expert, e bytes of the compute dtype.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np

from mtrain_cli.config.cluster import Constant
from mtrain_cli.config.schema import ConfigError, ModelConfig
from mtrain_cli.records.metrics import METRICS_FILE, read_metrics

_GUESS = "; not measured"
GROUPED = Constant(
    0.7, "guess", f"rate of grouped products, of that of large products{_GUESS}", 0.4, 0.9
)
FLOAT32 = Constant(
    0.07, "guess", f"rate of the router's float32 products, of the same rate{_GUESS}", 0.05, 0.4
)
EXPERT_LAUNCHES = Constant(
    60, "guess", f"number of kernels of router and experts in forward, twice in backward{_GUESS}",
    30, 150,
)  # fmt: skip
EXAMPLE = "zipf:X with X from 0 (equal loads) to 3, or a run, such as runs/latest"
_MOST = 3.0
_LAST = 20  # steps of a run whose loads count
_HALVINGS = 40


@dataclass(frozen=True)
class ExpertLoads:
    """How many tokens choose each expert: the expert of rank r gets a share ~ 1 / r^exponent.

    source: origin of the exponent, for the user.
    """

    exponent: float = 0.0
    source: str = "zipf:0, equal loads (the default of --expert-loads)"

    def pairs(self, tokens: int, experts: int, top_k: int) -> np.ndarray:
        """Return the number of pairs of each expert, [experts], which add up to tokens * top_k.

        An expert computes each token at most once, so none has more pairs than tokens.
        """
        shares = 1.0 / np.arange(1, experts + 1) ** self.exponent
        left, found = float(tokens * top_k), np.zeros(experts)
        for rank in range(experts):  # from the most loaded; what it cannot take goes to the others
            found[rank] = min(tokens, left * shares[rank] / shares[rank:].sum())
            left -= found[rank]
        return found

    def largest(self, experts: int, top_k: int) -> float:
        """Return the largest load, divided by the mean."""
        return float(self.pairs(1_000_000, experts, top_k)[0]) * experts / (1_000_000 * top_k)


def parse_loads(text: str | None, model: ModelConfig) -> ExpertLoads:
    """Return the loads that ``--expert-loads`` names.

    Raises:
        ConfigError: the value is wrong, or the model has no experts.
    """
    if text is None:
        return ExpertLoads()
    if not model.moe.experts:
        raise ConfigError(
            f"--expert-loads {text}: {model.name} has no experts; choose a model with "
            "model.moe.experts, such as model=qwen3_30b_a3b"
        )
    kind, colon, value = text.partition(":")
    if kind == "zipf" and colon:
        try:
            exponent = float(value)
        except ValueError:
            exponent = -1.0
        if not 0 <= exponent <= _MOST:
            raise ConfigError(f"--expert-loads {text}: give {EXAMPLE}")
        return ExpertLoads(exponent, f"zipf:{exponent:g}")
    return _of_run(text, model)


def _of_run(text: str, model: ModelConfig) -> ExpertLoads:
    """Return the Zipf loads whose largest load is the mean one of a run's last steps."""
    file = next((f for f in (Path(text), Path("runs", text)) if (f / METRICS_FILE).is_file()), None)
    if file is None:
        raise ConfigError(f"--expert-loads {text}: no such run; give {EXAMPLE}")
    steps = [step.expert_load_by_layer for step in read_metrics(file)]
    loads = [load for step in steps[-_LAST:] for load in step or ()]
    if not loads:
        raise ConfigError(f"--expert-loads {text}: {file} has no loads of experts; give {EXAMPLE}")
    wanted, moe = mean(loads), model.moe
    low, high = 0.0, _MOST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        below = ExpertLoads(middle).largest(moe.experts, moe.top_k) < wanted
        low, high = (middle, high) if below else (low, middle)
    source = (
        f"zipf:{high:.2f}, whose largest load is that of {file}: {wanted:.2f} times the mean, over "
        f"layers and the last {min(_LAST, len(steps))} steps"
    )
    return ExpertLoads(high, source)


@dataclass(frozen=True)
class GroupedProduct:
    """Equal matrix products, each limited by FLOP/s or by memory bandwidth.

    flop, moved: FLOP and bytes of one product.
    share: its rate, divided by that of large products.
    times: number of products.
    """

    flop: float
    moved: float
    share: Constant
    times: float


@dataclass(frozen=True)
class ExpertWork:
    """The work of one pass: products and bytes of element-wise kernels."""

    products: tuple[GroupedProduct, ...]
    moved: float


def expert_work(
    model: ModelConfig, tokens: int, e: int, loads: ExpertLoads
) -> tuple[ExpertWork, ExpertWork, ExpertWork]:
    """Return the work of router and experts: forward, recomputed and backward.

    Backward recomputes the router, gate and up, but not down. The bytes of element-wise kernels are
    counted in `model.experts` and `model.routing`, which are not compiled.

    Args:
        tokens: number of own tokens.
        e: bytes of the compute dtype.
    """
    moe, hidden, width = model.moe, model.hidden_size, model.moe.expert_size
    # Equal numbers of rows are one product, many times.
    rows = Counter(loads.pairs(tokens, moe.experts, moe.top_k).round().astype(int).tolist())
    into = _products(rows, hidden, 2 * width, e)
    out = _products(rows, width, hidden, e)
    router = GroupedProduct(
        2.0 * tokens * hidden * moe.experts, 4.0 * tokens * (hidden + moe.experts), FLOAT32, 1
    )
    pairs, scores = tokens * moe.top_k, 40.0 * tokens * moe.experts
    order = 16.0 * 8 * pairs  # sorting and placing the pairs
    shared = moe.shared_size * tokens * e
    read = (4.0 + e) * tokens * hidden + 2.0 * e * pairs * hidden  # the router's input, dispatch
    combined = 3.0 * e * pairs * hidden + (4.0 + 2 * e) * tokens * hidden
    inside = pairs * width
    forward = ExpertWork(
        (router, *into, *out),
        read + scores + order + combined + (7.0 * e + 8) * inside + 3.0 * shared,
    )
    again = ExpertWork((router, *into), read + scores + 3.0 * shared)
    backward = ExpertWork(
        (router, router, *into, *into, *out, *out),
        2 * read + scores + combined + (24.0 * e + 32) * inside + 5.0 * shared,
    )
    return forward, again, backward


def _products(rows: Counter[int], width: int, out: int, e: int) -> tuple[GroupedProduct, ...]:
    return tuple(
        GroupedProduct(
            2.0 * number * width * out,
            float(e) * (width * out + number * (width + out)),
            GROUPED,
            times,
        )
        for number, times in sorted(rows.items())
        if number
    )
