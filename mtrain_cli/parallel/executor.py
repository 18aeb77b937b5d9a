"""Run the program of a pass on tensors.

`Executor.tensors` holds one tensor per live buffer. `Executor.run` runs one operation after the
other and drops the buffers that each operation frees. Pooled buffers return to the pool. An
operation must not keep a tensor, because the tensor would add to the next kernel's peak memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mtrain_cli.attention.kernel import Kernel
from mtrain_cli.attention.packed_columns import SharedColumns
from mtrain_cli.attention.partials import Pair, accumulation_dtype, merge
from mtrain_cli.parallel import buffers
from mtrain_cli.parallel.buffers import Buffer
from mtrain_cli.parallel.program import Operation, Program
from mtrain_cli.parallel.transport import Transport

if TYPE_CHECKING:
    from mtrain_cli.parallel.cast_rows import CastRows
    from mtrain_cli.parallel.exchange import Exchange, ShardTiles


@dataclass(eq=False)
class Executor:
    """Runs the program of one pass of one layer's attention on this rank.

    widths: heads of the tensors that Ulysses trades together.
    """

    exchange: Exchange
    program: Program
    transport: Transport
    tiles: ShardTiles
    columns: SharedColumns | None
    kernel: Kernel
    scale: float
    tensors: dict[Buffer, Any]
    message: QueryMessage | None = None
    widths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.buffers = self.exchange.buffers
        self.high = accumulation_dtype(next(iter(self.tensors.values())).dtype)

    def run(self, operations: Iterable[Operation]) -> None:
        tensors, pooled = self.tensors, self.program.pooled
        for op in operations:
            op.run(self)
            for buffer in op.frees:
                # A step without pairs has no results.
                tensor = tensors.pop(buffer, None)
                if tensor is not None and buffer in pooled:
                    self.buffers.release(tensor)
                del tensor

    @property
    def rows(self) -> CastRows:
        assert self.tiles.rows is not None, "a group cast needs a plan of its rows"
        return self.tiles.rows

    def total(self, buffer: Buffer) -> RunningAttention:
        """Return the output so far. The first call begins it."""
        if buffer not in self.tensors:
            self.tensors[buffer] = RunningAttention(self.tensors[buffers.Q])
        return self.tensors[buffer]


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
    def pack(rows: tuple[Any, ...], *, needs_out: bool) -> tuple[QueryMessage, Tensor]:
        """Pack q, dout, out, lse and delta. Return the format and the message, uint8 [bytes]."""
        q, dout, out, lse, delta = rows
        parts = [q, dout, lse, out if needs_out else delta]
        message = QueryMessage([(t.shape, t.dtype) for t in parts], needs_out=needs_out)
        packed = torch.empty(sum(message._room), dtype=torch.uint8, device=q.device)
        for place, part in zip(packed.split(message._room), parts, strict=True):
            flat = part.contiguous().view(-1).view(torch.uint8)
            place[: len(flat)] = flat
        return message, packed

    def unpack(self, packed: Tensor) -> tuple[Any, ...]:
        """Return q, dout, out, lse, delta. Only one of out and delta is sent; the other is None."""
        places = zip(packed.split(self._room), self._sizes, self._shapes, strict=True)
        q, dout, lse, last = (
            place[:n].view(dtype).view(shape) for place, n, (shape, dtype) in places
        )
        return (q, dout, last, lse, None) if self._needs_out else (q, dout, None, lse, last)


class RunningAttention:
    """Attention over the keys added so far.

    sums: out and lse; None before the first keys.
    """

    def __init__(self, q: Tensor) -> None:
        self._q, self._high = q, accumulation_dtype(q.dtype)
        self.sums: Pair | None = None

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Merge the attention over further keys. The first call takes over ``out`` and ``lse``."""
        if self.sums is None:
            self.sums = out, lse
        else:
            self.sums = self.sums[0].to(self._high), self.sums[1]
            merge(*self.sums, out, lse)

    def result(self) -> Pair:
        """Return out in the dtype of q, and lse. If no key was added, out is 0 and lse -inf."""
        q = self._q
        if self.sums is not None:
            return self.sums[0].to(q.dtype), self.sums[1]
        shape = q.shape[0], q.shape[2], q.shape[1]
        return torch.zeros_like(q), q.new_full(shape, float("-inf"), dtype=self._high)
