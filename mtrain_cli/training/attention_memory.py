"""Memory of one layer's attention: the buffers of its exchange and of its kernel.

The program of the exchange lists the sizes of its buffers (`parallel.program`). Formulas give the
sizes of the kernel's buffers.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import cache, cached_property
from typing import NamedTuple

from mtrain_cli.attention.block_lists import BLOCK, mask_list_bytes, most_partial_blocks, word_bytes
from mtrain_cli.attention.mask import KeySpans
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.attention.named_masks import CAUSAL
from mtrain_cli.config.mask_settings import MaskSettings
from mtrain_cli.config.pattern_settings import DenseSettings
from mtrain_cli.config.schema import Config, ModelConfig
from mtrain_cli.data.open_dataset import most_intervals
from mtrain_cli.parallel.buffers import Kind
from mtrain_cli.parallel.cast_rows import largest_shares, too_many_to_count, whole_shares
from mtrain_cli.parallel.exchange_selection import ExchangeChoice
from mtrain_cli.parallel.layout import Balanced, Contiguous, Layout, Placement, Striped, Zigzag
from mtrain_cli.parallel.lowering import lower
from mtrain_cli.parallel.program import Program, ShardSizes, pool_bytes
from mtrain_cli.parallel.program_builder import Traits
from mtrain_cli.parallel.schedule import ScheduleOptions, make_schedule
from mtrain_cli.sparsity.pattern import make_pattern
from mtrain_cli.training.index_memory import IndexShape

_MOST_OF_16_BITS = 32767


class AttentionMemory:
    """Memory of one layer's attention on context rank 0, for one micro-batch, in bytes.

    index: sizes of the dynamic index. None for dense attention.
    sizes: sizes of a worker's shards.
    dense: memory of the layers without index in a sparse run. None if all layers are alike.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        exchange: ExchangeChoice,
        kernel: str,
        e: int,
        dense_kernel: str | None = None,
    ) -> None:
        """Prepare the sizes.

        Args:
            e: bytes of the compute dtype.
            dense_kernel: kernel of the layers without index in a sparse run; None for ``kernel``.
        """
        self.model, self.layout = config.model, layout
        self.exchange, self.kernel = exchange, kernel
        self.intervals = most_intervals(config)
        self.dense: AttentionMemory | None = None
        if config.sparsity.dense_layers:
            of_dense = replace(config, sparsity=DenseSettings())
            self.dense = AttentionMemory(of_dense, layout, exchange, dense_kernel or kernel, e)
        pattern = make_pattern(config.sparsity, config.seed)
        self.index = None if pattern is None else IndexShape.make(config, pattern, layout, exchange)
        self._masks = config.mask, config.data.document_mask, config.train.micro_batch
        self.sizes = shard_sizes(config, layout, exchange, e)
        if self.index is not None:
            self.sizes = replace(self.sizes, column_width=self.index.column_width)
        gathered = self.index is not None and self.index.gathered
        traits = Traits(
            columns=gathered,
            # PyTorch's kernel copies its inputs; the other kernels take views.
            copies_parts=kernel == "sdpa",
            zigzag=layout.name == "zigzag",
        )
        self._program = exchange.name, exchange.options(layout.workers), traits

    @cached_property
    def pool(self) -> int:
        """Bytes of the exchange's pool, which stays allocated from layer to layer."""
        return _pool(*self._program, self.sizes)

    @cached_property
    def ring_kv(self) -> int:
        """Bytes of the KV shard of another rank that a ring keeps for backward; 0 without one.

        This is the shard that arrived last in forward. If queries circulate in backward, forward
        ends with the rank's own shard, which recomputation makes anyway.
        """
        circulates = self.exchange.circulates_among(self.layout.workers)
        foreign = circulates and not self.exchange.queries_travel
        return _saved(*self._program, self.sizes)[Kind.KV] if foreign else 0

    @cached_property
    def gathered_columns(self) -> int:
        """Bytes of the columns that a ring gathers in forward and keeps for backward."""
        return _saved(*self._program, self.sizes).get(Kind.COLUMNS, 0)

    @cached_property
    def mask_tables(self) -> int:
        """Bytes that FlashAttention-4 derives from the masks and keeps for a micro-batch.

        These are the lists of blocks and the words of bits of dense attention, for sequences of one
        document. Layers with different masks have tables of their own.
        """
        mask, documents, sequences = self._masks
        heads, layout = self.exchange.heads, self.layout
        whole = layout.workers == heads or layout.name in (Contiguous.name, Zigzag.name)
        rectangles = whole and not documents and mask.kind in ("causal", "full")
        if self.kernel != "flash4" or self.index is not None or rectangles:
            return 0
        kinds = (mask.of_window_layers, CAUSAL) if mask.is_mixed else (mask,)
        seen: int | Fraction = layout.padded_seq
        if self.sizes.casts:
            own = layout.tokens_per_worker * heads
            seen = min(own * (1 + sum(received for _, received in self.sizes.casts)), seen)
        return sum(_mask_tables(kind, layout, heads, int(seen), sequences) for kind in kinds)

    @cached_property
    def in_backward(self) -> int:
        """Peak bytes of backward, without the tensors that forward saved.

        At the peak, backward holds the exchange's pool, the gradients of q, k and v, the KV of
        other workers, and the kernel's buffers.
        """
        exchange, sizes, workers = self.exchange, self.sizes, self.layout.workers
        ranks: int | Fraction = exchange.heads if exchange.circulates_among(workers) else workers
        if sizes.casts:
            ranks = exchange.heads * (1 + sum(received for _, received in sizes.casts))
        # FlashAttention-4 computes the two rectangles of a zigzag worker in turn and sums their
        # dk and dv in float32.
        zigzag = workers > exchange.heads and self.layout.name == "zigzag"
        kernel = kernel_backward(
            self.kernel,
            self.model,
            sizes.tokens,
            int(sizes.tokens * ranks),
            sizes.dtype_bytes,
            pieces=zigzag and self.index is None,
            index=self.index,
            intervals=self.intervals,
        )
        gathered = self.index is not None and self.index.gathered
        call = (kernel.blocks if gathered else kernel.call) // exchange.chunks
        sizes = replace(sizes, made_bytes=kernel.made)
        return self.pool + _peak_of_backward(*self._program, sizes, call, kernel.columns)


