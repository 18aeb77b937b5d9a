"""Placement: where the tokens of a batch lie, as a rank's attention sees it."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from mtrain_cli.attention.device_copy import to_device
from mtrain_cli.parallel.layout import Joined, Layout


class Placement:
    """The layout of a batch, and the layout that remains between two Ulysses all-to-alls.

    heads: number of neighboring ranks that share heads; 1 without Ulysses.
    """

    def __init__(self, layout: Layout, heads: int = 1) -> None:
        self.layout, self.heads = layout, heads
        self._orders: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    @cached_property
    def inside(self) -> Layout:
        """The layout in which the ranks that share heads count as one rank."""
        return self.layout if self.heads == 1 else Joined.of(self.layout, self.heads)

    def token_order(self, shard: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the permutation that sorts the tokens after an all-to-all, and its inverse.

        The all-to-all delivers the tokens of the ranks that share heads rank after rank. Both
        results are int64 [tokens]. They are copied to the device once.
        """
        key = shard, device
        if key not in self._orders:
            ranks = range(shard * self.heads, (shard + 1) * self.heads)
            order = np.argsort(
                np.concatenate([self.layout.positions(rank) for rank in ranks]), kind="stable"
            )
            self._orders[key] = to_device(order, device), to_device(np.argsort(order), device)
        return self._orders[key]
