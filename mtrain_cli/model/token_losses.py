"""Compute the loss of every token for evaluation, without gradients."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from mtrain_cli.data.labels import IGNORED


@torch.no_grad()
def token_losses(
    x_NC: Tensor,
    weight_VC: Tensor,
    labels_N: Tensor,
    chunk_bytes: int,
    is_greedy_N: Tensor | None = None,
) -> Tensor:
    """Return the cross entropy -log softmax(x W^T)[label] of each row, ``[N]``.

    The result is float32, or float64 for float64 input. Rows with label -100 have loss 0.

    Args:
        chunk_bytes: maximum size of the logits of a chunk of rows. A chunk has at least one row.
        is_greedy_N: receives whether the label of each row has the largest logit, bool ``[N]``. If
            several logits are equal, the lowest id counts as the largest.
    """
    dtype = torch.float64 if x_NC.dtype == torch.float64 else torch.float32
    rows = max(1, chunk_bytes // (dtype.itemsize * weight_VC.shape[0]))
    losses_N = torch.zeros(labels_N.shape, dtype=dtype, device=x_NC.device)
    if is_greedy_N is not None:
        is_greedy_N.fill_(False)
    for first in range(0, len(labels_N), rows):
        chunk = slice(first, first + rows)
        x_RC, labels_R = x_NC[chunk], labels_N[chunk]
        if not bool((labels_R != IGNORED).any()):
            continue  # of a long text, few tokens may have labels
        logits_RV = (x_RC @ weight_VC.t()).to(dtype)
        losses_N[chunk] = functional.cross_entropy(
            logits_RV, labels_R.long(), ignore_index=IGNORED, reduction="none"
        )
        if is_greedy_N is not None:
            is_greedy_N[chunk] = logits_RV.argmax(-1) == labels_R
    return losses_N