def shard_sizes(
    config: Config, layout: Layout, exchange: ExchangeChoice, dtype_bytes: int
) -> ShardSizes:
    """Return the sizes of a worker's shards, without the single columns of an index."""
    model, sequences = config.model, config.train.micro_batch
    return ShardSizes(
        tokens=layout.tokens_per_worker * sequences,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype_bytes=dtype_bytes,
        sequences=sequences,
        casts=_casts(
            exchange.name,
            exchange.options(layout.workers),
            layout,
            config.sparsity.block,
            CAUSAL if config.mask.is_mixed else config.mask,
            config.data.document_mask,
        ),
    )


@cache
def _programs(exchange: str, options: ScheduleOptions, traits: Traits) -> tuple[Program, Program]:
    """Return rank 0's program of the forward pass and its program of the backward pass."""
    schedule = make_schedule(exchange, options)
    return lower(schedule, 0, traits=traits), lower(schedule, 0, traits=traits, backward=True)


@cache
def _casts(
    exchange: str,
    options: ScheduleOptions,
    layout: Layout,
    block: int | None,
    mask: MaskSettings,
    documents: bool,
) -> tuple[tuple[Fraction, Fraction], ...]:
    """Return the largest shares of rows that group casts move under a mask; () without them.

    Documents make them smaller, unless they change the layout. A balanced layout of packed
    documents then moves at most about as much as one that deals out its chunks in turn.
    """
    schedule = make_schedule(exchange, options)
    if not schedule.traits.by_mask or too_many_to_count(layout):
        return whole_shares(schedule)
    whole = MaskRule(document_mask=False, mask=mask).undivided(layout.seq, layout.padded_seq)
    shares = largest_shares(schedule, layout, [whole], block)
    if layout.name != Balanced.name or not documents:
        return shares
    dealt = Striped(layout.workers, layout.seq, layout.block_size, layout.unit)
    spread = largest_shares(schedule, dealt, [whole], block)
    return tuple((max(a, c), max(b, d)) for (a, b), (c, d) in zip(shares, spread, strict=True))


