"""Documents packed end to end into sequences of equal length, read from the token store as they are asked for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.data.cache import cached_store
from mtrain_cli.data.corpora import open_corpus
from mtrain_cli.data.permutation import shuffled_order
from mtrain_cli.data.store import TokenStore
from mtrain_cli.data.tokenizers import open_tokenizer

IGNORED = -100
# The end of the stream becomes a padded sequence when at least this part of it is real, and is left out otherwise.
_LEAST_FILLED = 0.05


@dataclass(frozen=True)
class Sample:
    """One sequence, int32[seq] each.

    ``labels`` are the next tokens, so loss at position t compares logits[t] with labels[t]; -100 is ignored. ``documents`` numbers the
    packed documents of the sequence from 0 up. Padding stands at the end: token 0, label -100, a document of its own.
    """

    tokens: np.ndarray
    labels: np.ndarray
    documents: np.ndarray


class PackedDataset:
    """The stream of all documents cut every ``seq`` tokens; ``ds[i]`` reads one slice of it.

    The stream is the store's documents end to end, shuffled once by ``seed`` if ``shuffle``. Every token is in exactly one sequence,
    except a tail of less than 5 % of a sequence, which is left out. A label is the next token of the stream, also across the end of a
    sequence. With ``document_mask`` the last token of a document has no label; without it the sequence is one document with number 0.
    """

    def __init__(
        self, store: TokenStore, seq: int, *, seed: int = 0, shuffle: bool = True, document_mask: bool = True, where: str = ""
    ) -> None:
        self.seq = seq
        self.num_tokens = store.meta.num_tokens
        self.vocab_size = store.meta.vocab_size
        self.fingerprint = store.meta.sha256
        self._store, self._document_mask, self._where = store, document_mask, where
        self._order = shuffled_order(store.meta.num_documents, seed) if shuffle else None
        self._starts = store.offsets
        if self._order is not None:
            self._starts = np.zeros(store.meta.num_documents + 1, np.int64)
            np.cumsum(np.diff(store.offsets)[self._order], out=self._starts[1:])
        whole, rest = divmod(self.num_tokens, seq)
        self._length = whole + (rest >= max(2, _LEAST_FILLED * seq))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        """Sequence ``index``. Raises IndexError outside 0..len-1 and ConfigError for a corrupt store."""
        if not 0 <= index < self._length:
            raise IndexError(f"Sequence {index} of {self._length}.")
        begin = index * self.seq
        stream, ends = self._read(begin, min(begin + self.seq + 1, self.num_tokens))
        real = min(self.seq, self.num_tokens - begin)
        tokens = np.zeros(self.seq, np.int32)
        tokens[:real] = stream[:real]
        labels = np.full(self.seq, IGNORED, np.int32)
        labels[: stream.size - 1] = stream[1:]
        documents = np.zeros(self.seq, np.int32)
        if self._document_mask:
            labels[ends[ends <= self.seq] - 1] = IGNORED
            documents[ends[ends < self.seq]] = 1
            np.cumsum(documents, out=documents)
        return Sample(tokens, labels, documents)

    def describe(self) -> str:
        """One line: source, documents, tokens, tokenizer, sequences, and where the tokens lie."""
        meta = self._store.meta
        rest = self.num_tokens - len(self) * self.seq
        tail = f", {rest:,} tokens left out" if rest > 0 else f", the last one with {-rest:,} tokens of padding" if rest < 0 else ""
        return (
            f"{meta.source}: {_counted(meta.num_documents, 'document')}, {self.num_tokens:,} tokens "
            f"({meta.tokenizer}, vocabulary {meta.vocab_size:,}), {_counted(len(self), 'sequence')} of {self.seq:,}{tail}; {self._where}"
        )

    def _read(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens begin..end-1 of the stream, and where in them documents end: ends[k] is one past the last token of the k-th."""
        first = int(np.searchsorted(self._starts, begin, side="right")) - 1
        last = int(np.searchsorted(self._starts, end, side="left"))
        bounds = self._starts[first : last + 1] - begin
        if self._order is None:
            stream = self._store.tokens[begin:end]
        else:
            parts = []
            for place, document in enumerate(self._order[first:last]):
                start, stop = max(0, -int(bounds[place])), min(int(bounds[place + 1]), end - begin) - int(bounds[place])
                offset = int(self._store.offsets[document])
                parts.append(self._store.tokens[offset + start : offset + stop])
            stream = np.concatenate(parts)
        if (largest := int(stream.max())) >= self.vocab_size:
            problem = f"token {largest} is outside the vocabulary of {self.vocab_size}; the store is corrupt, prepare it again"
            raise ConfigError(f"{self._store.folder}: {problem}")
        return stream, bounds[1:]


def open_dataset(config: Config) -> PackedDataset:
    """The dataset of a configuration: groups ``data`` and ``seq``, ``seed``, ``model.vocab_size``.

    A corpus that is not a token store is tokenised first, once for all workers and runs (see ``cache``). Raises ConfigError for a missing
    or broken corpus, tokenizer or store, a vocabulary larger than the model's, and a corpus of less than one sequence.
    """
    data = config.data
    if data.kind == "tokens":
        if not data.path:
            raise ConfigError("data.path=null: data=tokens needs a folder written by `mtrain data prepare`")
        store, where = TokenStore.open(data.path, f"data.path={data.path}"), f"mapped from {data.path}"
        _check_vocabulary(config, store.meta.vocab_size, f"the token store {data.path} (tokenizer {store.meta.tokenizer})")
    else:
        tokenizer = open_tokenizer(data.tokenizer)
        _check_vocabulary(config, tokenizer.vocab_size, f"data.tokenizer={data.tokenizer}")
        store, where = cached_store(open_corpus(data), tokenizer)
    if store.meta.num_tokens < config.seq:
        origin = f"data.path={data.path}" if data.path else f"data={data.kind}"
        raise ConfigError(
            f"seq={config.seq}: {origin} holds only {store.meta.num_tokens:,} tokens, less than one sequence of {config.seq:,}; "
            f"give a longer corpus or a smaller seq"
        )
    return PackedDataset(store, config.seq, seed=config.seed, shuffle=data.shuffle, document_mask=data.document_mask, where=where)


def _check_vocabulary(config: Config, needed: int, owner: str) -> None:
    if config.model.vocab_size < needed:
        raise ConfigError(f"model.vocab_size={config.model.vocab_size}: {owner} has {needed:,} ids; set model.vocab_size={needed} or more")


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
