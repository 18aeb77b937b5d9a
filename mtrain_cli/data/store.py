"""The token store: a folder that holds a tokenized corpus in memory-mapped arrays.

``tokens.bin``: ids of all documents end to end. uint16, or uint32 for vocabularies above 65,536.
``documents.bin``: offsets, int64[num_documents + 1]. Document d is tokens[offsets[d] :
    offsets[d + 1]]. No document is empty.
``domains.bin``, if the corpus has domains: uint16[num_documents], indices into `StoreMeta.domains`.
``slices.bin``, ``slice_offsets.bin``, ``positions.bin``, if it has these columns: see
    `document_columns`.
``meta.json``: a `StoreMeta`. It is written last, so a folder without it is not a store.
``tokenizer.json``: the tokenizer, unless it is the byte tokenizer.

All numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mtrain_cli.config import documents
from mtrain_cli.config.mask_settings import MOST_INTERVALS
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.checked_files import explain_read_errors, read_metadata, require_folder
from mtrain_cli.data.corpora import Corpus
from mtrain_cli.data.document_columns import (
    INTEGER,
    NO_COLUMNS,
    POSITION,
    POSITIONS,
    SLICE_FIELDS,
    SLICE_OFFSETS,
    SLICES,
    ColumnWriter,
    DocumentColumns,
    WrittenColumns,
)
from mtrain_cli.data.file_sums import FileSums, Report, changed, check_all, sample_of
from mtrain_cli.data.filters import EMPTY, EVERYTHING, Filters, describe_left_out
from mtrain_cli.data.token_documents import TokenDocument
from mtrain_cli.data.tokenizers import (
    NO_BEGIN,
    Begin,
    ByteTokenizer,
    Tokenizer,
    describe_begin,
    open_tokenizer,
)
from mtrain_cli.launch.manifest import plain_name

VERSION = 1
TOKENS, DOCUMENTS, DOMAINS = "tokens.bin", "documents.bin", "domains.bin"
META, TOKENIZER = "meta.json", "tokenizer.json"
_DOMAIN: np.dtype = np.dtype("<u2")
_OFFSET: np.dtype = np.dtype("<i8")
_DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_HASH_CHUNK = 1 << 24
_AGAIN = "Prepare the store again."


@dataclass(frozen=True, kw_only=True)
class StoreMeta:
    """The content of meta.json. Stores of earlier versions lack fields that have a default.

    dtype: type of the token ids, uint16 or uint32.
    tokenizer, tokenizer_identity: name and `Tokenizer.identity`; "" if unknown.
    eos: id of the end token; None if documents have no end token.
    begin: what each document starts with; None if unknown, and then nothing.
    vocab_size: number of ids of the tokenizer; 0 if unknown.
    sha256: hash of tokens.bin, documents.bin and the files of columns, in this order.
    source: description of the corpus.
    recipe: identities of the corpus, the tokenizer and the filters. Two stores with the same recipe
        hold the same tokens.
    left_out: number of files and documents that are not in the store, as in `describe_left_out`.
    cut: number of documents that the filters cut at --max-tokens.
    mask_key, positions_key: names of the columns of masks and of rotary positions; "" without.
    files: checksums of each file but meta.json; empty if an earlier version of mtrain wrote the
        store.
    """

    version: int = VERSION
    dtype: str
    tokenizer: str
    tokenizer_identity: str = ""
    eos: int | None = None
    begin: Begin | None = None
    vocab_size: int = 0
    num_tokens: int
    num_documents: int
    sha256: str
    source: str
    recipe: dict[str, str] = field(default_factory=dict)
    domains: list[str] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    cut: int = 0
    mask_key: str = ""
    positions_key: str = ""
    columns: WrittenColumns = field(default_factory=WrittenColumns)
    files: dict[str, FileSums] = field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        """The names of the columns."""
        return [name for name in (self.mask_key, self.positions_key) if name]

    @classmethod
    def read(cls, folder: Path, origin: str) -> StoreMeta:
        """Read meta.json in ``folder``. origin: how the user named the folder, for messages.

        Raises:
            ConfigError: the file is missing, broken or from a newer version of mtrain.
        """
        advice = "Give a folder that `mtrain data prepare` of this version has written."
        content = read_metadata(folder / META, origin, VERSION, advice)
        try:
            meta = documents.checked(cls, content)
            entries: dict[str, Any] = dict(meta.files)
            sums = {name: documents.checked(FileSums, one) for name, one in entries.items()}
            meta = replace(meta, files=sums)
            counts = [meta.vocab_size, meta.num_tokens, meta.num_documents, meta.columns.intervals]
            if meta.dtype not in _DTYPES or min(*counts, meta.columns.slices + 1) < 1:
                raise documents.UnreadableError(f"dtype {meta.dtype}, counts {counts}")
            if not all(isinstance(count, int) for count in meta.left_out.values()):
                raise documents.UnreadableError("left_out has a count that is not a number")
            if outside := [name for name in sums if not plain_name(name)]:
                raise documents.UnreadableError(f"files names {outside[0]!r}")
        except documents.UnreadableError as error:
            raise ConfigError(f"{origin}: {META} is broken ({error}). {_AGAIN}") from None
        if meta.columns.intervals > MOST_INTERVALS:
            raise ConfigError(
                f"{origin}: {META} lists queries with {meta.columns.intervals} separate intervals "
                f"of keys; at most {MOST_INTERVALS} are allowed. Prepare documents with slices "
                "that touch or overlap, or with fewer slices per query."
            )
        return meta

    def write(self, folder: Path) -> None:
        """Write meta.json atomically."""
        write_json(folder / META, asdict(self))


@dataclass(frozen=True)
class Stretch:
    """Consecutive tokens of one unit of a `TokenSource`.

    ends: positions in ``tokens`` at which a document ends within the unit; None if no document
        ends within the unit.
    targets: whether the loss may predict each token; None if it may predict every token.
    """

    tokens: np.ndarray
    ends: np.ndarray | None = None
    targets: np.ndarray | None = None

    def target_mask(self) -> np.ndarray:
        """Return ``targets``, or an array of true values if it is None."""
        return np.ones(self.tokens.size, bool) if self.targets is None else self.targets


@dataclass(frozen=True)
class TokenStore:
    """An open token store. The arrays are memory-mapped if the store is on disk.

    tokens, offsets, domains: arrays of the files; ``domains`` is None without domains.
    folder: folder of the store; None if the store is in memory only.
    samples: checksum of a sample of each file's bytes, by file name, as read when it was opened.
    """

    meta: StoreMeta
    tokens: np.ndarray
    offsets: np.ndarray
    folder: Path | None = None
    domains: np.ndarray | None = None
    columns: DocumentColumns = NO_COLUMNS
    samples: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, path: str | Path, origin: str | None = None) -> TokenStore:
        """Map the store in a folder, and check a sample of its bytes.

        origin: how the user named the folder, for messages.

        Raises:
            ConfigError: the folder or meta.json is missing, or a file does not match meta.json.
        """
        folder, origin = Path(path).expanduser(), origin or str(path)
        require_folder(folder, origin, "written by `mtrain data prepare`")
        meta = StoreMeta.read(folder, origin)
        tokens = _map_array(folder / TOKENS, _DTYPES[meta.dtype], meta.num_tokens, origin)
        offsets = _map_offsets(folder / DOCUMENTS, meta, meta.num_tokens, origin)
        domains = None
        if meta.domains:
            domains = _map_array(folder / DOMAINS, _DOMAIN, meta.num_documents, origin)
            if int(domains.max()) >= len(meta.domains):
                raise ConfigError(f"{origin}: {DOMAINS} is corrupt. {_AGAIN}")
        columns = _open_columns(folder, meta, origin)
        samples = _check_samples(folder, meta, origin)
        return cls(meta, tokens, offsets, folder, domains, columns, samples)

    def read(self, unit: int, start: int, stop: int) -> Stretch:
        """Return the tokens ``start`` to ``stop`` - 1 of document ``unit``."""
        offset = int(self.offsets[unit])
        return Stretch(self.tokens[offset + start : offset + stop])

    def document(self, number: int) -> np.ndarray:
        """Return the ids of one document."""
        return self.tokens[self.offsets[number] : self.offsets[number + 1]]

    def open_tokenizer(self) -> Tokenizer:
        """Open the tokenizer that made the store. Raises ConfigError if its file is missing."""
        if self.meta.tokenizer_identity == ByteTokenizer.identity:
            return ByteTokenizer()
        assert self.folder is not None
        return open_tokenizer(str(self.folder / TOKENIZER), option="tokenizer of the store")

    def describe_begin(self) -> str:
        """Return how documents start; "" if the tokenizer has nothing to put there."""
        if self.meta.begin:
            return f"each document starts with {self.meta.begin}"
        if not self.meta.tokenizer_identity or self.folder is None:
            return ""
        try:
            tokenizer = self.open_tokenizer()
        except ConfigError:  # such as a cached store, which holds no tokenizer
            return ""
        tokenizer.begin = NO_BEGIN
        return describe_begin(tokenizer)

    def verify(
        self, part: int = 0, parts: int = 1, report: Report = lambda _done, _size: None
    ) -> None:
        """Compare all bytes with the checksums in meta.json. This caller is ``part`` of ``parts``.

        A store of an earlier version has one checksum, so each caller reads everything. Arrays and
        stores in memory have none.

        Raises:
            ConfigError: a file has changed.
        """
        if self.folder is None or not (self.folder / META).is_file():
            return
        origin, advice = str(self.folder), _advice(self.meta, self.folder)
        if self.meta.files:
            check_all(self.folder, self.meta.files, origin, advice, part, parts, report)
        elif _sha256(self.tokens, self.offsets, *self.columns.arrays) != self.meta.sha256:
            how = f"the sha256 is not the one in {META}"
            raise changed(origin, f"{TOKENS} or another file", how, advice)


@dataclass
class Written:
    """What the files of an unfinished store hold. domains to columns: as in `StoreMeta`."""

    tokens: int = 0
    documents: int = 0
    domains: list[str] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    cut: int = 0
    columns: WrittenColumns = field(default_factory=WrittenColumns)

    def file_sizes(self, tokenizer: Tokenizer) -> dict[str, int]:
        """Return the size of each file without columns in bytes, by file name."""
        return {
            TOKENS: self.tokens * _token_dtype(tokenizer).itemsize,
            DOCUMENTS: (self.documents + 1) * _OFFSET.itemsize if self.documents else 0,
            DOMAINS: self.documents * _DOMAIN.itemsize,
        }


class StoreWriter:
    """Append documents to the files of a store.

    Tokens wait in memory until `flush` writes them, so that many small documents cost one write.

    tokens, offsets, labels: the open files tokens.bin, documents.bin and domains.bin. ``labels`` is
        None if the store needs no domains.
    written: what the files already hold; None if the files are empty.
    columns: writes masks and rotary positions; None if the store needs none.
    """

    def __init__(
        self,
        tokens: BinaryIO,
        offsets: BinaryIO,
        tokenizer: Tokenizer,
        written: Written | None = None,
        *,
        labels: BinaryIO | None = None,
        filters: Filters = EVERYTHING,
        columns: ColumnWriter | None = None,
    ) -> None:
        self.tokenizer, self.filters, self.written = tokenizer, filters, written or Written()
        self._columns = columns
        self._dtype = _token_dtype(tokenizer)
        self._tokens, self._offsets, self._labels = tokens, offsets, labels
        self._end = np.array([] if tokenizer.eos is None else [tokenizer.eos], self._dtype)
        # Tokens of the document being written, and how many of them `flush` has written.
        self._open_document = self._flushed = 0
        self._exceeds_limit = self._has_content = False
        self._open_start = 0  # index in _pending_tokens at which that document begins
        self._pending_tokens: list[np.ndarray] = []
        self._pending_offsets: list[int] = [] if self.written.documents else [0]
        self._pending_labels: list[int] = []

    def append(self, ids: np.ndarray) -> None:
        """Add ids[N] to the open document. The first call after `end_document` opens a document."""
        if ids.size and not self._open_document:
            ids = self.tokenizer.begin.before(ids)
        limit = self.filters.max_tokens
        if limit and self._open_document + ids.size > limit:
            self._exceeds_limit = True
            ids = ids[: limit - self._open_document]
        self._pending_tokens.append(ids)
        self._open_document += ids.size
        self._has_content = True

    def end_document(self, domain: str = "", content: TokenDocument | None = None) -> None:
        """Append the end token and close the document. ``content``: it, if it is token ids.

        A document without tokens, or a document that the filters reject, is not written.
        """
        if self._open_document:
            if reason := self._close_document():
                self._drop(reason)
            else:
                self._accept(domain)
                if self._columns is not None and content is not None:
                    self._columns.append(content, self._open_document)
        elif self._has_content:
            self.reject(EMPTY)
        self._open_document = self._flushed = 0
        self._exceeds_limit = self._has_content = False
        self._open_start = len(self._pending_tokens)

    def leaves_out(self, domain: str) -> bool:
        """Return whether the filters leave out documents of a domain. If so, count one."""
        wanted = self.filters.domains
        if not wanted or domain in wanted:
            return False
        self.reject("of another domain")
        return True

    def reject(self, reason: str) -> None:
        """Count a document that the filters leave out. reason: key of ``left_out``."""
        self.written.left_out[reason] = self.written.left_out.get(reason, 0) + 1

    def _close_document(self) -> str:
        """Append the end token, unless the document is cut. Return why to leave it out, or ""."""
        filters = self.filters
        too_long = (
            self._exceeds_limit or 0 < filters.max_tokens < self._open_document + self._end.size
        )
        if too_long and not filters.truncate:
            return "longer than --max-tokens"
        if not too_long:
            self._pending_tokens.append(self._end)
            self._open_document += self._end.size
        if self._open_document < filters.min_tokens:
            return "shorter than --min-tokens"
        self.written.cut += too_long
        return ""

    def _accept(self, domain: str) -> None:
        written = self.written
        written.tokens += self._open_document
        written.documents += 1
        self._pending_offsets.append(written.tokens)
        if self._labels is not None:
            if domain not in written.domains:
                if len(written.domains) >= 1 << 16:
                    raise ConfigError(f"domain: a corpus has at most {1 << 16:,} of them")
                written.domains.append(domain)
            self._pending_labels.append(written.domains.index(domain))

    def _drop(self, reason: str) -> None:
        del self._pending_tokens[self._open_start :]
        if self._flushed:
            self._tokens.flush()
            self._tokens.truncate(self.written.tokens * self._dtype.itemsize)
            self._tokens.seek(0, os.SEEK_END)
        self.reject(reason)

    def flush(self) -> None:
        """Write all pending tokens, offsets, labels and columns to the files."""
        if self._pending_tokens:
            ids = np.concatenate(self._pending_tokens)
            assert ids.size == 0 or (ids.min() >= 0 and ids.max() < self.tokenizer.vocab_size)
            self._tokens.write(ids.astype(self._dtype, copy=False).data)
        self._offsets.write(np.array(self._pending_offsets, _OFFSET).data)
        if self._labels is not None:
            self._labels.write(np.array(self._pending_labels, _DOMAIN).data)
        self._flushed, self._open_start = self._open_document, 0
        for pending in (self._pending_tokens, self._pending_offsets, self._pending_labels):
            pending.clear()  # type: ignore[attr-defined]
        if self._columns is not None:
            self._columns.flush()

    def sync(self) -> None:
        """Call `flush`, and wait until everything is on disk."""
        self.flush()
        columns = self._columns.files.values() if self._columns is not None else ()
        for file in filter(None, (self._tokens, self._offsets, self._labels, *columns)):
            file.flush()
            os.fsync(file.fileno())

    def memory_store(self, tokens: memoryview, offsets: memoryview, corpus: Corpus) -> TokenStore:
        """Return the store in memory. tokens, offsets: contents of these files after `flush`."""
        self.require_documents(corpus)
        arrays = np.frombuffer(tokens, self._dtype), np.frombuffer(offsets, _OFFSET)
        return TokenStore(self._meta(corpus, {}, *arrays), *arrays)

    def finish(self, folder: Path, corpus: Corpus, recipe: dict[str, str]) -> None:
        """Call `sync`, and write meta.json to ``folder``, which holds the store's files."""
        self.require_documents(corpus)
        self.sync()
        written, origin = self.written, str(folder)
        tokens = _map_array(folder / TOKENS, self._dtype, written.tokens, origin)
        offsets = _map_array(folder / DOCUMENTS, _OFFSET, written.documents + 1, origin)
        meta = self._meta(corpus, recipe, tokens, offsets)
        columns = _open_columns(folder, meta, origin).arrays
        if columns:
            meta = replace(meta, sha256=_sha256(tokens, offsets, *columns))
        if not meta.domains:
            (folder / DOMAINS).unlink(missing_ok=True)
        replace(meta, files={n: FileSums.of(folder / n) for n in _names(folder)}).write(folder)

    def require_documents(self, corpus: Corpus) -> None:
        """Raise ConfigError if the store has no documents, and say what was left out."""
        if self.written.documents == 0:
            reasons = describe_left_out({**corpus.left_out, **self.written.left_out})
            content = "text" if corpus.fields is None else "documents of tokens"
            raise ConfigError(f"{corpus.origin}: holds no {content}{reasons and f'; {reasons}'}")

    def _meta(
        self, corpus: Corpus, recipe: dict[str, str], tokens: np.ndarray, offsets: np.ndarray
    ) -> StoreMeta:
        assert self._open_document == 0
        written, tokenizer, fields = self.written, self.tokenizer, corpus.fields
        return StoreMeta(
            dtype=self._dtype.name,
            tokenizer=tokenizer.name,
            tokenizer_identity=tokenizer.identity,
            eos=tokenizer.eos,
            begin=tokenizer.begin if fields is None else _own_begin(tokenizer, tokens, offsets),
            vocab_size=tokenizer.vocab_size,
            num_tokens=written.tokens,
            num_documents=written.documents,
            sha256=_sha256(tokens, offsets),
            source=corpus.description,
            recipe=recipe,
            domains=written.domains if any(written.domains) else [],
            left_out={**corpus.left_out, **written.left_out},
            cut=written.cut,
            mask_key=fields.mask.name if fields and fields.mask else "",
            positions_key=fields.positions.name if fields and fields.positions else "",
            columns=written.columns,
        )


