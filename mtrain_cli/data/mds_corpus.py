"""MDS shards as a corpus of text: decode the token ids for another tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.corpora import Corpus, Document, Unit, split_text
from mtrain_cli.data.mds import INDEX, MdsFolder
from mtrain_cli.data.mds_source import DOMAIN, SPANS, TOKENS, require_tokens
from mtrain_cli.data.tokenizers import ByteTokenizer, FileTokenizer

_DECODED_TOKENS = 1 << 21  # tokens to decode at once, on all cores


def mds_folders(root: Path) -> list[Path]:
    """Return ``root`` if it is a folder of shards, else those up to two levels below it."""
    if (root / INDEX).is_file():
        return [root]
    return sorted(
        {path.parent for pattern in (f"*/{INDEX}", f"*/*/{INDEX}") for path in root.glob(pattern)}
    )


def mds_corpus(
    path: str,
    decoder: ByteTokenizer | FileTokenizer,
    domains: tuple[str, ...] = (),
    origin: str = "SOURCE",
) -> Corpus:
    """Open the documents of one folder of shards, or of all folders below ``path``.

    In packed samples every span is a document. Its domain is the column ``domain``, or with several
    folders the folder's path below ``path``.

    Args:
        domains: documents of other domains come without text. Empty means all.

    Raises:
        ConfigError: a folder is broken.
    """
    root, place = Path(path).expanduser(), f"{origin}={path}"
    folders = mds_folders(root)
    digest = hashlib.sha256(f"mds 1 {decoder.identity}".encode())
    units = []
    for folder in folders:
        name = "" if folder == root else folder.relative_to(root).as_posix()
        shards = MdsFolder(folder, f"{place}: {name}" if name else place)
        require_tokens(shards)
        digest.update(f"{name} {shards.identity}".encode())
        for number, shard in enumerate(shards.shards):
            documents = partial(_documents, shards, number, name, decoder, domains)
            units.append(
                Unit(f"{name}/{shard.name}" if name else shard.name, shard.size, documents)
            )
    return Corpus(path, place, digest.hexdigest(), tuple(units))


def _documents(
    shards: MdsFolder,
    shard: int,
    folder: str,
    decoder: ByteTokenizer | FileTokenizer,
    domains: tuple[str, ...],
    skip: int,
) -> Iterator[Document]:
    """Yield the documents of a shard after the first ``skip``, decoded in batches."""
    first, last = int(shards.starts[shard]), int(shards.starts[shard + 1])
    columns = [name for name in (TOKENS, SPANS, DOMAIN) if name in shards.columns]
    size, record, pending_tokens = shards.shards[shard].size, 0, 0
    pending: list[tuple[Document, np.ndarray | None]] = []
    for number in range(first, last):
        sample = shards.sample(number, columns)
        domain = folder or (str(sample[DOMAIN]) if DOMAIN in sample else "")
        end = size * (number + 1 - first) // (last - first)
        for ids in _split_spans(
            sample[TOKENS], sample.get(SPANS), f"{shards.origin}: sample {number}"
        ):
            record += 1
            if record <= skip:
                continue
            wanted = not domains or domain in domains
            pending.append(
                (
                    Document(f"{shards.shards[shard].name}:{record}", (), record, end, domain),
                    ids if wanted else None,
                )
            )
            pending_tokens += ids.size
        if pending_tokens >= _DECODED_TOKENS:
            yield from _decode_documents(pending, decoder)
            pending, pending_tokens = [], 0
    yield from _decode_documents(pending, decoder)


def _decode_documents(
    pending: list[tuple[Document, np.ndarray | None]], decoder: ByteTokenizer | FileTokenizer
) -> Iterator[Document]:
    texts = iter(decoder.decode_batch([ids for _, ids in pending if ids is not None]))
    for document, ids in pending:
        pieces: Iterable[str] = () if ids is None else split_text([next(texts)])
        yield Document(document.name, pieces, document.record, document.end, document.domain)


def _split_spans(tokens: np.ndarray, spans: object, place: str) -> Iterator[np.ndarray]:
    if spans is None:
        yield tokens
        return
    try:
        pairs = np.asarray(spans, dtype=np.int64).reshape(-1, 2)
    except (TypeError, ValueError):
        raise ConfigError(f"{place}: {SPANS} is not a list of (begin, end)") from None
    if np.any(np.diff(pairs.ravel()) < 0) or (
        pairs.size and (pairs.min() < 0 or pairs.max() > tokens.size)
    ):
        raise ConfigError(
            f"{place}: {SPANS} must be increasing spans within its {tokens.size} tokens"
        )
    yield from (tokens[begin:end] for begin, end in pairs)
