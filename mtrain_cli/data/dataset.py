"""Pack documents end to end into sequences of equal length, and read each one on demand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.labels import IGNORED
from mtrain_cli.data.permutation import shuffled_order
from mtrain_cli.data.sampler import Sampler
from mtrain_cli.data.store import StoreMeta, Stretch, TokenStore

# The end of the stream becomes a padded sequence if at least this share of it is real. Otherwise it
# is left out.
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
    """Where a dataset reads tokens: units, end to end, which shuffling keeps whole.

    ``offsets`` is int64[units + 1]; unit u has the tokens offsets[u] to offsets[u + 1]. A
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
    """What a training reads: numbered sequences, some of them held out, and their order."""

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
    document with number 0. The last ``held_out`` sequences of the stream are not part of dataset[0]
    to dataset[len - 1].

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
            # The last token has no label, and reading the next unit may mean to unpack a shard.
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
        remainder = self.num_tokens - self.sequences * self.seq
        tail = (
            f", {remainder:,} tokens left out"
            if remainder > 0
            else f", the last one with {-remainder:,} tokens of padding"
            if remainder < 0
            else ""
        )
        held_out_text = (
            f", {self.sequences - self._length} more held out"
            if self.sequences > self._length
            else ""
        )
        return (
            f"{meta.source}: {_with_count(meta.num_documents, 'document')}, {self.num_tokens:,} "
            "tokens "
            f"({meta.tokenizer}, vocabulary "
            f"{f'{meta.vocab_size:,}' if meta.vocab_size else 'unknown'}), "
            f"{_with_count(len(self), 'sequence')} of {self.seq:,}{tail}{held_out_text}; "
            f"{self._location}"
        )

    def _read(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Read the tokens begin..end-1 of the stream.

        Returns:
            The tokens; the ends of documents among them, ends[k] being one past the last token of
            the k-th; and which tokens are targets (None: all).
        """
        first = int(np.searchsorted(self._starts, begin, side="right")) - 1
        last = int(np.searchsorted(self._starts, end, side="left"))
        bounds = self._starts[first : last + 1] - begin
        ends, targets = bounds[1:], None
        if self._order is None and isinstance(self._store, TokenStore):
            stream = self._store.tokens[begin:end]
        else:
            parts, inner_ends = [], []
            units = range(first, last) if self._order is None else self._order[first:last]
            for position, unit in enumerate(units):
                start, stop = (
                    max(0, -int(bounds[position])),
                    min(int(bounds[position + 1]), end - begin) - int(bounds[position]),
                )
                part = self._store.read(int(unit), start, stop)
                parts.append(part)
                if part.ends is not None:
                    inner_ends.append(part.ends + max(0, int(bounds[position])))
            stream = np.concatenate([part.tokens for part in parts])
            if inner_ends:
                ends = np.sort(np.concatenate([ends, *inner_ends]))
            if any(part.targets is not None for part in parts):
                targets = np.concatenate(
                    [
                        np.ones(p.tokens.size, bool) if p.targets is None else p.targets
                        for p in parts
                    ]
                )
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
                f"token {token} is outside the vocabulary of {self.vocab_size}. "
                "The store is corrupt: prepare it again."
            )
        else:
            problem = (
                f"token {token} does not fit model.vocab_size={self.vocab_size}: these tokens are "
                "from another tokenizer. Give a model with a "
                f"larger vocabulary, or convert them with `mtrain data prepare --from-tokenizer`."
            )
        raise ConfigError(f"{self._store.folder}: {problem}")


def _with_count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
