"""Names for what a step spends its time on, in the records of `torch.profiler`: `mtrain profile step` finds its parts by them.

A kernel's name says little: attention is Triton's, CuTe's and CUDA C++ of our own, the loss multiplies as layers do. What a kernel is for
says the range in which it was launched. These ranges lie outside of compiled functions, and while no profiler runs they do nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

PREFIX = "mtrain."
ATTENTION, INDEX, LOSS, OPTIMIZER = "attention", "index", "loss", "optimizer"
STEP, CLOSING = (
    "step",
    "closing",
)  # a whole step, and in it the wait for the device that the measurement itself adds

_NOTHING: AbstractContextManager[None] = nullcontext()


def label(name: str) -> AbstractContextManager[object]:
    """A range around what this thread launches inside; of several around it the innermost counts."""
    # Not `_profiler_enabled()`, which says it of this thread alone, and it is not this one that started the profiler in a backward pass.
    return profiler.record_function(PREFIX + name) if profiler._is_profiler_enabled else _NOTHING
