"""What an evaluation computes, by arithmetic, and how far it is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from mtrain_cli.config.schema import Config
from mtrain_cli.console import Console
from mtrain_cli.training.flops import allowed_pairs, parameters
from mtrain_cli.training.progress import format_duration

EVERY_S = 30.0  # between plain lines


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
    """Progress on stderr: a bar in a terminal, plain lines elsewhere, both with the time left.

    total: work to do, in FLOP.
    enabled: whether to show anything. True only on the first worker.
    """

    def __init__(
        self,
        total: float,
        *,
        enabled: bool = True,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._done, self._enabled = total, 0.0, enabled
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._clock = clock
        self._started = self._said = clock()
        self._is_bar = self._console.is_terminal and not self._console.is_dumb_terminal
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        self._bar = Progress(
            *columns, console=self._console, transient=True, disable=not (enabled and self._is_bar)
        )
        self._task = self._bar.add_task("", total=max(total, 1.0))
        self._bar.start()

    def advance(self, work: float, label: str) -> None:
        """Count work that is done. label: the cell, such as ``niah 64k dense``."""
        self._done += work
        text = f"{label}, {self.left()}"
        self._bar.update(self._task, completed=self._done, description=text)
        if not self._is_bar and self._clock() - self._said >= EVERY_S:
            self._said = self._clock()
            self.say(f"{self._done / max(self._total, 1.0):.0%} {text}")

    def left(self) -> str:
        """Return the time left, from the pace so far."""
        if not self._done:
            return "time left unknown"
        remaining = max(0.0, self._total - self._done)
        return f"{format_duration(remaining * (self._clock() - self._started) / self._done)} left"

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if self._enabled:
            self._console.print(line)

    def close(self) -> None:
        self._bar.stop()
