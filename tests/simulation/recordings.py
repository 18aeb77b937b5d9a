"""Small index files like those of a profile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from mtrain_cli.attention.index import BlockBitmap, Index, VerticalSlash
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.records.index_file import RecordedSetup, save_indices

BLOCK, SEQ, HEADS = 16, 1000, 4
PADDED = 1024  # of 4 workers in stripes of 16 tokens
SETUP = RecordedSetup(
    seq=SEQ,
    heads=HEADS,
    kv_heads=2,
    head_dim=32,
    dtype_bytes=2,
    workers=4,
    per_node=4,
    layout="striped",
    exchange="ring",
    block_size=BLOCK,
    columns={"vertical_slash": 20},
    iteration=3,
)


def masks() -> list[SequenceMask]:
    documents = np.sort(np.random.default_rng(2).integers(0, 4, SEQ - 7))
    return [SequenceMask.causal(SEQ, PADDED), SequenceMask.from_documents(documents, PADDED)]


def lines(seed: int, padded: int = PADDED) -> VerticalSlash:
    """Includes columns and diagonals in the padding."""
    rng = np.random.default_rng(seed)
    blocks = padded // BLOCK
    slashes = rng.random((2, HEADS, blocks)) < 0.15
    slashes[..., 0] = True
    columns = np.full((2, HEADS, 20), padded)
    for row in columns.reshape(-1, 20):
        row[:17] = np.sort(rng.choice(padded, 17, replace=False))
    return VerticalSlash(
        BLOCK, blocks, torch.from_numpy(slashes), torch.from_numpy(columns.astype(np.int32))
    )


def bitmap(seed: int) -> BlockBitmap:
    rng = np.random.default_rng(seed)
    return BlockBitmap.whole(
        BLOCK,
        torch.from_numpy(rng.random((2, HEADS, PADDED // BLOCK, PADDED // BLOCK)) < 0.2).tril(),
    )


def record(folder: Path, *patterns: str, layers: tuple[int, ...] = (0, 3, 5)) -> Path:
    made = {"vertical_slash": lines, "moba": bitmap, "dense": lambda _: None}
    indices: list[tuple[str, int, Index | None]] = [
        (p, layer, made[p](layer)) for p in patterns for layer in layers
    ]
    folder.mkdir(parents=True, exist_ok=True)
    save_indices(folder / "index.npz", SETUP, masks(), indices)
    return folder / "index.npz"
