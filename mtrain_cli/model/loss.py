"""LM head and cross entropy in one step, without ever holding the logits of more than a few rows.

Both gradients are formed while a chunk's logits exist (BurstEngine, SC '25, algorithm 3), so nothing is recomputed: three matrix
products in all. A chunk is a fixed number of bytes, not a number of chunks: its memory must not grow with the sequence.

N local tokens, C hidden, V vocabulary, R rows of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100


def fused_linear_cross_entropy(
    x_NC: Tensor, weight_VC: Tensor, labels_N: Tensor, chunk_bytes: int, scale: float | Tensor, *, compile: bool = False
) -> Tensor:
    """``scale`` times the sum over rows of -log softmax(x W^T)[label]: a float32 scalar (float64 for float64 input).

    Differentiable in x and W. Rows whose label is -100 count for nothing; with none left the result and both gradients are exactly 0.
    The logits of ``max(1, chunk_bytes // (4 V))`` rows exist at once, in float32; for bfloat16 input their gradient too, in bfloat16.
    dW is summed over chunks in float32 and returned in the weight's dtype. ``scale`` is a number or a 0-dim tensor without gradient.
    Under ``torch.no_grad`` no gradient is computed. ``compile`` fuses what happens between the matrix products.

    Never synchronises with a GPU. So a label outside [0, V) raises ValueError on the CPU, while on CUDA it makes the loss and that row's
    gradient NaN, which the trainer's check for non-finite steps reports.
    """
    rows_in_all, hidden = x_NC.shape
    vocab_size = weight_VC.shape[0]
    assert weight_VC.shape == (vocab_size, hidden), (x_NC.shape, weight_VC.shape)
    assert labels_N.shape == (rows_in_all,), (x_NC.shape, labels_N.shape)
    assert x_NC.dtype == weight_VC.dtype, (x_NC.dtype, weight_VC.dtype)
    if labels_N.device.type == "cpu":
        _check_labels(labels_N, vocab_size)
    rows = max(1, chunk_bytes // (_accumulation(x_NC.dtype).itemsize * vocab_size))
    # A tensor, filled on the device: as a Python number it would be a constant of the compiled code, which a new value compiles again.
    scale_tensor = scale if isinstance(scale, Tensor) else torch.full((), scale, dtype=_accumulation(x_NC.dtype), device=x_NC.device)
    return _FusedLinearCrossEntropy.apply(x_NC, weight_VC, labels_N.long(), rows, scale_tensor, torch.is_grad_enabled(), compile)


class _FusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NC: Tensor, weight_VC: Tensor, labels_N: Tensor, rows: int, scale: Tensor, grad_enabled: bool, compile: bool
    ) -> Tensor:
        dtype = _accumulation(x_NC.dtype)
        x_needed, weight_needed = (needed and grad_enabled for needed in ctx.needs_input_grad[:2])
        # Empty tensors stand for gradients that nobody asked for, so that every chunk takes the same path.
        dx_NC = torch.empty_like(x_NC if x_needed else x_NC[:, :0])
        dweight_VC = torch.zeros_like(weight_VC if weight_needed else weight_VC[:0], dtype=dtype)
        loss = torch.zeros((), dtype=dtype, device=x_NC.device)
        row_losses = _compiled_row_losses() if compile else _row_losses
        gradient_dtype = x_NC.dtype if x_needed or weight_needed else None
        for x_RC, labels_R, dx_RC in zip(x_NC.split(rows), labels_N.split(rows), dx_NC.split(rows), strict=True):
            logits_RV = _matmul(x_RC, weight_VC.t(), dtype)
            loss_R, dlogits_RV = row_losses(logits_RV, labels_R, scale, gradient_dtype)
            loss += loss_R.sum() * scale
            if x_needed:
                torch.mm(dlogits_RV, weight_VC, out=dx_RC)
            if weight_needed:
                _add_matmul(dweight_VC, dlogits_RV.t(), x_RC)
            del logits_RV, dlogits_RV  # or they would stand beside the next chunk's
        ctx.save_for_backward(dx_NC if x_needed else None, dweight_VC.to(weight_VC.dtype) if weight_needed else None)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx_NC, dweight_VC = ctx.saved_tensors
        return None if dx_NC is None else dx_NC * grad, None if dweight_VC is None else dweight_VC * grad, None, None, None, None, None


def _row_losses(logits_RV: Tensor, labels_R: Tensor, scale: Tensor, gradient_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Unscaled loss of every row, and ``scale * (softmax - one_hot)`` in ``gradient_dtype`` (if None, something unspecified).

    Overwrites ``logits_RV``, and returns it where its dtype is the one asked for.
    """
    ignored_R1 = (labels_R == IGNORED)[:, None]
    inside_R1 = ((labels_R >= 0) & (labels_R < logits_RV.shape[1]))[:, None]
    label_R1 = torch.where(inside_R1, labels_R[:, None], 0)
    exponentials_RV = logits_RV.sub_(logits_RV.amax(dim=1, keepdim=True))
    label_logit_R1 = exponentials_RV.gather(1, label_R1)
    exponentials_RV.exp_()
    sum_R1 = exponentials_RV.sum(dim=1, keepdim=True)
    loss_R1 = torch.where(ignored_R1, 0.0, torch.where(inside_R1, sum_R1.log() - label_logit_R1, torch.nan))
    if gradient_dtype is None:
        return loss_R1[:, 0], exponentials_RV
    # (softmax - one_hot) * sum, subtracted in full precision: rounding a probability near 1 first would lose the whole difference.
    exponentials_RV.scatter_(1, label_R1, exponentials_RV.gather(1, label_R1) - sum_R1)
    factor_R1 = torch.where(ignored_R1, 0.0, torch.where(inside_R1, scale / sum_R1, torch.nan))
    gradient_RV = exponentials_RV if gradient_dtype == logits_RV.dtype else torch.empty_like(logits_RV, dtype=gradient_dtype)
    return loss_R1[:, 0], torch.mul(exponentials_RV, factor_R1, out=gradient_RV)


@cache
def _compiled_row_losses() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_row_losses, dynamic=False)


def _accumulation(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b, summed and returned in ``dtype``."""
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def _add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, summed in total's dtype without a temporary of its size."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _check_labels(labels_N: Tensor, vocab_size: int) -> None:
    outside_N = (labels_N != IGNORED) & ((labels_N < 0) | (labels_N >= vocab_size))
    if bool(outside_N.any()):
        row = int(outside_N.nonzero()[0])
        raise ValueError(f"Label {int(labels_N[row])} of row {row} is outside the vocabulary of {vocab_size} tokens.")
