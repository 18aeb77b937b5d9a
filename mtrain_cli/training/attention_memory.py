"""Memory of one layer's attention: the buffers of its exchange and of its kernel.

The exchange's bytes come from its program (`parallel.program`). The kernel's bytes are formulas.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

from mtrain_cli.config.schema import Config, ModelConfig
from mtrain_cli.parallel.exchange_selection import ExchangeChoice
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.lowering import SHARDS, Traits, lower
from mtrain_cli.parallel.program import Compute, ComputeColumns, Program, ShardSizes, pool_bytes
from mtrain_cli.parallel.schedule import ScheduleOptions, make_schedule
from mtrain_cli.sparsity.pattern_registry import make_pattern
from mtrain_cli.training.index_memory import IndexShape

_MOST_OF_16_BITS = 32767


class AttentionMemory:
    """Bytes of one layer's attention on context rank 0, for one micro-batch.

    index: sizes of the dynamic index. None for dense attention.
    sizes: sizes of a worker's shards.
    """

    def __init__(
        self, config: Config, layout: Layout, exchange: ExchangeChoice, kernel: str, e: int
    ) -> None:
        """e: bytes of the compute dtype."""
        model, sequences = config.model, config.train.micro_batch
        self.model, self.layout, self.exchange, self.kernel = model, layout, exchange, kernel
        pattern = make_pattern(config.sparsity, config.seed)
        self.index = None if pattern is None else IndexShape.make(config, pattern, layout, exchange)
        heads = model.num_heads, model.num_kv_heads, model.head_dim
        self.sizes = ShardSizes(
            layout.tokens_per_worker * sequences,
            *heads,
            e,
            column_width=0 if self.index is None else self.index.column_width,
            sequences=sequences,
        )
        gathered = self.index is not None and self.index.gathered
        self._program = exchange.name, exchange.options(layout.workers), gathered

    @property
    def pool(self) -> int:
        """Bytes of the exchange's pool, which stay allocated from layer to layer."""
        return _pool(*self._program, self.sizes)

    @property
    def ring_kv(self) -> int:
        """Bytes of the KV shard that a ring keeps for backward; 0 for other exchanges.

        It is the shard that arrived last or, if queries circulate in backward, the rank's own.
        """
        circulates = self.exchange.circulates_among(self.layout.workers)
        return _saved(*self._program, self.sizes)["kv"] if circulates else 0

    @property
    def gathered_columns(self) -> int:
        """Bytes of the columns that a ring gathers once and forward keeps for backward."""
        return _saved(*self._program, self.sizes).get("columns", 0)

    def in_backward(self) -> int:
        """Return the peak bytes of backward, including the pool but not the saved tensors.

        They are the gradients of q, k and v, other workers' KV, and the kernel's buffers.
        """
        exchange, sizes, n = self.exchange, self.sizes, self.exchange.chunks
        groups = self.layout.workers // exchange.heads
        tokens, e = sizes.tokens * exchange.heads, sizes.dtype_bytes
        rows = sizes.tokens * sizes.heads * sizes.head_dim
        circulates = exchange.circulates_among(self.layout.workers)
        # FlashAttention-4 computes the two rectangles of a zigzag worker in turn and sums their
        # dk and dv in float32.
        zigzag = groups > 1 and self.layout.name == "zigzag"
        keys, pieces = tokens if circulates else tokens * groups, zigzag and self.index is None
        kernel = kernel_backward(self.kernel, self.model, sizes.tokens, keys, e, pieces, self.index)
        # PyTorch's kernel copies out, dout and lse of one part of the heads. If queries circulate,
        # it allocates a placeholder for out.
        copied = 0
        if self.kernel == "sdpa":
            copied = (2 * e * rows + 4 * sizes.tokens * sizes.heads) // n if n > 1 else 0
            copied += e * rows if exchange.queries_travel and circulates else 0
        # dk and dv are brought into rank order before they are cut into shards. Striped and
        # contiguous layouts do both in one copy, unless ranks share heads.
        kv_heads = max(1, sizes.kv_heads // exchange.heads)
        kv = 2 * tokens * groups * kv_heads * sizes.head_dim
        ordered = 3 * kernel.made * kv // (4 * n) if zigzag else 0
        if exchange.heads > 1:
            ordered = kernel.made * kv // (2 * n)
        gathered = self.index is not None and self.index.gathered
        scratch = (
            (Compute.__name__, (kernel.blocks if gathered else kernel.call) // n + copied),
            (ComputeColumns.__name__, kernel.columns),
            (SHARDS, ordered),
        )
        sizes = replace(sizes, made_bytes=kernel.made)
        return self.pool + _peak_of_backward(*self._program, sizes, scratch)


@cache
def _programs(exchange: str, options: ScheduleOptions, columns: bool) -> tuple[Program, Program]:
    """Return a worker's programs of the forward and of the backward pass.

    Args:
        columns: whether a ring gathers columns once.
    """
    schedule, traits = make_schedule(exchange, options), Traits(columns=columns)
    return lower(schedule, 0, traits=traits), lower(schedule, 0, traits=traits, backward=True)


# A search for settings that fit asks for the same few programs and sizes thousands of times.
@cache
def _pool(exchange: str, options: ScheduleOptions, columns: bool, sizes: ShardSizes) -> int:
    return pool_bytes(_programs(exchange, options, columns), sizes)


@cache
def _saved(
    exchange: str, options: ScheduleOptions, columns: bool, sizes: ShardSizes
) -> dict[str, int]:
    """Return the bytes of each buffer that forward saves, by first word of its name, such as kv."""
    forward, _ = _programs(exchange, options, columns)
    buffers = {name.partition(" ")[0]: forward.buffers[name] for name in forward.saved}
    return {word: int(b.size.of(sizes, forward.sharing)) for word, b in buffers.items()}


@cache
def _peak_of_backward(
    exchange: str,
    options: ScheduleOptions,
    columns: bool,
    sizes: ShardSizes,
    scratch: tuple[tuple[str, int], ...],
) -> int:
    """Return the peak bytes of backward, without the pool.

    Args:
        scratch: (name, bytes) of operations, as in `Program.peak_bytes`.
    """
    return _programs(exchange, options, columns)[1].peak_bytes(sizes, dict(scratch))


class KernelBuffers(NamedTuple):
    """Bytes of a kernel's backward call.

    made: bytes per element of the dk and dv that the call returns.
    call: buffers of a call that computes blocks and columns.
    blocks: buffers of a call that computes only blocks, since a ring gathers the columns.
    columns: buffers of a call that computes only columns.
    """

    made: int
    call: int
    blocks: int = 0
    columns: int = 0


def kernel_backward(
    kernel: str,
    model: ModelConfig,
    queries: int,
    keys: int,
    e: int,
    pieces: bool,
    index: IndexShape | None = None,
) -> KernelBuffers:
    """Return the bytes that a kernel's backward call allocates.

    The buffers of each kernel:
    - flash4: float32 accumulators of dq and, with grouped heads, of dk and dv; lse and delta. With
      an index also the lists of blocks and, after them, buffers for columns and another dq.
    - sdpa (FlashAttention-2): float32 accumulator of dq; dk and dv for every query head; dq, dk and
      dv of the current rectangle.
    - triton: lse and delta; the columns, or the lists of a bitmap. A list takes 2 bytes per pair of
      blocks and direction (4 beyond 32767 blocks).
    - reference: three float64 score matrices and more.

    Args:
        queries, keys: tokens of the call, summed over the micro-batch.
        e: bytes of the compute dtype.
        pieces: whether flash4 is called for more than one rectangle.
        index: sizes of the dynamic index. None for dense attention.
    """
    width, kv_width = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    grouped = model.num_heads != model.num_kv_heads
    row, statistics = queries * width, 4 * queries * model.num_heads
    columns = 0 if index is None else index.columns_in_backward(queries, model.head_dim, e)
    if kernel == "flash4":
        sums = 4 * row + 2 * statistics + (8 * keys * kv_width if grouped else 0)
        if pieces:
            return KernelBuffers(4, sums + e * (row + 2 * keys * kv_width))
        blocks = sums + (0 if index is None else 4 * index.listed(queries, keys))
        columns += statistics + e * row if columns else 0
        return KernelBuffers(e, max(blocks, columns), blocks, columns)
    if kernel == "sdpa":
        expanded = 2 * e * keys * width if grouped else 0
        current = e * (row + 2 * keys * kv_width)
        return KernelBuffers(4, 4 * row + 2 * statistics + expanded + current)
    if kernel == "triton":
        lists = 0
        if index is not None and index.bitmap:
            bytes_each = 4 if index.blocks <= _MOST_OF_16_BITS else 8
            lists = bytes_each * index.pairs_of_blocks(queries, keys)
        blocks = 2 * statistics + lists
        return KernelBuffers(4, blocks + columns, blocks, columns)
    scores = 3 * 8 * queries * keys * model.num_heads
    return KernelBuffers(e, scores, scores)
