"""Pack documents end to end into sequences of equal length, and read each one on demand."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.labels import IGNORED
from mtrain_cli.data.permutation import shuffled_order
from mtrain_cli.data.sampler import Sampler
from mtrain_cli.data.store import StoreMeta, Stretch, TokenStore

# The last sequence of the stream is padded. It is left out if less than this share is real tokens.
_MIN_FILLED = 0.05


@dataclass(frozen=True)
class Sample:
    """One sequence, int32[seq] each.

    Padding is at the end: token 0, label -100, in a document of its own.

    tokens: token ids.
    labels: the next tokens. The loss at position t compares logits[t] with labels[t]; -100 is
        ignored.
    documents: numbers of the packed documents, from 0.
    """

    tokens: np.ndarray
    labels: np.ndarray
    documents: np.ndarray


class TokenSource(Protocol):
    """Units of tokens that a dataset reads end to end. Shuffling keeps each unit whole.

    ``offsets`` is int64[units + 1]; unit u holds the tokens offsets[u] to offsets[u + 1] - 1. A
    ``meta.vocab_size`` of 0 means unknown.
    """

    @property
    def meta(self) -> StoreMeta: ...
    @property
    def offsets(self) -> np.ndarray: ...
    @property
    def folder(self) -> Path | None: ...
    def read(self, unit: int, start: int, stop: int) -> Stretch: ...


class Dataset(Protocol):
    """Numbered sequences for training, their order, and held-out sequences."""

    @property
    def fingerprint(self) -> str: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Sample: ...
    def sampler(self, seed: int) -> Sampler: ...
    def describe(self) -> str: ...
    @property
    def held_out(self) -> list[Sample]: ...


class PackedDataset:
    """The stream of all documents, cut every ``seq`` tokens. ``dataset[i]`` reads one sequence.

    The stream is the source's units end to end, shuffled once by ``seed`` if ``shuffle``. Every
    token is in exactly one sequence, except for a tail of less than 5 % of a sequence, which is
    left out. A label is the next token of the stream, also across the end of a sequence. With
    ``document_mask``, the last token of a document has no label. Without it, the sequence is one
    document with number 0. ``len(dataset)`` excludes the last ``held_out`` sequences.

    ``vocab_size`` is the model's: every token must be below it if the source does not know its
    vocabulary.
    """

    def __init__(
        self,
        store: TokenSource,
        seq: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        document_mask: bool = True,
        location: str = "",
        vocab_size: int = 0,
        held_out: int = 0,
    ) -> None:
        self.seq = seq
        self.num_tokens = store.meta.num_tokens
        self.vocab_size = store.meta.vocab_size or vocab_size
        self.fingerprint = store.meta.sha256
        self._store, self._document_mask, self._location = store, document_mask, location
        self._order = shuffled_order(store.meta.num_documents, seed) if shuffle else None
        self._starts = store.offsets
        if self._order is not None:
            self._starts = np.zeros(store.meta.num_documents + 1, np.int64)
            np.cumsum(np.diff(store.offsets)[self._order], out=self._starts[1:])
        whole, remainder = divmod(self.num_tokens, seq)
        self.sequences = whole + (remainder >= max(2, _MIN_FILLED * seq))
        self._length = self.sequences - held_out

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        """Return sequence ``index``.

        Raises:
            IndexError: outside 0 to len - 1.
            ConfigError: the source is corrupt.
        """
        if not 0 <= index < self._length:
            raise IndexError(f"Sequence {index} of {self._length}.")
        return self._sample(index)

    @property
    def held_out(self) -> list[Sample]:
        """The sequences after the last one, which are never trained on."""
        return [self._sample(index) for index in range(self._length, self.sequences)]

    def sampler(self, seed: int) -> Sampler:
        """Return the order of a run: a new permutation for each epoch."""
        return Sampler(self._length, seed)

    def _sample(self, index: int) -> Sample:
        begin = index * self.seq
        end = min(begin + self.seq + 1, self.num_tokens)
        if (
            self._document_mask
            and end == begin + self.seq + 1
            and self._starts[np.searchsorted(self._starts, end - 1)] == end - 1
        ):
            # The last token has no label, and reading the next unit may decompress a shard.
            end -= 1
        stream, ends, targets = self._read(begin, end)
        real = min(self.seq, self.num_tokens - begin)
        tokens = np.zeros(self.seq, np.int32)
        tokens[:real] = stream[:real]
        labels = np.full(self.seq, IGNORED, np.int32)
        labels[: stream.size - 1] = stream[1:]
        if targets is not None:
            labels[: stream.size - 1][~targets[1:]] = IGNORED
        documents = np.zeros(self.seq, np.int32)
        if self._document_mask:
            labels[ends[ends <= self.seq] - 1] = IGNORED
            documents[ends[ends < self.seq]] = 1
            np.cumsum(documents, out=documents)
        return Sample(tokens, labels, documents)

    def describe(self) -> str:
        """Return one line: source, documents, tokens, tokenizer, sequences, and location."""
        meta = self._store.meta
        vocabulary = f"{meta.vocab_size:,}" if meta.vocab_size else "unknown"
        remainder = self.num_tokens - self.sequences * self.seq
        held_out = self.sequences - len(self)
        tail = ""
        if remainder > 0:
            tail = f", {remainder:,} tokens left out"
        elif remainder < 0:
            tail = f", the last one with {-remainder:,} tokens of padding"
        if held_out:
            tail += f", {held_out} more held out"
        return (
            f"{meta.source}: {_with_count(meta.num_documents, 'document')}, {self.num_tokens:,} "
            f"tokens ({meta.tokenizer}, vocabulary {vocabulary}), "
            f"{_with_count(len(self), 'sequence')} of {self.seq:,}{tail}; {self._location}"
        )

    def _read(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Read the tokens begin..end-1 of the stream.

        Returns:
            tokens; ends, where ends[k] is one past the last token of the k-th document; targets,
            bool for each token, or None if all tokens are targets.
        """
        first = int(np.searchsorted(self._starts, begin, side="right")) - 1
        last = int(np.searchsorted(self._starts, end, side="left"))
        bounds = self._starts[first : last + 1] - begin
        ends, targets = bounds[1:], None
        if self._order is None and isinstance(self._store, TokenStore):
            stream = self._store.tokens[begin:end]
        else:
            parts = []
            units = range(first, last) if self._order is None else self._order[first:last]
            for unit, (low, high) in zip(units, pairwise(bounds.tolist()), strict=True):
                part = self._store.read(int(unit), max(0, -low), min(high, end - begin) - low)
                parts.append(part)
                if part.ends is not None:
                    ends = np.concatenate([ends, part.ends + max(0, low)])
            ends = np.sort(ends)
            stream = np.concatenate([part.tokens for part in parts])
            if any(part.targets is not None for part in parts):
                targets = np.concatenate([part.target_mask() for part in parts])
        self._check(stream)
        return stream, ends, targets

    def _check(self, stream: np.ndarray) -> None:
        """Raise ConfigError for token ids outside the vocabulary."""
        largest = int(stream.max())
        lowest = int(stream.min()) if stream.dtype.kind == "i" else 0
        if largest < self.vocab_size and lowest >= 0:
            return
        token = largest if largest >= self.vocab_size else lowest
        if self._store.meta.vocab_size:
            problem = (
                f"token {token} is outside the vocabulary of {self.vocab_size}. The store is "
                "corrupt: prepare it again."
            )
        else:
            problem = (
                f"token {token} does not fit model.vocab_size={self.vocab_size}: these tokens are "
                "from another tokenizer. Give a model with a larger vocabulary, or convert them "
                "with `mtrain data prepare --from-tokenizer`."
            )
        raise ConfigError(f"{self._store.folder}: {problem}")


def _with_count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
