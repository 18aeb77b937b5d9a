"""Record how long a layer's experts compute, in the forward and in the backward pass.

A `Recorder` records times itself. `torch.profiler` records labels (`profiler_labels`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from mtrain_cli.parallel import profiler_labels
from mtrain_cli.parallel.recording import BACKWARD, FORWARD, RECOMPUTE, Recorder


def record_experts(
    compute: Callable[[Tensor], Tensor],
    x_TC: Tensor,
    recorder: Recorder | None,
    layer: int,
    *,
    again: bool,
) -> Tensor:
    """Return ``compute(x_TC)``, and record its forward and its backward pass.

    Args:
        recorder: None records nothing, unless a profiler runs.
        again: whether this is the second forward pass of a checkpoint.
    """
    if recorder is None and not profiler_labels.listening():
        return compute(x_TC)
    span = _BackwardSpan(recorder, layer)
    x_TC = _End.apply(x_TC, span)
    with _pass(recorder, layer, RECOMPUTE if again else FORWARD):
        out_TC = compute(x_TC)
    return _Begin.apply(out_TC, span)


def _pass(recorder: Recorder | None, layer: int, direction: str) -> ExitStack:
    """Return an entered context that records one pass of a layer's experts."""
    with ExitStack() as entered:
        if recorder is not None:
            entered.enter_context(recorder.expert_pass(layer, direction))
        label = profiler_labels.of_layer(profiler_labels.EXPERTS, layer, direction)
        entered.enter_context(label)
        return entered.pop_all()


class _BackwardSpan:
    """The backward pass of the experts, which two nodes of the graph enclose."""

    def __init__(self, recorder: Recorder | None, layer: int) -> None:
        self._recorder, self._layer, self._open = recorder, layer, ExitStack()

    def begin(self) -> None:
        self._open = _pass(self._recorder, self._layer, BACKWARD)

    def end(self) -> None:
        self._open.close()


class _Begin(torch.autograd.Function):
    """Returns its argument. Backward begins the span."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, span: _BackwardSpan) -> Tensor:
        ctx.span = span
        ctx.save_for_backward(out.new_empty(0))
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # Under a checkpoint, reading any saved tensor runs the second forward pass. It must not
        # count as backward.
        _ = ctx.saved_tensors
        ctx.span.begin()
        return grad, None


class _End(torch.autograd.Function):
    """Returns its argument. Backward ends the span."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, span: _BackwardSpan) -> Tensor:
        ctx.span = span
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.span.end()
        return grad, None
