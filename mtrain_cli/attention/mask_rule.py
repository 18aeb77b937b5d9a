"""The rule by which a run masks its sequences."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mtrain_cli.attention.mask import IntArray, SequenceMask, document_starts
from mtrain_cli.attention.named_masks import CAUSAL
from mtrain_cli.config.mask_settings import MaskSettings
from mtrain_cli.config.schema import Config


class FullLayers(NamedTuple):
    """The layers that see all earlier tokens, in a model whose other layers have another mask."""

    masks: Sequence[SequenceMask]
    layers: frozenset[int]
    of: int

    def kinds(
        self, others: Sequence[SequenceMask]
    ) -> tuple[tuple[Sequence[SequenceMask], int], ...]:
        """Return the masks of each kind of layer, and the number of these layers in the model."""
        full = len(self.layers)
        return (others, self.of - full), (self.masks, full)


@dataclass(frozen=True)
class MaskRule:
    """Makes the mask of a sequence: the configured mask, inside each document if asked for.

    Slices that come with the documents replace it.
    """

    document_mask: bool
    mask: MaskSettings = CAUSAL

    @staticmethod
    def of(config: Config) -> MaskRule:
        return MaskRule(config.data.document_mask, config.mask)

    def by_layers(self, layers: int) -> tuple[tuple[MaskRule, int], ...]:
        """Return each rule that some of a model's ``layers`` follow, with the number of these."""
        full = sum(map(self.mask.is_full, range(layers)))
        if not full:
            return ((self, layers),)
        window = replace(self, mask=self.mask.of_window_layers)
        return (window, layers - full), (MaskRule(self.document_mask), full)

    def __call__(
        self,
        documents: NDArray[np.integer] | None,
        length: int,
        padded: int,
        slices: IntArray | None = None,
    ) -> SequenceMask:
        """Return the mask of a sequence. slices: those of the data, in positions, [slices, 5]."""
        if slices is not None:
            return SequenceMask.from_slices(slices, length, padded)
        whole = self.undivided(length, padded)
        if documents is None or not self.document_mask:
            return whole
        starts = document_starts(documents, padded)
        if len(documents) >= length and not starts.any():
            return whole
        if (first := self.mask.first_keys(starts)) is not None:
            return SequenceMask.from_first(first, length)
        return whole.intersect(SequenceMask.from_documents(documents, padded, causal=False))

    def undivided(self, length: int, padded: int) -> SequenceMask:
        """Return the mask of a sequence that is one document: each time the same object."""
        return _undivided(self.mask, length, padded)

    def starts(self, documents: NDArray[np.integer] | None, padded: int) -> IntArray:
        """Return the position at which the context of each position starts, int64 [padded]."""
        if documents is None or not self.document_mask:
            return np.zeros(padded, np.int64)
        return document_starts(documents, padded)


@functools.lru_cache(maxsize=8)  # a run has one or two lengths
def _undivided(mask: MaskSettings, length: int, padded: int) -> SequenceMask:
    if mask.kind == "causal":
        return SequenceMask.causal(length, padded)
    return SequenceMask.from_slices(mask.slices(length), length, padded)
