"""The token store: a folder of memory-mapped arrays with a tokenised corpus.

``tokens.bin``: ids of all documents end to end, little-endian uint16, or uint32 for vocabularies
    above 65,536.
``documents.bin``: little-endian int64[num_documents + 1]. Document d is tokens[offsets[d] :
    offsets[d + 1]], never empty.
``domains.bin``: uint16[num_documents], the domain of each document by its number in the metadata.
    Only if the corpus has domains.
``meta.json``: a `StoreMeta`. Written last, so a folder without it is not a store.
``tokenizer.json``: the tokenizer, unless it is the byte tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mtrain_cli.config import documents
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.checked_files import explain_read_errors, read_metadata, require_folder
from mtrain_cli.data.filters import EVERYTHING, Filters
from mtrain_cli.data.tokenizers import ByteTokenizer, Tokenizer, open_tokenizer

VERSION = 1
TOKENS, DOCUMENTS, DOMAINS = "tokens.bin", "documents.bin", "domains.bin"
META, TOKENIZER = "meta.json", "tokenizer.json"
_DOMAIN: np.dtype = np.dtype("<u2")
_OFFSET: np.dtype = np.dtype("<i8")
_DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_HASH_CHUNK = 1 << 24


@dataclass(frozen=True, kw_only=True)
class StoreMeta:
    """The content of meta.json. Stores of earlier versions lack the last three fields.

    dtype: uint16 or uint32.
    tokenizer_identity: identifies the mapping from text to ids, empty if unknown.
    eos: end token, or None.
    vocab_size: number of ids, 0 if unknown.
    sha256: hash of tokens.bin followed by documents.bin.
    recipe: identifies corpus, tokenizer and filters.
    domains: names of the domains by number.
    left_out: number of documents that the filters rejected, by reason.
    cut: number of documents that the filters cut at --max-tokens.
    """

    version: int = VERSION
    dtype: str
    tokenizer: str
    tokenizer_identity: str = ""
    eos: int | None = None
    vocab_size: int = 0
    num_tokens: int
    num_documents: int
    sha256: str
    source: str
    recipe: dict[str, str] = field(default_factory=dict)
    domains: list[str] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    cut: int = 0

    @classmethod
    def read(cls, folder: Path, origin: str) -> StoreMeta:
        """Parse meta.json.

        Raises:
            ConfigError: it is missing, broken or from a newer version of mtrain.
        """
        again = "Prepare the store again."
        content = read_metadata(
            folder / META,
            origin,
            VERSION,
            missing="Give a folder written by `mtrain data prepare`.",
            unsupported=f", but this mtrain reads version {VERSION}. {again}",
            advice=f". {again}",
        )
        content = {"domains": [], "left_out": {}, "cut": 0, **content}
        missing = [known.name for known in fields(cls) if known.name not in content]
        if missing:
            raise ConfigError(f"{origin}: {META} lacks {', '.join(missing)}. {again}")
        try:
            meta = documents.checked(cls, content)
        except documents.UnreadableError as error:
            raise ConfigError(f"{origin}: {META} is broken ({error}). {again}") from None
        counts = (meta.vocab_size, meta.num_tokens, meta.num_documents)
        if meta.dtype not in _DTYPES or min(counts) < 1:
            raise ConfigError(
                f"{origin}: {META} is broken (dtype {meta.dtype}, counts {counts}). {again}"
            )
        return meta

    def write(self, folder: Path) -> None:
        """Write meta.json atomically."""
        write_json(folder / META, asdict(self))


@dataclass(frozen=True)
class Stretch:
    """Consecutive tokens of one unit.

    tokens: ids.
    ends: positions in ``tokens`` at which a document ends, None without any.
    targets: which tokens may be predicted, None for all.
    """

    tokens: np.ndarray
    ends: np.ndarray | None = None
    targets: np.ndarray | None = None

    def target_mask(self) -> np.ndarray:
        """Return bool[tokens]: which tokens may be predicted."""
        return np.ones(self.tokens.size, bool) if self.targets is None else self.targets


@dataclass(frozen=True)
class TokenStore:
    """An open store: ``tokens`` uint16 or uint32[num_tokens], ``offsets`` int64[num_documents + 1].

    Both are memory-mapped if the store is on disk.
    """

    meta: StoreMeta
    tokens: np.ndarray
    offsets: np.ndarray
    folder: Path | None = None
    domains: np.ndarray | None = None

    @classmethod
    def open(cls, path: str | Path, origin: str | None = None) -> TokenStore:
        """Map the arrays of a store without reading the tokens.

        Raises:
            ConfigError: the folder is missing, meta.json is missing or broken, or an array has
                another size than it claims.
        """
        folder, origin = Path(path).expanduser(), origin or str(path)
        require_folder(folder, origin, "written by `mtrain data prepare`")
        meta = StoreMeta.read(folder, origin)
        tokens = _map_array(folder / TOKENS, _DTYPES[meta.dtype], meta.num_tokens, origin)
        offsets = _map_array(folder / DOCUMENTS, _OFFSET, meta.num_documents + 1, origin)
        if offsets[0] or offsets[-1] != meta.num_tokens or np.any(np.diff(offsets) <= 0):
            raise ConfigError(
                f"{origin}: {DOCUMENTS} is corrupt: its offsets do not rise from 0 to "
                f"{meta.num_tokens}. Prepare the store again."
            )
        domains = None
        if meta.domains:
            domains = _map_array(folder / DOMAINS, _DOMAIN, meta.num_documents, origin)
            if int(domains.max()) >= len(meta.domains):
                raise ConfigError(
                    f"{origin}: {DOMAINS} is corrupt: it has domains that {META} does not list. "
                    "Prepare the store again."
                )
        return cls(meta, tokens, offsets, folder, domains)

    def read(self, unit: int, start: int, stop: int) -> Stretch:
        """Return tokens start..stop-1 of document ``unit``."""
        offset = int(self.offsets[unit])
        return Stretch(self.tokens[offset + start : offset + stop])

    def document(self, number: int) -> np.ndarray:
        """Return the ids of one document."""
        return self.tokens[self.offsets[number] : self.offsets[number + 1]]

    def open_tokenizer(self) -> Tokenizer:
        """Open the tokenizer that made the store.

        Raises:
            ConfigError: its file is gone.
        """
        if self.meta.tokenizer_identity == ByteTokenizer.identity:
            return ByteTokenizer()
        assert self.folder is not None
        return open_tokenizer(str(self.folder / TOKENIZER), option="tokenizer of the store")

    def verify(self) -> None:
        """Read everything and compare it with the recorded sha256.

        Raises:
            ConfigError: it differs.
        """
        digest = _sha256(self.tokens, self.offsets)
        if digest != self.meta.sha256:
            raise ConfigError(
                f"{self.folder}: sha256 is {digest}, but {META} lists {self.meta.sha256}. The "
                "store is corrupt: prepare it again."
            )


@dataclass
class Written:
    """What the files of an unfinished store hold.

    tokens, documents: number of each.
    domains, left_out, cut: as in `StoreMeta`.
    """

    tokens: int = 0
    documents: int = 0
    domains: list[str] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    cut: int = 0

    def file_sizes(self, tokenizer: Tokenizer) -> dict[str, int]:
        """Return the bytes of each file by name."""
        return {
            TOKENS: self.tokens * _token_dtype(tokenizer).itemsize,
            DOCUMENTS: (self.documents + 1) * _OFFSET.itemsize if self.documents else 0,
            DOMAINS: self.documents * _DOMAIN.itemsize,
        }


class StoreWriter:
    """Append documents to the files of a store, which already hold ``written``.

    Tokens reach the files with the next `flush`, so that many small documents cost one write.
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
    ) -> None:
        self.tokenizer, self.filters, self.written = tokenizer, filters, written or Written()
        self._dtype = _token_dtype(tokenizer)
        self._tokens, self._offsets, self._labels = tokens, offsets, labels
        self._end = np.array([] if tokenizer.eos is None else [tokenizer.eos], self._dtype)
        # Tokens of the document being written, and how many of them are in the file.
        self._open_document = self._flushed = 0
        self._exceeds_limit = False
        self._open_start = 0  # start of the open document among the pending arrays
        self._pending_tokens: list[np.ndarray] = []
        self._pending_offsets: list[int] = [] if self.written.documents else [0]
        self._pending_labels: list[int] = []

    def append(self, ids: np.ndarray) -> None:
        """Add ids[N] to the document being written."""
        limit = self.filters.max_tokens
        if limit and self._open_document + ids.size > limit:
            self._exceeds_limit = True
            ids = ids[: limit - self._open_document]
        self._pending_tokens.append(ids)
        self._open_document += ids.size

    def end_document(self, domain: str = "") -> None:
        """Close the document with the tokenizer's end token.

        A document without text, or one that the filters reject, leaves no trace.
        """
        if self._open_document:
            reason = self._close_document()
            if reason:
                self._drop(reason)
            else:
                self._accept(domain)
        self._open_document = self._flushed = 0
        self._exceeds_limit = False
        self._open_start = len(self._pending_tokens)

    def reject(self, reason: str) -> None:
        """Count a document that the filters rejected."""
        self.written.left_out[reason] = self.written.left_out.get(reason, 0) + 1

    def _close_document(self) -> str:
        """Append the end token unless the document is cut. Return why to reject it, or nothing."""
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
                    raise ConfigError(
                        f"the corpus has more than {1 << 16:,} domains. Remove the key or column "
                        "domain, or use fewer folders."
                    )
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
        """Write everything that was appended to the files."""
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

    def sync(self) -> None:
        """Flush everything to the disk."""
        self.flush()
        for file in filter(None, (self._tokens, self._offsets, self._labels)):
            file.flush()
            os.fsync(file.fileno())

    def memory_store(self, tokens: memoryview, offsets: memoryview, source: str) -> TokenStore:
        """Return the store whose flushed files are the buffers ``tokens`` and ``offsets``."""
        arrays = np.frombuffer(tokens, self._dtype), np.frombuffer(offsets, _OFFSET)
        return TokenStore(self._meta(source, {}, *arrays), *arrays)

    def finish(self, folder: Path, source: str, recipe: dict[str, str]) -> None:
        """Sync the files in ``folder`` and write meta.json next to them."""
        self.sync()
        written, origin = self.written, str(folder)
        tokens = _map_array(folder / TOKENS, self._dtype, written.tokens, origin)
        offsets = _map_array(folder / DOCUMENTS, _OFFSET, written.documents + 1, origin)
        meta = self._meta(source, recipe, tokens, offsets)
        if not meta.domains:
            (folder / DOMAINS).unlink(missing_ok=True)
        meta.write(folder)

    def _meta(
        self, source: str, recipe: dict[str, str], tokens: np.ndarray, offsets: np.ndarray
    ) -> StoreMeta:
        """Return the metadata of the arrays ``tokens`` and ``offsets``, which were written."""
        assert self._open_document == 0
        written, tokenizer = self.written, self.tokenizer
        assert written.documents > 0
        return StoreMeta(
            dtype=self._dtype.name,
            tokenizer=tokenizer.name,
            tokenizer_identity=tokenizer.identity,
            eos=tokenizer.eos,
            vocab_size=tokenizer.vocab_size,
            num_tokens=written.tokens,
            num_documents=written.documents,
            sha256=_sha256(tokens, offsets),
            source=source,
            recipe=recipe,
            domains=written.domains if any(written.domains) else [],
            left_out=written.left_out,
            cut=written.cut,
        )


def _token_dtype(tokenizer: Tokenizer) -> np.dtype:
    return _DTYPES["uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"]


def write_json(path: Path, content: dict) -> None:
    """Replace a JSON file atomically, so that a crash leaves the old or the new one."""
    unfinished = path.with_name(path.name + ".tmp")
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def _map_array(path: Path, dtype: np.dtype, count: int, origin: str) -> np.ndarray:
    place, expected = f"{origin}: {path.name}", count * dtype.itemsize
    with explain_read_errors(place, f"{place} is missing. Prepare the store again."):
        size = path.stat().st_size
        if size != expected:
            raise ConfigError(
                f"{place} has {size:,} bytes but {META} implies {expected:,}. The store is "
                "truncated or mixed up: prepare it again."
            )
        # Return a plain view: every slice of a np.memmap costs microseconds.
        return np.memmap(path, dtype, mode="r").view(np.ndarray)


def _sha256(tokens: np.ndarray, offsets: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in (tokens, offsets):
        for start in range(0, array.size, _HASH_CHUNK):
            digest.update(np.ascontiguousarray(array[start : start + _HASH_CHUNK]).data)
    return digest.hexdigest()
