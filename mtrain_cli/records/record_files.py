"""Records: one row per timed span of a worker, in a file that pandas reads.

`profiles/definitions.md` documents the columns. A profile writes one part after each sample, so a
killed run keeps its samples, and joins the parts at the end. A simulation writes the same rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mtrain_cli.config.documents import read_json, reason
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.parallel.recording import DIRECTIONS, KINDS
from mtrain_cli.parallel.schedule import CONTEXT, DKV, DQ, HEADS, INNER, KV, OUTER, QUERIES

if TYPE_CHECKING:
    import pandas

SCHEMA = 2
RECORDS, PARTS, SUMMARY = "records.parquet", "records", "summary.json"
INDEX, TRACE = "index.npz", "trace.json"
# These write no records.
SWEEP = "sweep.jsonl"  # `simulate` with a sweep: one row per simulation
STEP, KERNELS = "step", "kernels.csv"  # `profile step`: kind in the summary, and file of rows
SPARSITY, HEAD_ROWS = "sparsity", "sparsity.parquet"  # `profile sparsity`: the same
LINKS = ("", CONTEXT, INNER, OUTER, HEADS)
PAYLOADS = ("", KV, DKV, QUERIES, DQ, HEADS, "columns", "index")
# Text columns. Files store dictionaries; arrays in memory hold indices into these tuples (codes).
WORDS: dict[str, tuple[str, ...]] = {
    "direction": DIRECTIONS,
    "phase": KINDS,
    "link": LINKS,
    "payload": PAYLOADS,
}

ROW = np.dtype(
    [
        ("case", np.int16),  # number of the case in summary.json
        ("iteration", np.int32),  # training step, or sample of an attention-only profile
        ("micro", np.int16),  # forward pass of that step, from 0
        ("layer", np.int16),
        ("direction", np.int8),
        ("step", np.int16),  # of the schedule, from 0; -1 before all steps
        ("rank", np.int16),
        ("phase", np.int8),
        ("link", np.int8),  # wait, send, receive: the channel
        ("payload", np.int8),  # wait, send, receive: the kind of data
        ("shard", np.int16),  # wait, send, receive: rank that owns the data; -1 for a collective
        # send: to; receive: from; wait: the rank waited for; -1 for none or several
        ("peer", np.int16),
        ("start_us", np.float64),  # since the iteration began, on the clock of rank 0
        ("dur_us", np.float32),
        # wait: the part before the peer started sending; a faster link would not shorten it
        ("late_us", np.float32),
        # attention: block pairs with computed pairs, summed over heads and sequences
        ("blocks", np.int64),
        ("columns", np.int64),  # columns: single columns, summed over heads and sequences
        ("pairs", np.int64),  # attention, columns: query-key pairs, summed over heads and sequences
        ("flop", np.float64),  # attention, columns
        ("bytes", np.int64),  # wait, send, receive
    ]
)


@dataclass(frozen=True)
class RecordedFolder:
    """The folder of a profile or simulation.

    summary: content of summary.json
    complete: whether all samples were recorded
    parts: files of rows, in order
    """

    folder: Path
    summary: dict[str, Any]
    complete: bool
    parts: tuple[Path, ...]

    def batches(self, columns: Iterable[str] | None = None) -> Iterator[dict[str, np.ndarray]]:
        """Yield the rows in batches of arrays, with words as codes of `WORDS`.

        Raises:
            ConfigError: a file is damaged or has another schema.
        """
        import pyarrow.parquet as pq

        wanted = list(columns) if columns is not None else list(ROW.names or ())
        for part in self.parts:
            try:
                with pq.ParquetFile(part) as file:
                    absent = [name for name in wanted if name not in file.schema_arrow.names]
                    if absent:
                        raise ConfigError(
                            f"{part}: has no column {', '.join(absent)}; "
                            "it was written by another version of mtrain"
                        )
                    for batch in file.iter_batches(batch_size=1 << 19, columns=wanted):
                        yield {name: _codes(batch.column(name), name, part) for name in wanted}
            except (OSError, ValueError) as error:
                if isinstance(error, ConfigError):
                    raise
                raise ConfigError(
                    f"{part}: not a parquet file, or damaged ({str(error).splitlines()[0]})"
                ) from error

    def frame(self) -> pandas.DataFrame:
        """Return all rows, with words as categories."""
        none = {name: np.empty(0, ROW[name]) for name in ROW.names or ()}
        batches = [none, *self.batches()]
        return as_frame({name: np.concatenate([b[name] for b in batches]) for name in none})


def as_frame(values: dict[str, np.ndarray]) -> pandas.DataFrame:
    """Turn columns with words as codes into a frame with words as categories."""
    import pandas

    frame = pandas.DataFrame(values)
    for name, words in WORDS.items():
        frame[name] = pandas.Categorical.from_codes(frame[name], categories=list(words))
    return frame


def _codes(column: Any, name: str, part: Path) -> np.ndarray:
    """Convert an arrow column to numbers. Words become codes of `WORDS`."""
    if name not in WORDS:
        return column.to_numpy(zero_copy_only=False).astype(ROW[name], copy=False)
    known = {word: code for code, word in enumerate(WORDS[name])}
    column = column.dictionary_encode() if not hasattr(column, "dictionary") else column
    try:
        table = np.array([known[word] for word in column.dictionary.to_pylist()] or [0], np.int8)
    except KeyError as error:
        raise ConfigError(
            f"{part}: {name} {error.args[0]!r} is unknown; "
            "it was written by another version of mtrain"
        ) from None
    return table[column.indices.to_numpy(zero_copy_only=False).astype(np.int64)]


def write_rows(rows: np.ndarray, path: Path) -> None:
    """Write rows of dtype `ROW` atomically."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays = {name: pa.array(np.ascontiguousarray(rows[name])) for name in ROW.names or ()}
    for name, words in WORDS.items():
        arrays[name] = pa.DictionaryArray.from_arrays(arrays[name], pa.array(words))
    table = pa.table(arrays).replace_schema_metadata({"mtrain_schema": str(SCHEMA)})
    draft = path.with_suffix(".part")
    pq.write_table(table, draft, compression="zstd")
    draft.replace(path)


def write_part(rows: np.ndarray, folder: Path, number: int) -> None:
    """Write the rows of one sample as part ``number``."""
    (folder / PARTS).mkdir(parents=True, exist_ok=True)
    write_rows(rows, folder / PARTS / f"{number:06d}.parquet")


def delete_parts_after(folder: Path, last: int) -> int:
    """Delete the parts after number ``last``. Return the number of remaining parts."""
    parts = sorted((folder / PARTS).glob("*.parquet"))
    for part in parts:
        if int(part.stem) > last:
            part.unlink()
    return sum(int(part.stem) <= last for part in parts)


def join_parts(folder: Path) -> None:
    """Join all parts into one file and remove them."""
    import pyarrow.parquet as pq

    parts = sorted((folder / PARTS).glob("*.parquet"))
    if not parts:
        return
    draft = (folder / RECORDS).with_suffix(".part")
    with pq.ParquetWriter(draft, pq.read_schema(parts[0]), compression="zstd") as writer:
        for part in parts:
            writer.write_table(pq.read_table(part))
    draft.replace(folder / RECORDS)
    for part in parts:
        part.unlink()
    (folder / PARTS).rmdir()


def write_summary(folder: Path, document: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{SUMMARY}.part"
    draft.write_text(json.dumps({"schema": SCHEMA, **document}, indent=1) + "\n")
    draft.replace(folder / SUMMARY)


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
