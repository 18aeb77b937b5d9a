"""Dynamic indices: which key blocks and single key columns a pattern chose, per query head, out of what the mask allows.

An index is made for one layer and step, in global positions, whatever the layout. Two forms exist. `VerticalSlash` holds block diagonals
(slashes) and single columns (bars): kilobytes at any length, and its transpose is a change of sign. `BlockBitmap` holds a bit for every
pair of blocks. In both, a pair of query and key counts once, however many lines contain it, and a mask always applies on top.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mtrain_cli.attention.mask import SequenceMask


@dataclass(frozen=True)
class Index(ABC):
    """block: tokens of a block; blocks: blocks of the padded sequence, whose last block may be short."""

    block: int
    blocks: int

    @property
    @abstractmethod
    def heads(self) -> tuple[int, int]:
        """Batch and query heads."""

    @abstractmethod
    def chosen(self, query_blocks: torch.Tensor, key_blocks: torch.Tensor) -> torch.Tensor:
        """bool [batch, heads, queries, keys]: which pairs of blocks (given by their global numbers) are chosen as a whole."""

    @property
    def columns(self) -> torch.Tensor | None:
        """int32 [batch, heads, width], ascending positions of single columns; ``blocks * block`` fills what is not used."""
        return None

    def allowed(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        """bool [batch, heads, queries, keys]: the index from its definition, position by position, without the mask."""
        seen = self.chosen(query_positions // self.block, key_positions // self.block)
        if self.columns is not None:
            table = torch.zeros(*self.heads, self.blocks * self.block + 1, dtype=torch.bool, device=seen.device)
            table.scatter_(-1, self.columns.long(), True)
            seen = seen | table[:, :, key_positions][:, :, None]
        return seen

    @abstractmethod
    def counts(self, masks: list[SequenceMask]) -> Counts:
        """Exact work under the masks (one per sequence of the batch), from the index alone, on the CPU."""

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """What `save` writes."""

    def to(self, device: torch.device | str) -> Index:
        """The same index with its tensors elsewhere."""
        return replace(self, **{name: t.to(device) for name, t in self.tensors().items()})

    def save(self, path: Path) -> None:
        """Writes the index to an .npz file."""
        values = {name: t.cpu().numpy() for name, t in self.tensors().items()}
        np.savez_compressed(path, kind=type(self).__name__, block=self.block, blocks=self.blocks, **values)

    def same_as(self, other: Index) -> bool:
        """Whether both choose the same blocks and columns."""
        if type(self) is not type(other) or (self.block, self.blocks, self.heads) != (other.block, other.blocks, other.heads):
            return False
        mine, theirs = self.tensors(), other.tensors()
        return all(_same(mine[name].cpu(), theirs[name].cpu(), self.blocks * self.block) for name in mine)


def _same(a: torch.Tensor, b: torch.Tensor, unused: int) -> bool:
    """Equal but for the width that columns were filled up to."""
    width = max(a.shape[-1], b.shape[-1])
    a, b = (torch.nn.functional.pad(t.long(), (0, width - t.shape[-1]), value=unused) for t in (a, b))
    return torch.equal(a, b)


def load_index(path: Path, device: torch.device | str = "cpu") -> Index:
    """Reads what `Index.save` wrote.

    Raises:
        ValueError: the file holds no index.
    """
    with np.load(path) as file:
        kinds = {cls.__name__: cls for cls in (VerticalSlash, BlockBitmap)}
        kind = str(file["kind"]) if "kind" in file else ""
        if kind not in kinds:
            raise ValueError(f"{path}: holds no index of mtrain.")
        values = {name: torch.from_numpy(file[name]).to(device) for name in file.files if name not in ("kind", "block", "blocks")}
        return kinds[kind](int(file["block"]), int(file["blocks"]), **values)


@dataclass(frozen=True)
class Counts:
    """Work of one index per sequence and head, int64 [batch, heads].

    pairs: query-key pairs that index and mask allow: the useful work. blocks: pairs of blocks that hold at least one pair of a chosen
    block. columns: single columns. column_pairs: the part of pairs that only columns give. slashes: block diagonals (0 for a bitmap).
    """

    pairs: NDArray[np.int64]
    blocks: NDArray[np.int64]
    columns: NDArray[np.int64]
    column_pairs: NDArray[np.int64]
    slashes: NDArray[np.int64]

    def flop(self, head_dim: int) -> tuple[int, int]:
        """Forward and backward FLOP of the useful work over batch and heads: 2 and 5 products of 2 * head_dim a pair."""
        pairs = int(self.pairs.sum())
        return 4 * head_dim * pairs, 10 * head_dim * pairs


@dataclass(frozen=True)
class VerticalSlash(Index):
    """slashes: bool [batch, heads, blocks], block diagonals: query block i computes key block i - d for every d that is set.

    bars: int32 [batch, heads, width], single key columns that every later query computes.
    """

    slashes: torch.Tensor
    bars: torch.Tensor

    @property
    def heads(self) -> tuple[int, int]:
        return self.slashes.shape[0], self.slashes.shape[1]

    @property
    def columns(self) -> torch.Tensor | None:
        return self.bars

    def chosen(self, query_blocks: torch.Tensor, key_blocks: torch.Tensor) -> torch.Tensor:
        away = query_blocks[:, None] - key_blocks[None, :]
        return self.slashes[:, :, away.clamp(min=0)] & (away >= 0)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"slashes": self.slashes, "bars": self.bars}

    def counts(self, masks: list[SequenceMask]) -> Counts:
        slashes, bars = self.slashes.cpu().numpy(), self.bars.cpu().numpy().astype(np.int64)
        batch, heads = self.heads
        pairs, blocks, columns, column_pairs = (np.zeros((batch, heads), np.int64) for _ in range(4))
        for b, mask in enumerate(masks):
            per_diagonal, touched = diagonal_work(mask, self.block, self.blocks)
            last = mask.last()
            for h in range(heads):
                on = slashes[b, h]
                blocks[b, h] = touched[on].sum()
                real = bars[b, h][bars[b, h] < mask.length]
                columns[b, h] = len(real)
                column_pairs[b, h] = (last[real] - real + 1 - self._covered(on, real, last[real])).sum()
                pairs[b, h] = per_diagonal[on].sum() + column_pairs[b, h]
        return Counts(pairs, blocks, columns, column_pairs, slashes.sum(-1))

    def _covered(self, on: NDArray[np.bool_], bars: NDArray[np.int64], last: NDArray[np.int64]) -> NDArray[np.int64]:
        """Query positions bar <= q <= last whose block lies on a diagonal that holds the bar's block."""
        upto = np.concatenate([[0], np.cumsum(on)])
        own, end = bars // self.block, last // self.block
        away = end - own
        inside_end = last - end * self.block + 1
        # Blocks strictly between the bar's own and the last one count in full, the own one from the bar on, the last one up to its row.
        between = np.where(away > 0, upto[np.maximum(away, 1)] - upto[1], 0) * self.block
        first_rows = np.where(away > 0, (own + 1) * self.block - bars, last - bars + 1)
        return on[0] * first_rows + between + np.where(away > 0, on[np.maximum(away, 0)] * inside_end, 0)


