"""The keys and values of a batch of sequences on one worker.

A worker holds the keys of the tokens that the layout gives it, and of every n-th generated token on
n workers. The order of keys does not matter: a new token sees all of them, and rotary positions are
already part of the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mtrain_cli.config.schema import ModelConfig
from mtrain_cli.model.decoder import Attend
from mtrain_cli.parallel.layout import Layout


class KvCache:
    """Keys and values of all layers on one worker.

    keys, values: for each layer [batch, capacity + 1, kv_heads, head_dim]. All workers write each
        token to their first free slot, so that all run the same operations, but only the worker
        that holds the token counts it. A full cache needs one more slot for this.
    used: number of slots in use of each sequence, int32 [batch].
    """

    def __init__(
        self,
        model: ModelConfig,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate the cache.

        Args:
            capacity: most tokens of a sequence that this worker holds.
        """
        shape = batch, capacity + 1, model.num_kv_heads, model.head_dim
        # Zeros, not arbitrary memory: kernels multiply slots that are not used by 0, and 0 times
        # NaN is NaN.
        self.keys, self.values = (
            [torch.zeros(shape, dtype=dtype, device=device) for _ in range(model.num_layers)]
            for _ in range(2)
        )
        self.used = torch.zeros(batch, dtype=torch.int32, device=device)
        self._rows = torch.arange(batch, device=device)

    @property
    def batch(self) -> int:
        return self.keys[0].shape[0]

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[1] - 1

    def reset(self) -> None:
        """Forget all sequences."""
        self.used.zero_()

    def store(self, layer: int, row: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store the keys and values of a prompt, [1, tokens, kv_heads, head_dim]."""
        tokens = k.shape[1]
        assert tokens <= self.capacity, (tokens, self.capacity)
        self.keys[layer][row, :tokens] = k[0]
        self.values[layer][row, :tokens] = v[0]

    def take_token(self, mine: torch.Tensor) -> torch.Tensor:
        """Count one more token in each sequence, and return its slots for `append`, int64 [batch].

        mine: whether this worker holds the token, a bool tensor on the device.
        """
        slots = self.used.long()
        self.used += mine
        return slots

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Store one token of each sequence.

        k, v: [batch, 1, kv_heads, head_dim].
        slots: result of `take_token`.
        """
        self.keys[layer][self._rows, slots] = k[:, 0]
        self.values[layer][self._rows, slots] = v[:, 0]


class StoringAttention:
    """An `Attend` function that stores the keys and values of a prompt, then calls another one."""

    def __init__(
        self,
        attend: Attend,
        release: Callable[[int], None],
        store: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None,
    ) -> None:
        """Prepare to compute one prompt.

        Args:
            attend: attention over the prompt.
            release: frees what ``attend`` keeps of a layer for a backward pass.
            store: takes layer, keys and values; None to store nothing.
        """
        self._attend, self._release, self._store = attend, release, store

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int
    ) -> torch.Tensor:
        if self._store is not None:
            self._store(layer, k, v)
        out = self._attend(q, k, v, layer)
        self._release(layer)
        return out


def most_held(layout: Layout, tokens: int) -> int:
    """Return the largest number of tokens of a prompt that a worker holds."""
    shards = (layout.positions(rank) for rank in range(layout.workers))
    return max(int((positions < tokens).sum()) for positions in shards)


def capacity_for(held: Sequence[int], max_new: int, workers: int) -> int:
    """Return the capacity that a batch needs on a worker.

    Args:
        held: number of tokens of each prompt that a worker holds. If it is that of the worker with
            most, all workers have equal capacity.
        workers: number of workers that share the generated tokens.
    """
    # No later token sees the last one.
    return max(1, max(held, default=0) + -(-(max_new - 1) // workers))
