"""Indices, masks and tensors for sparse attention tests.

They cover uneven lengths, documents, shards, empty rows and heads with different indices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mtrain_cli.attention.index import BlockBitmap, GatedBitmap, Index, StartBitmap, VerticalSlash
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.mask_tables import MaskTables
from mtrain_cli.attention.tiles import Tiles

_BLOCK = 128


@dataclass(frozen=True)
class Problem:
    masks: list[SequenceMask]
    tiles: Tiles
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor


def as_view_among_nan(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with the same values as a third of the heads of a tensor, the others NaN."""
    batch, tokens, heads, dim = tensor.shape
    wide = torch.full(
        (batch, tokens, 3, heads, dim), float("nan"), dtype=tensor.dtype, device=tensor.device
    )
    wide[:, :, 1] = tensor
    assert not wide[:, :, 1].is_contiguous()
    return wide[:, :, 1]


def make_index(
    kind: str, rng: np.random.Generator, batch: int, heads: int, seq: int, block: int
) -> Index:
    """Make an index of one kind.

    kind: slashes, columns, both, all (every block), none (empty), bitmap, gated (a bitmap with
        chunks chosen per query), or starts (a bitmap with a first query for each block).
    """
    blocks = -(-seq // block)
    if kind == "bitmap":
        bits = torch.from_numpy(rng.random((batch, heads, blocks, blocks)) < 0.4)
        return BlockBitmap.whole(block, bits.tril() | torch.eye(blocks, dtype=torch.bool))
    if kind == "gated":
        return gated_index(rng, batch, heads, seq, block, 2 * block)
    if kind == "starts":
        return start_index(rng, batch, heads, seq, block)
    slashes = torch.from_numpy(
        rng.random((batch, heads, blocks)) < (0.4 if kind in ("slashes", "both") else 0.0)
    )
    if kind in ("slashes", "both"):
        # All heads but one have diagonal 0: no kernel may rely on it.
        slashes[:, :, 0] = True
        slashes[0, 0, 0] = False
    if kind == "all":
        slashes[:] = True
    columns = torch.full((batch, heads, seq), blocks * block, dtype=torch.int32)
    widest = 1
    if kind in ("columns", "both", "all"):
        for b in range(batch):
            for h in range(heads):
                count = int(rng.integers(0, max(2, seq // 2)))
                widest = max(widest, count)
                columns[b, h, :count] = torch.from_numpy(np.sort(rng.permutation(seq)[:count]))
    # For some kinds the host knows the number of diagonals.
    return VerticalSlash(
        block,
        blocks,
        slashes,
        columns[..., :widest].contiguous(),
        int(slashes.sum(-1).max()) if kind == "both" else 0,
    )


def gated_index(
    rng: np.random.Generator, batch: int, heads: int, seq: int, block: int, chunk: int
) -> GatedBitmap:
    """Make a bitmap in which every query sees its own chunk and some earlier ones."""
    blocks, chunks = -(-seq // block), -(-seq // chunk)
    own = torch.arange(blocks * block)[:, None] // chunk
    seen = torch.from_numpy(rng.random((batch, heads, blocks * block, chunks)) < 0.3) & (
        torch.arange(chunks) < own
    )
    seen |= torch.arange(chunks) == own
    gates = torch.zeros(batch, heads, blocks * block, -(-chunks // 32), dtype=torch.int32)
    for c in range(chunks):
        gates[..., c // 32] |= seen[..., c].int() << (c % 32)
    bits = (
        seen.unflatten(2, (blocks, block))
        .any(3)
        .repeat_interleave(chunk // block, -1)[..., :blocks]
        .tril()
    )
    return GatedBitmap(block, blocks, bits, torch.arange(blocks, dtype=torch.int32), gates, chunk)


def start_index(
    rng: np.random.Generator, batch: int, heads: int, seq: int, block: int
) -> StartBitmap:
    """Make a bitmap in which every query sees its own block, and some blocks from a query on.

    Pairs of heads share a bitmap.
    """
    blocks, sharing = -(-seq // block), 2 - heads % 2
    bits = torch.from_numpy(rng.random((batch, heads // sharing, blocks, blocks)) < 0.5).tril(-1)
    starts = torch.from_numpy(rng.integers(0, block, bits.shape, np.uint8)) * bits
    whole = BlockBitmap.whole(block, bits | torch.eye(blocks, dtype=torch.bool))
    return StartBitmap(block, blocks, whole.bits, whole.rows, starts, sharing)


def held_rows(index: BlockBitmap, held: torch.Tensor) -> BlockBitmap:
    """Return some rows of a bitmap that holds all of them."""
    return index.with_rows(
        held, lambda t: t.unflatten(2, (index.blocks, -1))[:, :, held.long()].flatten(2, 3)
    )


def shard(kind: str, seq: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return query and key positions: the sequence, blocks dealt to three workers, or a part."""
    everywhere = np.arange(seq)
    number = everywhere // block
    return {
        "whole": (everywhere, everywhere),
        "striped queries": (everywhere[number % 3 == 1], everywhere),
        "striped": (everywhere[number % 3 == 1], everywhere[number % 3 == 0]),
        "later queries": (
            everywhere[number >= number[-1] // 2],
            everywhere[number < max(1, number[-1] // 2)],
        ),
    }[kind]


def make_problem(
    seed: int,
    kind: str,
    *,
    seq: int = 85,
    block: int = 16,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    documents: bool | None = True,
    window: int = 0,
    where: str = "whole",
    dtype=torch.float32,
    device="cpu",
    batch: int = 2,
) -> Problem:
    """Make a problem.

    documents: True for packed documents, False for one, None for one without padding.
    window: tokens that a query sees; 0 for all of its document.
    """
    rng = np.random.default_rng(seed)
    padded = seq + int(rng.integers(0, 5))
    if documents is None:
        padded = seq
        masks = [SequenceMask.causal(seq, seq)] * batch
    elif documents:
        masks = [
            SequenceMask.from_documents(np.sort(rng.integers(0, 4, seq - b)), padded)
            for b in range(batch)
        ]
    else:
        masks = [SequenceMask.causal(seq - b, padded) for b in range(batch)]
    if window:
        near = np.maximum(np.arange(padded) - window + 1, 0)
        masks = [m.intersect(SequenceMask.from_first(near, m.length)) for m in masks]
    queries, keys = shard(where, padded, block)
    tiles = Tiles.between(masks, queries, keys, MaskTables.make(masks, block)).to(device)
    geometry = tiles.geometry
    index = make_index(kind.removeprefix("local "), rng, batch, heads, padded, block).to(device)
    if kind.startswith("local "):
        # Like a context-parallel worker, keep only the rows of the local queries.
        assert isinstance(index, BlockBitmap)
        index = held_rows(index, geometry.query_blocks)
    tiles = tiles.with_index(index)
    torch.manual_seed(seed)
    shapes = (
        (len(queries), heads),
        (len(keys), kv_heads),
        (len(keys), kv_heads),
        (len(queries), heads),
    )
    return Problem(
        masks, tiles, *(torch.randn(batch, n, h, dim).to(device, dtype) for n, h in shapes)
    )


def column_problem(
    seed: int, *, width: int = 300, heads: int = 4, kv_heads: int = 2, batch: int = 2,
    blocks: int = 7, where: str = "whole", tail: int = 0,
) -> Problem:  # fmt: skip
    """Make a causal problem in which every head keeps diagonal 0, and one head has no columns.

    The blocks are those of FlashAttention-4, the tensors float64.
    """
    rng = np.random.default_rng(seed)
    seq = blocks * _BLOCK - tail
    slashes = torch.from_numpy(rng.random((batch, heads, blocks)) < 0.3)
    slashes[:, :, 0] = True
    columns = torch.full((batch, heads, width), blocks * _BLOCK, dtype=torch.int32)
    for b in range(batch):
        for h in range(heads):
            count = [0, width, *rng.integers(1, width, heads)][h]
            chosen = np.sort(rng.permutation(seq)[:count])
            columns[b, h, :count] = torch.from_numpy(chosen)
    masks = [SequenceMask.causal(seq, seq)] * batch
    queries, keys = shard(where, seq, _BLOCK)
    tiles = Tiles.between(masks, queries, keys, MaskTables.make(masks, _BLOCK))
    index = VerticalSlash(_BLOCK, blocks, slashes, columns, 0, has_own_blocks=True)
    torch.manual_seed(seed)
    shapes = (len(queries), heads), (seq, kv_heads), (seq, kv_heads), (len(queries), heads)
    tensors = (torch.randn(batch, n, h, 8, dtype=torch.float64) for n, h in shapes)
    return Problem(masks, tiles.with_index(index), *tensors)