# A search for settings that fit asks for the same few programs and sizes thousands of times.
@cache
def _pool(exchange: str, options: ScheduleOptions, traits: Traits, sizes: ShardSizes) -> int:
    return pool_bytes(_programs(exchange, options, traits), sizes)


@cache
def _saved(
    exchange: str, options: ScheduleOptions, traits: Traits, sizes: ShardSizes
) -> dict[Kind, int]:
    """Return the size of each buffer that forward saves."""
    forward, _ = _programs(exchange, options, traits)
    saved = {buffer.kind: forward.sizes[buffer] for buffer in forward.saved}
    return {kind: int(size.of(sizes, forward.sharing)) for kind, size in saved.items()}


@cache
def _peak_of_backward(
    exchange: str,
    options: ScheduleOptions,
    traits: Traits,
    sizes: ShardSizes,
    call: int,
    columns: int,
) -> int:
    """Return the peak bytes of backward, without the pool.

    Args:
        call, columns: bytes that the kernel allocates; see `Program.peak_bytes`.
    """
    return _programs(exchange, options, traits)[1].peak_bytes(sizes, call, columns)


@cache
def _mask_tables(mask: MaskSettings, layout: Layout, heads: int, keys: int, sequences: int) -> int:
    """Return the bytes of the tables of one mask (`AttentionMemory.mask_tables`).

    Args:
        heads: number of ranks that share heads.
        keys: number of keys of a sequence with which a rank computes.
    """
    queries = Placement(layout, heads).inside.positions(0)
    whole = MaskRule(document_mask=False, mask=mask).undivided(layout.seq, layout.padded_seq)
    # Workers hold whole blocks, so that the number of partial blocks depends little on the layout
    # of the keys.
    partial = most_partial_blocks(KeySpans(*whole.bounds(queries), layout.padded_seq))
    lists = mask_list_bytes(sequences, len(queries), keys, BLOCK)
    return lists + word_bytes(sequences, len(queries), keys, sequences * partial)


class KernelBuffers(NamedTuple):
    """Bytes that a kernel's backward call allocates.

    made: bytes per element of the dk and dv that the call returns.
    call: size of the buffers of a call that computes blocks and columns.
    blocks: size of the buffers of a call that computes only blocks. A ring that gathers the
        columns computes them in a call of their own.
    columns: size of the buffers of a call that computes only columns.
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
    intervals: int = 1,
) -> KernelBuffers:
    """Return the bytes that a kernel's backward call allocates.

    The buffers of each kernel:
    - flash4: float32 accumulators of dq and, with grouped heads, of dk and dv; lse and delta; with
      an index, the lists of blocks. The call frees these buffers before it computes columns. For
      columns, the call allocates the buffers of the columns and another dq.
    - sdpa (FlashAttention-2): float32 accumulator of dq; lse and delta; dk and dv for every query
      head; dq, dk and dv of the current rectangle. With several intervals per query, the sum of dq
      is float32.
    - triton: lse and delta; the buffers of the columns, or the lists of a bitmap. The lists take 4
      bytes per pair of a query block and a key block, or 8 bytes if a sequence has more than 32767
      blocks.
    - reference: three float64 score matrices. Smaller tensors are not counted.

    Args:
        queries, keys: number of queries and of keys in the call, summed over the micro-batch.
        e: bytes of the compute dtype.
        pieces: whether flash4 is called for several rectangles.
        index: sizes of the dynamic index. None for dense attention.
        intervals: most intervals of keys that a query sees.
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
        sums = (4 - e) * row if intervals > 1 else 0
        return KernelBuffers(4, 4 * row + 2 * statistics + expanded + current + sums)
    if kernel == "triton":
        lists = 0
        if index is not None and index.bitmap:
            bytes_each = 4 if index.blocks <= _MOST_OF_16_BITS else 8
            lists = bytes_each * index.pairs_of_blocks(queries, keys)
        blocks = 2 * statistics + lists
        return KernelBuffers(4, blocks + columns, blocks, columns)
    scores = 3 * 8 * queries * keys * model.num_heads
    return KernelBuffers(e, scores, scores)
