"""The mask (later also a dynamic index) as one kernel call sees it, on the device, made once per batch and shared by all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from mtrain_cli.attention.mask import Slice, Spans


@dataclass(frozen=True)
class Tiles:
    """What one kernel call computes: queries [batch, q] against keys [batch, k].

    low, high: int32 [batch, q] on the compute device, the key slots that a row sees (`Spans`).
    num_keys: key slots k. pairs: query-key pairs computed, summed over the batch, per head.
    slices: per sequence of the batch, the same mask as rectangles.
    cache: what a kernel derives from the tiles (block lists), kept for the other layers and for backward.
    """

    low: torch.Tensor
    high: torch.Tensor
    num_keys: int
    pairs: int
    slices: tuple[tuple[Slice, ...], ...]
    cache: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def make(spans: Sequence[Spans], device: torch.device | str = "cpu") -> Tiles:
        """One `Spans` per sequence of the batch, all of one size."""
        host = torch.from_numpy(np.stack([np.stack([s.low, s.high]) for s in spans]).astype(np.int32))
        if torch.device(device).type == "cuda":
            host = host.pin_memory().to(device, non_blocking=True)
        return Tiles(
            low=host[:, 0].contiguous(),
            high=host[:, 1].contiguous(),
            num_keys=spans[0].num_keys,
            pairs=sum(s.pairs for s in spans),
            slices=tuple(tuple(s.slices()) for s in spans),
        )

    @property
    def empty(self) -> bool:
        """Nothing to compute: the executor skips the kernel, never the communication."""
        return self.pairs == 0

    @cached_property
    def same_for_batch(self) -> bool:
        """All sequences of the batch have the same rectangles, so one kernel call may serve them together."""
        return all(s == self.slices[0] for s in self.slices)