def _own_begin(tokenizer: Tokenizer, tokens: np.ndarray, offsets: np.ndarray) -> Begin:
    """Return the tokenizer's begin token if all documents brought it, as token ids may."""
    begin, last = tokenizer.prescribed, offsets[1:] - 1
    brought = (
        (tokens[np.minimum(offsets[:-1] + at, last)] == one).all()
        for at, one in enumerate(begin.ids)
    )
    return begin if all(brought) else NO_BEGIN


def _token_dtype(tokenizer: Tokenizer) -> np.dtype:
    return _DTYPES["uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"]


def write_json(path: Path, content: dict) -> None:
    """Replace a JSON file atomically: after a crash the file holds the old or the new content."""
    unfinished = path.with_name(path.name + ".tmp")
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def _names(folder: Path) -> list[str]:
    """Return the names of the files that a store has in a folder, without meta.json."""
    names = (TOKENS, DOCUMENTS, DOMAINS, SLICES, SLICE_OFFSETS, POSITIONS, TOKENIZER)
    return [name for name in names if (folder / name).is_file()]


def _check_samples(folder: Path, meta: StoreMeta, origin: str) -> dict[str, str]:
    """Return the checksum of a sample of each file."""
    samples = {}
    for name in meta.files or _names(folder):
        place = f"{origin}: {name}"
        with explain_read_errors(place, f"{place} is missing. {_AGAIN}"):
            samples[name] = sample_of(folder / name)
        if meta.files and samples[name] != meta.files[name].sample:
            how = "a sample of its bytes has another checksum"
            raise changed(origin, name, how, _advice(meta, folder))
    return samples


