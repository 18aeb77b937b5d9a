"""Compare indices."""

from __future__ import annotations

import torch

from mtrain_cli.attention.index import GatedBitmap, Index


def same_index(a: Index, b: Index) -> bool:
    """Return whether both choose the same blocks, columns and chunks."""
    if type(a) is not type(b) or (a.block, a.blocks, a.heads) != (b.block, b.blocks, b.heads):
        return False
    if isinstance(a, GatedBitmap) and isinstance(b, GatedBitmap) and a.chunk != b.chunk:
        return False
    a_tensors, b_tensors = a.tensors(), b.tensors()
    return all(
        _equal_but_for_padding(a_tensors[name].cpu(), b_tensors[name].cpu(), a.blocks * a.block)
        for name in a_tensors
    )


def _equal_but_for_padding(a: torch.Tensor, b: torch.Tensor, unused: int) -> bool:
    """Return whether the tensors are equal, ignoring the width that columns were padded to."""
    width = max(a.shape[-1], b.shape[-1])
    a, b = (
        torch.nn.functional.pad(t.long(), (0, width - t.shape[-1]), value=unused) for t in (a, b)
    )
    return torch.equal(a, b)
