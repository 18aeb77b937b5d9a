"""The files of `mtrain profile sparsity` about attention itself: parquet tables, and maps as npz.

A step is the number of the training step, or of the checkpoint. A sample is the number of the
input, from 0.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mtrain_cli.config import documents
from mtrain_cli.config.documents import replacing
from mtrain_cli.config.schema import ConfigError

MAPS = "maps.npz"
KEYS, SLASHES, COLUMNS = "keys", "slashes", "columns"  # kinds of sets that overlap
_PLACES = "places"  # the array of `MAPS` that says where each map is from
_QUANTITIES = ("attention", "gradient")
_LISTS = ("queries", "mass", "distances", "measured", "predicted")
Array = np.ndarray[Any, np.dtype[Any]]
Row = TypeVar("Row")


@dataclass(frozen=True)
class TopKeyRow:
    """The attention that the largest keys of sampled queries hold (MTraining, figure 2b).

    queries: positions of the sampled queries that see more than k keys.
    mass: share of attention of each of these queries that its k largest keys hold.
    mean: mean of ``mass``; None if no query sees more than k keys.
    worst: minimum of ``mass``.
    uniform: mean share that k keys would hold if each key had the same attention. None if no query
        sees more than k keys, or in files of earlier versions.
    """

    step: int
    sample: int
    layer: int
    head: int
    k: int
    mean: float | None
    worst: float | None
    queries: list[int]
    mass: list[float]
    uniform: float | None = None


@dataclass(frozen=True)
class OverlapRow:
    """The Jaccard index of what two checkpoints choose for the same input.

    kind: `KEYS` for the largest keys, averaged over queries; `SLASHES` or `COLUMNS` of a pattern.
    k: number of keys; 0 for slashes and columns.
    pattern: name of the pattern; "" for keys.
    first, second: steps of the checkpoints, ascending.
    jaccard: size of the intersection / size of the union. None if no query sees more than k keys.
    """

    kind: str
    k: int
    pattern: str
    first: int
    second: int
    sample: int
    layer: int
    head: int
    jaccard: float | None


@dataclass(frozen=True)
class RopeRow:
    """Scores by distance against the prediction of rotary embedding, and shares of variance.

    r2: see `RopeAnalysis`. None if the scores do not vary.
    slash, vertical, both, rest: see `VarianceShares`. None if the scores do not vary.
    distances: first distance of each bin of the curves.
    measured, predicted: means of each bin, weighted by pairs.
    """

    step: int
    sample: int
    layer: int
    head: int
    r2: float | None
    slash: float | None
    vertical: float | None
    both: float | None
    rest: float | None
    distances: list[int]
    measured: list[float]
    predicted: list[float]


@dataclass(frozen=True)
class HeadMap:
    """The map of one head.

    width, attention, gradient: as in `AttentionMap`; the arrays are float32.
    """

    step: int
    sample: int
    layer: int
    head: int
    width: int
    attention: Array
    gradient: Array

    @property
    def label(self) -> str:
        sample = f", sample {self.sample}" if self.sample else ""
        return f"step {self.step}{sample}, layer {self.layer}, head {self.head}"


@dataclass
class AttentionFiles:
    """All results about attention of one measurement."""

    top_keys: list[TopKeyRow] = field(default_factory=list)
    overlap: list[OverlapRow] = field(default_factory=list)
    rope: list[RopeRow] = field(default_factory=list)
    maps: list[HeadMap] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.top_keys or self.overlap or self.rope or self.maps)

    def sort(self) -> None:
        """Sort the maps, which backward passes make from the last layer to the first."""
        self.maps.sort(key=lambda m: (m.step, m.sample, m.layer, m.head))

    def write(self, folder: Path) -> None:
        """Write the files that have content."""
        import pandas

        for name in TABLES:
            if rows := getattr(self, name):
                table = pandas.DataFrame([vars(row) for row in rows])
                table.to_parquet(folder / f"{name}.parquet")
        if self.maps:
            with replacing(folder / MAPS) as draft, draft.open("wb") as file:
                np.savez_compressed(file, allow_pickle=False, **_arrays(self.maps))


def without_lists(row: TopKeyRow | OverlapRow | RopeRow) -> dict[str, Any]:
    """Return the fields of a row that are not lists."""
    return {name: value for name, value in vars(row).items() if name not in _LISTS}


def read_attention_files(folder: Path) -> AttentionFiles:
    """Read the files that the folder has."""
    tables: dict[str, Any] = {
        name: _rows(folder / f"{name}.parquet", kind) for name, kind in TABLES.items()
    }
    return AttentionFiles(**tables, maps=_maps(folder / MAPS))


TABLES: dict[str, type[Any]] = {"top_keys": TopKeyRow, "overlap": OverlapRow, "rope": RopeRow}


def _rows(file: Path, kind: type[Row]) -> list[Row]:
    import pyarrow
    import pyarrow.parquet as pq

    if not file.is_file():
        return []
    try:
        rows = pq.read_table(file).to_pylist()
        return [documents.checked(kind, {k: _known(v) for k, v in row.items()}) for row in rows]
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{file}: cannot be read ({_line(error)}); measure again") from None


def _known(value: Any) -> Any:
    """Return None for NaN, as which pandas writes None."""
    return None if value != value else value


def _arrays(maps: Sequence[HeadMap]) -> dict[str, Array]:
    places = [[m.step, m.sample, m.layer, m.head, m.width] for m in maps]
    arrays = {_PLACES: np.array(places, np.int64)}
    for number, each in enumerate(maps):
        arrays[f"attention-{number}"] = each.attention
        arrays[f"gradient-{number}"] = each.gradient
    return arrays


def _maps(file: Path) -> list[HeadMap]:
    if not file.is_file():
        return []
    try:
        with np.load(file, allow_pickle=False) as arrays:
            places = arrays[_PLACES]
            if places.ndim != 2 or places.shape[1] != 5 or places.dtype != np.int64:
                raise ValueError("the list of maps is damaged")
            return [
                HeadMap(*place, *(_square(arrays[f"{name}-{number}"]) for name in _QUANTITIES))
                for number, place in enumerate(places.tolist())
            ]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{file}: cannot be read ({_line(error)}); measure again") from None


def _square(array: Array) -> Array:
    if array.ndim != 2 or array.shape[0] != array.shape[1] or array.dtype != np.float32:
        raise ValueError("a map is not a square table of float32")
    return array


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
