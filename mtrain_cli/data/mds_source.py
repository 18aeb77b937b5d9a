"""Read folders of MDS shards as one stream of tokens, or as text for another tokenizer to encode.

A sample holds one document, or several that are already packed. Its columns:

- ``input_ids``: the tokens, a one-dimensional array of integers.
- ``indices``, in packed samples only: (begin, end) of each document. Tokens outside all
  documents are no targets of the loss.
- ``mask``, optional: whether each token is a target of the loss.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.checked_files import explain_read_errors
from mtrain_cli.data.corpora import Corpus, Document, Unit, split_text
from mtrain_cli.data.file_sums import sample_of
from mtrain_cli.data.mds import INDEX, MdsFolder
from mtrain_cli.data.store import StoreMeta, Stretch
from mtrain_cli.data.token_cache import cached_array
from mtrain_cli.data.tokenizers import ByteTokenizer, FileTokenizer

TOKENS, SPANS, TARGETS, DOMAIN = "input_ids", "indices", "mask", "domain"
_DECODED_TOKENS = 1 << 21  # tokens to decode at once, on all cores
Decoder = ByteTokenizer | FileTokenizer
_SAMPLED_SHARDS = 8  # of these, a run remembers a sample of the bytes


class MdsSource:
    """Source of tokens for `PackedDataset`. A sample is a unit, which shuffling keeps whole."""

    folder: Path | None
    samples: dict[str, str]

    def __init__(self, path: str | Path, origin: str) -> None:
        """Open a folder of shards. origin: how the user named the folder, for messages.

        Raises:
            ConfigError: the folder is broken or has no column of tokens.
        """
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

    Raises:
        ConfigError: spans overlap, decrease or leave the sample, or a span is empty although
            ``allow_empty`` is False.
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
    """Yield (path relative to ``root``, open folder) for each of `mds_folders`; "" for ``root``.

    Raises:
        ConfigError: a folder is broken or has no tokens.
    """
    for folder in mds_folders(root):
        name = "" if folder == root else folder.relative_to(root).as_posix()
        shards = MdsFolder(folder, f"{origin}: {name}" if name else origin)
        require_tokens(shards)
        yield name, shards


def mds_corpus(
    path: str, decoder: Decoder, domains: tuple[str, ...] = (), origin: str = "SOURCE"
) -> Corpus:
    """Open a corpus of the documents in `mds_folders`. Every span of a packed sample is one.

    The domain of a document is the path of its folder relative to ``path``; if ``path`` itself
    holds the shards, the column ``domain`` names it.

    Args:
        decoder: tokenizer that made the shards.
        domains: domains to decode; documents of others have no text. Empty means all domains.
        origin: name of the command-line argument ``path``, for messages.
    """
    root, place = Path(path).expanduser(), f"{origin}={path}"
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
    decoder: Decoder,
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
    pending: list[tuple[Document, np.ndarray | None]], decoder: Decoder
) -> Iterator[Document]:
    texts = iter(decoder.decode_batch([ids for _, ids in pending if ids is not None]))
    for document, ids in pending:
        yield document if ids is None else replace(document, pieces=split_text([next(texts)]))
