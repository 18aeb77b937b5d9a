"""Evaluations that other packages add: entry points of the group `mtrain.evaluations`."""

from __future__ import annotations

import functools
from typing import Any

from mtrain_cli.config import plugins


@functools.cache
def find(kind: str) -> Any | None:
    """Return the object of the entry point with this name; None if no package has one.

    Before any work, ``check(request, source, beyond=)`` checks what an `EvaluationRequest` asks of
    a `ModelSource`, and returns what ``runner`` gets as ``tasks``. ``runner`` takes the arguments
    of `runner.Runner` and ``tasks``, and returns an object whose ``run`` all workers call together.
    """
    return plugins.load_by_name("mtrain.evaluations").get(kind)
