"""What every kind of evaluation has: cells to measure, samples, and a result."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


class Measurement(Protocol):
    """One kind of evaluation. Its items and rows are JSON objects, which workers share.

    together: most items to measure in one call.
    """

    together: int

    def cells(self) -> Sequence[Cell]:
        """Return the cells, in the order in which to measure them."""
        ...

    def settings(self, cell: Cell) -> Mapping[str, Any]:
        """Return what determines the samples of a cell, apart from the model and their number."""
        ...

    def labels(self, cell: Cell) -> tuple[str, ...]:
        """Return the settings, for the user. Reports show those in which results differ."""
        ...

    def details(self, cell: Cell) -> tuple[str, ...]:
        """Return further settings, for `Result.details`."""
        ...

    def items(self, cell: Cell) -> Iterator[Item]:
        """Yield the samples of a cell. Only the first worker calls this.

        Raises:
            ConfigError: the length is too short, or a file is missing.
        """
        ...

    def measure(self, scorer: Scorer, cell: Cell, items: Sequence[Item]) -> list[Row]:
        """Return a row with the key ``score`` for each item. All workers call this together."""
        ...

    def count(self, cell: Cell, wanted: int) -> int:
        """Return how many of the wanted samples the cell has."""
        ...

    def stale(self, cell: Cell, rows: Mapping[int, Row]) -> Collection[int]:
        """Return the numbers of rows from the disk whose samples the cell no longer has."""
        ...

    def learn(self, origin: str, label: str, rows: Sequence[Row]) -> None:
        """Take what the first model and attention decide for all others.

        Args:
            origin: hash of the model and its attention.
            label: their name for the user.
            rows: the rows of all their cells.
        """
        ...

    def after(self, origin: str) -> Measurement:
        """Return the measurement as it will be after `learn`, to find keys and costs.

        origin: hash of the model and attention from which to learn.
        """
        ...

    def tokens(self, cell: Cell) -> int:
        """Return about how many tokens a sample computes in sequences of the cell's length."""
        ...

    def result(self, rows: Sequence[Row], result: Result) -> Result:
        """Return a result with the scores of the rows."""
        ...
