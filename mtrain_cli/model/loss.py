"""LM head and cross entropy in one step, without ever holding the logits of more than a few rows.

By default both gradients are formed while a chunk's logits exist (BurstEngine, SC '25, algorithm 3), so nothing is recomputed: three matrix
products in all. Or logits are computed again in the backward pass, a fourth product, and nothing but the inputs is kept until then. A chunk
is a fixed number of bytes, not a number of chunks: its memory must not grow with the sequence.

N local tokens, C hidden, V vocabulary, R rows of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mtrain_cli.parallel import profiler_labels

IGNORED = -100


def fused_linear_cross_entropy(
    x_NC: Tensor,
    weight_VC: Tensor,
    labels_N: Tensor,
    chunk_bytes: int,
    scale: float | Tensor,
    *,
    recompute: bool = False,
    compile: bool = False,
) -> Tensor:
    """``scale`` times the sum over rows of -log softmax(x W^T)[label]: a float32 scalar (float64 for float64 input).

    Differentiable in x and W. Rows whose label is -100 count for nothing; with none left the result and both gradients are exactly 0.
    The logits of ``max(1, chunk_bytes // (4 V))`` rows exist at once, in float32; for bfloat16 input their gradient too, in bfloat16.
    dW is summed over chunks in float32 and returned in the weight's dtype. ``scale`` is a number or a 0-dim tensor without gradient.
    Under ``torch.no_grad`` no gradient is computed. ``recompute`` forms gradients in the backward pass, from logits computed again.
    ``compile`` fuses what happens between the matrix products.

    Never synchronises with a GPU. So a label outside [0, V) raises ValueError on the CPU, while on CUDA it makes the loss and that row's
    gradient NaN, which the trainer's check for non-finite steps reports.
    """
    return with_z_loss(
        x_NC, weight_VC, labels_N, chunk_bytes, scale, 0.0, recompute=recompute, compile=compile
    )[0]


def with_z_loss(
    x_NC: Tensor,
    weight_VC: Tensor,
    labels_N: Tensor,
    chunk_bytes: int,
    scale: float | Tensor,
    z_loss: float,
    *,
    recompute: bool = False,
    compile: bool = False,
) -> tuple[Tensor, Tensor]:
    """-> `fused_linear_cross_entropy` plus ``scale`` times the sum over the rows that count of z_loss * logsumexp(x W^T)^2, and the former
    alone, without gradient.

    The second term keeps logits from drifting away (PaLM, arXiv:2204.02311, section 5, with 1e-4; ST-MoE, arXiv:2202.08906, equation 5).
    """
    rows_in_all, hidden = x_NC.shape
    vocab_size = weight_VC.shape[0]
    assert weight_VC.shape == (vocab_size, hidden), (x_NC.shape, weight_VC.shape)
    assert labels_N.shape == (rows_in_all,), (x_NC.shape, labels_N.shape)
    assert x_NC.dtype == weight_VC.dtype, (x_NC.dtype, weight_VC.dtype)
    if labels_N.device.type == "cpu":
        _check_labels(labels_N, vocab_size)
    rows = max(1, chunk_bytes // (accumulation(x_NC.dtype).itemsize * vocab_size))
    # A tensor, filled on the device: as a Python number it would be a constant of the compiled code, which a new value compiles again.
    scale_tensor = (
        scale
        if isinstance(scale, Tensor)
        else torch.full((), scale, dtype=accumulation(x_NC.dtype), device=x_NC.device)
    )
    how = _LossOptions(rows, float(z_loss), compile)
    return _FusedLinearCrossEntropy.apply(
        x_NC, weight_VC, labels_N.long(), how, scale_tensor, torch.is_grad_enabled(), recompute
    )


@dataclass(frozen=True)
class _LossOptions:
    """rows: of a chunk. z_loss: coefficient. compile: what is between the products."""

    rows: int
    z_loss: float
    compile: bool


class _FusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NC: Tensor,
        weight_VC: Tensor,
        labels_N: Tensor,
        how: _LossOptions,
        scale: Tensor,
        grad_enabled: bool,
        recompute: bool,
    ) -> tuple[Tensor, Tensor]:
        needed = tuple(needed and grad_enabled for needed in ctx.needs_input_grad[:2])
        ctx.how, ctx.needed, ctx.recompute = how, needed, recompute
        with profiler_labels.label(profiler_labels.LOSS):
            total, loss, dx_NC, dweight_VC = _chunks(
                x_NC, weight_VC, labels_N, how, scale, (False, False) if recompute else needed
            )
        if recompute:
            ctx.save_for_backward(x_NC, weight_VC, labels_N, scale)
        else:
            ctx.save_for_backward(dx_NC, dweight_VC)
        ctx.mark_non_differentiable(loss)
        return total, loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        with profiler_labels.label(profiler_labels.LOSS):
            if ctx.recompute:
                x_NC, weight_VC, labels_N, scale = ctx.saved_tensors
                dx_NC, dweight_VC = _chunks(
                    x_NC, weight_VC, labels_N, ctx.how, scale * grad, ctx.needed
                )[2:]
            else:
                dx_NC, dweight_VC = (
                    None if gradient is None else gradient * grad for gradient in ctx.saved_tensors
                )
        return dx_NC, dweight_VC, None, None, None, None, None


def _chunks(
    x_NC: Tensor,
    weight_VC: Tensor,
    labels_N: Tensor,
    how: _LossOptions,
    scale: Tensor,
    needed: tuple[bool, ...],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """-> loss with and without the z-loss, and the gradients of x and W that are ``needed``."""
    x_needed, weight_needed = needed
    dtype = accumulation(x_NC.dtype)
    # Empty tensors stand for gradients that nobody asked for, so that every chunk takes the same path.
    dx_NC = torch.empty_like(x_NC if x_needed else x_NC[:, :0])
    dweight_VC = torch.zeros_like(weight_VC if weight_needed else weight_VC[:0], dtype=dtype)
    loss = torch.zeros((), dtype=dtype, device=x_NC.device)
    total = torch.zeros_like(loss)
    gradient_dtype = x_NC.dtype if x_needed or weight_needed else None
    row_losses = _compiled(gradient_dtype == dtype) if how.compile else _row_losses
    for x_RC, labels_R, dx_RC in zip(
        x_NC.split(how.rows), labels_N.split(how.rows), dx_NC.split(how.rows), strict=True
    ):
        logits_RV = _matmul(x_RC, weight_VC.t(), dtype)
        loss_R, total_R, dlogits_RV = row_losses(
            logits_RV, labels_R, scale, gradient_dtype, how.z_loss
        )
        loss += loss_R.sum() * scale
        total += total_R.sum() * scale
        if x_needed:
            torch.mm(dlogits_RV, weight_VC, out=dx_RC)
        if weight_needed:
            add_matmul(dweight_VC, dlogits_RV.t(), x_RC)
        del logits_RV, dlogits_RV  # or they would stand beside the next chunk's
    return (
        total,
        loss,
        dx_NC if x_needed else None,
        dweight_VC.to(weight_VC.dtype) if weight_needed else None,
    )


def _row_losses(
    logits_RV: Tensor,
    labels_R: Tensor,
    scale: Tensor,
    gradient_dtype: torch.dtype | None,
    z_loss: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Unscaled loss of every row without and with its z-loss, and ``scale`` times the gradient of the latter by the logits, in
    ``gradient_dtype`` (if None, something unspecified): softmax * (1 + 2 z_loss logsumexp) - one_hot.

    Overwrites ``logits_RV``, and returns it where its dtype is the one asked for.
    """
    label_R1 = _columns_of(labels_R, logits_RV.shape[1])
    highest_R1 = logits_RV.amax(dim=1, keepdim=True)
    exponentials_RV = logits_RV.sub_(highest_R1)
    label_logit_R1 = exponentials_RV.gather(1, label_R1)
    sum_R1 = exponentials_RV.exp_().sum(dim=1, keepdim=True)
    row = _row_terms(
        labels_R, logits_RV.shape[1], highest_R1, sum_R1, label_logit_R1, scale, z_loss
    )
    if gradient_dtype is None:
        return row.loss_R, row.total_R, exponentials_RV
    gradient_RV = (
        exponentials_RV
        if gradient_dtype == logits_RV.dtype
        else torch.empty_like(logits_RV, dtype=gradient_dtype)
    )
    torch.mul(exponentials_RV, row.factor_R1, out=gradient_RV)
    return (
        row.loss_R,
        row.total_R,
        gradient_RV.scatter_(1, label_R1, row.label_gradient_R1.to(gradient_dtype)),
    )


def _row_losses_apart(
    logits_RV: Tensor,
    labels_R: Tensor,
    scale: Tensor,
    gradient_dtype: torch.dtype | None,
    z_loss: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`_row_losses` for a compiler, where the gradient has another dtype than the logits: exponentials are computed twice, never written.
    What overwrites its input would become, once compiled, a tensor of its own; this makes the gradient alone.
    """
    label_R1 = _columns_of(labels_R, logits_RV.shape[1])
    highest_R1 = logits_RV.amax(dim=1, keepdim=True)
    exponentials_RV = (logits_RV - highest_R1).exp()
    sum_R1 = exponentials_RV.sum(dim=1, keepdim=True)
    row = _row_terms(
        labels_R,
        logits_RV.shape[1],
        highest_R1,
        sum_R1,
        logits_RV.gather(1, label_R1) - highest_R1,
        scale,
        z_loss,
    )
    if gradient_dtype is None:
        return row.loss_R, row.total_R, logits_RV[:0]
    is_label_RV = torch.arange(logits_RV.shape[1], device=logits_RV.device) == label_R1
    gradient_RV = torch.where(
        is_label_RV, row.label_gradient_R1, exponentials_RV * row.factor_R1
    ).to(gradient_dtype)
    return row.loss_R, row.total_R, gradient_RV


@dataclass(frozen=True)
class _RowTerms:
    """Of every row: its loss, that with the z-loss, what its exponentials are multiplied by in the gradient, and the label's gradient."""

    loss_R: Tensor
    total_R: Tensor
    factor_R1: Tensor
    label_gradient_R1: Tensor


def _row_terms(
    labels_R: Tensor,
    vocab_size: int,
    highest_R1: Tensor,
    sum_R1: Tensor,
    label_logit_R1: Tensor,
    scale: Tensor,
    z_loss: float,
) -> _RowTerms:
    """highest, sum: of logits, and of exp(logit - highest). label_logit: above the highest."""
    ignored_R1 = (labels_R == IGNORED)[:, None]
    inside_R1 = ((labels_R >= 0) & (labels_R < vocab_size))[:, None]
    loss_R1 = torch.where(
        ignored_R1, 0.0, torch.where(inside_R1, sum_R1.log() - label_logit_R1, torch.nan)
    )
    factor_R1 = torch.where(ignored_R1, 0.0, torch.where(inside_R1, scale / sum_R1, torch.nan))
    # The label's own: (softmax - one_hot) * sum, in full precision; rounding a probability near 1 first would lose the whole difference.
    label_exponential_R1 = label_logit_R1.exp()
    if not z_loss:
        return _RowTerms(
            loss_R1[:, 0], loss_R1[:, 0], factor_R1, (label_exponential_R1 - sum_R1) * factor_R1
        )
    logsumexp_R1 = sum_R1.log() + highest_R1
    total_R1 = loss_R1 + torch.where(ignored_R1, 0.0, z_loss * logsumexp_R1.square())
    weight_R1 = 1.0 + 2.0 * z_loss * logsumexp_R1
    label_gradient_R1 = (label_exponential_R1 * weight_R1 - sum_R1) * factor_R1
    return _RowTerms(loss_R1[:, 0], total_R1[:, 0], factor_R1 * weight_R1, label_gradient_R1)


def _columns_of(labels_R: Tensor, vocab_size: int) -> Tensor:
    """Where a row's label stands; the first column for a row that has none."""
    return torch.where((labels_R >= 0) & (labels_R < vocab_size), labels_R, 0)[:, None]


@cache
def _compiled(in_place: bool) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """in_place: the gradient has the dtype of the logits, and takes their place."""
    return torch.compile(_row_losses if in_place else _row_losses_apart, dynamic=False)


def accumulation(dtype: torch.dtype) -> torch.dtype:
    """In which sums are made."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b, summed and returned in ``dtype``."""
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
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
        raise ValueError(
            f"Label {int(labels_N[row])} of row {row} is outside the vocabulary of {vocab_size} tokens."
        )
