"""Keep Python's cyclic garbage collector from scanning all objects in the middle of a step.

A full collection visits every object of PyTorch, the compilers and the model. At 256K tokens on
four H200s, a collection took 0.3 s of a 4.2 s step, on every rank. The GPUs ran out of queued
kernels and idled. Most objects that are alive after the first step stay alive. Therefore all
objects are frozen after that step, and later collections visit only newer objects.
"""

from __future__ import annotations

import gc


def freeze_garbage() -> None:
    """Exempt all live objects from cyclic collection. Reference counting still frees them."""
    # First collect objects that were frozen earlier and have become garbage.
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def unfreeze_garbage() -> None:
    """Make frozen objects visible again, for example to `gc.get_objects`."""
    gc.unfreeze()
