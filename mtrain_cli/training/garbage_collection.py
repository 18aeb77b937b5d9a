"""Keep Python's cyclic garbage collector from scanning all objects in the middle of a step.

At 256K tokens on four H200s, a collection took 0.3 s of a 4.2 s step. Most objects that are alive
after the first step stay alive, so they are frozen then, and later collections visit newer ones.
"""

from __future__ import annotations

import gc


def freeze_garbage() -> None:
    """Exempt all live objects from cyclic collection. Reference counting still frees them."""
    gc.unfreeze()  # collect objects that were frozen earlier and have become garbage
    gc.collect()
    gc.freeze()


def unfreeze_garbage() -> None:
    """Make frozen objects visible again, for example to `gc.get_objects`."""
    gc.unfreeze()
