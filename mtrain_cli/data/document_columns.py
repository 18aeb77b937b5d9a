"""The columns of a token store: masks and rotary positions that come with the documents.

``slices.bin``: slices of all documents end to end, int64[slices, 5], as in `token_documents`.
``slice_offsets.bin``: int64[num_documents + 1]. Document d has the slices offsets[d] to
    offsets[d + 1] - 1. A document without slices has no mask of its own.
``positions.bin``: rotary position of each token, int32[num_tokens]. -1 for all tokens of a document
    without positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from mtrain_cli.attention.mask import IntArray, SequenceMask, cut_slices
from mtrain_cli.data.token_documents import TokenDocument, TokenFields

SLICES, SLICE_OFFSETS, POSITIONS = "slices.bin", "slice_offsets.bin", "positions.bin"
NO_POSITION = -1
INTEGER: np.dtype = np.dtype("<i8")
POSITION: np.dtype = np.dtype("<i4")
SLICE_FIELDS = 5


@dataclass
class WrittenColumns:
    """What the columns of an unfinished store hold.

    masked, positioned: number of documents with a mask, and with positions.
    intervals: most separate intervals of keys that a query of a document sees.
    keyless: number of tokens that see no key.
    empty_slices: number of given slices without queries or without keys, which the store drops.
    largest_position: -1 without positions.
    """

    slices: int = 0
    masked: int = 0
    intervals: int = 1
    keyless: int = 0
    empty_slices: int = 0
    positioned: int = 0
    largest_position: int = NO_POSITION


class ColumnWriter:
    """Append the columns of documents to the open files of a store, those of `column_sizes`.

    written: what the files hold, once pending values are flushed.
    first: whether no document has been written yet.
    """

    def __init__(self, files: Mapping[str, BinaryIO], written: WrittenColumns, first: bool) -> None:
        self.files, self.written = files, written
        self._pending: dict[str, list[np.ndarray]] = {name: [] for name in files}
        if first and SLICE_OFFSETS in files:
            self._pending[SLICE_OFFSETS].append(np.zeros(1, INTEGER))

    def append(self, document: TokenDocument, length: int) -> None:
        """Append the columns of the first ``length`` tokens of a document."""
        written = self.written
        if SLICES in self.files:
            if document.slices is not None:
                slices = cut_slices(document.slices, 0, length)
                # A document whose tokens see nothing still has a mask: an empty slice says so.
                slices = slices if len(slices) else np.zeros((1, SLICE_FIELDS), np.int64)
                mask = SequenceMask.from_slices(slices, length, length)
                q_start, q_stop, k_start, k_stop, _ = document.slices.T
                written.keyless += int((mask.high <= mask.low).all(0).sum())
                written.empty_slices += int(((q_stop == q_start) | (k_stop == k_start)).sum())
                self._pending[SLICES].append(slices.astype(INTEGER))
                written.slices += len(slices)
                written.masked += 1
                written.intervals = max(written.intervals, document.intervals)
            self._pending[SLICE_OFFSETS].append(np.array([written.slices], INTEGER))
        if POSITIONS in self.files:
            positions = np.full(length, NO_POSITION, POSITION)
            if document.positions is not None:
                positions[:] = document.positions[:length]
                written.positioned += 1
                written.largest_position = max(written.largest_position, int(positions.max()))
            self._pending[POSITIONS].append(positions)

    def flush(self) -> None:
        """Write all pending values to the files."""
        for name, arrays in self._pending.items():
            for array in arrays:
                self.files[name].write(np.ascontiguousarray(array).data)
            arrays.clear()


def column_sizes(
    fields: TokenFields | None, written: WrittenColumns, tokens: int, documents: int
) -> dict[str, int]:
    """Return the size in bytes of each column's file after a number of tokens and documents.

    fields: keys of the corpus; None for a corpus of text, whose store has no columns.
    """
    sizes = {}
    if fields is not None and fields.mask is not None:
        sizes[SLICES] = written.slices * SLICE_FIELDS * INTEGER.itemsize
        sizes[SLICE_OFFSETS] = (documents + 1) * INTEGER.itemsize if documents else 0
    if fields is not None and fields.positions is not None:
        sizes[POSITIONS] = tokens * POSITION.itemsize
    return sizes


@dataclass(frozen=True)
class DocumentColumns:
    """The memory-mapped arrays of the files; None without masks or positions."""

    slices: IntArray | None = None
    slice_offsets: IntArray | None = None
    positions: np.ndarray | None = None

    def slices_of(self, document: int) -> IntArray | None:
        """Return the slices of a document; None if it has no mask of its own."""
        if self.slices is None or self.slice_offsets is None:
            return None
        begin, end = self.slice_offsets[document : document + 2]
        return self.slices[begin:end] if end > begin else None

    def positions_of(self, first: int, end: int) -> np.ndarray | None:
        """Return the positions of tokens ``first`` to ``end`` - 1 of the store, all of a document.

        Return None if the document has none.
        """
        if self.positions is None or self.positions[first] == NO_POSITION:
            return None
        return self.positions[first:end]

    @property
    def arrays(self) -> list[np.ndarray]:
        """All arrays, for the hash of the store."""
        arrays = (self.slices, self.slice_offsets, self.positions)
        return [array for array in arrays if array is not None]


NO_COLUMNS = DocumentColumns()
