"""How many tokens choose each expert, and how these loads fall on the workers of an expert group.

The loads come from a profile, which has those of each expert, or are a Zipf distribution. A Zipf
distribution does not say which expert is popular. With expert parallelism, the experts of a worker
are then drawn at random: the expected case is the draw with the median load of the busiest worker.
The best case deals the experts evenly, and the worst case gives the most popular ones to one
worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import mean

import numpy as np

from mtrain_cli.config.documents import damaged_lines
from mtrain_cli.config.schema import ConfigError, ModelConfig
from mtrain_cli.records.expert_loads import LOAD_PARTS, LOADS, analyse_experts
from mtrain_cli.records.metrics import METRICS_FILE, metrics_file, read_readable_metrics
from mtrain_cli.records.record_files import open_records
from mtrain_cli.simulation.calibration import HIGH, LOW, VALUE

EXAMPLE = (
    "zipf:X with X from 0 (equal loads) to 3, a profile of experts, or a run, such as runs/latest"
)
_MOST = 3.0
_LAST = 20  # steps of a run whose loads count
_HALVINGS = 40
_DRAWS = 101  # of the experts of a worker
_TOKENS = 1_000_000  # for ratios of loads


@dataclass(frozen=True)
class ExpertLoads:
    """How many tokens choose each expert. All workers' tokens have the same loads.

    exponent: the expert of rank r gets a share ~ 1 / r^exponent.
    source: origin of the loads, for the user.
    shares: recorded share of each expert in the tokens of its layer, by layer; empty for a Zipf
        distribution.
    """

    exponent: float = 0.0
    source: str = "zipf:0, equal loads (the default of --expert-loads)"
    shares: tuple[tuple[float, ...], ...] = ()

    def pairs(self, tokens: int, experts: int, top_k: int) -> np.ndarray:
        """Return the number of pairs of each expert, [layers, experts].

        Those of a layer add up to tokens * top_k. A Zipf distribution has one layer, whose loads
        descend. There, an expert has at most as many pairs as there are tokens.
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

    def largest(self, experts: int, top_k: int) -> float:
        """Return the largest load of an expert, divided by the mean; mean over layers."""
        return self._degree(self.pairs(_TOKENS, experts, top_k))

    def busiest(self, experts: int, top_k: int, workers: int) -> float:
        """Return the largest load of a worker, divided by the mean; mean over layers."""
        return self._degree(self.dealt(_TOKENS, experts, top_k, workers).sum(-1))

    @staticmethod
    def _degree(loads: np.ndarray) -> float:
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
    """Return the loads that ``--expert-loads`` names.

    Raises:
        ConfigError: the value is wrong, or the model has no experts.
    """
    if text is None:
        return ExpertLoads()
    text = text or repr(text)  # "" would be the current folder
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
    folders = [Path(parent, text, inside) for parent in ("", "runs") for inside in ("", "profile")]
    profile = next((f for f in folders if (f / LOADS).is_file() or (f / LOAD_PARTS).is_dir()), None)
    return _of_run(text, model) if profile is None else _of_profile(text, profile, model)


def _of_profile(text: str, folder: Path, model: ModelConfig) -> ExpertLoads:
    """Return the recorded loads of each expert, as means over a profile's first case."""
    found = next(iter(analyse_experts(open_records(folder))), None)
    if found is None:
        raise ConfigError(f"--expert-loads {text}: {folder} has no loads of experts")
    shares, wanted = found.shares.mean(0, dtype=np.float64), model.moe.experts
    if shares.shape[1] != wanted:
        raise ConfigError(
            f"--expert-loads {text}: has loads of {shares.shape[1]} experts, but "
            f"model.moe.experts={wanted}"
        )
    shares /= shares.sum(1, keepdims=True)
    largest = float((shares.max(1) * wanted).mean())
    source = (
        f"of {folder} (largest {largest:.2f} times the mean, over {len(shares)} layers and "
        f"{len(found.steps)} steps)"
    )
    return ExpertLoads(0.0, source, tuple(map(tuple, shares.tolist())))


def _of_run(text: str, model: ModelConfig) -> ExpertLoads:
    """Return the Zipf loads whose largest load is the mean one of a run's last steps."""
    file = next((f for f in (Path(text), Path("runs", text)) if (f / METRICS_FILE).is_file()), None)
    if file is None:
        exists = any(place.exists() for place in (Path(text), Path("runs", text)))
        why = "holds no loads of experts" if exists else "no such run"
        raise ConfigError(f"--expert-loads {text}: {why}; give {EXAMPLE}")
    metrics, damaged = read_readable_metrics(file)
    steps = [step.expert_load_by_layer for step in metrics]
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
    source += f"; {damaged_lines(metrics_file(file), damaged)}" if damaged else ""
    return ExpertLoads(high, source)
