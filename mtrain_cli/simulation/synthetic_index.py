"""Draw indices for predictions of lengths that nobody has trained."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mtrain_cli.attention.index import BlockBitmap, VerticalSlash

_RUN = 16  # slashes in a run of a synthetic index
_NEAR = 0.25  # share of its slashes that lie next to the main diagonal


@dataclass(frozen=True)
class SyntheticIndex:
    """An index of which every head of every layer draws its own columns and slashes.

    A quarter of the slashes lie next to the main diagonal, the others in runs.

    density: share of the causal block pairs that lie on slashes, 0 to 1.
    columns: number of single columns per head, drawn from all positions.
    fewest, most: bounds on the number of slashes per head; most=0 means none.
    """

    density: float = 0.05
    columns: int = 2048
    block: int = 128
    seed: int = 0
    fewest: int = 1
    most: int = 0

    def index(self, layer: int, seq: int, heads: int) -> VerticalSlash:
        """Draw the index of a layer for ``seq`` tokens. Padding completes the last block."""
        blocks = -(-seq // self.block)
        area = blocks - np.arange(blocks)
        area_wanted = self.density * area.sum()
        on = np.zeros((1, heads, blocks), bool)
        columns = np.empty((1, heads, min(self.columns, seq)), np.int32)
        for head in range(heads):
            rng = np.random.default_rng([self.seed, layer, head])
            near = range(int(_NEAR * area_wanted / blocks))
            runs = rng.permutation(-(-blocks // _RUN))[:, None] * _RUN + np.arange(_RUN)
            order = list(dict.fromkeys([0, *near, *runs[runs < blocks].tolist()]))
            # The slash that reaches the wanted area is included.
            number = int(np.searchsorted(np.cumsum(area[order]), area_wanted)) + 1
            on[0, head, order[: min(max(number, self.fewest), self.most or blocks)]] = True
            columns[0, head] = np.sort(
                rng.choice(seq, columns.shape[-1], replace=False, shuffle=False)
            )
        return VerticalSlash(self.block, blocks, torch.from_numpy(on), torch.from_numpy(columns))


@dataclass(frozen=True)
class SyntheticBlocks:
    """Lists of key blocks as `block_topk` chooses them, drawn for each group of heads and layer.

    Every block of queries sees itself, the block before it, the first block, and the hot blocks of
    its group, which all later queries see. The others are drawn evenly from the keys and, as in
    small trained models, unevenly from the queries: blocks of queries want exponentially
    distributed numbers of them.

    density: share of the causal pairs that the blocks of a head hold, 0 to 1.
    hot: number of hot blocks.
    row_cap: most blocks that a block of queries wants, as a multiple of the mean.
    groups: number of groups of heads, each with one list.
    """

    density: float
    hot: int
    block: int = 128
    row_cap: float = 3.0
    groups: int = 1
    seed: int = 0

    def index(self, layer: int, seq: int, heads: int) -> BlockBitmap:
        """Draw the index of a layer for ``seq`` tokens. Padding completes the last block."""
        blocks = -(-seq // self.block)
        at = np.arange(blocks)
        causal = at <= at[:, None]
        forced = ((at == 0) | (at >= at[:, None] - 1)) & causal
        # Blocks on the diagonal hold half of the pairs of others.
        wanted = self.density * (causal.sum() - blocks / 2) + blocks / 2
        bits = np.empty((1, heads, blocks, blocks), bool)
        for group in range(self.groups):
            rng = np.random.default_rng([self.seed, layer, group])
            chosen = forced.copy()
            hot = rng.choice(blocks, min(self.hot, blocks), replace=False, shuffle=False)
            chosen[:, hot] = causal[:, hot]
            left = at + 1 - chosen.sum(1)
            number = min(max(0, wanted - chosen.sum()), left.sum())
            share = rng.exponential(size=blocks).clip(1e-6, self.row_cap)
            for _ in range(30):  # rows that want more than there is leave it to the others
                share *= number / max(1.0, (share.clip(max=1) * left).sum())
            for row, count in enumerate(np.rint(share.clip(max=1) * left).astype(np.int64)):
                others = np.flatnonzero(~chosen[row, : row + 1])
                chosen[row, rng.choice(others, count, replace=False, shuffle=False)] = True
            size = heads // self.groups
            bits[:, group * size : (group + 1) * size] = chosen
        return BlockBitmap.whole(self.block, torch.from_numpy(bits))
