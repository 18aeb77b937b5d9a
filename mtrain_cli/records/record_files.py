"""Records: one row per timed span of a worker, in a file that pandas can read.

`profiles/definitions.md` documents the columns. A profile writes one file of rows (a part) after
each sample, so a killed run keeps its samples. At the end, the profile joins its parts. A
simulation writes rows with the same columns.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mtrain_cli import __version__
from mtrain_cli.config import plugins
from mtrain_cli.config.documents import read_json, reason, replace_text, replacing
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.parallel import pipeline_schedule
from mtrain_cli.parallel.recording import DIRECTIONS, KINDS
from mtrain_cli.parallel.schedule import (
    CONTEXT,
    DKV,
    DQ,
    HEADS,
    HIDDEN,
    INNER,
    KV,
    OUTER,
    QUERIES,
    STAGE,
    TENSOR,
)

if TYPE_CHECKING:
    import pandas

SCHEMA = 2
RECORDS, PARTS, SUMMARY = "records.parquet", "records", "summary.json"
INDEX, TRACE = "index.npz", "trace.json"
# Three commands write other files instead of records.
SWEEP = "sweep.csv"  # `simulate` with a sweep: one line per simulation
STEP, KERNELS = "step", "kernels.csv"  # `profile step`: kind in the summary, and its file
SPARSITY, HEAD_ROWS = "sparsity", "sparsity.parquet"  # `profile sparsity`: kind, and its file
LINKS = ("", CONTEXT, INNER, OUTER, HEADS)  # of the messages of attention
_OF_PIPELINE = pipeline_schedule.ACTIVATIONS, pipeline_schedule.GRADIENTS
PAYLOADS = ("", KV, DKV, QUERIES, DQ, HEADS, "columns", "index", HIDDEN, *_OF_PIPELINE)
# The text columns and their possible words. Files store the words. Arrays in memory store codes:
# indices into these tuples.
WORDS: dict[str, tuple[str, ...]] = {
    "direction": DIRECTIONS,
    "phase": KINDS,
    "link": (*LINKS, TENSOR, STAGE),
    "payload": PAYLOADS,
}

ROW = np.dtype(
    [
        ("case", np.int16),  # number of the case in summary.json
        ("iteration", np.int32),  # training step, or sample of an attention-only profile
        ("micro", np.int16),  # micro-batch of the training step, from 0
        ("layer", np.int16),
        ("direction", np.int8),
        # step of the schedule, from 0; -1 before all steps. stage, and its waits: virtual stage
        ("step", np.int16),
        ("rank", np.int16),
        ("phase", np.int8),
        # Each comment below first names the phases whose rows have a value. Other rows have 0 or
        # -1.
        ("link", np.int8),  # wait, send, receive: the channel
        ("payload", np.int8),  # wait, send, receive: the kind of data
        ("shard", np.int16),  # wait, send, receive: rank that owns the data; -1 for a collective
        # send: rank that receives; receive: rank that sent; wait: rank that it waits for. -1 if
        # there are several
        ("peer", np.int16),
        ("start_us", np.float64),  # all: since the iteration began, on the clock of rank 0
        ("dur_us", np.float32),  # all: duration
        # wait: time until the peer started to send. A faster link would not shorten it
        ("late_us", np.float32),
        # attention: block pairs with computed pairs, summed over heads and sequences
        ("blocks", np.int64),
        ("columns", np.int64),  # columns: single columns, summed over heads and sequences
        ("pairs", np.int64),  # attention, columns: query-key pairs, summed over heads and sequences
        ("flop", np.float64),  # attention, columns: FLOP of the pairs
        ("bytes", np.int64),  # wait, send, receive: bytes of the message
    ]
)


@dataclass(frozen=True)
class RecordedFolder:
    """The folder of a profile or simulation.

    summary: content of summary.json.
    complete: whether all requested samples were recorded.
    parts: files of rows, in order.
    """

    folder: Path
    summary: dict[str, Any]
    complete: bool
    parts: tuple[Path, ...]

    def batches(self, columns: Iterable[str] | None = None) -> Iterator[dict[str, np.ndarray]]:
        """Yield the given columns, or all, in batches of arrays. Codes of `WORDS` replace words.

        Raises:
            ConfigError: a file is damaged or has another schema.
        """
        import pyarrow.parquet as pq

        wanted = list(columns) if columns is not None else list(ROW.names or ())
        for part in self.parts:
            with reading(part), pq.ParquetFile(part) as file:
                absent = [name for name in wanted if name not in file.schema_arrow.names]
                if absent:
                    raise ConfigError(
                        f"{part}: has no column {', '.join(absent)}; "
                        "the file was written by another version of mtrain"
                    )
                for batch in file.iter_batches(batch_size=1 << 19, columns=wanted):
                    yield {name: _codes(batch.column(name), name, part) for name in wanted}

    def check_schemas(self) -> None:
        """Raise ConfigError if a file has another schema than the summary, or is no parquet."""
        import pyarrow.parquet as pq

        for part in self.parts:
            with reading(part):
                schema = (pq.read_schema(part).metadata or {}).get(b"mtrain_schema")
                if schema is not None and schema != str(SCHEMA).encode():
                    raise ConfigError(
                        f"{part}: has schema {schema.decode()}, but its {SUMMARY} has {SCHEMA}; "
                        "measure again into a new folder"
                    )

    def frame(self) -> pandas.DataFrame:
        """Return all rows as a pandas DataFrame with categorical text columns."""
        none = {name: np.empty(0, ROW[name]) for name in ROW.names or ()}
        batches = [none, *self.batches()]
        return as_frame({name: np.concatenate([b[name] for b in batches]) for name in none})


@contextmanager
def reading(part: Path) -> Iterator[None]:
    """Turn errors from reading a damaged file into a `ConfigError`."""
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        why = str(error).splitlines()[0]
        raise ConfigError(f"{part}: not a parquet file, or damaged ({why})") from error


def as_frame(values: dict[str, np.ndarray]) -> pandas.DataFrame:
    """Return the columns as a pandas DataFrame. Codes of `WORDS` become categories."""
    import pandas

    frame = pandas.DataFrame(values)
    for name, words in WORDS.items():
        frame[name] = pandas.Categorical.from_codes(frame[name], categories=list(words))
    return frame


def _codes(column: Any, name: str, part: Path) -> np.ndarray:
    """Return an arrow column as an array of numbers. Words become codes of `WORDS`."""
    if column.null_count:
        raise ConfigError(f"{part}: {name} lacks values; measure again")
    if name not in WORDS:
        values = column.to_numpy(zero_copy_only=False).astype(ROW[name], copy=False)
        if not np.isfinite(values).all():
            raise ConfigError(f"{part}: {name} has values that are not finite; measure again")
        return values
    known = {word: code for code, word in enumerate(WORDS[name])}
    column = column.dictionary_encode() if not hasattr(column, "dictionary") else column
    try:
        table = np.array([known[word] for word in column.dictionary.to_pylist()] or [0], np.int8)
    except KeyError as error:
        raise ConfigError(
            f"{part}: unknown {name} {error.args[0]!r}; "
            "the file was written by another version of mtrain"
        ) from None
    return table[column.indices.to_numpy(zero_copy_only=False).astype(np.int64)]


def write_rows(rows: np.ndarray, path: Path) -> None:
    """Write rows as a parquet file, atomically. Codes of `WORDS` become words."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays = {name: pa.array(np.ascontiguousarray(rows[name])) for name in rows.dtype.names or ()}
    for name in WORDS.keys() & arrays:
        arrays[name] = pa.DictionaryArray.from_arrays(arrays[name], pa.array(WORDS[name]))
    table = pa.table(arrays).replace_schema_metadata({"mtrain_schema": str(SCHEMA)})
    with replacing(path) as draft:
        pq.write_table(table, draft, compression="zstd")


