"""Records: what every worker did when, one row a span, in a file that pandas reads. `profiles/definitions.md` describes it for readers.

A profile writes one part after each sample, so that one that is killed leaves what it has, and joins them at the end. A simulation writes
the same rows.
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
RECORDS, PARTS, SUMMARY, INDEX, TRACE = (
    "records.parquet",
    "records",
    "summary.json",
    "index.npz",
    "trace.json",
)
SWEEP = "sweep.jsonl"  # rows of a sweep of simulations, which leaves no records
STEP, KERNELS = (
    "step",
    "kernels.csv",
)  # the kind of a summary of one step, which leaves no records either, and its rows
SPARSITY, HEAD_ROWS = "sparsity", "sparsity.parquet"  # the same of a sparsity profile
LINKS = ("", CONTEXT, INNER, OUTER, HEADS)
PAYLOADS = ("", KV, DKV, QUERIES, DQ, HEADS, "columns", "index")
# Columns that are words: stored as dictionaries, codes in these orders while in memory.
WORDS: dict[str, tuple[str, ...]] = {
    "direction": DIRECTIONS,
    "phase": KINDS,
    "link": LINKS,
    "payload": PAYLOADS,
}

ROW = np.dtype(
    [
        ("case", np.int16),  # number of the case in summary.json
        ("iteration", np.int32),  # training step, or sample where attention alone is measured
        ("micro", np.int16),  # forward pass of that step, from 0
        ("layer", np.int16),
        ("direction", np.int8),
        ("step", np.int16),  # of the schedule, from 0; -1 for what comes before all steps
        ("rank", np.int16),
        ("phase", np.int8),
        ("link", np.int8),  # wait, send, receive: the channel
        ("payload", np.int8),  # wait, send, receive: what is moved
        ("shard", np.int16),  # wait, send, receive: whose it is; -1 for a collective
        (
            "peer",
            np.int16,
        ),  # send: to; receive: from; wait: the rank that was waited for; -1 for none or several
        ("start_us", np.float64),  # since the iteration began, on the clock of rank 0
        ("dur_us", np.float32),
        (
            "late_us",
            np.float32,
        ),  # wait: the part before the peer had begun to send, which no link could have shortened
        (
            "blocks",
            np.int64,
        ),  # attention: pairs of blocks that hold computed pairs, summed over heads and sequences
        ("columns", np.int64),  # columns: single columns, summed over heads and sequences
        ("pairs", np.int64),  # attention, columns: query-key pairs, summed over heads and sequences
        ("flop", np.float64),  # attention, columns
        ("bytes", np.int64),  # wait, send, receive
    ]
)


@dataclass(frozen=True)
class RecordedFolder:
    """What a folder holds. complete: False if the profile was ended before it had all samples. parts: files of rows, in order."""

    folder: Path
    summary: dict[str, Any]
    complete: bool
    parts: tuple[Path, ...]

    def batches(self, columns: Iterable[str] | None = None) -> Iterator[dict[str, np.ndarray]]:
        """Rows, some at a time, as arrays; words as codes of `WORDS`. What memory holds does not grow with the files.

        Raises:
            ConfigError: a file is damaged or of another schema.
        """
        import pyarrow.parquet as pq

        wanted = list(columns) if columns is not None else list(ROW.names or ())
        for part in self.parts:
            try:
                with pq.ParquetFile(part) as file:
                    absent = [name for name in wanted if name not in file.schema_arrow.names]
                    if absent:
                        raise ConfigError(
                            f"{part}: has no column {', '.join(absent)}; it was written by another version of mtrain"
                        )
                    for batch in file.iter_batches(batch_size=1 << 19, columns=wanted):
                        yield {name: _codes(batch.column(name), name, part) for name in wanted}
            except (OSError, ValueError) as error:
                if isinstance(error, ConfigError):
                    raise
                raise ConfigError(
                    f"{part}: is no parquet file, or a damaged one ({str(error).splitlines()[0]})"
                ) from error

    def frame(self) -> pandas.DataFrame:
        """All rows, words as categories."""
        found = list(self.batches())
        return as_frame(
            {
                name: np.concatenate([b[name] for b in found]) if found else np.empty(0, ROW[name])
                for name in ROW.names or ()
            }
        )

    def frames(self) -> Iterator[pandas.DataFrame]:
        """The same, some rows at a time."""
        return map(as_frame, self.batches())


def as_frame(values: dict[str, np.ndarray]) -> pandas.DataFrame:
    """Columns with words as codes -> a frame with words as categories."""
    import pandas

    frame = pandas.DataFrame(values)
    for name, words in WORDS.items():
        frame[name] = pandas.Categorical.from_codes(frame[name], categories=list(words))
    return frame


def _codes(column: Any, name: str, part: Path) -> np.ndarray:
    """An arrow column as numbers; words as codes of `WORDS`."""
    if name not in WORDS:
        return column.to_numpy(zero_copy_only=False).astype(ROW[name], copy=False)
    known = {word: code for code, word in enumerate(WORDS[name])}
    column = column.dictionary_encode() if not hasattr(column, "dictionary") else column
    try:
        table = np.array([known[word] for word in column.dictionary.to_pylist()] or [0], np.int8)
    except KeyError as error:
        raise ConfigError(
            f"{part}: {name} {error.args[0]!r} is unknown; it was written by another version of mtrain"
        ) from None
    return table[column.indices.to_numpy(zero_copy_only=False).astype(np.int64)]


def write_rows(rows: np.ndarray, path: Path) -> None:
    """rows: of dtype `ROW`. The file appears complete or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays, names = [], []
    for name in ROW.names or ():
        values = np.ascontiguousarray(rows[name])
        arrays.append(
            pa.DictionaryArray.from_arrays(pa.array(values), pa.array(WORDS[name]))
            if name in WORDS
            else pa.array(values)
        )
        names.append(name)
    table = pa.table(arrays, names=names).replace_schema_metadata({"mtrain_schema": str(SCHEMA)})
    draft = path.with_suffix(".part")
    pq.write_table(table, draft, compression="zstd")
    draft.replace(path)


