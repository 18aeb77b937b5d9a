"""The message with which another rank computes the gradients of this rank's queries."""

from __future__ import annotations

from typing import Any

import torch


class QueryMessage:
    """The format of a query message.

    The message is one flat byte tensor. It holds q, dout and lse. It also holds out if the kernel
    needs out, and delta otherwise.
    """

    def __init__(self, shapes: list[tuple[torch.Size, torch.dtype]], *, needs_out: bool) -> None:
        self._shapes, self._needs_out = shapes, needs_out
        self._sizes = [shape.numel() * dtype.itemsize for shape, dtype in shapes]
        # Align every part to 256 bytes, as torch's allocator does.
        self._room = [-(-n // 256) * 256 for n in self._sizes]

    @staticmethod
    def pack(rows: tuple[Any, ...], *, needs_out: bool) -> tuple[QueryMessage, torch.Tensor]:
        """Pack q, dout, out, lse and delta. Return the format and the message, uint8 [bytes]."""
        q, dout, out, lse, delta = rows
        parts = [q, dout, lse, out if needs_out else delta]
        message = QueryMessage([(t.shape, t.dtype) for t in parts], needs_out=needs_out)
        packed = torch.empty(sum(message._room), dtype=torch.uint8, device=q.device)
        for place, part in zip(packed.split(message._room), parts, strict=True):
            flat = part.contiguous().view(-1).view(torch.uint8)
            place[: len(flat)] = flat
        return message, packed

    def unpack(self, packed: torch.Tensor) -> tuple[Any, ...]:
        """Return q, dout, out, lse, delta. Only one of out and delta is sent; the other is None."""
        places = zip(packed.split(self._room), self._sizes, self._shapes, strict=True)
        q, dout, lse, last = (
            place[:n].view(dtype).view(shape) for place, n, (shape, dtype) in places
        )
        return (q, dout, last, lse, None) if self._needs_out else (q, dout, None, lse, last)
