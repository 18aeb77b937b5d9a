"""What every kind of evaluation has: cells to measure, samples, and a result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtrain_cli.config.sizes import format_size
from mtrain_cli.evaluation.results import Result
from mtrain_cli.inference.scorer import Scorer

Row = dict[str, Any]
Item = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One result to measure. task, length: as in `Result`."""

    task: str
    length: int

    def __str__(self) -> str:
        """Return ``niah 64k``."""
        return f"{self.task} {format_size(self.length)}" if self.length else self.task


class Measurement(ABC):
    """One kind of evaluation. Its items and rows are JSON objects, which workers share.

    Both may have a ``text``, a hash: a row is measured again if its item has another one.
    """

    together = 1  # most items to measure in one call
    generates = False  # whether the model writes, so that it needs a cache

    @abstractmethod
    def cells(self) -> Sequence[Cell]:
        """Return the cells, in the order in which to measure them."""

    @abstractmethod
    def settings(self, cell: Cell) -> Mapping[str, Any]:
        """Return what determines the samples of a cell, apart from the model and their number."""

    @abstractmethod
    def labels(self, cell: Cell) -> tuple[str, ...]:
        """Return the settings, for `Result.settings`."""

    @abstractmethod
    def details(self, cell: Cell) -> tuple[str, ...]:
        """Return further settings, for `Result.details`."""

    @abstractmethod
    def items(self, cell: Cell) -> Iterator[Item]:
        """Yield the samples of a cell, with the key ``ids``. Only the first worker calls this.

        Raises ConfigError if the length is too short, or a file is missing.
        """

    @abstractmethod
    def measure(self, scorer: Scorer, cell: Cell, items: Sequence[Item]) -> list[Row]:
        """Return a row with the key ``score`` for each item. All workers call this together."""

    @abstractmethod
    def result(self, rows: Sequence[Row], result: Result) -> Result:
        """Return a result with the scores of the rows."""

    def count(self, cell: Cell, wanted: int) -> int:  # noqa: ARG002 - most make any number
        """Return how many of the wanted samples the cell has."""
        return wanted

    def learn(self, origin: str, label: str, rows: Sequence[Row]) -> None:  # noqa: B027
        """Take what the first model and attention decide for all others, from their rows.

        origin, label: their hash, and their name for the user.
        """
