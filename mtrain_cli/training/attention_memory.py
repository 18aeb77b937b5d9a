"""Memory of one layer's attention: its dynamic index, and the buffers of exchange and kernel.

The program of the exchange lists the sizes of its buffers (`parallel.program`). Formulas give the
sizes of the index and of the kernel's buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from mtrain_cli.attention.block_lists import (
    BLOCK,
    list_widths,
    mask_list_bytes,
    most_partial_blocks,
    word_bytes,
)
from mtrain_cli.attention.column_blocks import Front
from mtrain_cli.attention.mask import KeySpans
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.attention.named_masks import CAUSAL
from mtrain_cli.attention.packed_columns import COLUMN_TILE
from mtrain_cli.config.mask_settings import MaskSettings
from mtrain_cli.config.pattern_settings import DenseSettings
from mtrain_cli.config.schema import Config, ModelConfig
from mtrain_cli.data.open_dataset import most_intervals
from mtrain_cli.parallel.buffers import Kind
from mtrain_cli.parallel.cast_rows import largest_shares, too_many_to_count, whole_shares
from mtrain_cli.parallel.exchange_selection import ExchangeChoice
from mtrain_cli.parallel.layout import Balanced, Contiguous, Layout, Placement, Striped, Zigzag
from mtrain_cli.parallel.lowering import Traits, lower
from mtrain_cli.parallel.program import Program, ShardSizes, pool_bytes
from mtrain_cli.parallel.ring import shorter_rings
from mtrain_cli.parallel.schedule import GROUP_CAST, ScheduleOptions, make_schedule
from mtrain_cli.sparsity.pattern import Pattern, make_pattern

_MOST_OF_16_BITS = 32767
# From kernels/triton/sparse/key_gradient.py, which cannot be imported without Triton.
_MOST_PARTS, _PROGRAMS_WANTED = 16, 1024


@dataclass(frozen=True, kw_only=True)
class IndexShape:
    """Sizes of one layer's dynamic index on one worker, for one micro-batch.

    owners: heads of a bitmap; several query heads may share one.
    block, blocks: tokens per block, and blocks per whole sequence.
    bitmap: whether the index is a bitmap of blocks. Any other index has slashes and columns.
    kept: bytes of the index.
    counted: bytes that each micro-batch of a step needs to count the pairs of a bitmap.
    column_width: columns per head, rounded up to whole tiles.
    ways: number of ranks that share heads (Ulysses). A kernel call has the tokens of these ranks.
    rings: whether KV or queries circulate.
    gathers_columns: whether a ring gathers the columns in forward and keeps them until backward.
    diagonals: maximum number of slashes per head; 0 = no limit.
    starts: whether the index is a `StartBitmap`.
    """

    sequences: int
    heads: int
    owners: int
    block: int
    blocks: int
    bitmap: bool
    kept: int
    counted: int
    column_width: int
    ways: int
    rings: bool
    gathers_columns: bool
    diagonals: int = 0
    starts: bool = False

    @staticmethod
    def make(
        config: Config, pattern: Pattern, layout: Layout, exchange: ExchangeChoice
    ) -> IndexShape:
        """Return the sizes of the largest index that the pattern may choose."""
        sparsity, sequences, heads = config.sparsity, config.train.micro_batch, exchange.heads
        request, model_heads = pattern.request(), config.model.num_heads
        blocks = -(-layout.padded_seq // request.block)
        own_blocks = -(-blocks // layout.workers)
        rings = exchange.circulates_among(layout.workers)
        if request.bitmap:
            rows = blocks if heads > 1 or (rings and exchange.queries_travel) else own_blocks
            bytes_each = 2 if request.block**2 < 1 << 15 else 4
            kept = sequences * model_heads * rows * blocks
            counted, width = bytes_each * sequences * own_blocks * blocks, 0
            if request.starts:
                owners = _owners(config, heads)
                kept = 2 * sequences * owners * rows * blocks
            if request.chunk:  # each query chooses its keys
                chunk_words = -(-blocks * request.block // (32 * request.chunk))
                kept += 4 * sequences * model_heads * rows * request.block * chunk_words
                counted += 8 * sequences * blocks * request.block
        else:
            most = sparsity.column_bound  # None: every token may be a column
            width = min(layout.padded_seq if most is None else most, blocks * request.block)
            kept, counted = sequences * model_heads * (blocks + 4 * width), 0
        return IndexShape(
            sequences=sequences, heads=model_heads, block=request.block, blocks=blocks,
            bitmap=request.bitmap, kept=kept, counted=counted, ways=heads, rings=rings,
            column_width=-(-width // COLUMN_TILE) * COLUMN_TILE,
            gathers_columns=rings and exchange.shared_columns and width > 0,
            diagonals=0 if request.bitmap else sparsity.slash_bound(blocks), starts=request.starts,
            owners=_owners(config, heads) if request.starts else model_heads,
        )  # fmt: skip

    @property
    def head_lists(self) -> int:
        return self.sequences * (self.heads // self.ways)

    @property
    def columns(self) -> int:
        """Number of columns in a kernel call, summed over sequences and heads."""
        return self.head_lists * self.column_width

    def derived(self, kernel: str) -> int:
        """Return the bytes that a kernel derives and keeps for backward (`Tiles.index_cache`)."""
        if (
            self.bitmap
            or kernel not in ("flash4", "triton")
            or (self.rings and not self.gathers_columns)
        ):
            return 0
        # The key slots of the columns, the columns below each block, and the list of slashes.
        numbers = self.columns * (2 if self.gathers_columns else 1)
        if self.columns:
            numbers += self.head_lists * (self.blocks + 1)
        if kernel == "triton" and not self.rings:
            numbers += self.head_lists * (2 * self.blocks + 1)
        return 4 * numbers

    # The tokens of the following are those of a call, summed over sequences.

    def listed_pairs(self, queries: int, keys: int) -> int:
        """Return the bytes of a list of a call's pairs of query block and key block, for Triton.

        The list has the pairs of all owners and sequences, in 16 bits each if they suffice.
        """
        pairs = self.sequences * self.owners * self._blocks_of(queries) * self._blocks_of(keys)
        return pairs * (2 if self.blocks <= _MOST_OF_16_BITS and not self.starts else 4)

    def listed(self, queries: int, keys: int) -> int:
        """Count the entries of a call's lists of query blocks, one list per key block and head."""
        widths = list_widths(self._blocks_of(queries * self.ways), self.diagonals, plain=False)
        return self.head_lists * self._blocks_of(keys) * sum(widths)

    def columns_in_backward(self, queries: int, head_dim: int, e: int) -> int:
        """Return the bytes that a call needs for columns in backward.

        Packed keys and values, and float32 gradients of each part that `backward_columns` computes
        and of their sum (a ring that gathers the columns holds the packed ones and the sum); key
        slots and positions; and a bit per query block and column, if slashes cover the column.
        """
        if not self.columns:
            return 0
        parts = max(1, min(_MOST_PARTS, _PROGRAMS_WANTED // (self.columns // COLUMN_TILE)))
        gradients = 8 * (parts + (parts > 1) - self.gathers_columns) * head_dim
        packed = 0 if self.gathers_columns else 2 * e * head_dim
        covered = self._blocks_of(queries * self.ways) * self.columns // 8
        return self.columns * (packed + gradients + 8) + covered

    def in_front(
        self, queries: int, keys: int, kv_width: int, group: int, e: int, chunks: int = 1
    ) -> int:
        """Return what `column_blocks.Front` adds to the backward of all heads, in bytes.

        Keys and values behind the front; in the front also their gradients and, with grouped heads,
        float32 sums; the longer lists; and a bit per query block and column.

        kv_width: of the KV heads of a rank. chunks: calls that share the heads.
        """
        if self.rings or not self.columns or self.block != BLOCK:
            return 0
        rows, of_keys = self._blocks_of(queries * self.ways), self._blocks_of(keys)
        tiles = self.column_width // BLOCK
        front = Front.in_backward(group, tiles, self.head_lists // chunks, rows, of_keys)
        if front is None:
            return 0
        tokens = self.sequences * front.blocks * BLOCK
        tensors = 2 * e * (keys + 2 * tokens) + (8 * tokens if group > 1 else 0)
        width, full = front.list_width(rows), list_widths(rows, self.diagonals, plain=True)[1]
        lists = self.head_lists * (front.blocks + of_keys) * (width + full)
        words = max(2, rows) * self.columns // 8
        return tensors * kv_width + 4 * (lists - self.listed(queries, keys)) + words

    def _blocks_of(self, tokens: int) -> int:
        """Return the number of blocks per sequence."""
        return -(-tokens // (self.block * self.sequences))


def column_width(
    config: Config, pattern: Pattern | None, layout: Layout, exchange: ExchangeChoice
) -> int:
    """Return `IndexShape.column_width`, or 0 for dense attention."""
    return 0 if pattern is None else IndexShape.make(config, pattern, layout, exchange).column_width


def _owners(config: Config, ways: int) -> int:
    """Return the heads of a `StartBitmap` whose query heads are divided ``ways``."""
    heads, kv_heads = config.model.num_heads, config.model.num_kv_heads
    shared = getattr(config.sparsity, "index_per", "") == "kv_group" and kv_heads % ways == 0
    return kv_heads if shared else heads


class AttentionMemory:
    """Memory of one layer's attention on context rank 0, for one micro-batch, in bytes.

    index: sizes of the dynamic index; None for dense attention.
    dense: memory of the layers without index in a sparse run; None if all layers are alike.
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
        """e: bytes of the compute dtype. dense_kernel: for layers without index, if it differs."""
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
        self.gathers_columns = self.index is not None and self.index.gathers_columns
        traits = Traits(
            columns=self.gathers_columns,
            copies_parts=kernel == "sdpa",  # the other kernels take views
            zigzag=layout.name == "zigzag",
        )
        self._program = exchange.name, exchange.options(layout.workers), traits

    @cached_property
    def pool(self) -> int:
        """The exchange's pool, which stays allocated from layer to layer."""
        return _pool(*self._program, self.sizes)

    @cached_property
    def ring_kv(self) -> int:
        """The KV shard of another rank that a ring keeps for backward: the last to arrive.

        If queries circulate in backward, forward ends with the rank's own shard, which
        recomputation makes anyway.
        """
        circulates = self.exchange.circulates_among(self.layout.workers)
        foreign = circulates and not self.exchange.queries_travel
        return _saved(*self._program, self.sizes)[Kind.KV] if foreign else 0

    @cached_property
    def gathered_columns(self) -> int:
        """The columns that a ring gathers in forward and keeps for backward."""
        return _saved(*self._program, self.sizes).get(Kind.COLUMNS, 0)

    @property
    def _ranks_of_casts(self) -> Fraction | int:
        """Of how many ranks' shards a group cast brings the keys, with the own ones."""
        _, backward = _programs(*self._program)
        casts = {op.cast for op in backward.posts if op.transfer.kind == GROUP_CAST}
        of_backward = self.sizes.casts[-len(casts) :]
        return self.exchange.heads * (1 + sum(received for _, received in of_backward))

    @cached_property
    def mask_tables(self) -> int:
        """What FlashAttention-4 derives from the masks of one document: block lists and words."""
        mask, documents, sequences = self._masks
        heads, layout = self.exchange.heads, self.layout
        whole = layout.workers == heads or layout.name in (Contiguous.name, Zigzag.name)
        rectangles = whole and not documents and mask.kind in ("causal", "full")
        if self.kernel != "flash4" or self.index is not None or rectangles:
            return 0
        kinds = (mask.of_window_layers, CAUSAL) if mask.is_mixed else (mask,)
        seen: int | Fraction = layout.padded_seq
        if self.sizes.casts:
            seen = min(layout.tokens_per_worker * self._ranks_of_casts, seen)
        return sum(_mask_tables(kind, layout, heads, int(seen), sequences) for kind in kinds)

    @cached_property
    def in_backward(self) -> int:
        """Peak of backward, without the tensors that forward saved.

        It has the exchange's pool, the gradients of q, k and v, the KV of other workers, and the
        kernel's buffers.
        """
        exchange, sizes, workers = self.exchange, self.sizes, self.layout.workers
        ranks: int | Fraction = exchange.heads if exchange.circulates_among(workers) else workers
        if sizes.casts:
            ranks = self._ranks_of_casts
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
            chunks=exchange.chunks,
        )
        call = (kernel.blocks if self.gathers_columns else kernel.call) // exchange.chunks
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
    """Return rank 0's programs of both passes; of a long ring, those of a shorter one."""
    _, options = shorter_rings(exchange, options)[0]
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
    """Return the largest shares of rows that group casts move under a mask; () without them."""
    schedule = make_schedule(exchange, options)
    if not schedule.traits.by_mask or too_many_to_count(layout):
        return whole_shares(schedule)
    whole = MaskRule(document_mask=False, mask=mask).undivided(layout.seq, layout.padded_seq)
    shares = largest_shares(schedule, layout, [whole], block)
    if layout.name != Balanced.name or not documents:
        return shares
    # A balanced layout of packed documents moves at most about as much as one that deals out its
    # chunks in turn.
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
    """Return the peak bytes of backward, without the pool (see `Program.peak_bytes`)."""
    return _programs(exchange, options, traits)[1].peak_bytes(sizes, call, columns)


@cache
def _mask_tables(mask: MaskSettings, layout: Layout, heads: int, keys: int, sequences: int) -> int:
    """Return the bytes of the tables of one mask, for ``keys`` keys of a sequence."""
    queries = Placement(layout, heads).inside.positions(0)
    if mask.kind == CAUSAL.kind:  # without arrays as long as the sequence
        low, high = np.zeros((2, 1, len(queries)), np.int64)
        high[0] = np.where(queries < layout.seq, queries + 1, 0)
    else:
        rule = MaskRule(document_mask=False, mask=mask)
        low, high = rule.undivided(layout.seq, layout.padded_seq).bounds(queries)
    # Workers hold whole blocks, so that the number of partial blocks depends little on the layout
    # of the keys.
    partial = most_partial_blocks(KeySpans(low, high, layout.padded_seq))
    lists = mask_list_bytes(sequences, len(queries), keys, BLOCK)
    return lists + word_bytes(sequences, len(queries), keys, sequences * partial)


class KernelBuffers(NamedTuple):
    """Bytes that a kernel's backward call allocates.

    made: bytes per element of the dk and dv that the call returns.
    call, blocks, columns: buffers of a call that computes blocks and columns, or only one of them.
        A ring that gathers the columns computes them in a call of their own.
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
    chunks: int = 1,
) -> KernelBuffers:
    """Return the bytes that a kernel's backward call allocates.

    queries, keys: their numbers in the call, summed over the micro-batch.
    pieces: whether flash4 is called for several rectangles.
    intervals: most intervals of keys that a query sees.
    chunks: calls that share the heads.
    """
    width, kv_width = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    grouped = model.num_heads != model.num_kv_heads
    row, statistics = queries * width, 4 * queries * model.num_heads
    columns = 0 if index is None else index.columns_in_backward(queries, model.head_dim, e)
    if kernel == "flash4":
        # Float32 sums of dq and, with grouped heads, of dk and dv; lse and delta; lists of blocks.
        # They are freed before the columns, which have buffers of their own and another dq.
        sums = 4 * row + 2 * statistics + (8 * keys * kv_width if grouped else 0)
        if pieces:
            return KernelBuffers(4, sums + e * (row + 2 * keys * kv_width))
        blocks = sums + (0 if index is None else 4 * index.listed(queries, keys))
        group = model.num_heads // model.num_kv_heads
        if index is not None:
            of_rank = max(kv_width // index.ways, model.head_dim)
            blocks += index.in_front(queries, keys, of_rank, group, e, chunks)
        columns += statistics + e * row if columns else 0
        return KernelBuffers(e, max(blocks, columns), blocks, columns)
    if kernel == "sdpa":
        # FlashAttention-2: the float32 sum of dq; lse and delta; dk and dv for every query head;
        # dq, dk and dv of the current rectangle.
        expanded = 2 * e * keys * width if grouped else 0
        current = e * (row + 2 * keys * kv_width)
        sums = (4 - e) * row if intervals > 1 else 0
        return KernelBuffers(4, 4 * row + 2 * statistics + expanded + current + sums)
    if kernel == "triton":  # lse and delta; the buffers of the columns, or the lists of a bitmap
        lists = 0
        if index is not None and index.bitmap:
            lists = 2 * index.listed_pairs(queries, keys)  # by query block and by key block
        blocks = 2 * statistics + lists
        return KernelBuffers(4, blocks + columns, blocks, columns)
    scores = 3 * 8 * queries * keys * model.num_heads  # three float64 matrices
    return KernelBuffers(e, scores, scores)
