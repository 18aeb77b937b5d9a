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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mtrain_cli.config import documents
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.filters import EVERYTHING, Filters
from mtrain_cli.data.tokenizers import ByteTokenizer, Tokenizer, open_tokenizer
from mtrain_cli.launch.failures import read_failure

VERSION = 1
TOKENS, DOCUMENTS, DOMAINS, META, TOKENIZER = (
    "tokens.bin",
    "documents.bin",
    "domains.bin",
    "meta.json",
    "tokenizer.json",
)
_DOMAIN: np.dtype = np.dtype("<u2")
_OFFSET: np.dtype = np.dtype("<i8")
_DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_HASH_CHUNK = 1 << 24


@dataclass(frozen=True)
class StoreMeta:
    """The content of meta.json. Stores of earlier versions lack the last three fields.

    dtype: uint16 or uint32.
    tokenizer_identity: identifies the mapping from text to ids.
    eos: end token, or None.
    sha256: of tokens.bin, then documents.bin.
    recipe: distinguishes two ways of making a store.
    domains: names of the domains by number.
    left_out: number of documents that the filters rejected, by reason.
    cut: number of documents that the filters cut at --max-tokens.
    """

    version: int
    dtype: str
    tokenizer: str
    tokenizer_identity: str
    eos: int | None
    vocab_size: int
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
        try:
            content = documents.read_json(folder / META)
        except FileNotFoundError:
            raise ConfigError(
                f"{origin}: no {META} in it. Give a folder written by `mtrain data prepare`."
            ) from None
        except OSError as error:
            raise read_failure(
                error, f"{origin}: {META} cannot be read ({error.strerror})"
            ) from None
        except ValueError as error:
            raise ConfigError(
                f"{origin}: {META} is not JSON ({documents.reason(error)}). Prepare the store "
                "again."
            ) from None
        if not isinstance(content, dict) or content.get("version") != VERSION:
            version = content.get("version") if isinstance(content, dict) else None
            raise ConfigError(
                f"{origin}: {META} has version {version}, but this mtrain reads version {VERSION}. "
                "Prepare the store again."
            )
        content = {"domains": [], "left_out": {}, "cut": 0, **content}
        missing = [known.name for known in fields(cls) if known.name not in content]
        if missing:
            raise ConfigError(
                f"{origin}: {META} lacks {', '.join(missing)}. Prepare the store again."
            )
        try:
            meta = documents.checked(cls, content)
        except documents.UnreadableError as error:
            raise ConfigError(
                f"{origin}: {META} is broken ({error}). Prepare the store again."
            ) from None
        counts = (meta.vocab_size, meta.num_tokens, meta.num_documents)
        if str(meta.dtype) not in _DTYPES or not all(
            isinstance(count, int) and count > 0 for count in counts
        ):
            raise ConfigError(
                f"{origin}: {META} is broken (dtype {meta.dtype}, counts {counts}). Prepare the "
                "store again."
            )
        return meta

    def write(self, folder: Path) -> None:
        """Write meta.json atomically."""
        write_json(folder / META, asdict(self))


@dataclass(frozen=True)
class Stretch:
    """A run of tokens of one unit.

    tokens: ids.
    ends: positions in it where a document ends. None: no document ends inside.
    targets: which tokens may be predicted. None: all.
    """

    tokens: np.ndarray
    ends: np.ndarray | None = None
    targets: np.ndarray | None = None


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
        if not folder.is_dir():
            problem = "is not a folder" if folder.exists() else "no such folder"
            raise ConfigError(
                f"{origin}: {problem}. Give a folder written by `mtrain data prepare`."
            )
        meta = StoreMeta.read(folder, origin)
        tokens = _map_array(folder / TOKENS, _DTYPES[meta.dtype], meta.num_tokens, origin)
        offsets = _map_array(folder / DOCUMENTS, _OFFSET, meta.num_documents + 1, origin)
        if (
            offsets[0] != 0
            or offsets[-1] != meta.num_tokens
            or not np.all(offsets[1:] > offsets[:-1])
        ):
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


