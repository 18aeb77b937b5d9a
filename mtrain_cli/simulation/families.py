"""Synthetic indices: families of block diagonals with stated parameters, for predictions where no index was recorded.

What real indices look like depends on model, data and training step: a prediction from a family says what a layout does to such an index,
and no more. Record one with `mtrain profile imbalance` where it matters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from mtrain_cli.attention.index import VerticalSlash

_RUN = 16  # diagonals of a cluster
_NEAR = 0.25  # of the diagonals of `clustered` that are the nearest
_DRIFT = (
    1 / 64
)  # of the sequence: how far a cluster of `drifting` moves at most from one layer, or step, to the next


@dataclass(frozen=True)
class IndexFamily:
    """density: share of the causal pairs of blocks that lie on chosen diagonals. columns: single ones a head, anywhere. Every head of
    every layer draws its own; of `drifting` every head, and its clusters move from layer to layer. step: of a training, in which those
    move as far as in a layer. fewest, most: diagonals of a head, whatever the density; most 0: no bound.
    """

    name: str
    density: float = 0.05
    columns: int = 2048
    block: int = 128
    seed: int = 0
    step: int = 0
    fewest: int = 1
    most: int = 0

    @property
    def describe(self) -> str:
        return f"{self.name}: {_FAMILIES[self.name][1]}, {self.density:.1%} of the causal blocks, {self.columns} columns, seed {self.seed}"

    def index(self, layer: int, seq: int, heads: int) -> VerticalSlash:
        """seq: tokens; those of a last block that is not full are padding."""
        blocks = -(-seq // self.block)
        area = blocks - np.arange(blocks)
        on = np.zeros((1, heads, blocks), bool)
        columns = np.empty((1, heads, min(self.columns, seq)), np.int32)
        for head in range(heads):
            rng = np.random.default_rng([self.seed, layer, head])
            # What drifts is drawn once; its columns are drawn anew in every step, too.
            lines = np.random.default_rng([self.seed, head]) if self.name == _DRIFTING else rng
            order = _FAMILIES[self.name][0](
                lines, blocks, self.density * area.sum(), layer + self.step
            )
            order = np.concatenate([[0], order[order > 0]])
            # The one that crosses the budget is in.
            number = int(np.searchsorted(np.cumsum(area[order]), self.density * area.sum())) + 1
            on[0, head, order[: min(max(number, self.fewest), self.most or blocks)]] = True
            columns[0, head] = np.sort(
                rng.choice(seq, columns.shape[-1], replace=False, shuffle=False)
            )
        return VerticalSlash(self.block, blocks, torch.from_numpy(on), torch.from_numpy(columns))


# (generator, blocks, area wanted, layer and step) -> all diagonals, those to take first
Order = Callable[[np.random.Generator, int, float, int], np.ndarray]


def _local(rng: np.random.Generator, blocks: int, wanted: float, time: int) -> np.ndarray:  # noqa: ARG001 - all are called alike
    return np.arange(blocks)


def _uniform(rng: np.random.Generator, blocks: int, wanted: float, time: int) -> np.ndarray:  # noqa: ARG001
    return rng.permutation(blocks)


def _clustered(rng: np.random.Generator, blocks: int, wanted: float, time: int) -> np.ndarray:  # noqa: ARG001
    near = int(_NEAR * wanted / blocks)
    runs = rng.permutation(-(-blocks // _RUN))[:, None] * _RUN + np.arange(_RUN)
    order = np.concatenate([np.arange(near), runs[runs < blocks]])
    return _each_once(order)


def _drifting(rng: np.random.Generator, blocks: int, wanted: float, time: int) -> np.ndarray:  # noqa: ARG001
    start = rng.permutation(-(-blocks // _RUN)) * _RUN
    speed = rng.uniform(-_DRIFT, _DRIFT, len(start)) * blocks
    moved = np.floor(start + speed * time).astype(np.int64)[:, None] + np.arange(_RUN)
    # Clusters come to lie on each other; what then lies on none comes last.
    return _each_once(np.concatenate([moved.ravel() % blocks, np.arange(blocks)]))


def _each_once(order: np.ndarray) -> np.ndarray:
    _, first = np.unique(order, return_index=True)
    return order[np.sort(first)]


_DRIFTING = "drifting"
_FAMILIES: dict[str, tuple[Order, str]] = {
    "local": (_local, "the diagonals of the recent past"),
    "clustered": (_clustered, f"a quarter nearest, the others in runs of {_RUN} anywhere"),
    "uniform": (_uniform, "diagonals anywhere with equal chance"),
    _DRIFTING: (
        _drifting,
        f"runs of {_RUN} anywhere, each moving by up to 1/{round(1 / _DRIFT)} of the sequence a layer",
    ),
}
FAMILIES = tuple(_FAMILIES)
