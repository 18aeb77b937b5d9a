"""Read folders of MDS shards, the format of mosaicml-streaming and of ProLong's data: as one stream
of tokens, or as text for another tokenizer to encode.

``index.json`` lists the shards. An uncompressed shard holds the number of samples n, uint32; the
offsets of the samples from the beginning of the file, uint32[n + 1]; a JSON text, which this reader
ignores; and the samples. A sample holds the size of each column without a fixed size, uint32, then
the bytes of all columns in the order of ``column_names``. All numbers are little-endian.

A shard is memory-mapped when it is first needed, or decompressed in memory, where only the last few
are kept. Opening a shard verifies its size and checksum. Pickled columns are refused, because
unpickling can run any code.

A sample holds one document, or several that are already packed. Its columns: ``input_ids``, the
tokens; in packed samples ``indices``, (begin, end) of each document, outside of which no token is a
target of the loss; and perhaps ``mask``, whether each token is a target.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from mtrain_cli.config import documents
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.checked_files import (
    Report,
    explain_read_errors,
    read_metadata,
    require_folder,
    sample_of,
)
from mtrain_cli.data.corpora import Corpus, Document, Unit, split_text
from mtrain_cli.data.store import StoreMeta, Stretch
from mtrain_cli.data.text_files import unpacked
from mtrain_cli.data.tokenizers import Tokenizer
from mtrain_extras.mds.cached import cached_array

INDEX = "index.json"
TOKENS, SPANS, TARGETS, DOMAIN = "input_ids", "indices", "mask", "domain"
_DECODED_TOKENS = 1 << 21  # tokens to decode at once, on all cores
_SAMPLED_SHARDS = 8  # of these, a run remembers a sample of the bytes
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


@dataclass(frozen=True)
class Encoding:
    """The encoding of a column.

    kind: name of the encoding, such as str, int or ndarray; the whole text if it is unknown.
    dtype, shape: those of every value of an ndarray column; None if each value stores its own.
    """

    kind: str
    dtype: np.dtype | None = None
    shape: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, text: str) -> Encoding:
        """Parse an entry of ``column_encodings``, such as ``ndarray:uint32:4,8``."""
        kind, *details = text.split(":")
        try:
            if kind == "ndarray" and len(details) <= 2:
                dtype = np.dtype(details[0]).newbyteorder("<") if details else None
                shape = tuple(map(int, details[1].split(","))) if len(details) == 2 else None
                if (dtype is None or dtype.name in _SCALARS) and min(shape or (0,)) >= 0:
                    return cls(kind, dtype, shape)
        except (TypeError, ValueError):
            pass
        return cls(text)  # no error, because the column may not be needed

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
        if self.kind in _SCALARS:
            return np.frombuffer(raw, _SCALARS[self.kind])[0].item()
        if self.kind in ("str", "json"):
            text = raw.tobytes().decode()
            return text if self.kind == "str" else json.loads(text)
        if self.kind != "ndarray":
            raise ValueError("mtrain cannot read this encoding")
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
    """A file that index.json lists: path relative to the folder, size, checksums by algorithm."""

    basename: str
    bytes: int
    hashes: dict[str, str] | None = None


@dataclass(frozen=True)
class Shard:
    """One entry of index.json.

    raw_data: the uncompressed file, which may be missing on disk if ``zip_data`` is not None.
    compression: algorithm, such as zstd or zstd:7.
    zip_data: the compressed file.
    """

    raw_data: ShardFile
    samples: int
    format: str
    column_names: list[str]
    column_encodings: list[str]
    compression: str | None = None
    zip_data: ShardFile | None = None


class MdsFolder:
    """An open folder of shards.

    shards: the entries of index.json.
    encodings, columns: the text and the meaning of each column's encoding, by name of the column,
        in the order of a sample's bytes.
    starts: number of samples before each shard, then the number of all samples, int64[shards + 1].
    identity: hash of the list of shards.
    """

    def __init__(self, path: str | Path, origin: str | None = None) -> None:
        """Read index.json, but no shard. origin: how the user named the folder, for messages."""
        self.folder, self.origin = Path(path).expanduser(), origin or str(path)
        require_folder(self.folder, self.origin, f"of MDS shards, which holds an {INDEX}")
        index = self.folder / INDEX
        content = read_metadata(index, self.origin, 2, "Give a folder of MDS shards of version 2.")
        try:
            self.shards = [documents.checked(Shard, entry) for entry in content["shards"]]
            _check_shards(self.shards)
        except (documents.UnreadableError, KeyError, TypeError) as error:
            reason = documents.reason(error)
            raise self._error(f"{INDEX} is not an index of MDS shards ({reason})") from None
        first = self.shards[0]
        self.encodings = dict(zip(first.column_names, first.column_encodings, strict=True))
        self.columns = {name: Encoding.parse(text) for name, text in self.encodings.items()}
        self.starts = np.cumsum([0, *(shard.samples for shard in self.shards)])
        identity = json.dumps(content["shards"], sort_keys=True)
        self.identity = hashlib.sha256(identity.encode()).hexdigest()
        self._variable = [name for name, encoding in self.columns.items() if encoding.size is None]
        packed = any(shard.zip_data for shard in self.shards)
        cache = functools.lru_cache(_UNPACKED_SHARDS if packed else _MAPPED_SHARDS)
        self._open_shard = cache(self._read_shard)

    @property
    def num_samples(self) -> int:
        return int(self.starts[-1])

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
                file = self.shards[shard].raw_data.basename
                where = f"sample {place}, column {name} ({self.encodings[name]})"
                raise self._error(f"{file} is corrupt: {where}: {error}") from None
        return values

    def array_lengths(self, name: str, shard: int) -> np.ndarray:
        """Return the lengths of the one-dimensional arrays in a column of a shard, int64[samples].

        Only the sizes of the arrays are read, not the elements.
        """
        encoding, samples = self.columns[name], self.shards[shard].samples
        if encoding.shape is not None:
            return np.full(samples, int(np.prod(encoding.shape)), np.int64)
        raw, offsets = self._open_shard(shard)
        start, end = self._bounds(raw, offsets)[name]
        dtype = encoding.dtype
        if dtype is None:
            codes = set(raw[start].tolist())
            dtype = _DTYPE_OF_CODE.get(codes.pop()) if len(codes) == 1 else None
            start = start + 1
        head = raw[np.minimum(start, raw.size - 1)].astype(np.int64)
        payload = end - start - 1 - (head >> 2) * (1 << (head & 3))
        wrong = (head >> 2 != 1) | (payload < 0) | (end > offsets[1:])
        if dtype is None or np.any(wrong) or np.any(payload % dtype.itemsize):
            raise self._error(
                f"{self.shards[shard].raw_data.basename} is corrupt: column {name} "
                f"({self.encodings[name]}) does not hold rows of a single dtype"
            )
        return payload // dtype.itemsize

    def files(self) -> list[ShardFile]:
        """Return the file from which each shard is read: the uncompressed one if it is there."""
        return [
            shard.raw_data
            if shard.zip_data is None or (self.folder / shard.raw_data.basename).exists()
            else shard.zip_data
            for shard in self.shards
        ]

    def verify(self, part: int, parts: int, report: Report) -> None:
        """Compare every ``parts``-th shard, from shard ``part`` on, with its size and checksum."""
        files = self.files()[part::parts]
        done, size = 0, sum(file.bytes for file in files)
        for file in files:
            self._map_file(file)
            report(done := done + file.bytes, size)

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
        return ConfigError(f"{self.origin}: {' '.join(problem.split())}")

    def _bounds(
        self, raw: np.ndarray, offsets: np.ndarray
    ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return where each column's values begin and end, int64[samples], for ``offsets``."""
        heads = offsets[:-1, None] + np.arange(4 * len(self._variable))
        if heads.size and heads.max() >= raw.size:
            raise self._error("a shard is corrupt: a sample is shorter than its columns")
        sizes = raw[heads].view("<u4").astype(np.int64)
        sizes_by_name = dict(zip(self._variable, sizes.T, strict=True))
        bounds, position = {}, offsets[:-1] + 4 * len(self._variable)
        for name, encoding in self.columns.items():
            end = position + (sizes_by_name[name] if encoding.size is None else encoding.size)
            bounds[name] = (position, end)
            position = end
        if not self._variable and np.any(position != offsets[1:]):
            raise self._error("a shard is corrupt: its samples and columns differ in size")
        return bounds

    def _read_shard(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a shard's bytes, uint8, and the offsets of its samples, int64[samples + 1]."""
        shard, source = self.shards[number], self.files()[number]
        file, samples = shard.raw_data, shard.samples
        raw = self._map_file(source) if source is file else self._unpack(source, shard)
        count = int(np.frombuffer(raw[:4], "<u4")[0]) if raw.size >= 4 else -1
        offsets = np.frombuffer(raw[4 : 8 + 4 * samples], "<u4").astype(np.int64)
        if (
            count != samples
            or offsets.size != samples + 1
            or np.any(offsets[1:] < offsets[:-1])
            or offsets[0] < 8 + 4 * samples
            or offsets[-1] != file.bytes
        ):
            raise self._error(
                f"{file.basename} is corrupt: its header does not match {INDEX} ({samples} samples)"
            )
        return raw, offsets

    def _map_file(self, file: ShardFile) -> np.ndarray:
        path, place = self.folder / file.basename, f"{self.origin}: {Path(file.basename).name}"
        with explain_read_errors(place, f"{place} is missing, but {INDEX} lists it"):
            size = path.stat().st_size
            if size != file.bytes:
                raise ConfigError(
                    f"{place} has {size:,} bytes, but {INDEX} lists {file.bytes:,}. Copy it again."
                )
            raw = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
        self._verify_checksum(raw, file)
        return raw

    def _unpack(self, packed: ShardFile, shard: Shard) -> np.ndarray:
        raw, place, size = self._map_file(packed), packed.basename, shard.raw_data.bytes
        origin = f"{self.origin}: {place}"
        with unpacked(io.BytesIO(raw.data), str(shard.compression), origin) as stream:
            content = stream.read(size + 1)  # a longer one contradicts the index
        if len(content) != size:
            given = f"{len(content):,}" if len(content) < size else "more"
            raise self._error(f"{place} unpacks to {given} bytes, but {INDEX} lists {size:,}")
        raw = np.frombuffer(content, np.uint8)
        self._verify_checksum(raw, shard.raw_data)
        return raw

    def _verify_checksum(self, raw: np.ndarray, file: ShardFile) -> None:
        """Compare a file with the first of its checksums that Python can compute."""
        for algorithm, expected in (file.hashes or {}).items():
            if algorithm in hashlib.algorithms_guaranteed and not algorithm.startswith("shake"):
                digest = hashlib.new(algorithm, raw.data, usedforsecurity=False).hexdigest()
                if digest != expected:
                    raise self._error(
                        f"{file.basename} is corrupt: its {algorithm} is {digest}, but {INDEX} "
                        f"lists {expected}. Copy it again."
                    )
                return


def _check_shards(shards: list[Shard]) -> None:
    if not shards:
        raise documents.UnreadableError("it lists no shards")
    for shard in shards:
        raw = shard.raw_data
        # A shard holds at least the number of samples n and n + 1 offsets.
        if shard.samples < 0 or not 8 + 4 * shard.samples <= raw.bytes < _MAX_SHARD_BYTES:
            raise documents.UnreadableError(
                f"{raw.basename} cannot hold {shard.samples:,} samples in {raw.bytes:,} bytes"
            )
        columns = shard.column_names, shard.column_encodings
        if columns != (shards[0].column_names, shards[0].column_encodings):
            raise documents.UnreadableError("its shards have different columns")
        if shard.format != "mds" or len(columns[0]) != len(columns[1]):
            raise documents.UnreadableError(f"the format of {raw.basename} is not mds")
        for file in filter(None, (raw, shard.zip_data)):
            name = file.basename
            if not name or name[0] == "/" or ".." in PurePosixPath(name).parts or "\\" in name:
                raise documents.UnreadableError(f"{name!r} is not in the folder")


class MdsSource:
    """Source of tokens for `PackedDataset`. A sample is a unit, which shuffling keeps whole."""

    folder: Path | None
    samples: dict[str, str]

    def __init__(self, path: str | Path, origin: str) -> None:
        """Open a folder of shards. origin: how the user named the folder, for messages."""
        self.shards = shards = MdsFolder(path, origin)
        self.folder, self.verify = shards.folder, shards.verify
        require_tokens(shards)
        self._columns = [TOKENS]
        for column, kinds in ((SPANS, ("ndarray", "json")), (TARGETS, ("ndarray",))):
            if column in shards.columns:
                shards.require_column(column, *kinds)
                self._columns.append(column)
        self._origin = origin
        lengths = sample_lengths(shards)
        self.offsets = np.concatenate([[0], np.cumsum(lengths)])
        kind = "packed samples" if SPANS in self._columns else "documents"
        self.meta = StoreMeta(
            dtype="uint32",
            tokenizer="of the shards",
            num_tokens=int(self.offsets[-1]),
            num_documents=lengths.size,
            sha256=hashlib.sha256(shards.identity.encode() + lengths.tobytes()).hexdigest(),
            source=f"{kind} of {path}",
        )
        files = shards.files()
        self.samples = {}
        for file in files[:: -(-len(files) // _SAMPLED_SHARDS)]:
            place = f"{origin}: {file.basename}"
            with explain_read_errors(place, f"{place} is missing, but {INDEX} lists it"):
                self.samples[file.basename] = sample_of(shards.folder / file.basename)

    def read(self, unit: int, start: int, stop: int) -> Stretch:
        sample = self.shards.sample(unit, self._columns)
        place, tokens = f"{self._origin}: sample {unit}", sample[TOKENS]
        length = int(self.offsets[unit + 1] - self.offsets[unit])
        if tokens.shape != (length,):
            raise ConfigError(
                f"{place} has an {TOKENS} of shape {tokens.shape}, not ({length},) as at the start "
                "of the run. The shards have changed: start the run again."
            )
        ends = targets = None
        if SPANS in sample:
            spans = parse_spans(sample[SPANS], length, place, allow_empty=False)
            ends = np.unique(spans)
            ends = ends[(ends > start) & (ends < stop)] - start
            if np.diff(spans).sum() != length:
                targets = np.zeros(length, bool)
                for begin, end in spans:
                    targets[begin:end] = True
        if TARGETS in sample:
            mask = np.asarray(sample[TARGETS]).astype(bool)
            if mask.shape != (length,):
                raise ConfigError(
                    f"{place} has a {TARGETS} of shape {mask.shape}, but {length} tokens. Write "
                    "one value per token."
                )
            targets = mask if targets is None else targets & mask
        return Stretch(tokens[start:stop], ends, None if targets is None else targets[start:stop])


def parse_spans(spans: object, length: int, place: str, *, allow_empty: bool) -> np.ndarray:
    """Return (begin, end) of each document of a sample of ``length`` tokens, int64[documents, 2].

    Args:
        spans: value of the column ``indices``.
        place: name of the input, with which error messages begin.
    """
    try:
        pairs = np.asarray(spans, dtype=np.int64).reshape(-1, 2)
    except (TypeError, ValueError):
        raise ConfigError(f"{place}: {SPANS} is not a list of (begin, end)") from None
    bounds = np.concatenate([[0], pairs.ravel(), [length]])
    if np.any(np.diff(bounds) < 0) or (not allow_empty and np.any(pairs[:, 0] == pairs[:, 1])):
        raise ConfigError(f"{place}: {SPANS} must be increasing spans within its {length} tokens")
    return pairs


def require_tokens(shards: MdsFolder) -> None:
    """Raise ConfigError unless the column ``input_ids`` holds one-dimensional integer arrays."""
    shards.require_column(TOKENS, "ndarray")
    encoding = shards.columns[TOKENS]
    wrong_dtype = encoding.dtype is not None and encoding.dtype.kind not in "iu"
    if wrong_dtype or (encoding.shape is not None and len(encoding.shape) != 1):
        raise ConfigError(
            f"{shards.origin}: column {TOKENS} is {shards.encodings[TOKENS]}. It must hold "
            "one-dimensional arrays of integers, such as ndarray:uint32."
        )


def sample_lengths(shards: MdsFolder) -> np.ndarray:
    """Return the number of tokens in each sample, int64[samples].

    The result is cached on disk, because counting may decompress every shard.
    """
    facts = ["mds lengths 1", str(shards.folder.absolute()), shards.identity]
    for shard in shards.shards:
        for file in filter(None, (shard.raw_data, shard.zip_data)):
            if (path := shards.folder / file.basename).exists():
                status = path.stat()
                facts.append(f"{file.basename} {status.st_size} {status.st_mtime_ns}")
    key = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]

    def measure() -> np.ndarray:
        shard_numbers = range(len(shards.shards))
        return np.concatenate([shards.array_lengths(TOKENS, number) for number in shard_numbers])

    return cached_array(key, measure)


def mds_folders(root: Path) -> list[Path]:
    """Return the folders of MDS shards: ``root``, or else its subfolders up to two levels deep."""
    if (root / INDEX).is_file():
        return [root]
    return sorted(path.parent for depth in ("*", "*/*") for path in root.glob(f"{depth}/{INDEX}"))


def open_mds_folders(root: Path, origin: str) -> Iterator[tuple[str, MdsFolder]]:
    """Yield (path relative to ``root``, open folder) for each of `mds_folders`; "" for ``root``."""
    for folder in mds_folders(root):
        name = "" if folder == root else folder.relative_to(root).as_posix()
        shards = MdsFolder(folder, f"{origin}: {name}" if name else origin)
        require_tokens(shards)
        yield name, shards


def mds_corpus(path: str, decoder: Tokenizer, domains: tuple[str, ...] = ()) -> Corpus:
    """Open a corpus of the documents in `mds_folders`. Every span of a packed sample is one.

    The domain of a document is the path of its folder relative to ``path``; if ``path`` itself
    holds the shards, the column ``domain`` names it.

    Args:
        decoder: tokenizer that made the shards.
        domains: domains to decode; documents of others have no text. Empty means all domains.
    """
    root, place = Path(path).expanduser(), f"SOURCE={path}"
    digest = hashlib.sha256(f"mds 1 {decoder.identity}".encode())
    units = []
    for name, shards in open_mds_folders(root, place):
        digest.update(f"{name} {shards.identity}".encode())
        for number, shard in enumerate(shards.shards):
            documents = partial(_documents, shards, number, name, decoder, domains)
            file = shard.raw_data
            label = f"{name}/{file.basename}" if name else file.basename
            units.append(Unit(label, file.bytes, documents))
    return Corpus(path, place, digest.hexdigest(), tuple(units))


def _documents(
    shards: MdsFolder,
    shard: int,
    folder: str,
    decoder: Tokenizer,
    domains: tuple[str, ...],
    skip: int,
) -> Iterator[Document]:
    """Yield the documents of a shard after the first ``skip``. Decode them in batches."""
    first, last = int(shards.starts[shard]), int(shards.starts[shard + 1])
    columns = [name for name in (TOKENS, SPANS, DOMAIN) if name in shards.columns]
    file, record, pending_tokens = shards.shards[shard].raw_data, 0, 0
    pending: list[tuple[Document, np.ndarray | None]] = []
    for number in range(first, last):
        sample = shards.sample(number, columns)
        tokens = sample[TOKENS]
        domain = folder or (str(sample[DOMAIN]) if DOMAIN in sample else "")
        end = file.bytes * (number + 1 - first) // (last - first)
        spans = np.array([[0, tokens.size]])
        if SPANS in sample:
            place = f"{shards.origin}: sample {number}"
            spans = parse_spans(sample[SPANS], tokens.size, place, allow_empty=True)
        for start, stop in spans:
            record += 1
            if record <= skip:
                continue
            document = Document(f"{file.basename}:{record}", (), record, end, domain)
            wanted = not domains or domain in domains
            pending.append((document, tokens[start:stop] if wanted else None))
            pending_tokens += stop - start
        if pending_tokens >= _DECODED_TOKENS:
            yield from _decode_documents(pending, decoder)
            pending, pending_tokens = [], 0
    yield from _decode_documents(pending, decoder)


def _decode_documents(
    pending: list[tuple[Document, np.ndarray | None]], decoder: Tokenizer
) -> Iterator[Document]:
    texts = iter(decoder.decode_batch([ids for _, ids in pending if ids is not None]))
    for document, ids in pending:
        yield document if ids is None else replace(document, pieces=split_text([next(texts)]))