class StoreWriter:
    """Append documents to a pair of binary files.

    The files already hold ``num_documents`` documents. Appended tokens reach them with the next
    `flush`, so that many small documents cost one write.
    """

    def __init__(
        self,
        tokens: BinaryIO,
        offsets: BinaryIO,
        tokenizer: Tokenizer,
        num_tokens: int = 0,
        num_documents: int = 0,
        *,
        labels: BinaryIO | None = None,
        domains: Sequence[str] = (),
        filters: Filters = EVERYTHING,
        left_out: Mapping[str, int] | None = None,
        cut: int = 0,
    ) -> None:
        self.tokenizer = tokenizer
        self.dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
        self.num_tokens = num_tokens
        self.num_documents = num_documents
        self.filters = filters
        self.domains = list(domains)
        self.left_out = dict(left_out or {})
        self.cut = cut
        self._tokens, self._offsets, self._labels = tokens, offsets, labels
        self._end = np.array([] if tokenizer.eos is None else [tokenizer.eos], _DTYPES[self.dtype])
        # Tokens of the document being written, and how many of them are in the file.
        self._open_document = self._flushed = 0
        self._exceeds_limit = False
        self._open_start = 0  # start of the open document among the pending arrays
        self._pending_tokens: list[np.ndarray] = []
        self._pending_offsets: list[int] = [] if num_documents else [0]
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
        filters = self.filters
        if self._open_document:
            too_long = (
                self._exceeds_limit or 0 < filters.max_tokens < self._open_document + self._end.size
            )
            if too_long and not filters.truncate:
                self._drop("longer than --max-tokens")
            else:
                if not too_long:
                    self._pending_tokens.append(self._end)
                    self._open_document += self._end.size
                if self._open_document < filters.min_tokens:
                    self._drop("shorter than --min-tokens")
                else:
                    self.cut += too_long
                    self._accept(domain)
        self._open_document = self._flushed = 0
        self._exceeds_limit = False
        self._open_start = len(self._pending_tokens)

    def reject(self, reason: str) -> None:
        """Count a document that the filters rejected."""
        self.left_out[reason] = self.left_out.get(reason, 0) + 1

    def _accept(self, domain: str) -> None:
        self.num_tokens += self._open_document
        self.num_documents += 1
        self._pending_offsets.append(self.num_tokens)
        if self._labels is not None:
            if domain not in self.domains:
                if len(self.domains) >= 1 << 16:
                    raise ConfigError(
                        f"the corpus has more than {1 << 16:,} domains. Remove the key or column "
                        "domain, or use fewer folders."
                    )
                self.domains.append(domain)
            self._pending_labels.append(self.domains.index(domain))

    def _drop(self, reason: str) -> None:
        del self._pending_tokens[self._open_start :]
        if self._flushed:
            self._tokens.flush()
            self._tokens.truncate(self.num_tokens * _DTYPES[self.dtype].itemsize)
            self._tokens.seek(0, os.SEEK_END)
        self.reject(reason)

    def flush(self) -> None:
        """Write everything that was appended to the files."""
        if self._pending_tokens:
            ids = np.concatenate(self._pending_tokens)
            assert ids.size == 0 or (ids.min() >= 0 and ids.max() < self.tokenizer.vocab_size)
            self._tokens.write(ids.astype(_DTYPES[self.dtype], copy=False).data)
        self._offsets.write(np.array(self._pending_offsets, _OFFSET).data)
        if self._labels is not None:
            self._labels.write(np.array(self._pending_labels, _DOMAIN).data)
        self._flushed, self._open_start = self._open_document, 0
        self._pending_tokens.clear()
        self._pending_offsets.clear()
        self._pending_labels.clear()

    def sync(self) -> None:
        """Flush everything to the disk."""
        self.flush()
        for file in (
            self._tokens,
            self._offsets,
            *([self._labels] if self._labels is not None else []),
        ):
            file.flush()
            os.fsync(file.fileno())

    def meta(
        self, source: str, recipe: dict[str, str], tokens: np.ndarray, offsets: np.ndarray
    ) -> StoreMeta:
        """Return the metadata of what was written, as the arrays ``tokens`` and ``offsets``."""
        assert self._open_document == 0
        assert self.num_documents > 0
        return StoreMeta(
            version=VERSION,
            dtype=self.dtype,
            tokenizer=self.tokenizer.name,
            tokenizer_identity=self.tokenizer.identity,
            eos=self.tokenizer.eos,
            vocab_size=self.tokenizer.vocab_size,
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            sha256=_sha256(tokens, offsets),
            source=source,
            recipe=recipe,
            domains=self.domains if any(self.domains) else [],
            left_out=self.left_out,
            cut=self.cut,
        )

    def memory_store(self, tokens: memoryview, offsets: memoryview, source: str) -> TokenStore:
        """Return the store if its flushed files are only in memory."""
        token_array, offset_array = (
            np.frombuffer(tokens, _DTYPES[self.dtype]),
            np.frombuffer(offsets, _OFFSET),
        )
        return TokenStore(
            self.meta(source, {}, token_array, offset_array), token_array, offset_array
        )

    def finish(self, folder: Path, source: str, recipe: dict[str, str]) -> None:
        """Sync the files in ``folder`` and write meta.json next to them."""
        self.sync()
        tokens = _map_array(folder / TOKENS, _DTYPES[self.dtype], self.num_tokens, str(folder))
        offsets = _map_array(folder / DOCUMENTS, _OFFSET, self.num_documents + 1, str(folder))
        meta = self.meta(source, recipe, tokens, offsets)
        if not meta.domains:
            (folder / DOMAINS).unlink(missing_ok=True)
        meta.write(folder)


def array_sizes(num_tokens: int, num_documents: int, tokenizer: Tokenizer) -> tuple[int, int, int]:
    """Return the bytes of tokens.bin, documents.bin and domains.bin for these counts."""
    dtype = _DTYPES["uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"]
    return (
        num_tokens * dtype.itemsize,
        (num_documents + 1) * _OFFSET.itemsize,
        num_documents * _DOMAIN.itemsize,
    )


def write_json(path: Path, content: dict) -> None:
    """Replace a JSON file atomically, so that a crash leaves the old or the new one."""
    unfinished = path.with_name(path.name + ".tmp")
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def _map_array(path: Path, dtype: np.dtype, count: int, origin: str) -> np.ndarray:
    try:
        size = path.stat().st_size
        if size != count * dtype.itemsize:
            raise ConfigError(
                f"{origin}: {path.name} has {size:,} bytes but {META} implies "
                f"{count * dtype.itemsize:,}. "
                f"The store is truncated or mixed up: prepare it again."
            )
        # A plain view, because slicing the memmap class itself costs microseconds each time.
        return np.memmap(path, dtype, mode="r").view(np.ndarray)
    except FileNotFoundError:
        raise ConfigError(f"{origin}: {path.name} is missing. Prepare the store again.") from None
    except OSError as error:
        raise read_failure(
            error, f"{origin}: {path.name} cannot be read ({error.strerror})"
        ) from None


def _sha256(tokens: np.ndarray, offsets: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in (tokens, offsets):
        for start in range(0, array.size, _HASH_CHUNK):
            digest.update(np.ascontiguousarray(array[start : start + _HASH_CHUNK]).data)
    return digest.hexdigest()
