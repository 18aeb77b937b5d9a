"""The token store: a folder that holds a tokenized corpus in memory-mapped arrays.

``tokens.bin``: ids of all documents end to end. uint16, or uint32 for vocabularies above 65,536.
``documents.bin``: offsets, int64[num_documents + 1]. Document d is tokens[offsets[d] :
    offsets[d + 1]]. No document is empty.
``domains.bin``, if the corpus has domains: uint16[num_documents], indices into `StoreMeta.domains`.
``slices.bin``, if documents bring masks: slices of all documents end to end, int64[slices, 5], as
    in `token_documents`; ``slice_offsets.bin``: int64[num_documents + 1], their offsets. A document
    without slices is causal.
``targets.bin``, if documents say which tokens the loss may predict: a byte for each token, 0 or 1.
``positions.bin``, if documents bring rotary positions: int32[num_tokens]; -1 for all tokens of a
    document without.
``meta.json``: a `StoreMeta`. It is written last, so a folder without it is not a store.
``tokenizer.json``: the tokenizer, unless it is the byte tokenizer.

All numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mtrain_cli.attention.mask import IntArray, SequenceMask, cut_slices
from mtrain_cli.config import documents
from mtrain_cli.config.mask_settings import MOST_INTERVALS
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.sizes import with_count
from mtrain_cli.data.checked_files import (
    FileSums,
    Report,
    changed,
    check_all,
    explain_read_errors,
    read_metadata,
    require_folder,
    sample_of,
)
from mtrain_cli.data.corpora import EMPTY, EVERYTHING, Corpus, Filters, describe_left_out
from mtrain_cli.data.token_documents import TokenDocument, TokenFields
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
SLICES, SLICE_OFFSETS, POSITIONS = "slices.bin", "slice_offsets.bin", "positions.bin"
TARGETS = "targets.bin"
META, TOKENIZER = "meta.json", "tokenizer.json"
_NAMES = (TOKENS, DOCUMENTS, DOMAINS, SLICES, SLICE_OFFSETS, POSITIONS, TARGETS, TOKENIZER)
_DOMAIN, _POSITION, _OFFSET = np.dtype("<u2"), np.dtype("<i4"), np.dtype("<i8")
_TARGET = np.dtype("?")
_DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_SLICE_FIELDS = 5
_NO_POSITION = -1
_HASH_CHUNK = 1 << 24
_AGAIN = "Prepare the store again."


@dataclass
class WrittenColumns:
    """What the masks, positions and targets of a store hold.

    masked, positioned: number of documents with a mask, and with positions.
    intervals: most separate intervals of keys that a query of a document sees.
    keyless: number of tokens that see no key.
    empty_slices: number of given slices without queries or without keys, which the store drops.
    targets: number of tokens that the loss may predict.
    """

    slices: int = 0
    masked: int = 0
    intervals: int = 1
    keyless: int = 0
    empty_slices: int = 0
    positioned: int = 0
    largest_position: int = _NO_POSITION
    targets: int = 0


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
    notes: number of documents with a peculiarity, by a phrase such as "without a target".
    mask_key, positions_key, targets_key: names of the columns of masks, of rotary positions and of
        targets; "" without.
    whole: whether a sequence holds whole documents only, such as conversations.
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
    notes: dict[str, int] = field(default_factory=dict)
    mask_key: str = ""
    positions_key: str = ""
    targets_key: str = ""
    whole: bool = False
    columns: WrittenColumns = field(default_factory=WrittenColumns)
    files: dict[str, FileSums] = field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        """The names of the columns."""
        return [name for name in (self.mask_key, self.positions_key, self.targets_key) if name]

    @property
    def remarks(self) -> list[str]:
        """Lines on the tokens that the loss may predict, and on documents with a peculiarity."""
        share = self.columns.targets / max(self.num_tokens, 1)
        notes = [f"{with_count(count, 'document')} {note}" for note, count in self.notes.items()]
        counted = f"the loss counts {self.columns.targets:,} tokens ({share:.1%})"
        return [*([counted] if self.targets_key else []), *notes]

    @classmethod
    def read(cls, folder: Path, origin: str) -> StoreMeta:
        """Read meta.json in ``folder``. origin: how the user named the folder, for messages."""
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
            counted = meta.left_out | meta.notes
            if not all(isinstance(count, int) for count in counted.values()):
                raise documents.UnreadableError("left_out has a count that is not a number")
            if outside := [name for name in sums if not plain_name(name)]:
                raise documents.UnreadableError(f"files names {outside[0]!r}")
        except documents.UnreadableError as error:
            raise ConfigError(f"{origin}: {META} is damaged ({error}). {_AGAIN}") from None
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


@dataclass(frozen=True)
class TokenStore:
    """An open token store. The arrays are memory-mapped if the store is on disk.

    tokens to positions: arrays of the files; None if the store does not have the file.
    folder: folder of the store; None if the store is in memory only.
    samples: checksum of a sample of each file's bytes, by file name, as read when it was opened.
    """

    meta: StoreMeta
    tokens: np.ndarray
    offsets: np.ndarray
    folder: Path | None = None
    domains: np.ndarray | None = None
    slices: IntArray | None = None
    slice_offsets: IntArray | None = None
    positions: np.ndarray | None = None
    targets: np.ndarray | None = None
    samples: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, path: str | Path, origin: str | None = None) -> TokenStore:
        """Map the store in a folder, and check a sample of its bytes.

        origin: how the user named the folder, for messages.
        """
        folder, origin = Path(path).expanduser(), origin or str(path)
        require_folder(folder, origin, "written by `mtrain data prepare`")
        meta = StoreMeta.read(folder, origin)

        def offsets(name: str, end: int, least: int) -> np.ndarray:
            """Map offsets of documents that rise from 0 to ``end`` by ``least`` or more."""
            offsets = _map_array(folder / name, _OFFSET, meta.num_documents + 1, origin)
            if offsets[0] or offsets[-1] != end or np.any(np.diff(offsets) < least):
                why = f"its offsets do not rise from 0 to {end}"
                raise ConfigError(f"{origin}: {name} is corrupt: {why}. {_AGAIN}")
            return offsets

        tokens = _map_array(folder / TOKENS, _DTYPES[meta.dtype], meta.num_tokens, origin)
        ends = offsets(DOCUMENTS, meta.num_tokens, least=1)
        domains = slices = slice_ends = positions = targets = None
        if meta.domains:
            domains = _map_array(folder / DOMAINS, _DOMAIN, meta.num_documents, origin)
            if int(domains.max()) >= len(meta.domains):
                raise ConfigError(f"{origin}: {DOMAINS} is corrupt. {_AGAIN}")
        if meta.mask_key:
            count = meta.columns.slices
            slices = _map_array(folder / SLICES, _OFFSET, count * _SLICE_FIELDS, origin)
            slices = slices.reshape(-1, _SLICE_FIELDS)
            slice_ends = offsets(SLICE_OFFSETS, count, least=0)
        if meta.positions_key:
            positions = _map_array(folder / POSITIONS, _POSITION, meta.num_tokens, origin)
        if meta.targets_key:
            targets = _map_array(folder / TARGETS, _TARGET, meta.num_tokens, origin)
        columns = domains, slices, slice_ends, positions, targets
        return cls(meta, tokens, ends, folder, *columns, _check_samples(folder, meta, origin))

    def read(self, unit: int, start: int, stop: int) -> Stretch:
        """Return the tokens ``start`` to ``stop`` - 1 of document ``unit``."""
        span = slice(int(self.offsets[unit]) + start, int(self.offsets[unit]) + stop)
        targets = None if self.targets is None else self.targets[span]
        return Stretch(self.tokens[span], targets=targets)

    def document(self, number: int) -> np.ndarray:
        """Return the ids of one document."""
        return self.tokens[self.offsets[number] : self.offsets[number + 1]]

    def slices_of(self, document: int) -> IntArray | None:
        """Return the slices of a document; None if it has no mask of its own."""
        if self.slices is None or self.slice_offsets is None:
            return None
        begin, end = self.slice_offsets[document : document + 2]
        return self.slices[begin:end] if end > begin else None

    def positions_of(self, document: int) -> np.ndarray | None:
        """Return the positions of a document's tokens; None if it has none."""
        begin, end = self.offsets[document : document + 2]
        if self.positions is None or self.positions[begin] == _NO_POSITION:
            return None
        return self.positions[begin:end]

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
        """
        if self.folder is None or not (self.folder / META).is_file():
            return
        origin, advice = str(self.folder), _advice(self.meta, self.folder)
        if self.meta.files:
            check_all(self.folder, self.meta.files, origin, advice, part, parts, report)
        elif _sha256(self.folder) != self.meta.sha256:
            how = f"the sha256 is not the one in {META}"
            raise changed(origin, f"{TOKENS} or another file", how, advice)


@dataclass
class Written:
    """What the files of an unfinished store hold. domains to notes: as in `StoreMeta`."""

    tokens: int = 0
    documents: int = 0
    domains: list[str] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    columns: WrittenColumns = field(default_factory=WrittenColumns)
    notes: dict[str, int] = field(default_factory=dict)

    def file_sizes(self, tokenizer: Tokenizer, fields: TokenFields | None) -> dict[str, int]:
        """Return the size of each file in bytes, by file name. fields: keys of token ids."""
        offsets = (self.documents + 1) * _OFFSET.itemsize if self.documents else 0
        sizes = {
            TOKENS: self.tokens * _token_dtype(tokenizer).itemsize,
            DOCUMENTS: offsets,
            DOMAINS: self.documents * _DOMAIN.itemsize,
        }
        if fields is not None and fields.mask is not None:
            sizes[SLICES] = self.columns.slices * _SLICE_FIELDS * _OFFSET.itemsize
            sizes[SLICE_OFFSETS] = offsets
        if fields is not None and fields.positions is not None:
            sizes[POSITIONS] = self.tokens * _POSITION.itemsize
        if fields is not None and fields.targets is not None:
            sizes[TARGETS] = self.tokens * _TARGET.itemsize
        return sizes


class StoreWriter:
    """Append documents to the files of a store.

    Values wait in memory until `flush` writes them, so that many small documents cost one write.

    files: the open files by name, those of `Written.file_sizes`; without domains.bin, the store has
        no domains.
    written: what the files already hold; None if the files are empty.
    """

    def __init__(
        self,
        files: Mapping[str, BinaryIO],
        tokenizer: Tokenizer,
        written: Written | None = None,
        filters: Filters = EVERYTHING,
    ) -> None:
        self.tokenizer, self.filters, self.written = tokenizer, filters, written or Written()
        self._files, self._dtype = files, _token_dtype(tokenizer)
        self._end = np.array([] if tokenizer.eos is None else [tokenizer.eos], self._dtype)
        # Tokens of the document being written, and how many of them `flush` has written.
        self._open_document = self._flushed = 0
        self._exceeds_limit = self._has_content = False
        self._open_start = 0  # index of the pending tokens at which that document begins
        self._pending: dict[str, list[np.ndarray]] = {name: [] for name in files}
        if not self.written.documents:
            for name in {DOCUMENTS, SLICE_OFFSETS} & set(files):
                self._pending[name].append(np.zeros(1, _OFFSET))

    @classmethod
    def in_memory(cls, tokenizer: Tokenizer, fields: TokenFields | None = None) -> StoreWriter:
        names = Written().file_sizes(tokenizer, fields).keys() - {DOMAINS}
        return cls({name: io.BytesIO() for name in _NAMES if name in names}, tokenizer)

    def append(self, ids: np.ndarray) -> None:
        """Add ids[N] to the open document. The first call after `end_document` opens a document."""
        if ids.size and not self._open_document:
            ids = self.tokenizer.begin.before(ids)
        limit = self.filters.max_tokens
        if limit and self._open_document + ids.size > limit:
            self._exceeds_limit = True
            ids = ids[: limit - self._open_document]
        assert ids.size == 0 or (ids.min() >= 0 and ids.max() < self.tokenizer.vocab_size)
        self._pending[TOKENS].append(ids.astype(self._dtype, copy=False))
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
                self._accept(domain, content)
        elif self._has_content:
            self.reject(EMPTY)
        self._open_document = self._flushed = 0
        self._exceeds_limit = self._has_content = False
        self._open_start = len(self._pending[TOKENS])

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
        """Append the end token. Return why to leave the document out, or ""."""
        self._pending[TOKENS].append(self._end)
        self._open_document += self._end.size
        if self._exceeds_limit or 0 < self.filters.max_tokens < self._open_document:
            return "longer than --max-tokens"
        return "shorter than --min-tokens" * (self._open_document < self.filters.min_tokens)

    def _accept(self, domain: str, content: TokenDocument | None) -> None:
        written, pending, length = self.written, self._pending, self._open_document
        written.tokens += length
        written.documents += 1
        pending[DOCUMENTS].append(np.array([written.tokens], _OFFSET))
        if DOMAINS in pending:
            if domain not in written.domains:
                if len(written.domains) >= 1 << 16:
                    raise ConfigError(f"domain: a corpus has at most {1 << 16:,} of them")
                written.domains.append(domain)
            pending[DOMAINS].append(np.array([written.domains.index(domain)], _DOMAIN))
        columns = written.columns
        if SLICES in pending:
            if content is not None and content.slices is not None:
                slices = cut_slices(content.slices, 0, length)
                # A document whose tokens see nothing still has a mask: an empty slice says so.
                slices = slices if len(slices) else np.zeros((1, _SLICE_FIELDS), np.int64)
                mask = SequenceMask.from_slices(slices, length, length)
                q_start, q_stop, k_start, k_stop, _ = content.slices.T
                columns.keyless += int((mask.high <= mask.low).all(0).sum())
                columns.empty_slices += int(((q_stop == q_start) | (k_stop == k_start)).sum())
                pending[SLICES].append(slices.astype(_OFFSET))
                columns.slices += len(slices)
                columns.masked += 1
                columns.intervals = max(columns.intervals, content.intervals)
            pending[SLICE_OFFSETS].append(np.array([columns.slices], _OFFSET))
        if POSITIONS in pending:
            positions = np.full(length, _NO_POSITION, _POSITION)
            if content is not None and content.positions is not None:
                positions[:] = content.positions
                columns.positioned += 1
                columns.largest_position = max(columns.largest_position, int(positions.max()))
            pending[POSITIONS].append(positions)
        notes = [] if content is None else [*content.notes]
        if TARGETS in pending:
            targets = np.ones(length, _TARGET)
            if content is not None and content.targets is not None:
                targets[:] = content.targets
            columns.targets += int(targets.sum())
            pending[TARGETS].append(targets)
            if not targets[1:].any():
                notes.append("without a target")
        for note in notes:
            written.notes[note] = written.notes.get(note, 0) + 1

    def _drop(self, reason: str) -> None:
        del self._pending[TOKENS][self._open_start :]
        if self._flushed:
            file = self._files[TOKENS]
            file.flush()
            file.truncate(self.written.tokens * self._dtype.itemsize)
            file.seek(0, os.SEEK_END)
        self.reject(reason)

    def flush(self) -> None:
        """Write all pending values to the files."""
        for name, arrays in self._pending.items():
            if arrays:
                self._files[name].write(np.concatenate(arrays).reshape(-1).data)
            arrays.clear()
        self._flushed, self._open_start = self._open_document, 0

    def sync(self) -> None:
        """Call `flush`, and wait until everything is on disk."""
        self.flush()
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def memory_store(self, corpus: Corpus) -> TokenStore:
        """Return the store of an `in_memory` writer."""
        self.require_documents(corpus)
        self.flush()
        digest, buffers = hashlib.sha256(), {}
        for name, file in self._files.items():
            buffers[name] = file.getbuffer()  # type: ignore[attr-defined]
            digest.update(buffers[name])
        tokens = np.frombuffer(buffers[TOKENS], self._dtype)
        offsets = np.frombuffer(buffers[DOCUMENTS], _OFFSET)
        targets = np.frombuffer(buffers[TARGETS], _TARGET) if TARGETS in buffers else None
        meta = self._meta(corpus, {}, tokens, offsets, digest.hexdigest())
        return TokenStore(meta, tokens, offsets, targets=targets)

    def finish(self, folder: Path, corpus: Corpus, recipe: dict[str, str]) -> None:
        """Call `sync`, and write meta.json to ``folder``, which holds the store's files."""
        self.require_documents(corpus)
        self.sync()
        written, origin = self.written, str(folder)
        tokens = _map_array(folder / TOKENS, self._dtype, written.tokens, origin)
        offsets = _map_array(folder / DOCUMENTS, _OFFSET, written.documents + 1, origin)
        meta = self._meta(corpus, recipe, tokens, offsets, _sha256(folder))
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
        self,
        corpus: Corpus,
        recipe: dict[str, str],
        tokens: np.ndarray,
        offsets: np.ndarray,
        sha256: str,
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
            sha256=sha256,
            source=corpus.description,
            recipe=recipe,
            domains=written.domains if any(written.domains) else [],
            left_out={**corpus.left_out, **written.left_out},
            mask_key=fields.mask.name if fields and fields.mask else "",
            positions_key=fields.positions.name if fields and fields.positions else "",
            targets_key=fields.targets.name if fields and fields.targets else "",
            whole=fields is not None and fields.whole,
            notes=written.notes,
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
    return [name for name in _NAMES if (folder / name).is_file()]


def _check_samples(folder: Path, meta: StoreMeta, origin: str) -> dict[str, str]:
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


def _sha256(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in _names(folder):
        if name not in (DOMAINS, TOKENIZER):
            with (folder / name).open("rb") as file:
                while chunk := file.read(_HASH_CHUNK):
                    digest.update(chunk)
    return digest.hexdigest()
