"""The clocks of the workers of an expert group in one pass of a layer.

The parts of a layer's experts run in the order of `tensor_group.staggered`, as in training. Each
part follows its program (`expert_rows`) on the clocks of all workers of the group, and on that of
their links. An all-to-all begins when the last worker starts it. `topology.expert_parallel=auto`
and the simulator both price rows with these clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mtrain_cli.parallel.tensor_group import staggered
from mtrain_cli.training.expert_rows import IN, NEXT, OUT, WAIT

_PRODUCTS = {IN: 2, OUT: 1}  # relative size of the products


class MessageCost(NamedTuple):
    """A message of rows.

    us: its time in microseconds.
    busy: time for which it occupies the link.
    size: number of bytes that a worker receives, in the mean.
    """

    us: float
    busy: float
    size: float


class GroupClocks:
    """The workers of an expert group in one pass of a layer. Times are in microseconds.

    clocks: time of each worker, from the start of the pass.
    sending: time for which messages are on their way.
    busy: time for which they occupy the link.
    size: number of bytes that a worker receives, in the mean.
    span: time of the pass of the slowest worker.
    exposed: time for which the worker with the most work waits for rows.
    hidden: time of messages that overlaps with computation.
    """

    def __init__(
        self,
        program: Sequence[str],
        units: int,
        messages: Mapping[str, MessageCost],
        computing: np.ndarray,
    ) -> None:
        """Run a pass.

        Args:
            program: what a part does.
            units: number of parts.
            messages: cost of each kind of message.
            computing: time of each worker's experts in the whole pass.
        """
        self._program, self._messages = program, messages
        self.clocks, self._link = np.zeros(len(computing)), 0.0
        self.sending = self.busy = self.size = 0.0
        share = units * sum(_PRODUCTS.get(word, 0) for word in program)
        self._computing = {word: n * computing / share for word, n in _PRODUCTS.items()}
        staggered(self._part() for _ in range(units))
        self.span = float(self.clocks.max())
        self.exposed = max(0.0, self.span - float(computing.max()))
        self.hidden = max(0.0, self.sending - self.exposed)

    def _part(self) -> Iterator[None]:
        """Run a part of the experts, and yield where other parts go on."""
        arrivals: deque[float] = deque()
        for word in self._program:
            if word == NEXT:
                yield
            elif word == WAIT:
                self.clocks = np.maximum(self.clocks, arrivals.popleft())
            elif word in self._computing:
                self.clocks = self.clocks + self._computing[word]
            else:
                us, busy, size = self._messages[word]
                self._link = max(float(self.clocks.max()), self._link) + us
                self.sending, self.busy, self.size = (
                    self.sending + us, self.busy + busy, self.size + size
                )  # fmt: skip
                arrivals.append(self._link)
