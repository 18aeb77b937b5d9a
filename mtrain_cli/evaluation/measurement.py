"""What every kind of evaluation has: cells to measure, samples, and a result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtrain_cli.evaluation.results import Result
from mtrain_cli.inference.scorer import Scorer

Row = dict[str, Any]
Item = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One result to measure.

    task: as in `Result`.
    length: tokens of a sample.
    """

    task: str
    length: int


class Measurement(ABC):
    """One kind of evaluation. Its items and rows are JSON objects, which workers share."""

    together = 1  # most items to measure in one call

    @abstractmethod
    def cells(self) -> Sequence[Cell]:
        """Return the cells, in the order in which to measure them."""

    @abstractmethod
    def settings(self, cell: Cell) -> Mapping[str, Any]:
        """Return what determines the samples of a cell, apart from the model and their number."""

    @abstractmethod
    def labels(self, cell: Cell) -> tuple[str, ...]:
        """Return the settings, for the user. Reports show those in which results differ."""

    @abstractmethod
    def details(self, cell: Cell) -> tuple[str, ...]:
        """Return further settings, for `Result.details`."""

    @abstractmethod
    def items(self, cell: Cell) -> Iterator[Item]:
        """Yield the samples of a cell. Only the first worker calls this.

        Raises:
            ConfigError: the length is too short, or a file is missing.
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

    def stale(self, cell: Cell, rows: Mapping[int, Row]) -> Collection[int]:  # noqa: ARG002
        """Return the numbers of rows from the disk whose samples the cell no longer has."""
        return ()

    def learn(self, origin: str, label: str, rows: Sequence[Row]) -> None:  # noqa: B027
        """Take what the first model and attention decide for all others.

        Args:
            origin: hash of the model and its attention.
            label: their name for the user.
            rows: the rows of all their cells.
        """

    def after(self, origin: str) -> Measurement:  # noqa: ARG002 - most learn nothing
        """Return the measurement as it will be after `learn`, to find keys and costs.

        origin: hash of the model and attention from which to learn.
        """
        return self

    def tokens(self, cell: Cell) -> int:
        """Return about how many tokens a sample computes in sequences of the cell's length."""
        return cell.length