def _advice(meta: StoreMeta, folder: Path) -> str:
    """Return what to do about a store whose bytes have changed. The cache has no recipe."""
    if meta.recipe:
        return "Put the file back, or prepare the store again."
    return f"Delete the folder {folder}: mtrain makes it again."


def _open_columns(folder: Path, meta: StoreMeta, origin: str) -> DocumentColumns:
    slices = offsets = positions = None
    if meta.mask_key:
        count = meta.columns.slices
        slices = _map_array(folder / SLICES, INTEGER, count * SLICE_FIELDS, origin)
        slices = slices.reshape(-1, SLICE_FIELDS)
        offsets = _map_offsets(folder / SLICE_OFFSETS, meta, count, origin, least=0)
    if meta.positions_key:
        positions = _map_array(folder / POSITIONS, POSITION, meta.num_tokens, origin)
    return DocumentColumns(slices, offsets, positions)


def _map_offsets(path: Path, meta: StoreMeta, end: int, origin: str, least: int = 1) -> np.ndarray:
    """Map offsets of documents that rise from 0 to ``end`` by ``least`` or more."""
    offsets = _map_array(path, _OFFSET, meta.num_documents + 1, origin)
    if offsets[0] or offsets[-1] != end or np.any(np.diff(offsets) < least):
        raise ConfigError(
            f"{origin}: {path.name} is corrupt: its offsets do not rise from 0 to {end}. {_AGAIN}"
        )
    return offsets


def _map_array(path: Path, dtype: np.dtype, count: int, origin: str) -> np.ndarray:
    place, expected = f"{origin}: {path.name}", count * dtype.itemsize
    with explain_read_errors(place, f"{place} is missing. {_AGAIN}"):
        size = path.stat().st_size
        if size != expected:
            raise ConfigError(
                f"{place} has {size:,} bytes, but {META} implies {expected:,}. The file is "
                "incomplete, or belongs to another store: prepare the store again."
            )
        if not size:
            return np.zeros(0, dtype)  # an empty file cannot be mapped
        # A view of class ndarray, because slicing an np.memmap takes microseconds.
        return np.memmap(path, dtype, mode="r").view(np.ndarray)


def _sha256(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in (array.reshape(-1) for array in arrays):
        for start in range(0, array.size, _HASH_CHUNK):
            digest.update(np.ascontiguousarray(array[start : start + _HASH_CHUNK]).data)
    return digest.hexdigest()
