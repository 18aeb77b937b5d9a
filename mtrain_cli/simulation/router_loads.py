"""How many tokens choose each expert, and how these loads fall on the workers of an expert group.

A Zipf distribution does not say which expert is popular. With expert parallelism, the expected case
is then the random deal with the median load of the busiest worker; the best case deals the experts
evenly, and the worst case gives the most popular ones to one worker.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from mtrain_cli.config.schema import ConfigError, ModelConfig
from mtrain_cli.records.expert_loads import LOAD_PARTS, LOADS, analyse_experts
from mtrain_cli.records.record_files import open_records
from mtrain_cli.simulation.calibration import HIGH, LOW, VALUE

EXAMPLE = "zipf:X with X from 0 (equal loads) to 3, or a profile of experts"
_MOST = 3.0
_DRAWS = 101  # of the experts of a worker
_TOKENS = 1_000_000  # for ratios of loads


@dataclass(frozen=True)
class ExpertLoads:
    """How many tokens choose each expert. All workers' tokens have the same loads.

    exponent: the expert of rank r gets a share ~ 1 / r^exponent.
    shares: recorded share of each expert in its layer's tokens, by layer; empty for Zipf.
    """

    exponent: float = 0.0
    source: str = "zipf:0, equal loads (the default of --expert-loads)"
    shares: tuple[tuple[float, ...], ...] = ()

    def pairs(self, tokens: int, experts: int, top_k: int) -> np.ndarray:
        """Return the number of pairs of each expert, [layers, experts].

        A Zipf distribution has one layer, whose loads descend; no expert has more pairs than
        tokens.
        """
        if self.shares:
            return np.array(self.shares) * (tokens * top_k)
        shares = 1.0 / np.arange(1, experts + 1) ** self.exponent
        left, found = float(tokens * top_k), np.zeros(experts)
        for rank in range(experts):  # from the most loaded; what it cannot take goes to the others
            found[rank] = min(tokens, left * shares[rank] / shares[rank:].sum())
            left -= found[rank]
        return found[None]

    def dealt(
        self, tokens: int, experts: int, top_k: int, workers: int, bound: str = VALUE
    ) -> np.ndarray:
        """Return the pairs of the experts of each worker, [layers, workers, experts / workers]."""
        pairs = self.pairs(tokens, experts, top_k)
        if not self.shares and workers > 1 and self.exponent:
            pairs = pairs[:, _order(self.exponent, experts, top_k, workers, bound)]
        return pairs.reshape(len(pairs), workers, -1)

    def busiest(self, experts: int, top_k: int, workers: int) -> float:
        """Return the largest load of a worker, divided by the mean; mean over layers."""
        loads = self.dealt(_TOKENS, experts, top_k, workers).sum(-1)
        return float((loads.max(1) / loads.mean(1)).mean())


@lru_cache(maxsize=64)
def _order(exponent: float, experts: int, top_k: int, workers: int, bound: str) -> np.ndarray:
    """Return the ranks of the experts in the order in which consecutive workers hold them."""
    ranks = np.arange(experts)
    if bound == HIGH:
        return ranks
    pairs = ExpertLoads(exponent).pairs(_TOKENS, experts, top_k)[0]
    if bound == LOW:
        held: list[list[int]] = [[] for _ in range(workers)]
        for rank in ranks.tolist():  # to the worker with the fewest pairs that still has room
            open_ones = (each for each in held if len(each) < experts // workers)
            min(open_ones, key=lambda each: float(pairs[each].sum())).append(rank)
        return np.array(held).flatten()
    generator = np.random.default_rng(0)
    draws = [generator.permutation(experts) for _ in range(_DRAWS)]
    draws.sort(key=lambda draw: float(pairs[draw].reshape(workers, -1).sum(1).max()))
    return draws[_DRAWS // 2]


def parse_loads(text: str | None, model: ModelConfig) -> ExpertLoads:
    """Return the loads that ``expert_loads`` names: zipf:X, or a profile with loads of experts.

    Raises:
        ConfigError: the value is wrong, or the model has no experts.
    """
    if text is None:
        return ExpertLoads()

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"expert_loads={text}: {why}")

    wanted = model.moe.experts
    if not wanted:
        raise refuse(f"{model.name} has no experts; choose another, such as model=qwen3_30b_a3b")
    kind, colon, value = text.partition(":")
    if kind == "zipf" and colon:
        with suppress(ValueError):
            if 0 <= (exponent := float(value)) <= _MOST:
                return ExpertLoads(exponent, f"zipf:{exponent:g}")
        raise refuse(f"give {EXAMPLE}")
    folders = [Path(parent, text, inside) for parent in ("", "runs") for inside in ("", "profile")]
    folder = next((f for f in folders if (f / LOADS).is_file() or (f / LOAD_PARTS).is_dir()), None)
    loads = [] if folder is None else analyse_experts(open_records(folder))
    recorded = next(iter(loads), None)
    if not text or recorded is None:
        raise refuse(f"holds no loads of experts; give {EXAMPLE}")
    shares = recorded.shares.mean(0, dtype=np.float64)
    if shares.shape[1] != wanted:
        raise refuse(f"has loads of {shares.shape[1]} experts, but model.moe.experts={wanted}")
    shares /= shares.sum(1, keepdims=True)
    largest = float((shares.max(1) * wanted).mean())
    source = (
        f"of {folder} (largest {largest:.2f} times the mean, over {len(shares)} layers and "
        f"{len(recorded.steps)} steps)"
    )
    return ExpertLoads(0.0, source, tuple(map(tuple, shares.tolist())))
