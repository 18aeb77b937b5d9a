"""The keys by which a program names its buffers."""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import NamedTuple


class Kind(Enum):
    """What a buffer holds."""

    __hash__ = object.__hash__  # in C, because every operation looks up its buffers

    # Tensors of a layer
    Q, K, V, OUT, LSE = "q", "k", "v", "out", "lse"
    DOUT, DELTA, DQ, DK, DV = "dout", "delta", "dq", "dk", "dv"
    COLUMNS, DCOLUMNS = "columns", "dcolumns"  # gathered single columns, and their gradients
    # One shard of a rank
    KV, DKV = "kv", "dkv"
    QUERIES, DQUERIES = "queries", "dqueries"  # a query message, and the gradient of its queries
    # One step of a rank
    KEYS, DKEYS = "keys", "dkeys"  # the keys of a kernel call, and the dk and dv that it returns
    PART = "part"  # out and lse of a kernel call
    SHARDS = "shards"  # key gradients, cut into shards
    # One part of the heads
    ROWS, OWN_ROWS = "rows", "own rows"  # gradients of all rows, and of this rank's own rows
    RESULT, DQ_PART = "result", "dq part"  # out and lse, or dq
    # Sums over steps
    TOTAL, DQ_SUM, DKV_SUM = "total", "dq_sum", "dkv sum"
    # One transfer
    GATHERED, LEAVING = "gathered", "leaving"  # keys that arrive, and a copy of those that leave
    RETURNED, SUM = "returned", "sum"  # gradients that arrive by a group reduce or reduce-scatter
    ROUNDED = "rounded"  # gradients in the dtype in which they leave
    # The messages of Ulysses
    HEADS_TO_TRADE, TRADED_HEADS = "heads to trade", "traded heads"
    TOKENS_TO_TRADE, TRADED_TOKENS = "tokens to trade", "traded tokens"

    # The cache makes one object per buffer, so that looking up a buffer compares addresses.

    @cache
    def of(self, shard: int) -> Buffer:
        return Buffer(self, shard)

    @cache
    def at(self, generation: int | None) -> Buffer:
        return Buffer(self, generation=generation)


class Side(Enum):
    """Where a tensor of a layer is, as seen from the all-to-alls of Ulysses.

    INSIDE: between them, with a part of the heads. Also without Ulysses.
    OWN: outside, with all heads of this rank's tokens.
    BY_RANK: as the second all-to-all delivers the heads, a view of its message.
    """

    __hash__ = object.__hash__

    INSIDE, OWN, BY_RANK = "", "own", "by rank"


class Buffer(NamedTuple):
    """The name of a buffer.

    generation: number of the step, the transfer or the part of the heads that makes the buffer.
    """

    kind: Kind
    shard: int | None = None
    generation: int | None = None
    side: Side = Side.INSIDE

    def __str__(self) -> str:
        words = [self.kind.value]
        if self.shard is not None:
            words += [str(self.shard)]
        if self.generation is not None:
            words += ["by"] * (self.shard is not None) + [str(self.generation)]
        if self.side is Side.OWN:
            words.insert(0, Side.OWN.value)
        return " ".join([*words, *["by rank"] * (self.side is Side.BY_RANK)])

    def on(self, side: Side) -> Buffer:
        return self._replace(side=side)


Q, K, V, OUT, LSE = map(Buffer, (Kind.Q, Kind.K, Kind.V, Kind.OUT, Kind.LSE))
DOUT, DELTA, DQ, DK, DV = map(Buffer, (Kind.DOUT, Kind.DELTA, Kind.DQ, Kind.DK, Kind.DV))
COLUMNS, DCOLUMNS = Buffer(Kind.COLUMNS), Buffer(Kind.DCOLUMNS)
TOTAL, DQ_SUM, DKV_SUM = Buffer(Kind.TOTAL), Buffer(Kind.DQ_SUM), Buffer(Kind.DKV_SUM)
DKV_OF_PARTS = Buffer(Kind.DKV)  # the key gradients of a lone rank, one part after the other
