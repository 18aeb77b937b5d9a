"""Compute LM head and cross entropy together, with the logits of only a few rows in memory.

The forward pass computes the gradients of a chunk of rows while its logits exist (BurstEngine,
SC '25, algorithm 3), in three matrix products. With ``recompute``, backward computes the logits
again, in four.

Shape suffixes: N local tokens, C hidden size, V vocabulary size, R rows of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from mtrain_cli.attention.partials import accumulation_dtype, high_product
from mtrain_cli.data.labels import IGNORED
from mtrain_cli.launch.temporary_folders import compiled
from mtrain_cli.parallel import profiler_labels


@dataclass(frozen=True)
class LossOptions:
    """How to compute the loss.

    chunk_bytes: maximum size of the float32 logits of a chunk, beside which a bfloat16 gradient of
        the logits takes memory. A chunk has at least one row.
    recompute: compute the gradients in backward, from recomputed logits.
    by_row: return the total loss of each row, [N], each with its gradient, and 0 as cross entropy.
        It needs ``recompute`` and a ``scale`` of 1.
    """

    chunk_bytes: int = 1 << 20
    z_loss: float = 0.0
    recompute: bool = False
    by_row: bool = False
    compile: bool = False


def chunked_losses(
    x_NC: Tensor, weight_VC: Tensor, labels_N: Tensor, scale: float | Tensor, options: LossOptions
) -> tuple[Tensor, Tensor]:
    """Return the total loss, which includes the z-loss, and the cross entropy.

    Cross entropy: ``scale`` times the sum of -log softmax(x W^T)[label]. z-loss: ``scale`` times
        the sum of z_loss * logsumexp(x W^T)^2, which keeps logits from drifting (arXiv:2204.02311,
        section 5; arXiv:2202.08906, equation 5). Both are float32 scalars, or float64 for float64
        input, over rows whose label is not -100. Only the total has a gradient; that of W is summed
        in float32.

    A label outside [0, V) raises ValueError on a CPU, and gives NaN on a GPU, which must not wait.
    """
    num_rows, hidden = x_NC.shape
    vocab_size = weight_VC.shape[0]
    assert weight_VC.shape == (vocab_size, hidden), (x_NC.shape, weight_VC.shape)
    assert labels_N.shape == (num_rows,), (x_NC.shape, labels_N.shape)
    assert x_NC.dtype == weight_VC.dtype, (x_NC.dtype, weight_VC.dtype)
    if labels_N.device.type == "cpu":
        _check_labels(labels_N, vocab_size)
    # Compiled code treats a Python number as a constant. It would be compiled anew for each value.
    scale_tensor = (
        scale
        if isinstance(scale, Tensor)
        else torch.full((), scale, dtype=accumulation_dtype(x_NC.dtype), device=x_NC.device)
    )
    return _FusedLinearCrossEntropy.apply(
        x_NC, weight_VC, labels_N.long(), options, scale_tensor, torch.is_grad_enabled()
    )


class _FusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NC: Tensor,
        weight_VC: Tensor,
        labels_N: Tensor,
        options: LossOptions,
        scale: Tensor,
        grad_enabled: bool,
    ) -> tuple[Tensor, Tensor]:
        needed = tuple(needed and grad_enabled for needed in ctx.needs_input_grad[:2])
        ctx.options, ctx.needed = options, needed
        with profiler_labels.label(profiler_labels.LOSS):
            total, loss, dx_NC, dweight_VC = _chunks(
                x_NC, weight_VC, labels_N, options, scale,
                (False, False) if options.recompute else needed,
            )  # fmt: skip
        if options.recompute:
            ctx.save_for_backward(x_NC, weight_VC, labels_N, scale)
        else:
            ctx.save_for_backward(dx_NC, dweight_VC)
        ctx.mark_non_differentiable(loss)
        return total, loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        with profiler_labels.label(profiler_labels.LOSS):
            if ctx.options.recompute:
                x_NC, weight_VC, labels_N, scale = ctx.saved_tensors
                grad = grad[:, None] if ctx.options.by_row else grad
                dx_NC, dweight_VC = _chunks(
                    x_NC, weight_VC, labels_N, ctx.options, scale * grad, ctx.needed
                )[2:]
            else:
                dx_NC, dweight_VC = (
                    None if gradient is None else gradient * grad for gradient in ctx.saved_tensors
                )
        return dx_NC, dweight_VC, None, None, None, None


def _chunks(
    x_NC: Tensor,
    weight_VC: Tensor,
    labels_N: Tensor,
    options: LossOptions,
    scale: Tensor,
    needed: tuple[bool, ...],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return total loss, cross entropy, gradient of x and gradient of W.

    scale: [] or, of each row, [N, 1].
    """
    x_needed, weight_needed = needed
    dtype = accumulation_dtype(x_NC.dtype)
    # For a gradient that is not needed, the loop below gets an empty tensor.
    dx_NC = torch.empty_like(x_NC if x_needed else x_NC[:, :0])
    dweight_VC = torch.zeros_like(weight_VC if weight_needed else weight_VC[:0], dtype=dtype)
    loss = torch.zeros((), dtype=dtype, device=x_NC.device)
    total = loss.new_zeros(len(x_NC) if options.by_row else ())
    gradient_dtype = x_NC.dtype if x_needed or weight_needed else None
    row_losses = _compiled(gradient_dtype == dtype) if options.compile else _row_losses
    rows = max(1, options.chunk_bytes // (dtype.itemsize * weight_VC.shape[0]))
    for at in range(0, len(x_NC), rows):
        chunk = slice(at, at + rows)
        x_RC, labels_R, dx_RC = x_NC[chunk], labels_N[chunk], dx_NC[chunk]
        logits_RV = high_product(x_RC, weight_VC.t())
        loss_R, total_R, dlogits_RV = row_losses(
            logits_RV, labels_R, scale[chunk] if scale.ndim else scale, gradient_dtype,
            options.z_loss,
        )  # fmt: skip
        if options.by_row:
            total[chunk] = total_R
        else:
            loss += loss_R.sum() * scale
            total += total_R.sum() * scale
        if x_needed:
            torch.mm(dlogits_RV, weight_VC, out=dx_RC)
        if weight_needed:
            add_matmul(dweight_VC, dlogits_RV.t(), x_RC)
        del logits_RV, dlogits_RV  # free them before the next chunk allocates its logits
    return (
        total,
        loss,
        dx_NC if x_needed else None,
        dweight_VC.to(weight_VC.dtype) if weight_needed else None,
    )


def _row_losses(
    logits_RV: Tensor, labels_R: Tensor, scale: Tensor, gradient_dtype: torch.dtype | None,
    z_loss: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the cross entropy and the total loss of each row, and the gradient of the logits."""
    # The gradient, scale * (softmax * (1 + 2 z_loss logsumexp) - one_hot), overwrites logits of the
    # same dtype; without gradient_dtype there is none. The losses are not multiplied by ``scale``.
    label_R1 = _label_columns(labels_R, logits_RV.shape[1])
    highest_R1 = logits_RV.amax(dim=1, keepdim=True)
    exponentials_RV = logits_RV.sub_(highest_R1)
    label_logit_R1 = exponentials_RV.gather(1, label_R1)
    sum_R1 = exponentials_RV.exp_().sum(dim=1, keepdim=True)
    loss_R, total_R, factor_R1, label_gradient_R1 = _row_terms(
        labels_R, logits_RV.shape[1], highest_R1, sum_R1, label_logit_R1, scale, z_loss
    )
    if gradient_dtype is None:
        return loss_R, total_R, exponentials_RV
    gradient_RV = exponentials_RV
    if gradient_dtype != logits_RV.dtype:
        gradient_RV = torch.empty_like(logits_RV, dtype=gradient_dtype)
    torch.mul(exponentials_RV, factor_R1, out=gradient_RV)
    gradient_RV.scatter_(1, label_R1, label_gradient_R1.to(gradient_dtype))
    return loss_R, total_R, gradient_RV


def _row_losses_out_of_place(
    logits_RV: Tensor, labels_R: Tensor, scale: Tensor, gradient_dtype: torch.dtype | None,
    z_loss: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the result of `_row_losses`, in a form that suits a compiler."""
    # A compiler turns an overwritten tensor into a new one; so overwrite nothing, and compute the
    # exponentials twice instead of storing them.
    label_R1 = _label_columns(labels_R, logits_RV.shape[1])
    highest_R1 = logits_RV.amax(dim=1, keepdim=True)
    exponentials_RV = (logits_RV - highest_R1).exp()
    sum_R1 = exponentials_RV.sum(dim=1, keepdim=True)
    label_logit_R1 = logits_RV.gather(1, label_R1) - highest_R1
    loss_R, total_R, factor_R1, label_gradient_R1 = _row_terms(
        labels_R, logits_RV.shape[1], highest_R1, sum_R1, label_logit_R1, scale, z_loss
    )
    if gradient_dtype is None:
        return loss_R, total_R, logits_RV[:0]
    is_label_RV = torch.arange(logits_RV.shape[1], device=logits_RV.device) == label_R1
    gradient_RV = torch.where(is_label_RV, label_gradient_R1, exponentials_RV * factor_R1).to(
        gradient_dtype
    )
    return loss_R, total_R, gradient_RV


def _row_terms(
    labels_R: Tensor, vocab_size: int, highest_R1: Tensor, sum_R1: Tensor, label_logit_R1: Tensor,
    scale: Tensor, z_loss: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return cross entropy and total loss of the rows, and two terms of their gradients.

    These are the gradient of a logit other than the label's / exp(logit - largest of the row), and
    the gradient of the label's logit.
    """
    ignored_R1 = (labels_R == IGNORED)[:, None]
    inside_R1 = ((labels_R >= 0) & (labels_R < vocab_size))[:, None]
    loss_R1 = torch.where(
        ignored_R1, 0.0, torch.where(inside_R1, sum_R1.log() - label_logit_R1, torch.nan)
    )
    factor_R1 = torch.where(ignored_R1, 0.0, torch.where(inside_R1, scale / sum_R1, torch.nan))
    # Subtract in full precision. A probability near 1 that was rounded before the subtraction would
    # lose its small difference from 1.
    label_exponential_R1 = label_logit_R1.exp()
    if not z_loss:
        label_gradient_R1 = (label_exponential_R1 - sum_R1) * factor_R1
        return loss_R1[:, 0], loss_R1[:, 0], factor_R1, label_gradient_R1
    logsumexp_R1 = sum_R1.log() + highest_R1
    total_R1 = loss_R1 + torch.where(ignored_R1, 0.0, z_loss * logsumexp_R1.square())
    weight_R1 = 1.0 + 2.0 * z_loss * logsumexp_R1
    label_gradient_R1 = (label_exponential_R1 * weight_R1 - sum_R1) * factor_R1
    return loss_R1[:, 0], total_R1[:, 0], factor_R1 * weight_R1, label_gradient_R1


def _label_columns(labels_R: Tensor, vocab_size: int) -> Tensor:
    """Return the column of each row's label, ``[R, 1]``. The column of an invalid label is 0."""
    return torch.where((labels_R >= 0) & (labels_R < vocab_size), labels_R, 0)[:, None]


@cache
def _compiled(in_place: bool) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return compiled(_row_losses if in_place else _row_losses_out_of_place, False)


def add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to ``total``, in the dtype of ``total``, without a temporary tensor of its size."""
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
            f"Label {int(labels_N[row])} of row {row} is outside the vocabulary of {vocab_size} "
            "tokens."
        )


@torch.no_grad()
def token_losses(
    x_NC: Tensor,
    weight_VC: Tensor,
    labels_N: Tensor,
    chunk_bytes: int,
    is_greedy_N: Tensor | None = None,
) -> Tensor:
    """Return the cross entropy of each row without gradients, ``[N]``; 0 for label -100.

    chunk_bytes: maximum size of the logits of a chunk of rows.
    is_greedy_N: receives whether each label has the largest logit, the first of equal ones, bool
        ``[N]``.
    """
    dtype = accumulation_dtype(x_NC.dtype)
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
