"""Run the program of a pass on tensors.

`Executor.tensors` holds one tensor per live buffer. `Executor.run` runs one operation after the
other and drops the buffers that each operation frees. Pooled buffers return to the pool. An
operation must not keep a tensor, because the tensor would add to the next kernel's peak memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mtrain_cli.attention.kernel import Kernel
from mtrain_cli.attention.partials import accumulation_dtype
from mtrain_cli.attention.shared_columns import SharedColumns
from mtrain_cli.parallel import buffers
from mtrain_cli.parallel.buffers import Buffer
from mtrain_cli.parallel.program import Operation, Program
from mtrain_cli.parallel.query_message import QueryMessage
from mtrain_cli.parallel.running_attention import RunningAttention
from mtrain_cli.parallel.transport import Transport

if TYPE_CHECKING:
    from mtrain_cli.parallel.cast_rows import CastRows
    from mtrain_cli.parallel.exchange import Exchange, ShardTiles


class Executor:
    """Runs the program of one pass of one layer's attention on this rank.

    columns: the single columns of the index that are gathered once per pass; None if no columns
        are gathered.
    tensors: the live buffers. At first these are the program's inputs.
    message: format of the query messages that circulate.
    widths: heads of the tensors that Ulysses trades together.
    """

    def __init__(
        self,
        exchange: Exchange,
        program: Program,
        transport: Transport,
        tiles: ShardTiles,
        columns: SharedColumns | None,
        kernel: Kernel,
        scale: float,
        tensors: dict[Buffer, Any],
    ) -> None:
        self.exchange, self.program, self.transport = exchange, program, transport
        self.tiles, self.columns, self.kernel, self.scale = tiles, columns, kernel, scale
        self.tensors = tensors
        self.buffers = exchange.buffers
        self.high = accumulation_dtype(next(iter(tensors.values())).dtype)
        self.message: QueryMessage | None = None
        self.widths: list[int] = []

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
        total = self.tensors.get(buffer)
        if total is None:
            total = self.tensors[buffer] = RunningAttention(self.tensors[buffers.Q])
        return total
