"""Evaluations that other packages add: entry points of the group `mtrain.evaluations`."""

from __future__ import annotations

import functools
from typing import Any, Protocol

from mtrain_cli.config import plugins


class Evaluator(Protocol):
    """Evaluates on this worker. All workers call `run` together."""

    def run(self) -> None: ...


class OtherKind(Protocol):
    """An evaluation of another package. The name of the entry point is its ``kind``."""

    def check(self, request: Any, source: Any, *, beyond: bool) -> Any:
        """Check before any work what `EvaluationRequest` asks of a `ModelSource`.

        Return what `runner` gets as ``tasks``.
        """

    def runner(self, *arguments: Any, **more: Any) -> Evaluator:
        """Return the evaluator, from the arguments of `runner.Runner` and ``tasks``."""


@functools.cache
def find(kind: str) -> Any | None:
    """Return the `OtherKind` of this name; None if no package has one."""
    return plugins.load_by_name("mtrain.evaluations").get(kind)
