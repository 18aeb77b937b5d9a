"""Labels in `torch.profiler` records, with which `mtrain profile step` attributes time to parts.

A kernel belongs to the range in which a thread launches it: kernel names do not tell, because the
loss uses the same matrix products as the layers. Labels are set outside compiled functions.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

PREFIX = "mtrain."
ATTENTION, INDEX, LOSS, OPTIMIZER = "attention", "index", "loss", "optimizer"
# Parts of a layer with experts (`of_layer`), and a wait for a message inside one.
ROUTER, EXPERTS, MESSAGE = "router", "experts", "message"
# STEP: a whole step. CLOSING: the wait for the device that the measurement adds to it.
STEP, CLOSING = "step", "closing"
# Parts of a step without a label: messages that nothing hides, waits for other ranks, and the rest
# of a GPU's or of a CPU's time.
LINKS, WAITS, IDLE, HOST = "links", "waits", "idle", "host"

_NOTHING: AbstractContextManager[None] = nullcontext()


def label(name: str) -> AbstractContextManager[object]:
    """Label the kernels that this thread launches in the ``with`` block.

    If labels are nested, the innermost label counts.
    """
    # `_profiler_enabled()` would be wrong: it only answers for the thread that started the
    # profiler, and the backward pass runs on another one.
    return profiler.record_function(PREFIX + name) if profiler._is_profiler_enabled else _NOTHING


def listening() -> bool:
    return bool(profiler._is_profiler_enabled)


def of_layer(name: str, layer: int, direction: str) -> AbstractContextManager[object]:
    """Label a part of one pass of a layer: `ROUTER` or `EXPERTS`."""
    return label(f"{name}/{layer}/{direction}") if listening() else _NOTHING
