"""What an evaluation computes, by arithmetic, and how far it is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from mtrain_cli.config.schema import Config
from mtrain_cli.console import Console
from mtrain_cli.training.flops import allowed_pairs, parameters
from mtrain_cli.training.progress import format_duration

EVERY_S = 30.0  # between lines


def forward_flop(config: Config, length: int) -> float:
    """Return the FLOP of one forward pass over a sequence, with dense attention.

    2 per matmul parameter and token, and 4 * head_dim per layer, head and pair that the mask allows
    (`training.flops.FlopsPerToken`). A sparse pattern computes fewer pairs.
    """
    model = config.model
    width = model.num_layers * model.num_heads * model.head_dim
    pairs = allowed_pairs(replace(config, seq=length))
    return 2.0 * parameters(model).matmul * length + 4.0 * width * pairs


def format_flop(flop: float) -> str:
    """Return ``1.2 PFLOP``."""
    unit = min(6, int(math.log(max(flop, 1), 1000) + 1e-9))
    return f"{flop / 1000**unit:.3g} {' KMGTPE'[unit].strip()}FLOP"


class EvaluationProgress:
    """Prints lines on stderr: results, and every 30 s how far the work is, with the time left.

    total: work to do, in FLOP.
    enabled: whether to print anything. True only on the first worker.
    """

    def __init__(
        self,
        total: float,
        *,
        enabled: bool = True,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._done, self._enabled = max(total, 1.0), 0.0, enabled
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._clock = clock
        self._started = self._said = clock()

    def advance(self, work: float, label: str) -> None:
        """Count work that is done. label: the cell, such as ``niah 64k dense``."""
        self._done += work
        now = self._clock()
        if now - self._said >= EVERY_S and self._done:
            self._said = now
            left = max(0.0, self._total / self._done - 1) * (now - self._started)
            self.say(f"{self._done / self._total:.0%} {label}, {format_duration(left)} left")

    def say(self, line: str) -> None:
        if self._enabled:
            self._console.print(line)
