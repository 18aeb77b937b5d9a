"""Waits for the messages of tensor groups, which each layer sends before and after attention.

Attention's own waits belong to passes (`record_sums`). These waits lie between passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mtrain_cli.parallel.recording import KINDS, WAIT
from mtrain_cli.parallel.schedule import TENSOR
from mtrain_cli.records.record_files import WORDS

_LINK, _WAIT = WORDS["link"].index(TENSOR), KINDS.index(WAIT)


@dataclass
class TensorWaits:
    """Waits in milliseconds, as sums over layers and micro-batches.

    late: the part of a rank's waits before the last worker started the message, by that worker,
        [ranks, ranks].
    exposed: the other part: messages under way that no computation hides, [ranks].
    """

    late: np.ndarray
    exposed: np.ndarray

    @staticmethod
    def none(ranks: int) -> TensorWaits:
        return TensorWaits(np.zeros((ranks, ranks)), np.zeros(ranks))

    def add(self, rows: dict[str, np.ndarray]) -> None:
        """Add the waits among the rows of one iteration."""
        mine = (rows["phase"] == _WAIT) & (rows["link"] == _LINK)
        rank, peer = rows["rank"][mine], rows["peer"][mine]
        whole = rows["dur_us"][mine].astype(np.float64)
        late = np.clip(rows["late_us"][mine], 0, whole) * (peer >= 0)
        np.add.at(self.late, (rank, peer), late / 1e3)
        np.add.at(self.exposed, rank, (whole - late) / 1e3)

    def sum(self, other: TensorWaits) -> TensorWaits:
        return TensorWaits(self.late + other.late, self.exposed + other.exposed)

    def mean(self, iterations: int) -> TensorWaits:
        return TensorWaits(self.late / iterations, self.exposed / iterations)
