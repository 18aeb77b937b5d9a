"""Read sequences of equal length, into which `packing` packs documents, each on demand."""

from __future__ import annotations

from collections.abc import Mapping
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
from mtrain_cli.data.packing import Bins, Part, Stream
from mtrain_cli.data.sampler import Sampler, shuffled_order
from mtrain_cli.data.store import POSITIONS, SLICES, StoreMeta, Stretch, TokenStore


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
    """Sequences of ``seq`` tokens of a `Stream` of documents. ``dataset[i]`` reads one sequence.

    Every token is in exactly one sequence, except a tail of less than 5 % of a sequence. The label
    of a position is the next token of the stream, even if that token is in the next sequence. If
    the store demands whole documents, as conversations do, `Bins` packs them instead.

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
    too_long: as in `Bins`.
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
        too_long: str = "truncate_left",
    ) -> None:
        self.seq = seq
        self.num_tokens = store.meta.num_tokens
        self.vocab_size = store.meta.vocab_size or vocab_size
        self.fingerprint, self.samples = store.meta.sha256, store.samples
        self.verify = store.verify
        self.store, self._document_mask, self._location = store, document_mask, location
        self._masked, self._positioned = masked, positioned
        order = shuffled_order(store.meta.num_documents, seed) if shuffle else None
        if store.meta.whole:
            lengths = np.diff(store.offsets)
            self._packing: Stream | Bins = Bins(lengths, seq, seed if shuffle else None, too_long)
        else:
            self._packing = Stream(store.offsets, seq, order)
        self.sequences = self._packing.sequences
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
        """The end of a line that says what the source left out, and what is special about it."""
        meta = self.store.meta
        return "".join(
            f"; {line}" for line in (*meta.remarks, describe_left_out(meta.left_out)) if line
        )

    def sampler(self, seed: int) -> Sampler:
        """Return a sampler that orders the sequences by a new permutation in each epoch."""
        return Sampler(self._length, seed)

    def _sample(self, index: int) -> Sample:
        parts = self._packing.parts(index)
        if self._document_mask and parts[-1].place == self.seq:
            # The sequence ends with its document, so its last position has no label. Do not read
            # the next token: it may need another shard to be decompressed.
            parts.pop()
        stream, ends, targets = self._read(parts)
        real, size = min(self.seq, stream.size), stream.size
        tokens = np.zeros(self.seq, np.int32)
        tokens[:real] = stream[:real]
        labels = np.full(self.seq, IGNORED, np.int32)
        labels[: size - 1] = stream[1:]
        if targets is not None:
            labels[: size - 1][~targets[1:]] = IGNORED
        documents = np.zeros(self.seq, np.int32)
        if self._document_mask:
            labels[ends[ends <= self.seq] - 1] = IGNORED
            documents[ends[ends < self.seq]] = 1
            np.cumsum(documents, out=documents)
        slices = None
        if self._masked:
            slices = self._slices(parts)
            # If the next token does not see this one, it continues another text, such as the
            # question of another answer.
            labels[: size - 1][~self._continued(parts, size)[1:]] = IGNORED
        positions = None
        if self._positioned:
            positions = self._positions(parts, size)
            # If the position does not rise, the next token continues another text, too.
            labels[: size - 1][positions[1:size] <= positions[: size - 1]] = IGNORED
            positions = positions[: self.seq]
        ends_document = self._document_mask and bool((ends == real).any())
        return Sample(tokens, labels, documents, slices, positions, real, ends_document)

    def describe(self) -> str:
        """Return one line: source, documents, tokens, tokenizer, sequences, and location."""
        meta = self.store.meta
        vocabulary = f"{meta.vocab_size:,}" if meta.vocab_size else "unknown"
        held_out = self.sequences - len(self)
        tail = self._packing.describe() + (f", {held_out} more held out" if held_out else "")
        begin = self.store.describe_begin() if isinstance(self.store, TokenStore) else ""
        return (
            f"{meta.source}: {with_count(meta.num_documents, 'document')}, {self.num_tokens:,} "
            f"tokens ({meta.tokenizer}, vocabulary {vocabulary}){begin and f', {begin}'}, "
            f"{with_count(len(self), 'sequence')} of {self.seq:,}{tail}{self.left_out}; "
            f"{self._location}"
        )

    def _read(self, parts: list[Part]) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return tokens, ends of documents and targets of the parts as `Stretch` has them."""
        offsets, ends, targets = self.store.offsets, [], None
        read = [self.store.read(part.unit, part.start, part.stop) for part in parts]
        for part, stretch in zip(parts, read, strict=True):
            if stretch.ends is not None:
                ends += (stretch.ends + part.place).tolist()
            if part.stop == offsets[part.unit + 1] - offsets[part.unit]:
                ends.append(part.place + part.stop - part.start)
        stream = np.concatenate([stretch.tokens for stretch in read])
        if any(stretch.targets is not None for stretch in read):
            every = (
                np.ones(stretch.tokens.size, bool) if stretch.targets is None else stretch.targets
                for stretch in read
            )
            targets = np.concatenate(list(every))
        self._check(stream)
        return stream, np.array(ends, np.int64), targets

    def _slices(self, parts: list[Part]) -> IntArray:
        assert isinstance(self.store, TokenStore)
        tables, most = [], self.store.meta.columns.intervals
        for unit, start, last, place in parts:
            stop = min(last, start + self.seq - place)  # without the token after the sequence
            own = self.store.slices_of(unit)
            if own is None:
                table = causal_slices(stop - start)
            else:
                length = int(self.store.offsets[unit + 1] - self.store.offsets[unit])
                if not intervals_at_most(own, length, most):
                    raise self._corrupt(SLICES)
                table = cut_slices(own, start, stop)
            table[:, :4] += place
            tables.append(table)
        return np.concatenate(tables)

    def _continued(self, parts: list[Part], size: int) -> np.ndarray:
        """Return whether each token sees the token before it, bool [size]."""
        assert isinstance(self.store, TokenStore)
        continued = np.ones(size, bool)
        for unit, start, stop, place in parts:
            if (own := self.store.slices_of(unit)) is not None:
                continued[place : place + stop - start] = continues(own, start, stop)
        return continued

    def _positions(self, parts: list[Part], size: int) -> np.ndarray:
        """Return the rotary position of each token, int32[size], at least [seq]."""
        assert isinstance(self.store, TokenStore)
        positions = np.arange(max(self.seq, size), dtype=np.int32)
        for unit, start, stop, place in parts:
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
