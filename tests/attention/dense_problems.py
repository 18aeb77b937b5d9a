"""Small problems of dense attention, with documents, padding and rows that see no key."""

from __future__ import annotations

import numpy as np
import torch

from mtrain_cli.attention.mask import KeySlice, KeySpans, SequenceMask

SCALE = 0.3


def make_dense_problem(
    seed: int, heads: int, kv_heads: int, dtype: torch.dtype = torch.float64, *, slices: int = 0
) -> tuple[list[KeySpans], torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the spans of two sequences, and random q, k, v and dout.

    slices: number of slices of the masks, with several intervals per query; 0 for documents.

    The queries and keys are random halves of the positions, so some rows see no key.
    """
    rng = np.random.default_rng(seed)
    padded = int(rng.integers(2, 90))
    queries, keys = (np.sort(rng.permutation(padded)[: max(1, padded // 2)]) for _ in range(2))
    spans = []
    for _ in range(2):
        length = int(rng.integers(1, padded + 1))
        ids = np.sort(rng.integers(0, rng.integers(1, 6), length))
        mask = SequenceMask.from_documents(ids, padded)
        if slices:
            mask = SequenceMask.from_slices(random_slices(rng, length, slices), length, padded)
        spans.append(mask.spans(queries, keys))
    torch.manual_seed(seed)
    q, k, v, dout = (
        torch.randn(2, n, h, 16, dtype=dtype)
        for n, h in (
            (len(queries), heads),
            (len(keys), kv_heads),
            (len(keys), kv_heads),
            (len(queries), heads),
        )
    )
    return spans, q, k, v, dout


def random_slices(rng: np.random.Generator, length: int, count: int) -> list[KeySlice]:
    """Return overlapping slices of all kinds."""

    def bounds() -> list[int]:
        return np.sort(rng.integers(0, length + 1, 2)).tolist()

    return [KeySlice(*bounds(), *bounds(), int(rng.integers(4))) for _ in range(count)]