def write_part(rows: np.ndarray, folder: Path, number: int, parts: str = PARTS) -> None:
    """Write the rows of one sample as part ``number`` in the folder ``parts``."""
    (folder / parts).mkdir(parents=True, exist_ok=True)
    write_rows(rows, folder / parts / f"{number:06d}.parquet")


def delete_parts_after(folder: Path, last: int, kind: str = PARTS) -> int:
    """Delete the parts whose number is above ``last``. Return the number of remaining parts."""
    parts = sorted((folder / kind).glob("*.parquet"))
    for part in parts:
        if int(part.stem) > last:
            part.unlink()
    return sum(int(part.stem) <= last for part in parts)


def join_parts(folder: Path, kind: str = PARTS, joined: str = RECORDS) -> None:
    """Join all parts into one file, and remove the parts."""
    import pyarrow.parquet as pq

    parts = sorted((folder / kind).glob("*.parquet"))
    if not parts:
        return
    schema, options = pq.read_schema(parts[-1]), {"compression": "zstd"}
    with replacing(folder / joined) as draft, pq.ParquetWriter(draft, schema, **options) as writer:
        for part in parts:
            # Parts of earlier versions have more columns.
            writer.write_table(pq.read_table(part, columns=schema.names))
    for part in parts:
        part.unlink()
    (folder / kind).rmdir()


