"""Draw synthetic indices, which show how a layout handles a kind of index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mtrain_cli.attention.index import VerticalSlash

_RUN = 16  # slashes in a run
_NEAR = 0.25  # in `clustered`, share of the slashes that lie next to the main diagonal
_DRIFT = 1 / 64  # share of the sequence that a run moves at most per layer or step
# Slashes nearest to the main diagonal; a quarter there and the others in runs; drawn from all
# diagonals; runs that move by up to `_DRIFT` of the sequence per layer.
FAMILIES = ("local", "clustered", "uniform", "drifting")


@dataclass(frozen=True)
class IndexFamily:
    """A kind of synthetic index. Every head of every layer draws its own columns and slashes.

    In `drifting`, a head's runs of slashes move from layer to layer and from step to step.

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
            drawn_once = self.name == "drifting"
            lines = np.random.default_rng([self.seed, head]) if drawn_once else rng
            area_wanted = self.density * area.sum()
            order = _order(self.name, lines, blocks, area_wanted, layer + self.step)
            order = np.concatenate([[0], order[order > 0]])
            # The slash that reaches the wanted area is included.
            number = int(np.searchsorted(np.cumsum(area[order]), area_wanted)) + 1
            on[0, head, order[: min(max(number, self.fewest), self.most or blocks)]] = True
            columns[0, head] = np.sort(
                rng.choice(seq, columns.shape[-1], replace=False, shuffle=False)
            )
        return VerticalSlash(self.block, blocks, torch.from_numpy(on), torch.from_numpy(columns))


def _order(
    name: str, rng: np.random.Generator, blocks: int, wanted: float, time: int
) -> np.ndarray:
    """Return the diagonals in the order in which a head chooses them. wanted: block pairs."""
    match name:
        case "local":
            order = np.arange(blocks)
        case "uniform":
            order = rng.permutation(blocks)
        case "clustered":
            near = int(_NEAR * wanted / blocks)
            runs = rng.permutation(-(-blocks // _RUN))[:, None] * _RUN + np.arange(_RUN)
            order = np.concatenate([np.arange(near), runs[runs < blocks]])
        case _:
            start = rng.permutation(-(-blocks // _RUN)) * _RUN
            speed = rng.uniform(-_DRIFT, _DRIFT, len(start)) * blocks
            moved = np.floor(start + speed * time).astype(np.int64)[:, None] + np.arange(_RUN)
            # Runs may overlap. Diagonals that are in no run come last.
            order = np.concatenate([moved.ravel() % blocks, np.arange(blocks)])
    _, first = np.unique(order, return_index=True)
    return order[np.sort(first)]