def write_part(rows: np.ndarray, folder: Path, number: int) -> None:
    """The rows of one sample, beside those of others."""
    (folder / PARTS).mkdir(parents=True, exist_ok=True)
    write_rows(rows, folder / PARTS / f"{number:06d}.parquet")


def forget_parts(folder: Path, last: int) -> int:
    """Removes the parts after number ``last``, which an attempt left that is not gone on with -> how many stay."""
    parts = sorted((folder / PARTS).glob("*.parquet"))
    for part in parts:
        if int(part.stem) > last:
            part.unlink()
    return sum(int(part.stem) <= last for part in parts)


def join_parts(folder: Path) -> None:
    """Makes one file of all parts, one after the other, and removes them."""
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
    """What a profile or simulation left in a folder.

    Raises:
        ConfigError: there is nothing, or it is of another schema.
    """
    path = folder / SUMMARY
    if not path.is_file():
        raise ConfigError(f"{folder}: holds no profile ({SUMMARY} is missing)")
    try:
        summary = read_json(path)
        schema = summary["schema"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ConfigError(f"{path}: is no summary of a profile ({reason(error)})") from error
    if schema != SCHEMA:
        raise ConfigError(
            f"{path}: has schema {schema}, this version of mtrain reads {SCHEMA}; measure again, or use the version it names"
        )
    cases = summary.get("cases")
    if cases is not None and not (
        isinstance(cases, list) and all(isinstance(case, dict) for case in cases)
    ):
        raise ConfigError(f"{path}: is no summary of a profile (cases must be a list of objects)")
    whole = folder / RECORDS
    parts = (whole,) if whole.is_file() else tuple(sorted((folder / PARTS).glob("*.parquet")))
    return RecordedFolder(folder, summary, bool(summary.get("complete")), parts)
