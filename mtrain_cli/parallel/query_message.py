"""The message that lets another rank compute the gradients of these queries."""

from __future__ import annotations

from typing import Any

import torch


class QueryMessage:
    """What another worker needs to compute gradients for these queries, as one flat byte tensor.

    It holds q, dout and lse, and out (if the kernel needs it) or delta.
    """

    def __init__(self, rows: tuple[Any, ...], *, needs_out: bool) -> None:
        q, dout, out, lse, delta = rows
        self._needs_out = needs_out
        parts = [q, dout, lse, out if needs_out else delta]
        self._shapes = [(t.shape, t.dtype) for t in parts]
        flat = [t.contiguous().view(-1).view(torch.uint8) for t in parts]
        self._sizes = [len(t) for t in flat]
        # Align every part to 256 bytes, as torch's allocator does.
        self._room = [-(-n // 256) * 256 for n in self._sizes]
        self.packed = torch.empty(sum(self._room), dtype=torch.uint8, device=q.device)
        for place, part in zip(self.packed.split(self._room), flat, strict=True):
            place[: len(part)] = part

    def unpack(self, packed: torch.Tensor) -> tuple[Any, ...]:
        """Return q, dout, out, lse, delta; out or delta is None, whichever was not sent."""
        places = zip(packed.split(self._room), self._sizes, self._shapes, strict=True)
        q, dout, lse, last = (
            place[:n].view(dtype).view(shape) for place, n, (shape, dtype) in places
        )
        return (q, dout, last, lse, None) if self._needs_out else (q, dout, None, lse, last)
