"""Whole sequences of text for perplexity: from the user's files, or what a run held out."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.config.sizes import format_size, with_count
from mtrain_cli.data.corpora import describe_left_out
from mtrain_cli.data.dataset import Sample
from mtrain_cli.data.open_dataset import open_dataset
from mtrain_cli.data.store import TokenStore
from mtrain_cli.data.text_files import refuse_unread_key, text_corpus
from mtrain_cli.data.token_cache import cached_store
from mtrain_cli.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Sequence:
    """A whole sequence.

    documents: number of each token's document, int32 [length]; None if all tokens are one document.
    """

    ids: np.ndarray  # token ids, int32 [length]
    documents: np.ndarray | None = None

    @property
    def earlier(self) -> np.ndarray:
        """The number of earlier tokens in the document of each token, int64 [length]."""
        places = np.arange(len(self.ids))
        if self.documents is None:
            return places
        starts = np.flatnonzero(np.diff(self.documents, prepend=self.documents[0] - 1))
        return places - starts[np.searchsorted(starts, places, side="right") - 1]


def store_of_files(path: str, text_key: str, tokenizer: Tokenizer) -> TokenStore:
    """Return the tokens of a file or folder of text. Raises ConfigError if it cannot be read."""
    corpus = text_corpus(path, text_key, path_option="--text", key_option="--text-key")
    refuse_unread_key(corpus, text_key)
    return cached_store(corpus, tokenizer)[0]


def sequences_of_files(
    store: TokenStore, tokenizer: Tokenizer, length: int, count: int
) -> list[Sequence]:
    """Return at most ``count`` sequences of ``length`` tokens, each from one document.

    Each starts with the begin token, also if it does not begin its document. The first sequence of
    each document comes first, so that few documents do not give all. Shorter documents and rests
    are left out; ConfigError if none is long enough.
    """
    tokens = np.diff(store.offsets)
    if not len(tokens) or tokens.max() < length:
        longest = int(tokens.max()) if len(tokens) else 0
        raise ConfigError(
            f"--text {store.meta.source}: no document has {length:,} tokens; the longest has "
            f"{longest:,}. Give longer documents, or a smaller --length"
        )
    begin = np.array(tokenizer.begin.ids, np.int32)
    skip, own = len(begin), length - len(begin)
    parts = (
        store.read(int(unit), skip + turn * own, skip + (turn + 1) * own).tokens.astype(np.int32)
        for turn in range((int(tokens.max()) - skip) // own)
        for unit in np.flatnonzero(tokens - skip >= (turn + 1) * own)
    )
    return [Sequence(np.concatenate([begin, ids])) for ids in itertools.islice(parts, count)]


def left_out_of_files(store: TokenStore, length: int) -> str:
    """Return a line on the files and documents that `sequences_of_files` does not use, or ""."""
    counts = dict(store.meta.left_out)
    if short := int((np.diff(store.offsets) < length).sum()):
        counts[f"shorter than {length:,} tokens"] = short
    return describe_left_out(counts)


def sequences_of_run(config: Config, length: int, count: int) -> list[Sequence]:
    """Return at most ``count`` sequences of ``length`` tokens that a run held out of training.

    Documents keep their borders if the run masks them (``data.document_mask``). ConfigError if the
    run held out fewer tokens, or its data are missing or bring masks.
    """
    data = config.data
    if not data.eval_sequences:
        raise ConfigError(
            "the run held out no text (data.eval_sequences=0). Give --text FILE with text that it "
            "was not trained on"
        )
    if data.mask_key is not None or data.positions_key is not None:
        raise ConfigError(
            "the data of the run bring masks or positions, which this command does not read. Give "
            "--text FILE"
        )
    if data.mix is not None and length > config.seq:
        raise ConfigError(
            f"--length {format_size(length)}: the held-out sequences of data.mix have "
            f"{config.seq:,} tokens and do not follow each other. Give at most "
            f"{format_size(config.seq)}, or --text FILE"
        )
    samples = open_dataset(config).held_out
    joined = [_joined(samples)] if length > config.seq else [_joined([one]) for one in samples]
    sequences = [
        Sequence(ids[at : at + length], _numbered(documents[at : at + length]))
        for ids, documents in joined
        for at in range(0, len(ids) - length + 1, length)
    ]
    if not sequences:
        raise ConfigError(
            f"--length {format_size(length)}: the run held out "
            f"{with_count(data.eval_sequences, 'sequence')} of at most {config.seq:,} tokens "
            "(data.eval_sequences). Give a smaller --length or --text FILE"
        )
    return sequences[:count]


def _joined(samples: list[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of consecutive samples without padding, and the document of each."""
    ids, documents = [], []
    last = 0
    for sample in samples:
        ids.append(sample.tokens[: sample.real])
        documents.append(sample.documents[: sample.real] + last)
        last = int(documents[-1][-1]) + int(sample.ends_document)
    return np.concatenate(ids), np.concatenate(documents)


def _numbered(documents: np.ndarray) -> np.ndarray | None:
    """Return documents counted from 0; None if there is only one."""
    counted = (documents - documents[0]).astype(np.int32)
    return counted if counted.any() else None
