"""Read folders of MDS shards, the format of mosaicml-streaming and of ProLong's data.

``index.json`` lists the shards. An uncompressed shard holds, in this order:

- the number of samples n, uint32;
- the offsets of the samples from the beginning of the file, uint32[n + 1];
- a JSON text, which this reader ignores;
- the samples.

A sample holds the size of each column without a fixed size, uint32, then the bytes of all columns
in the order of ``column_names``. All numbers are little-endian.

A shard is memory-mapped when it is first needed. A compressed shard is decompressed in memory, and
only the last few decompressed shards are kept. Opening a shard verifies its size and checksum.
Pickled columns are refused, because unpickling can run any code.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from mtrain_cli.config import documents
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.checked_files import explain_read_errors, read_metadata, require_folder
from mtrain_cli.data.file_sums import Report
from mtrain_cli.data.unpacking import Unpacked

INDEX = "index.json"
_UNPACKED_SHARDS = 4  # decompressed shards to keep in memory, usually 64 MiB each
_MAPPED_SHARDS = 256
_MAX_SHARD_BYTES = 1 << 32  # offsets are uint32
# An array without a fixed dtype begins with a byte for its dtype: 8 is uint8, 9 int8, 18 float16.
_DTYPE_OF_CODE = {
    bits + code: np.dtype(f"{kind}{bits}").newbyteorder("<")
    for bits in (8, 16, 32, 64)
    for code, kind in enumerate(("uint", "int", "float"))
    if (kind, bits) != ("float", 8)
}
_SCALARS = {"int": np.dtype("<i8")} | {dtype.name: dtype for dtype in _DTYPE_OF_CODE.values()}
_READERS: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "str": bytes.decode,
    "json": lambda content: json.loads(content.decode()),
    "str_int": lambda content: int(content.decode()),
    "str_float": lambda content: float(content.decode()),
}


@dataclass(frozen=True)
class Encoding:
    """The encoding of a column.

    kind: name of the encoding, such as str, int or ndarray.
    dtype, shape: dtype and shape of every value of an ndarray column. None if each value stores its
        own dtype or shape, or if the column is not an ndarray.
    """

    kind: str
    dtype: np.dtype | None = None
    shape: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, text: str) -> Encoding:
        """Parse an entry of ``column_encodings``, such as ``ndarray:uint32:4,8``.

        An unknown encoding raises no error, because the column may not be needed. In this case
        ``kind`` is the whole entry, and `is_readable` is false.
        """
        kind, *details = text.split(":")
        try:
            if kind == "ndarray" and len(details) <= 2:
                dtype = np.dtype(details[0]).newbyteorder("<") if details else None
                shape = tuple(map(int, details[1].split(","))) if len(details) == 2 else None
                if (dtype is None or dtype.name in _SCALARS) and min(shape or (0,)) >= 0:
                    return cls(kind, dtype, shape)
        except (TypeError, ValueError):
            pass
        return cls(text)

    @property
    def is_readable(self) -> bool:
        """Whether `decode` can read values of this encoding."""
        return self.kind == "ndarray" or self.kind in _SCALARS or self.kind in _READERS

    @property
    def size(self) -> int | None:
        """Size of every value in bytes; None if the values differ in size."""
        if self.kind in _SCALARS:
            return _SCALARS[self.kind].itemsize
        if self.dtype is None or self.shape is None:
            return None
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def decode(self, raw: np.ndarray) -> Any:
        """Return the value that the bytes ``raw`` hold. raw: uint8[bytes].

        Raises:
            ValueError: the bytes are not a value of this encoding.
        """
        if self.kind == "ndarray":
            return self._decode_array(raw)
        if self.kind in _SCALARS:
            return np.frombuffer(raw, _SCALARS[self.kind])[0].item()
        return _READERS[self.kind](raw.tobytes())

    def _decode_array(self, raw: np.ndarray) -> np.ndarray:
        dtype, shape, start = self.dtype, self.shape, 0
        if dtype is None:
            code, start = int(raw[0]), 1
            if code not in _DTYPE_OF_CODE:
                raise ValueError(f"unknown dtype code {code}")
            dtype = _DTYPE_OF_CODE[code]
        if shape is None:
            axes, width = int(raw[start]) >> 2, 1 << (int(raw[start]) & 3)
            end = start + 1 + axes * width
            shape = tuple(np.frombuffer(raw[start + 1 : end], f"<u{width}").tolist())
            start = end
        return np.frombuffer(raw[start:], dtype).reshape(shape)


@dataclass(frozen=True)
class ShardFile:
    """A file that index.json lists.

    name: path relative to the folder of index.json.
    size: size in bytes.
    hashes: checksums in hexadecimal, by algorithm.
    """

    name: str
    size: int
    hashes: dict[str, str]


@dataclass(frozen=True)
class Shard:
    """One entry of index.json.

    raw: the uncompressed file, which may be missing on disk if ``packed`` is not None.
    samples: number of samples.
    compression: algorithm, such as zstd or zstd:7; None for a shard without compression.
    packed: the compressed file; None for a shard without compression.
    """

    raw: ShardFile
    samples: int
    compression: str | None
    packed: ShardFile | None


class MdsFolder:
    """An open folder of shards.

    shards: the entries of index.json.
    encodings: the text of each column's encoding, by name of the column.
    columns: the parsed encodings, by name of the column, in the order of a sample's bytes.
    starts: number of samples before each shard, then the number of all samples, int64[shards + 1].
    identity: hash of the list of shards.
    """

    def __init__(self, path: str | Path, origin: str | None = None) -> None:
        """Read index.json, but no shard.

        Args:
            origin: how the user named the folder. Every message begins with it.

        Raises:
            ConfigError: the folder or index.json is missing, or index.json is not valid.
        """
        self.folder, self.origin = Path(path).expanduser(), origin or str(path)
        require_folder(self.folder, self.origin, f"of MDS shards, which holds an {INDEX}")
        content = read_metadata(
            self.folder / INDEX,
            self.origin,
            2,
            missing=f"Give a folder of MDS shards.{self._subfolder_hint()}",
            unsupported=". Only MDS shards of version 2 can be read.",
        )
        try:
            self.shards, names, encodings = _parse_index(content)
        except (KeyError, TypeError, AttributeError, OverflowError, IndexError) as error:
            reason = documents.reason(error)
            raise self._error(f"{INDEX} is not an index of MDS shards ({reason})") from None
        except ValueError as error:
            raise self._error(f"{INDEX} {error}") from None
        self.encodings = dict(zip(names, encodings, strict=True))
        self.columns = {name: Encoding.parse(text) for name, text in self.encodings.items()}
        expected = [encoding.size for encoding in self.columns.values()]
        for sizes in (entry.get("column_sizes") for entry in content["shards"]):
            if sizes not in (None, expected):
                raise self._error(
                    f"{INDEX} has column_sizes {json.dumps(sizes)}, but the encodings "
                    f"({self.describe_columns()}) need {json.dumps(expected)}"
                )
        self.starts = np.cumsum([0, *(shard.samples for shard in self.shards)])
        identity = json.dumps(content["shards"], sort_keys=True)
        self.identity = hashlib.sha256(identity.encode()).hexdigest()
        self._variable = [name for name, encoding in self.columns.items() if encoding.size is None]
        packed = any(shard.packed for shard in self.shards)
        cache = functools.lru_cache(_UNPACKED_SHARDS if packed else _MAPPED_SHARDS)
        self._open_shard = cache(self._read_shard)

    @property
    def num_samples(self) -> int:
        return int(self.starts[-1])

    @property
    def compression(self) -> str | None:
        """Compression algorithm of the first shard; None if that shard is not compressed."""
        return self.shards[0].compression

    def sample(self, number: int, columns: Sequence[str]) -> dict[str, Any]:
        """Return the values of ``columns`` in sample ``number``, by name of the column.

        Where possible, an array is a view of the shard.
        """
        shard = int(np.searchsorted(self.starts, number, side="right")) - 1
        raw, offsets = self._open_shard(shard)
        place = number - int(self.starts[shard])
        bounds = self._bounds(raw, offsets[place : place + 2])
        values = {}
        for name in columns:
            begin, end = bounds[name]
            try:
                if end[0] > offsets[place + 1]:
                    raise ValueError("it extends beyond its sample")
                values[name] = self.columns[name].decode(raw[int(begin[0]) : int(end[0])])
            except (ValueError, IndexError, TypeError) as error:
                file, reason = self.shards[shard].raw.name, " ".join(str(error).split())
                where = f"sample {place}, column {name} ({self.encodings[name]})"
                raise self._error(f"{file} is corrupt: {where}: {reason}") from None
        return values

    def array_lengths(self, name: str, shard: int) -> np.ndarray:
        """Return the lengths of the arrays in one column of a shard, int64[samples].

        The arrays have one dimension. Only the sizes of the arrays are read, not the elements.

        Args:
            name: name of the column.
            shard: number of the shard.
        """
        encoding = self.columns[name]
        if encoding.shape is not None:
            return np.full(self.shards[shard].samples, int(np.prod(encoding.shape)), np.int64)
        raw, offsets = self._open_shard(shard)
        start, end = self._bounds(raw, offsets)[name]
        dtype = encoding.dtype
        if dtype is None:
            codes = set(raw[start].tolist())
            dtype = _DTYPE_OF_CODE.get(codes.pop()) if len(codes) == 1 else None
            start = start + 1
        itemsize = dtype.itemsize if dtype else 0
        head = raw[np.minimum(start, raw.size - 1)].astype(np.int64)
        payload = end - start - 1 - (head >> 2) * (1 << (head & 3))
        if (
            itemsize == 0
            or np.any(head >> 2 != 1)
            or np.any(payload < 0)
            or np.any(payload % itemsize)
            or np.any(end > offsets[1:])
        ):
            raise self._error(
                f"{self.shards[shard].raw.name} is corrupt: column {name} "
                f"({self.encodings[name]}) does not hold rows of a single dtype"
            )
        return payload // itemsize

    def files(self) -> list[ShardFile]:
        """Return the file from which each shard is read: the uncompressed one if it is there."""
        return [
            shard.raw
            if shard.packed is None or (self.folder / shard.raw.name).exists()
            else shard.packed
            for shard in self.shards
        ]

    def verify(self, part: int, parts: int, report: Report) -> None:
        """Compare every ``parts``-th shard, from shard ``part`` on, with its size and checksum.

        Raises:
            ConfigError: a file is missing or has changed.
        """
        mine = self.files()[part::parts]
        done, size = 0, sum(file.size for file in mine)
        for file in mine:
            self._map_file(file)
            report(done := done + file.size, size)

    def unlisted(self) -> dict[str, int]:
        """Return the number of shards in the folder that index.json does not list."""
        listed = {file.name for shard in self.shards for file in (shard.raw, shard.packed) if file}
        found = (path.relative_to(self.folder).as_posix() for path in self.folder.glob("*.mds*"))
        count = sum(name not in listed for name in found)
        return {f".mds (not in {INDEX})": count} if count else {}

    def require_column(self, name: str, *kinds: str) -> None:
        """Raise ConfigError unless the column ``name`` exists and its kind is one of ``kinds``."""
        if name not in self.columns:
            raise self._error(f"has no column {name}; its columns: {self.describe_columns()}")
        if self.columns[name].kind not in kinds:
            raise self._error(f"column {name} is {self.encodings[name]}, not {' or '.join(kinds)}")

    def describe_columns(self) -> str:
        """Return the name and encoding of each column in one line."""
        return ", ".join(f"{name} ({encoding})" for name, encoding in self.encodings.items())

    def _error(self, problem: str) -> ConfigError:
        one_line = " ".join(problem.split())  # texts from the file may hold line breaks
        return ConfigError(f"{self.origin}: {one_line}")

    def _subfolder_hint(self) -> str:
        inside = sorted(path.parent.name for path in self.folder.glob(f"*/{INDEX}"))
        if not inside:
            return ""
        return f" Its subfolders {', '.join(inside[:8])} have one: name them in data.mix."

    def _bounds(
        self, raw: np.ndarray, offsets: np.ndarray
    ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return where each column's values begin and end, int64[samples], for ``offsets``."""
        heads = offsets[:-1, None] + np.arange(4 * len(self._variable))
        if heads.size and heads.max() >= raw.size:
            raise self._error(
                "a shard is corrupt: a sample is too short for the sizes of its columns"
            )
        sizes = raw[heads].view("<u4").astype(np.int64)
        sizes_by_name = dict(
            zip(self._variable, sizes.reshape(len(offsets) - 1, len(self._variable)).T, strict=True)
        )
        bounds, position = {}, offsets[:-1] + 4 * len(self._variable)
        for name, encoding in self.columns.items():
            end = position + (sizes_by_name[name] if encoding.size is None else encoding.size)
            bounds[name] = (position, end)
            position = end
        if not self._variable and np.any(wrong := position != offsets[1:]):
            place = int(np.argmax(wrong))
            found, needed = (int(ends[place] - offsets[place]) for ends in (offsets[1:], position))
            raise self._error(
                f"a shard is corrupt: a sample has {found:,} bytes but its columns need {needed:,}"
            )
        return bounds

    def _read_shard(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a shard's bytes, uint8, and the offsets of its samples, int64[samples + 1]."""
        shard = self.shards[number]
        file, samples = shard.raw, shard.samples
        if shard.packed is None or (self.folder / file.name).exists():
            raw = self._map_file(file)
        else:
            raw = self._unpack(shard.packed, shard)
        count = int(np.frombuffer(raw[:4], "<u4")[0]) if raw.size >= 4 else -1
        offsets = np.frombuffer(raw[4 : 8 + 4 * samples], "<u4").astype(np.int64)
        if (
            count != samples
            or offsets.size != samples + 1
            or np.any(offsets[1:] < offsets[:-1])
            or offsets[0] < 8 + 4 * samples
            or offsets[-1] != file.size
        ):
            raise self._error(
                f"{file.name} is corrupt: its header does not match {INDEX} ({samples} samples)"
            )
        return raw, offsets

    def _map_file(self, file: ShardFile) -> np.ndarray:
        path, place = self.folder / file.name, f"{self.origin}: {Path(file.name).name}"
        with explain_read_errors(place, f"{place} is missing, but {INDEX} lists it"):
            found = path.stat().st_size
            if found != file.size:
                raise ConfigError(
                    f"{place} has {found:,} bytes, but {INDEX} lists {file.size:,}. The file is "
                    "incomplete, or is a different file: copy it again."
                )
            raw = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
        self._verify_checksum(path.name, raw, file.hashes)
        return raw

    def _unpack(self, packed: ShardFile, shard: Shard) -> np.ndarray:
        raw, place, size = self._map_file(packed), f"{self.origin}: {packed.name}", shard.raw.size
        stream = Unpacked(io.BytesIO(raw.data), str(shard.compression), place, any_ratio=True)
        content = io.BufferedReader(stream).read(size + 1)  # a longer one contradicts the index
        if len(content) != size:
            found = f"{len(content):,}" if len(content) < size else "more"
            raise ConfigError(f"{place} unpacks to {found} bytes, but {INDEX} lists {size:,}")
        unpacked = np.frombuffer(content, np.uint8)
        self._verify_checksum(shard.raw.name, unpacked, shard.raw.hashes)
        return unpacked

    def _verify_checksum(self, name: str, raw: np.ndarray, hashes: dict[str, str]) -> None:
        """Compare a file with the first of its checksums that Python can compute."""
        for algorithm, expected in hashes.items():
            if algorithm in hashlib.algorithms_guaranteed and not algorithm.startswith("shake"):
                found = hashlib.new(algorithm, raw.data, usedforsecurity=False).hexdigest()
                if found != expected:
                    raise self._error(
                        f"{name} is corrupt: its {algorithm} is {found}, but {INDEX} lists "
                        f"{expected}. Copy it again."
                    )
                return


def _parse_index(content: dict[str, Any]) -> tuple[list[Shard], list[str], list[str]]:
    """Return the shards, the names of the columns, and the encodings of the columns."""
    # A ValueError completes a sentence that begins with "index.json".
    if not content["shards"]:
        raise ValueError("lists no shards")
    shards = [_parse_shard(entry) for entry in content["shards"]]
    columns = [(entry["column_names"], entry["column_encodings"]) for entry in content["shards"]]
    names, encodings = columns[0]
    are_lists = isinstance(names, list) and isinstance(encodings, list)
    are_strings = are_lists and all(isinstance(text, str) for text in names + encodings)
    if not are_strings or len(names) != len(encodings):
        raise ValueError(
            "column_names and column_encodings must be lists of strings of equal length"
        )
    if any(other != columns[0] for other in columns):
        raise ValueError("lists shards with different columns. Put them into separate folders.")
    return shards, names, encodings


def _parse_shard(entry: dict[str, Any]) -> Shard:
    if entry["format"] != "mds":
        raise KeyError("format mds")
    packed = entry.get("zip_data")
    raw, samples = _parse_file(entry["raw_data"]), _whole_number(entry, "samples")
    shard = Shard(raw, samples, entry.get("compression"), _parse_file(packed) if packed else None)
    # A shard holds at least the number of samples n and n + 1 offsets.
    if samples < 0 or not 8 + 4 * samples <= raw.size < _MAX_SHARD_BYTES:
        raise ValueError(
            f"lists {raw.name} with {raw.size:,} bytes for {samples:,} samples, which no MDS shard "
            "can have"
        )
    return shard


def _parse_file(facts: dict[str, Any]) -> ShardFile:
    """Return the file that an entry of index.json describes."""
    name = str(facts["basename"])
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or not name.isprintable():
        raise ValueError(f"names the shard {name!r}, which is not in the folder")
    hashes = facts.get("hashes") or {}
    if not isinstance(hashes, dict):
        raise ValueError(f"has hashes {json.dumps(hashes)} for {name}, not an object of hashes")
    return ShardFile(name, _whole_number(facts, "bytes"), hashes)


def _whole_number(facts: dict[str, Any], key: str) -> int:
    """Return the whole number of an entry of index.json."""
    value = facts[key]
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"has {key} {json.dumps(value)} for a shard, not a whole number")
    return value
