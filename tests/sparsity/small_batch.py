"""A small batch and a vertical-slash pattern, for tests that compute an index pair by pair."""

from __future__ import annotations

import numpy as np
import torch

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.sparsity.pattern import MaskedPositions
from mtrain_cli.sparsity.vertical_slash import ProbedAttention, VerticalSlashPattern

SEQ, BLOCK, HEADS, KV_HEADS, DIM = 150, 16, 4, 2, 8


def inputs(
    seed: int = 0, documents: bool = False, length: int = SEQ
) -> tuple[torch.Tensor, torch.Tensor, MaskedPositions]:
    torch.manual_seed(seed)
    # Keys at a few positions stand out, like sinks and topics, so that budgets differ between
    # heads.
    q, k = torch.randn(2, SEQ, HEADS, DIM), torch.randn(2, SEQ, KV_HEADS, DIM)
    k[:, ::37] *= 4
    if documents:
        masks = [
            SequenceMask.from_documents(
                np.sort(np.random.default_rng(b).integers(0, 3, length)), SEQ
            )
            for b in range(2)
        ]
    else:
        masks = [SequenceMask.causal(length, SEQ)] * 2
    return q, k, MaskedPositions.make(masks, BLOCK)


def pattern(**changed) -> VerticalSlashPattern:
    default = {
        "block": BLOCK, "last_q": 20, "windows": 1, "p_v": 0.6, "p_s": 0.7, "joint": False,
        "sink_tokens": 2,
        "min_columns": 3, "max_columns": 60, "min_slashes": 1, "max_slashes": 0,
        "index_per": "query_head",
    }  # fmt: skip
    return VerticalSlashPattern(**{**default, **changed})


def fewest_that_reach(
    mass: list[float], share: float, forced: set[int], least: int, most: int
) -> set[int]:
    order = sorted(range(len(mass)), key=lambda line: (line not in forced, -mass[line], line))
    kept: set[int] = set()
    held, total = 0.0, sum(mass)
    for rank, line in enumerate(order[:most]):
        if held < share * total or rank < least or line in forced:
            kept.add(line)
        held += mass[line]
    return kept


def mass(pattern, q, k, masked):
    """Return the mass that probed queries give to local keys, [blocks, heads, keys] a sequence."""
    masses = [[] for _ in masked.masks]
    for sequence, _, table in ProbedAttention(q, k, pattern.probes(masked), masked).tables():
        masses[sequence].append(table)
    return [torch.cat(tables) for tables in masses]