def diagonal_work(mask: SequenceMask, block: int, blocks: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Per block diagonal d: allowed pairs in it, and pairs of blocks that hold any. int64 [blocks] each."""
    q = np.arange(mask.length)
    first = mask.first[: mask.length]
    own = q // block
    away = own - first // block
    pairs = np.zeros(blocks + 1, np.int64)
    # Each row sees all of the blocks between the first visible one and its own, the end of the first, and its own up to itself.
    one = away == 0
    np.add.at(pairs, np.zeros(one.sum(), np.int64), (q - first + 1)[one])
    more = ~one
    np.add.at(pairs, np.zeros(more.sum(), np.int64), (q - own * block + 1)[more])
    np.add.at(pairs, away[more], ((first // block + 1) * block - first)[more])
    steps = np.zeros(blocks + 2, np.int64)
    np.add.at(steps, np.full(more.sum(), 1), block)
    np.add.at(steps, away[more], -block)
    pairs[:blocks] += np.cumsum(steps)[:blocks]
    touched = np.zeros(blocks, np.int64)
    reach = np.zeros(blocks, np.int64) - 1
    np.maximum.at(reach, own, away)
    for r in reach[reach >= 0]:
        touched[: r + 1] += 1
    return pairs[:blocks], touched


@dataclass(frozen=True)
class BlockBitmap(Index):
    """bits: bool [batch, heads, blocks, blocks], query block by key block; only key blocks up to the query's own are ever set."""

    bits: torch.Tensor

    @property
    def heads(self) -> tuple[int, int]:
        return self.bits.shape[0], self.bits.shape[1]

    def chosen(self, query_blocks: torch.Tensor, key_blocks: torch.Tensor) -> torch.Tensor:
        return self.bits[:, :, query_blocks][..., key_blocks]

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"bits": self.bits}

    def counts(self, masks: list[SequenceMask]) -> Counts:
        bits = self.bits.cpu().numpy()
        zero = np.zeros(self.heads, np.int64)
        pairs, blocks = zero.copy(), zero.copy()
        for b, mask in enumerate(masks):
            work = block_pairs(mask, self.block, self.blocks)
            pairs[b] = (bits[b] * work).sum((-1, -2))
            blocks[b] = (bits[b] & (work > 0)).sum((-1, -2))
        return Counts(pairs, blocks, zero, zero, zero)


def block_pairs(mask: SequenceMask, block: int, blocks: int) -> NDArray[np.int64]:
    """Allowed pairs in each pair of blocks, int64 [blocks, blocks]."""
    starts = np.arange(blocks + 1) * block
    work = np.zeros((blocks, blocks), np.int64)
    for i in range(blocks):
        q = np.arange(i * block, min((i + 1) * block, mask.length))
        if len(q):
            seen = np.minimum(starts[None, 1 : i + 2], q[:, None] + 1) - np.maximum(starts[None, : i + 1], mask.first[q][:, None])
            work[i, : i + 1] = np.maximum(seen, 0).sum(0)
    return work
