"""Read folders of MDS shards, the format of mosaicml-streaming. ProLong's data uses it.

``index.json`` lists the shards. An uncompressed shard is: uint32 number of samples n; uint32[n + 1]
offsets of the samples from the beginning of the file; a JSON text that this reader ignores; the
samples. A sample is the uint32 sizes of its columns without a fixed size, then the bytes of all
columns in the order of ``column_names``. All numbers are little-endian.

Shards are mapped when first needed. Compressed shards are unpacked in memory, and only a few are
kept. Size and checksum are verified then. Pickled columns are refused, because reading one runs its
author's code.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from mtrain_cli import install_command
from mtrain_cli.config import documents
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch.failures import read_failure

INDEX = "index.json"
_UNPACKED_SHARDS = 4  # number of unpacked shards to keep in memory, usually 64 MiB each
_MAPPED_SHARDS = 256
_CHUNK = 1 << 24  # bytes to unpack at once
_MAX_SHARD_BYTES = 1 << 32  # bytes of a shard; offsets are uint32
_SCALARS = (
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
)
_MAX_COUNT = 2**53  # upper limit for a number of bytes or samples
_PLAIN = ("bytes", "str", "str_int", "str_float", "int", "json", *_SCALARS)
# The byte with which an array without a fixed dtype names its dtype.
_DTYPE_OF_CODE = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}


@dataclass(frozen=True)
class Encoding:
    """How a column is written.

    kind: name of the encoding.
    dtype, shape: of an ndarray, None where they differ by sample.
    """

    kind: str
    dtype: np.dtype | None = None
    shape: tuple[int, ...] | None = None

    @property
    def is_readable(self) -> bool:
        """Whether values can be read."""
        return self.kind == "ndarray" or self.kind in _PLAIN

    @property
    def size(self) -> int | None:
        """Bytes of a value, None if they differ by sample."""
        if self.kind == "ndarray":
            return (
                None
                if self.dtype is None or self.shape is None
                else int(np.prod(self.shape)) * self.dtype.itemsize
            )
        return (
            8
            if self.kind == "int"
            else np.dtype(self.kind).itemsize
            if self.kind in _SCALARS
            else None
        )

    def decode(self, raw: np.ndarray) -> Any:
        """Return the value in raw, uint8[bytes].

        Raises:
            ValueError: the bytes are not such a value.
        """
        if self.kind == "ndarray":
            return self._decode_array(raw)
        if self.kind == "int" or self.kind in _SCALARS:
            return np.frombuffer(
                raw, np.dtype("int64" if self.kind == "int" else self.kind).newbyteorder("<")
            )[0].item()
        content = raw.tobytes()
        if self.kind == "bytes":
            return content
        text = content.decode("utf-8")
        readers: dict[str, Callable[[str], Any]] = {
            "str": str,
            "json": json.loads,
            "str_int": int,
            "str_float": float,
        }
        return readers[self.kind](text)

    def _decode_array(self, raw: np.ndarray) -> np.ndarray:
        dtype, shape, start = self.dtype, self.shape, 0
        if dtype is None:
            dtype, start = _dtype_for(int(raw[0])), 1
        if shape is None:
            axes, width = int(raw[start]) >> 2, 1 << (int(raw[start]) & 3)
            shape = tuple(
                np.frombuffer(raw[start + 1 : start + 1 + axes * width], f"<u{width}").tolist()
            )
            start += 1 + axes * width
        return np.frombuffer(raw[start:], dtype).reshape(shape)


@dataclass(frozen=True)
class Shard:
    """One entry of index.json. ``packed`` is name, size and hashes of a compressed file."""

    name: str
    size: int
    samples: int
    hashes: dict[str, str]
    compression: str | None
    packed: tuple[str, int, dict[str, str]] | None


class MdsFolder:
    """An open folder of shards.

    columns: encodings by name, in the order of the bytes.
    starts: int64[shards + 1], the first sample of each shard.
    """

    def __init__(self, path: str | Path, origin: str | None = None) -> None:
        """Read index.json only.

        Raises:
            ConfigError: something is missing or unknown. The message begins with ``origin``.
        """
        self.folder, self.origin = Path(path).expanduser(), origin or str(path)
        content = self._read_index()
        shards = content["shards"]
        try:
            self.shards = [_parse_shard(entry) for entry in shards]
            names, encodings = shards[0]["column_names"], shards[0]["column_encodings"]
            if not (
                _is_string_list(names)
                and _is_string_list(encodings)
                and len(names) == len(encodings)
            ):
                raise ValueError(
                    "column_names and column_encodings must be lists of strings of equal length"
                )
            if not all(
                0 <= number < _MAX_COUNT
                for shard in self.shards
                for number in (shard.size, shard.samples)
            ):
                raise ValueError("has an invalid size or number of samples")
            same_columns = all(
                (entry["column_names"], entry["column_encodings"]) == (names, encodings)
                for entry in shards
            )
        except (KeyError, TypeError, AttributeError, OverflowError, IndexError) as error:
            raise ConfigError(
                f"{self.origin}: {INDEX} is not an index of MDS shards ({documents.reason(error)})"
            ) from None
        except ValueError as error:
            raise ConfigError(f"{self.origin}: {INDEX} {error}") from None
        if not same_columns:
            raise ConfigError(
                f"{self.origin}: {INDEX} lists shards with different columns. Put them into "
                "separate folders."
            )
        self.encodings = dict(zip(names, encodings, strict=True))
        self.columns = {name: _parse_encoding(text) for name, text in self.encodings.items()}
        for entry in shards:
            self._check_column_sizes(entry.get("column_sizes"))
        self.starts = np.cumsum([0, *(shard.samples for shard in self.shards)])
        self.identity = hashlib.sha256(json.dumps(shards, sort_keys=True).encode()).hexdigest()
        self._variable = [name for name, encoding in self.columns.items() if encoding.size is None]
        self._shard_cache: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_samples(self) -> int:
        return int(self.starts[-1])

    @property
    def compression(self) -> str | None:
        """Compression of the first shard."""
        return self.shards[0].compression

    def sample(self, number: int, columns: Sequence[str]) -> dict[str, Any]:
        """Return the values of ``columns`` of a sample. Arrays are views where possible."""
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
                file, why = self.shards[shard].name, " ".join(str(error).split())
                raise ConfigError(
                    f"{self.origin}: {file} is corrupt: sample {place}, column {name} "
                    f"({self.encodings[name]}): {why}"
                ) from None
        return values

    def array_lengths(self, name: str, shard: int) -> np.ndarray:
        """Return the length of the 1D ndarray ``name`` in every sample of a shard, int64[samples].

        The elements are not read.
        """
        encoding = self.columns[name]
        if encoding.shape is not None:
            return np.full(self.shards[shard].samples, int(np.prod(encoding.shape)), np.int64)
        raw, offsets = self._open_shard(shard)
        begin, end = self._bounds(raw, offsets)[name]
        start, itemsize = begin.copy(), 0 if encoding.dtype is None else encoding.dtype.itemsize
        if encoding.dtype is None:
            codes = set(raw[start].tolist())
            itemsize = (
                0
                if len(codes) != 1 or not codes <= _DTYPE_OF_CODE.keys()
                else np.dtype(_DTYPE_OF_CODE[codes.pop()]).itemsize
            )
            start += 1
        head = raw[np.minimum(start, raw.size - 1)].astype(np.int64)
        payload = end - start - 1 - (head >> 2) * (1 << (head & 3))
        if (
            itemsize == 0
            or np.any(head >> 2 != 1)
            or np.any(payload < 0)
            or np.any(payload % itemsize)
            or np.any(end > offsets[1:])
        ):
            raise ConfigError(
                f"{self.origin}: {self.shards[shard].name} is corrupt: column {name} "
                f"({self.encodings[name]}) does not hold rows of a single dtype"
            )
        return payload // itemsize

    def require_column(self, name: str, *kinds: str) -> None:
        """Raise ConfigError unless there is a column of this name with one of these kinds."""
        if name not in self.columns:
            raise ConfigError(
                f"{self.origin}: has no column {name}; its columns: {self.describe_columns()}"
            )
        if self.columns[name].kind not in kinds:
            raise ConfigError(
                f"{self.origin}: column {name} is {self.encodings[name]}, not {' or '.join(kinds)}"
            )

    def describe_columns(self) -> str:
        """Return names and encodings of the columns."""
        return ", ".join(f"{name} ({encoding})" for name, encoding in self.encodings.items())

    def _check_column_sizes(self, sizes: Any) -> None:
        """Check ``column_sizes`` of an index against the sizes that its encodings imply."""
        expected_sizes = [encoding.size for encoding in self.columns.values()]
        if sizes is None or sizes == expected_sizes:
            return
        if not isinstance(sizes, list) or len(sizes) != len(expected_sizes):
            raise ConfigError(
                f"{self.origin}: {INDEX} has column_sizes {sizes}, but the encodings need "
                f"{len(expected_sizes)} sizes or null: {expected_sizes}"
            )
        name, size, expected = next(
            (n, a, b) for n, a, b in zip(self.columns, sizes, expected_sizes, strict=True) if a != b
        )
        raise ConfigError(
            f"{self.origin}: {INDEX} gives column {name} ({self.encodings[name]}) the size "
            f"{json.dumps(size)} in column_sizes, "
            f"but its encoding has {json.dumps(expected)}. Write the index again."
        )

    def _bounds(
        self, raw: np.ndarray, offsets: np.ndarray
    ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return where each column begins and ends in the samples at offsets[:-1], int64 each."""
        heads = offsets[:-1, None] + np.arange(4 * len(self._variable))
        if heads.size and heads.max() >= raw.size:
            raise ConfigError(
                f"{self.origin}: a shard is corrupt: a sample is too short for the sizes of its "
                "columns"
            )
        sizes = (
            raw[heads].view("<u4").astype(np.int64).reshape(len(offsets) - 1, len(self._variable))
        )
        by_name = {name: sizes[:, place] for place, name in enumerate(self._variable)}
        bounds, position = {}, offsets[:-1] + 4 * len(self._variable)
        for name, encoding in self.columns.items():
            end = position + (by_name[name] if encoding.size is None else encoding.size)
            bounds[name] = (position, end)
            position = end
        if not self._variable and np.any(position != offsets[1:]):
            place = int(np.argmax(position != offsets[1:]))
            found, expected = (
                int(offsets[place + 1] - offsets[place]),
                int(position[place] - offsets[place]),
            )
            raise ConfigError(
                f"{self.origin}: a shard is corrupt: a sample has {found:,} bytes but its columns "
                f"need {expected:,}"
            )
        return bounds

    def _open_shard(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a shard's bytes, uint8, and the offsets of its samples, int64[samples + 1]."""
        with self._lock:
            if number in self._shard_cache:
                self._shard_cache.move_to_end(number)
                return self._shard_cache[number]
            shard = self.shards[number]
            path = self.folder / shard.name
            raw = (
                self._map_file(path, shard.size, shard.hashes)
                if shard.packed is None or path.exists()
                else self._unpack(shard)
            )
            count = int(np.frombuffer(raw[:4], "<u4")[0]) if raw.size >= 4 else -1
            offsets = np.frombuffer(raw[4 : 8 + 4 * shard.samples], "<u4").astype(np.int64)
            rises = offsets.size == shard.samples + 1 and np.all(offsets[1:] >= offsets[:-1])
            if (
                count != shard.samples
                or not rises
                or offsets[0] < 8 + 4 * shard.samples
                or offsets[-1] != shard.size
            ):
                raise ConfigError(
                    f"{self.origin}: {shard.name} is corrupt: its header does not match {INDEX} "
                    f"({shard.samples} samples)"
                )
            self._shard_cache[number] = (raw, offsets)
            while len(self._shard_cache) > (
                _MAPPED_SHARDS if shard.packed is None else _UNPACKED_SHARDS
            ):
                self._shard_cache.popitem(last=False)
            return raw, offsets

    def _map_file(self, path: Path, size: int, hashes: dict[str, str]) -> np.ndarray:
        try:
            found = path.stat().st_size
            if found != size:
                raise ConfigError(
                    f"{self.origin}: {path.name} has {found:,} bytes but {INDEX} lists {size:,}. "
                    "It is truncated: copy it again."
                )
            raw = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
        except FileNotFoundError:
            raise ConfigError(f"{self.origin}: {path.name} is missing; {INDEX} lists it") from None
        except OSError as error:
            raise read_failure(
                error, f"{self.origin}: {path.name} cannot be read ({error.strerror})"
            ) from None
        self._verify_checksum(path.name, raw, hashes)
        return raw

    def _unpack(self, shard: Shard) -> np.ndarray:
        assert shard.packed is not None
        name, size, hashes = shard.packed
        raw = self._map_file(self.folder / name, size, hashes)
        decompress = _decompressor(shard.compression, f"{self.origin}: {name}")
        try:
            content = _read_unpacked(decompress(raw.data), shard.size)
        except (OSError, ValueError, EOFError, zlib.error) as error:
            raise ConfigError(
                f"{self.origin}: {name} cannot be unpacked ({error}). Copy it again."
            ) from None
        if len(content) != shard.size:
            found = f"{len(content):,}" if len(content) < shard.size else "more"
            raise ConfigError(
                f"{self.origin}: {name} unpacks to {found} bytes but {INDEX} lists {shard.size:,}"
            )
        unpacked = np.frombuffer(content, np.uint8)
        self._verify_checksum(shard.name, unpacked, shard.hashes)
        return unpacked

    def _verify_checksum(self, name: str, raw: np.ndarray, hashes: dict[str, str]) -> None:
        """Compare with the first checksum that Python can compute, if there is one."""
        for algorithm, expected in hashes.items():
            if algorithm in hashlib.algorithms_guaranteed and not algorithm.startswith("shake"):
                found = hashlib.new(algorithm, raw.data, usedforsecurity=False).hexdigest()
                if found != expected:
                    raise ConfigError(
                        f"{self.origin}: {name} is corrupt: its {algorithm} is {found}, but "
                        f"{INDEX} lists {expected}. Copy it again."
                    )
                return

    def _read_index(self) -> dict[str, Any]:
        if not self.folder.is_dir():
            problem = "is not a folder" if self.folder.exists() else "no such folder"
            raise ConfigError(
                f"{self.origin}: {problem}. Give a folder of MDS shards, which holds an {INDEX}."
            )
        try:
            content = documents.read_json(self.folder / INDEX)
        except FileNotFoundError:
            inside = sorted(path.parent.name for path in self.folder.glob(f"*/{INDEX}"))
            hint = (
                f" Its subfolders {', '.join(inside[:8])} have one: name them in data.mix."
                if inside
                else ""
            )
            raise ConfigError(
                f"{self.origin}: no {INDEX} in it. Give a folder of MDS shards.{hint}"
            ) from None
        except OSError as error:
            raise read_failure(
                error, f"{self.origin}: {INDEX} cannot be read ({error.strerror})"
            ) from None
        except ValueError as error:
            raise ConfigError(
                f"{self.origin}: {INDEX} is not JSON ({documents.reason(error)})"
            ) from None
        if (
            not isinstance(content, dict)
            or not isinstance(content.get("shards"), list)
            or content.get("version") != 2
        ):
            version = content.get("version") if isinstance(content, dict) else None
            raise ConfigError(
                f"{self.origin}: {INDEX} has version {version}. Only MDS shards of version 2 can "
                "be read."
            )
        if not content["shards"]:
            raise ConfigError(f"{self.origin}: {INDEX} lists no shards")
        return content


def _is_string_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _parse_encoding(text: str) -> Encoding:
    kind, *details = str(text).split(":")
    try:
        if kind == "ndarray" and len(details) <= 2:
            dtype = np.dtype(details[0]).newbyteorder("<") if details else None
            if dtype is None or dtype.name in _SCALARS:
                shape = tuple(map(int, details[1].split(","))) if len(details) == 2 else None
                if min(shape or (0,)) >= 0:
                    return Encoding(kind, dtype, shape)
        if not details and kind in _PLAIN:
            return Encoding(kind)
    except (TypeError, ValueError):
        pass
    # A column that nobody reads may have any kind, as long as the sample holds its size.
    return Encoding(str(text))


def _parse_shard(entry: dict[str, Any]) -> Shard:
    if entry["format"] != "mds":
        raise KeyError("format mds")
    raw, packed = entry["raw_data"], entry.get("zip_data")
    shard = Shard(
        _require_inside(str(raw["basename"])),
        int(raw["bytes"]),
        int(entry["samples"]),
        dict(raw.get("hashes") or {}),
        entry.get("compression"),
        (
            _require_inside(str(packed["basename"])),
            int(packed["bytes"]),
            dict(packed.get("hashes") or {}),
        )
        if packed
        else None,
    )
    # The minimum is the number of samples, an offset for each, and one for the end of the last.
    if shard.samples < 0 or not 8 + 4 * shard.samples <= shard.size < _MAX_SHARD_BYTES:
        raise ValueError(
            f"lists {shard.name} with {shard.size:,} bytes for {shard.samples:,} samples, which no "
            "MDS shard can have"
        )
    return shard


def _require_inside(name: str) -> str:
    """Return ``name`` if it is in the folder or below it.

    Raises:
        ValueError: it is not.
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or set(name) & set("\\\0"):
        raise ValueError(f"names the shard {name!r}, which is not in the folder")
    return name


def _dtype_for(code: int) -> np.dtype:
    if code not in _DTYPE_OF_CODE:
        raise ValueError(f"unknown dtype code {code}")
    return np.dtype(_DTYPE_OF_CODE[code]).newbyteorder("<")


def _read_unpacked(stream: Any, size: int) -> bytearray:
    """Return all that the stream unpacks to, but at most ``size`` + 1 bytes."""
    content = bytearray()
    while len(content) <= size and (piece := stream.read(min(_CHUNK, size + 1 - len(content)))):
        content += piece
    return content


def _decompressor(compression: str | None, place: str) -> Callable[[Any], Any]:
    """Return a function from packed bytes to a stream of unpacked ones."""
    kind = str(compression).partition(":")[0]
    if kind == "gz":
        return lambda content: gzip.GzipFile(fileobj=io.BytesIO(content))
    if kind == "zstd":
        return _zstd_decompressor(place)
    raise ConfigError(f"{place}: is compressed with {compression}. Only zstd and gz can be read.")


def _zstd_decompressor(place: str) -> Callable[[Any], Any]:
    """Use Python's own zstd from 3.14 on, else the package."""
    try:
        from compression import zstd  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        pass
    else:
        return lambda content: zstd.ZstdFile(io.BytesIO(content))
    try:
        import zstandard
    except ImportError:
        raise ConfigError(
            f"{place}: needs the zstandard package: {install_command('data')}"
        ) from None

    class Stream:
        def __init__(self, content: Any) -> None:
            self._stream = zstandard.ZstdDecompressor().stream_reader(content)

        def read(self, most: int) -> bytes:
            try:
                return self._stream.read(most)
            except zstandard.ZstdError as error:
                raise ValueError(str(error)) from None

    return Stream
