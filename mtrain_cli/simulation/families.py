"""Draw synthetic indices, for predictions without a recorded index.

Real indices depend on model, data and training step; a synthetic one only shows how a layout
handles this kind of index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mtrain_cli.attention.index import VerticalSlash

_RUN = 16  # slashes in a run
_NEAR = 0.25  # in `clustered`, share of the slashes that lie next to the main diagonal
# In `drifting`, the most that a run moves from one layer or training step to the next, as a share
# of the sequence.
_DRIFT = 1 / 64


@dataclass(frozen=True)
class IndexFamily:
    """A kind of synthetic index. Every head of every layer draws its own columns and slashes.

    In `drifting`, a head has the same runs of slashes in all layers, and each run moves from layer
    to layer, and from training step to step.

    density: share of the causal block pairs that lie on slashes, 0 to 1.
    columns: number of single columns per head, drawn from all positions.
    fewest, most: bounds on the number of slashes per head; most=0 means none.
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
        return (
            f"{self.name}: {_FAMILIES[self.name][1]}, {self.density:.1%} of the causal blocks, "
            f"{self.columns} columns, seed {self.seed}"
        )

    def index(self, layer: int, seq: int, heads: int) -> VerticalSlash:
        """Draw the index of a layer for ``seq`` tokens. Padding completes the last block."""
        # Imported late: it takes seconds, and commands check names of families before.
        import torch

        from mtrain_cli.attention.index import VerticalSlash

        blocks = -(-seq // self.block)
        area = blocks - np.arange(blocks)
        on = np.zeros((1, heads, blocks), bool)
        columns = np.empty((1, heads, min(self.columns, seq)), np.int32)
        for head in range(heads):
            rng = np.random.default_rng([self.seed, layer, head])
            # Drifting runs are drawn once, columns in every layer.
            drawn_once = self.name == _DRIFTING
            lines = np.random.default_rng([self.seed, head]) if drawn_once else rng
            area_wanted = self.density * area.sum()
            order = _FAMILIES[self.name][0](lines, blocks, area_wanted, layer + self.step)
            order = np.concatenate([[0], order[order > 0]])
            # The slash that reaches the wanted area is included.
            number = int(np.searchsorted(np.cumsum(area[order]), area_wanted)) + 1
            on[0, head, order[: min(max(number, self.fewest), self.most or blocks)]] = True
            columns[0, head] = np.sort(
                rng.choice(seq, columns.shape[-1], replace=False, shuffle=False)
            )
        return VerticalSlash(self.block, blocks, torch.from_numpy(on), torch.from_numpy(columns))


# (random generator, number of blocks, wanted area in block pairs, layer plus training step) ->
# the numbers of the diagonals, in the order in which a head chooses them
Order = Callable[[np.random.Generator, int, float, int], np.ndarray]


def _local(rng, blocks: int, wanted: float, time: int) -> np.ndarray:  # noqa: ARG001
    return np.arange(blocks)


def _uniform(rng, blocks: int, wanted: float, time: int) -> np.ndarray:  # noqa: ARG001
    return rng.permutation(blocks)


def _clustered(rng, blocks: int, wanted: float, time: int) -> np.ndarray:  # noqa: ARG001
    near = int(_NEAR * wanted / blocks)
    runs = rng.permutation(-(-blocks // _RUN))[:, None] * _RUN + np.arange(_RUN)
    order = np.concatenate([np.arange(near), runs[runs < blocks]])
    return _first_of_each(order)


def _drifting(rng, blocks: int, wanted: float, time: int) -> np.ndarray:  # noqa: ARG001
    start = rng.permutation(-(-blocks // _RUN)) * _RUN
    speed = rng.uniform(-_DRIFT, _DRIFT, len(start)) * blocks
    moved = np.floor(start + speed * time).astype(np.int64)[:, None] + np.arange(_RUN)
    # Runs may overlap. Diagonals that are in no run come last.
    return _first_of_each(np.concatenate([moved.ravel() % blocks, np.arange(blocks)]))


def _first_of_each(order: np.ndarray) -> np.ndarray:
    _, first = np.unique(order, return_index=True)
    return order[np.sort(first)]


_DRIFTING = "drifting"
_FAMILIES: dict[str, tuple[Order, str]] = {
    "local": (_local, "the slashes nearest to the main diagonal"),
    "clustered": (
        _clustered,
        f"a quarter of the slashes next to the main diagonal, the others in runs of {_RUN}",
    ),
    "uniform": (_uniform, "slashes drawn from all diagonals with equal chance"),
    _DRIFTING: (
        _drifting,
        f"runs of {_RUN} slashes, each moving by up to 1/{round(1 / _DRIFT)} of the sequence "
        "per layer",
    ),
}
FAMILIES = tuple(_FAMILIES)
