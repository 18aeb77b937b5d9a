"""Memory of a dynamic index, and of the tensors that kernels derive from the index."""

from __future__ import annotations

from dataclasses import dataclass

from mtrain_cli.attention.block_lists import list_widths
from mtrain_cli.attention.packed_columns import COLUMN_TILE
from mtrain_cli.config.schema import Config
from mtrain_cli.parallel.exchange_selection import ExchangeChoice
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.sparsity.pattern import Pattern

# From kernels/triton/sparse/key_gradient.py, which cannot be imported without Triton.
_MOST_PARTS, _PROGRAMS_WANTED = 16, 1024


def column_width(
    config: Config, pattern: Pattern | None, layout: Layout, exchange: ExchangeChoice
) -> int:
    """Return `IndexShape.column_width`, or 0 for dense attention."""
    if pattern is None:
        return 0
    return IndexShape.make(config, pattern, layout, exchange).column_width


@dataclass(frozen=True, kw_only=True)
class IndexShape:
    """Sizes of one layer's dynamic index on one worker, for one micro-batch.

    sequences: number of sequences of the micro-batch.
    heads: number of query heads of the model.
    block: tokens per block.
    blocks: blocks per whole sequence.
    bitmap: whether the index is a bitmap of blocks. Any other index has slashes and columns.
    kept: bytes of the index.
    counted: bytes that a micro-batch needs to count the pairs of a bitmap. A step needs this memory
        for all its micro-batches.
    column_width: columns per head, rounded up to whole tiles.
    ways: number of ranks that share heads (Ulysses). A kernel call has the tokens of these ranks.
    rings: whether KV or queries circulate.
    gathered: whether a ring gathers the columns in forward and keeps them until backward.
    diagonals: maximum number of slashes per head. 0 means no limit.
    """

    sequences: int
    heads: int
    block: int
    blocks: int
    bitmap: bool
    kept: int
    counted: int
    column_width: int
    ways: int
    rings: bool
    gathered: bool
    diagonals: int = 0

    @staticmethod
    def make(
        config: Config, pattern: Pattern, layout: Layout, exchange: ExchangeChoice
    ) -> IndexShape:
        """Return the sizes of the largest index that the pattern may choose.

        Without a limit on columns in the configuration, every token may be a column.
        """
        sparsity, sequences = config.sparsity, config.train.micro_batch
        heads = config.model.num_heads
        request = pattern.request()
        blocks = -(-layout.padded_seq // request.block)
        own_blocks = -(-blocks // layout.workers)
        rings = exchange.circulates_among(layout.workers)
        if request.bitmap:
            all_rows = exchange.heads > 1 or (rings and exchange.queries_travel)
            rows = blocks if all_rows else own_blocks
            bytes_each = 2 if request.block**2 < 1 << 15 else 4
            kept = sequences * heads * rows * blocks
            counted, width = bytes_each * sequences * own_blocks * blocks, 0
            if request.chunk:
                chunk_words = -(-blocks * request.block // (32 * request.chunk))
                kept += 4 * sequences * heads * rows * request.block * chunk_words
                counted += 8 * sequences * blocks * request.block
        else:
            most = sparsity.column_bound
            width = min(layout.padded_seq if most is None else most, blocks * request.block)
            kept, counted = sequences * heads * (blocks + 4 * width), 0
        return IndexShape(
            sequences=sequences,
            heads=heads,
            block=request.block,
            blocks=blocks,
            bitmap=request.bitmap,
            kept=kept,
            counted=counted,
            column_width=-(-width // COLUMN_TILE) * COLUMN_TILE,
            ways=exchange.heads,
            rings=rings,
            gathered=rings and exchange.shared_columns and width > 0,
            diagonals=0 if request.bitmap else sparsity.slash_bound(blocks),
        )

    @property
    def head_lists(self) -> int:
        """Number of lists of slashes and columns in a kernel call: one per sequence and head."""
        return self.sequences * (self.heads // self.ways)

    @property
    def columns(self) -> int:
        """Number of columns in a kernel call, summed over sequences and heads."""
        return self.head_lists * self.column_width

    def derived(self, kernel: str) -> int:
        """Return the size of the tensors that a kernel derives and keeps for backward.

        A kernel derives the key slots of the columns, the number of columns below each block, and
        the list of slashes (`Tiles.index_cache`). If a ring gathers the columns once, the kernel
        also derives the slots of the columns among the rank's own keys.
        """
        if self.bitmap or kernel not in ("flash4", "triton") or (self.rings and not self.gathered):
            return 0
        numbers = self.columns * (2 if self.gathered else 1)
        if self.columns:
            numbers += self.head_lists * (self.blocks + 1)
        if kernel == "triton" and not self.rings:
            numbers += self.head_lists * (2 * self.blocks + 1)
        return 4 * numbers

    def pairs_of_blocks(self, queries: int, keys: int) -> int:
        """Count the pairs of a query block and a key block in a call, over heads and sequences.

        Args:
            queries, keys: number of queries and of keys in the call, summed over sequences.
        """
        return self.sequences * self.heads * self._blocks_of(queries) * self._blocks_of(keys)

    def listed(self, queries: int, keys: int) -> int:
        """Count the entries of a call's lists of query blocks (`attention.block_lists`).

        A call has one list per key block and head.

        Args:
            queries, keys: number of queries and of keys in the call, summed over sequences.
        """
        widths = list_widths(self._blocks_of(queries * self.ways), self.diagonals, plain=False)
        return self.head_lists * self._blocks_of(keys) * sum(widths)

    def columns_in_backward(self, queries: int, head_dim: int, e: int) -> int:
        """Return the bytes that a call needs for columns in backward.

        The call holds:
        - the packed keys and values
        - float32 gradients of each part that `backward_columns` computes, and the sum of the parts
        - key slots and positions, 8 bytes per column
        - one bit per query block and column, which says whether slashes cover the column.

        If a ring gathers the columns, the result excludes the packed columns and the sum of their
        gradients: the exchange holds both.

        Args:
            queries: number of queries in the call, summed over sequences.
            e: bytes of the compute dtype.
        """
        if not self.columns:
            return 0
        parts = max(1, min(_MOST_PARTS, _PROGRAMS_WANTED // (self.columns // COLUMN_TILE)))
        gradients = 8 * (parts + (parts > 1) - self.gathered) * head_dim
        packed = 0 if self.gathered else 2 * e * head_dim
        covered = self._blocks_of(queries * self.ways) * self.columns // 8
        return self.columns * (packed + gradients + 8) + covered

    def _blocks_of(self, tokens: int) -> int:
        """Return the number of blocks per sequence, for `tokens` tokens in all sequences."""
        return -(-tokens // (self.block * self.sequences))
