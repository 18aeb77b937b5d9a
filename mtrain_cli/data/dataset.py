"""Pack documents end to end into sequences of equal length, and read each sequence on demand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from mtrain_cli.attention.mask import (
    IntArray,
    causal_slices,
    continues,
    cut_slices,
    intervals_at_most,
)
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.sizes import with_count
from mtrain_cli.data.checked_files import Report
from mtrain_cli.data.corpora import describe_left_out
from mtrain_cli.data.labels import IGNORED
from mtrain_cli.data.sampler import Sampler, shuffled_order
from mtrain_cli.data.store import POSITIONS, SLICES, StoreMeta, Stretch, TokenStore

# The tokens after the last whole sequence are padded to one more sequence. If they fill less than
# this share of it, they are left out instead.
_MIN_FILLED = 0.05


class TokenSource(Protocol):
    """Tokens in units: documents, or samples of several packed ones. Shuffling keeps them whole.

    meta, samples: as in `TokenStore`.
    offsets: unit u holds the tokens offsets[u] to offsets[u + 1] - 1, int64[units + 1].
    folder: place of the data, for messages.
    """

    @property
    def meta(self) -> StoreMeta: ...
    @property
    def offsets(self) -> np.ndarray: ...
    @property
    def folder(self) -> Path | None: ...
    @property
    def samples(self) -> Mapping[str, str]: ...

    def read(self, unit: int, start: int, stop: int) -> Stretch:
        """Return the tokens ``start`` to ``stop`` - 1 of a unit."""

    def verify(self, part: int, parts: int, report: Report) -> None:
        """Compare bytes with their checksums. This caller is ``part`` of ``parts``."""


@dataclass(frozen=True)
class Sample:
    """One sequence. Padding, if any, is at the end, with token 0 and its own document number.

    tokens: token ids, int32[seq].
    labels: the token that follows each position, int32[seq]; `IGNORED` where there is no target.
    documents: number of each position's document within the sequence, from 0, int32[seq].
    slices: mask of the sequence, int64 [slices, 5], as in `SequenceMask.from_slices`; None without.
    positions: rotary position of each token, int32[seq]; None if the data have none.
    real: number of tokens before the padding; None if there is no padding.
    ends_document: whether the last token before the padding ends a document. A label does not show
        this: the next token may belong to the document without being a target.
    """

    tokens: np.ndarray
    labels: np.ndarray
    documents: np.ndarray
    slices: np.ndarray | None = None
    positions: np.ndarray | None = None
    real: int | None = None
    ends_document: bool = False


class PackedDataset:
    """The stream of all documents, cut every ``seq`` tokens. ``dataset[i]`` reads one sequence.

    Every token is in exactly one sequence, except a tail of less than 5 % of a sequence. The label
    of a position is the next token of the stream, even if that token is in the next sequence.

    store: source of the tokens; the stream joins its units end to end.
    shuffle: whether the units are in random order, which ``seed`` determines.
    document_mask: if true, the last token of a document has no label. If false, the whole sequence
        is one document with number 0.
    masked: whether each sample has the slices of its documents' masks. A document without a mask
        is causal. A token has no label if the next token does not see it.
    positioned: whether each sample has the rotary positions of its documents. A document without
        positions has its positions in the sequence.
    location: where the tokens are, for `describe`.
    vocab_size: vocabulary of the model, which limits the ids if the store does not know its own.
    held_out: number of sequences at the end of the stream that ``len(dataset)`` excludes.
    """

    def __init__(
        self,
        store: TokenSource,
        seq: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        document_mask: bool = True,
        masked: bool = False,
        positioned: bool = False,
        location: str = "",
        vocab_size: int = 0,
        held_out: int = 0,
    ) -> None:
        self.seq = seq
        self.num_tokens = store.meta.num_tokens
        self.vocab_size = store.meta.vocab_size or vocab_size
        self.fingerprint, self.samples = store.meta.sha256, store.samples
        self.verify = store.verify
        self.store, self._document_mask, self._location = store, document_mask, location
        self._masked, self._positioned = masked, positioned
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
            IndexError: ``index`` is not in 0 to len - 1.
            ConfigError: the source is corrupt.
        """
        if not 0 <= index < self._length:
            raise IndexError(f"sequence {index} does not exist; allowed: 0 to {self._length - 1}")
        return self._sample(index)

    @property
    def held_out(self) -> list[Sample]:
        """The last sequences of the stream, which no training step reads."""
        return [self._sample(index) for index in range(self._length, self.sequences)]

    @property
    def left_out(self) -> str:
        """The end of a line that says what the source left out; "" if it left out nothing."""
        counts = self.store.meta.left_out
        return f"; {describe_left_out(counts)}" if counts else ""

    def sampler(self, seed: int) -> Sampler:
        """Return a sampler that orders the sequences by a new permutation in each epoch."""
        return Sampler(self._length, seed)

    def _sample(self, index: int) -> Sample:
        begin = index * self.seq
        end = min(begin + self.seq + 1, self.num_tokens)
        if (
            self._document_mask
            and end == begin + self.seq + 1
            and self._starts[np.searchsorted(self._starts, end - 1)] == end - 1
        ):
            # The sequence ends with its document, so its last position has no label. Do not read
            # the next token: it may need another shard to be decompressed.
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
        slices = None
        if self._masked:
            slices = self._slices(begin, begin + real)
            # If the next token does not see this one, it continues another text, such as the
            # question of another answer.
            labels[: stream.size - 1][~self._continued(begin, begin + stream.size)[1:]] = IGNORED
        positions = None
        if self._positioned:
            positions = self._positions(begin, begin + stream.size)
            # If the position does not rise, the next token continues another text, too.
            labels[: stream.size - 1][
                positions[1 : stream.size] <= positions[: stream.size - 1]
            ] = IGNORED
            positions = positions[: self.seq]
        ends_document = self._document_mask and bool((ends == real).any())
        return Sample(tokens, labels, documents, slices, positions, real, ends_document)

    def describe(self) -> str:
        """Return one line: source, documents, tokens, tokenizer, sequences, and location."""
        meta = self.store.meta
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
        begin = self.store.describe_begin() if isinstance(self.store, TokenStore) else ""
        return (
            f"{meta.source}: {with_count(meta.num_documents, 'document')}, {self.num_tokens:,} "
            f"tokens ({meta.tokenizer}, vocabulary {vocabulary}){begin and f', {begin}'}, "
            f"{with_count(len(self), 'sequence')} of {self.seq:,}{tail}{self.left_out}; "
            f"{self._location}"
        )

    def _read(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return tokens, ends of documents and targets of the stream as `Stretch` has them."""
        first = int(np.searchsorted(self._starts, begin, side="right"))
        last = int(np.searchsorted(self._starts, end, side="left"))
        ends, targets = self._starts[first : last + 1] - begin, None
        if self._order is None and isinstance(self.store, TokenStore):
            stream = self.store.tokens[begin:end]
        else:
            parts = []
            for unit, start, stop, place in self._parts(begin, end):
                parts.append(part := self.store.read(unit, start, stop))
                if part.ends is not None:
                    ends = np.concatenate([ends, part.ends + place])
            ends = np.sort(ends)
            stream = np.concatenate([part.tokens for part in parts])
            if any(part.targets is not None for part in parts):
                every = (
                    np.ones(part.tokens.size, bool) if part.targets is None else part.targets
                    for part in parts
                )
                targets = np.concatenate(list(every))
        self._check(stream)
        return stream, ends, targets

    def _parts(self, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (unit, start, stop, place) for the tokens ``begin`` to ``end`` - 1 of the stream.

        The tokens ``start`` to ``stop`` - 1 of the unit follow ``place`` others.
        """
        first = int(np.searchsorted(self._starts, begin, side="right")) - 1
        last = int(np.searchsorted(self._starts, end, side="left"))
        for number in range(first, last):
            low, high = self._starts[number : number + 2].tolist()
            unit = number if self._order is None else int(self._order[number])
            start = max(begin - low, 0)
            yield unit, start, min(high, end) - low, low + start - begin

    def _slices(self, begin: int, end: int) -> IntArray:
        assert isinstance(self.store, TokenStore)
        parts, most = [], self.store.meta.columns.intervals
        for unit, start, stop, place in self._parts(begin, end):
            own = self.store.slices_of(unit)
            if own is None:
                part = causal_slices(stop - start)
            else:
                length = int(self.store.offsets[unit + 1] - self.store.offsets[unit])
                if not intervals_at_most(own, length, most):
                    raise self._corrupt(SLICES)
                part = cut_slices(own, start, stop)
            part[:, :4] += place
            parts.append(part)
        return np.concatenate(parts)

    def _continued(self, begin: int, end: int) -> np.ndarray:
        """Return whether each token sees the token before it, bool [end - begin]."""
        assert isinstance(self.store, TokenStore)
        continued = np.ones(end - begin, bool)
        for unit, start, stop, place in self._parts(begin, end):
            if (own := self.store.slices_of(unit)) is not None:
                continued[place : place + stop - start] = continues(own, start, stop)
        return continued

    def _positions(self, begin: int, end: int) -> np.ndarray:
        """Return the rotary position of each token, int32[end - begin], at least [seq]."""
        assert isinstance(self.store, TokenStore)
        positions = np.arange(max(self.seq, end - begin), dtype=np.int32)
        for unit, start, stop, place in self._parts(begin, end):
            if (own := self.store.positions_of(unit)) is not None:
                own = own[start:stop]
                if own.min() < 0 or own.max() > self.store.meta.columns.largest_position:
                    raise self._corrupt(POSITIONS)
                positions[place : place + stop - start] = own
        return positions

    def _corrupt(self, name: str) -> ConfigError:
        return ConfigError(
            f"{self.store.folder}: {name} is corrupt: it holds impossible values. Prepare the "
            "store again."
        )

    def _check(self, stream: np.ndarray) -> None:
        largest, lowest = int(stream.max()), int(stream.min()) if stream.dtype.kind == "i" else 0
        if largest < self.vocab_size and lowest >= 0:
            return
        token = largest if largest >= self.vocab_size else lowest
        if self.store.meta.vocab_size:
            problem = (
                f"token {token} is outside the store's vocabulary of {self.vocab_size} ids. The "
                "store is corrupt: prepare it again."
            )
        else:
            problem = (
                f"token {token} does not fit model.vocab_size={self.vocab_size}: these tokens are "
                "from another tokenizer. Give a model with a larger vocabulary, or convert them "
                "with `mtrain data prepare --from-tokenizer`."
            )
        raise ConfigError(f"{self.store.folder}: {problem}")