def computed_summary(kind: str) -> dict[str, Any]:
    """Return what summary.json says of a result that this process computed, not measured."""
    return {
        "kind": kind,
        "complete": True,
        "samples_wanted": 1,
        "samples": 1,
        "command": ["mtrain", *sys.argv[1:]],
        "environment": {
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "versions": {"mtrain": __version__},
            "gpus": [],
        },
    }


def write_summary(folder: Path, document: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"schema": SCHEMA, **document}, indent=1)
    replace_text(folder / SUMMARY, f"{text}\n")


def open_records(folder: Path) -> RecordedFolder:
    """Open the folder of a profile or simulation.

    Raises:
        ConfigError: the folder holds no profile, or its schema differs.
    """
    path = folder / SUMMARY
    if not path.is_file():
        raise ConfigError(f"{folder}: not a profile ({SUMMARY} is missing)")
    try:
        summary = read_json(path)
        schema = summary["schema"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ConfigError(f"{path}: not the summary of a profile ({reason(error)})") from error
    if schema != SCHEMA:
        raise ConfigError(
            f"{path}: has schema {schema}, this version of mtrain reads {SCHEMA}; "
            "measure again, or use the version that wrote it"
        )
    cases = summary["cases"] if summary.get("cases") is not None else []
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
        raise ConfigError(f"{path}: not the summary of a profile (cases must be a list of objects)")
    whole = folder / RECORDS
    parts = (whole,) if whole.is_file() else tuple(sorted((folder / PARTS).glob("*.parquet")))
    return RecordedFolder(folder, summary, bool(summary.get("complete")), parts)


# --- records of other packages -----

Named = Sequence[tuple[str, Any]]  # (name of the run, its records)


class RecordKind(Protocol):
    """How a report reads and shows records of another package: entry points `mtrain.records`."""

    def read(self, folder: Path) -> Any:
        """Return the records of a folder, or None; raise ConfigError for a damaged file."""

    def rows(self, records: Any) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Return {name of a CSV file: rows of text and numbers}."""

    def tables(self, records: Any) -> Sequence[Any]:
        """Return objects whose ``section`` is a `reporting.table.Section`."""

    def figures(self, named: Named) -> Sequence[Any]:
        """Return each `plots.Figure` for the page."""


def read_others(folder: Path) -> tuple[tuple[RecordKind, Any], ...]:
    """Return each kind of records in a folder, with the records."""
    kinds = plugins.load("mtrain.records", lambda _, kind: (kind, kind.read(folder)))
    return tuple((kind, records) for kind, records in kinds if records)


def by_kind(of_runs: Sequence[tuple[str, Sequence[tuple[RecordKind, Any]]]]) -> Iterator[Any]:
    """Yield (kind, [(run, records)]) for each kind that a run has."""
    for one in dict.fromkeys(kind for _, others in of_runs for kind, _ in others):
        yield one, [(run, rs) for run, others in of_runs for kind, rs in others if kind is one]
