"""Attention over a growing set of keys."""

from __future__ import annotations

import torch

from mtrain_cli.attention.partials import accumulation_dtype, merge


class RunningAttention:
    """Attention output and lse over the keys added so far."""

    def __init__(self, q: torch.Tensor) -> None:
        self._q = q
        self._high = accumulation_dtype(q.dtype)
        self._out: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None

    def add(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge the attention over further keys into the sums. No key may be added twice.

        The first call takes over ``out`` and ``lse`` as the sums.
        """
        if self._out is None or self._lse is None:
            self._out, self._lse = out, lse
            return
        self._out = self._out.to(self._high)
        merge(self._out, self._lse, out, lse)

    def partial(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None if self._out is None or self._lse is None else (self._out, self._lse)

    def replace_partial(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Replace the sums by ``out`` and ``lse``, which already include the sums."""
        self._out, self._lse = out, lse

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out in the dtype of q, and lse. If no key was added, out is 0 and lse -inf."""
        q = self._q
        if self._out is None or self._lse is None:
            shape = q.shape[0], q.shape[2], q.shape[1]
            lse = torch.full(shape, float("-inf"), dtype=self._high, device=q.device)
            return torch.zeros_like(q), lse
        return self._out.to(q.dtype), self._lse
