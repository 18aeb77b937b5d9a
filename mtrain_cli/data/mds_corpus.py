"""Read MDS shards as a corpus of text: decode the token ids for another tokenizer to encode."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from mtrain_cli.data.corpora import Corpus, Document, Unit, split_text
from mtrain_cli.data.mds import INDEX, MdsFolder
from mtrain_cli.data.mds_source import DOMAIN, SPANS, TOKENS, parse_spans, require_tokens
from mtrain_cli.data.tokenizers import ByteTokenizer, FileTokenizer

_DECODED_TOKENS = 1 << 21  # tokens to decode at once, on all cores
Decoder = ByteTokenizer | FileTokenizer


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
    """Open a corpus of the documents in `mds_folders`.

    Every span of a packed sample is a document. Its domain is the path of its folder relative to
    ``path``; if ``path`` itself holds the shards, the column ``domain`` names it.

    Args:
        decoder: tokenizer that made the shards.
        domains: domains to decode; documents of others have no text. Empty means all domains.
        origin: name of the command-line argument ``path``, for messages.

    Raises:
        ConfigError: a folder is broken.
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
