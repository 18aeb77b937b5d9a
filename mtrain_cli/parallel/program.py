"""The program of a pass: the operations of one rank in one pass of one layer's attention.

The executor runs a program, the simulator predicts its time, and a run plan adds up the sizes of
its buffers. It is plain data. Every buffer is written before it is read. The last operation that
uses a buffer frees it. The buffer that a transfer sends stays until the transfer's `Wait`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from mtrain_cli.parallel.buffers import Buffer
from mtrain_cli.parallel.schedule import Transfer

if TYPE_CHECKING:
    from mtrain_cli.attention.tiles import Tiles
    from mtrain_cli.parallel.exchange import Executor

Part = tuple[int, int]  # (i, n): the i-th of n equal parts


@dataclass(frozen=True)
class Shard:
    """The tokens of one rank. Ranks that share heads hold one shard together."""

    number: int


@dataclass(frozen=True)
class Stage:
    """The rows that group casts bring for the stage of this number, from 1, of all stages."""

    number: int
    of: int


@dataclass(frozen=True)
class Whole:
    """All key shards, in sequence order. After a group cast, only the rows that arrived."""


Keys = Shard | Stage | Whole


class Unit(NamedTuple):
    """A count of tensor elements."""

    kind: str
    cast: int = 0


# QUERIES: a rank's queries.
# KEYS: the keys and values with which a rank computes. Ulysses repeats a key-value head if it has
#     more ranks than the model has key-value heads.
# OWN_KEYS: a rank's keys and values before Ulysses trades them, with every head once.
# STATS: one element per query and head, such as lse.
# COLUMNS: keys and values of single columns.
# WIDE_COLUMNS: the same columns, padded to whole tiles, as they travel.
# Unit(SENT, i), Unit(RECEIVED, i): keys and values of the rows that group cast number i moves.
QUERIES, KEYS, OWN_KEYS, STATS = map(Unit, ("queries", "keys", "own_keys", "stats"))
COLUMNS, WIDE_COLUMNS = Unit("columns"), Unit("wide_columns")
SENT, RECEIVED = "sent", "received"
Shape = tuple[tuple[Fraction, Unit, int], ...]  # (count, unit, bytes per element) of a buffer
# Precisions. LOW: the compute dtype. HIGH: float32, for sums. MADE: the dtype of a kernel's dk, dv.
# ROUNDED: bfloat16, in which gradients may travel. `low`, `high`, `as_made` and `rounded` give the
# size of one unit.
LOW, HIGH, MADE, ROUNDED = "low", "high", "made", "rounded"
_SUM_BYTES, _ROUNDED_BYTES = 4, 2


@dataclass(frozen=True)
class ShardSizes:
    """The numbers that determine the size of a shard.

    column_width: `columns`, rounded up to whole tiles.
    made_bytes: bytes per element of the dk and dv that a kernel returns; 0 means `dtype_bytes`.
    casts: for each group cast, the rows that a rank sends and receives, divided by the rows of its
        shard. Those of backward follow those of forward if both passes have different stages.
    crossing: for each, `cast_rows.cast_shares`; empty if not counted.
    """

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int
    columns: int = 0
    column_width: int = 0
    sequences: int = 1
    made_bytes: int = 0
    casts: tuple[tuple[Fraction, Fraction], ...] = ()
    crossing: tuple[tuple[Fraction, ...], ...] = ()

    def width(self, precision: str) -> int:
        """Return the number of bytes per element. precision: LOW, HIGH, MADE or ROUNDED."""
        widths = {HIGH: _SUM_BYTES, MADE: self.made_bytes, ROUNDED: _ROUNDED_BYTES}
        return widths.get(precision) or self.dtype_bytes

    def count(self, unit: Unit, sharing: int) -> int | Fraction:
        """Return the number of elements in a unit, such as KEYS, on one rank.

        Of the ranks that share heads (Ulysses), each holds 1 / sharing of the heads for sharing
        times as many tokens, so most results do not depend on ``sharing``.
        """
        if unit in (KEYS, OWN_KEYS):
            kv_heads = self.kv_heads if unit == OWN_KEYS else max(self.kv_heads, sharing)
            return 2 * self.tokens * kv_heads * self.head_dim
        if unit.kind in (SENT, RECEIVED):
            return self.casts[unit.cast][unit.kind == RECEIVED] * self.count(KEYS, sharing)
        if unit == QUERIES:
            return self.tokens * self.heads * self.head_dim
        if unit == STATS:
            return self.tokens * self.heads
        width = {COLUMNS: self.columns, WIDE_COLUMNS: self.column_width}[unit]
        return Fraction(2 * self.sequences * self.heads * width * self.head_dim, sharing)


@dataclass(frozen=True)
class Size:
    """A number of bytes: a sum of terms count * elements of a unit * bytes per element."""

    terms: tuple[tuple[Fraction, Unit, str], ...] = ()

    def __add__(self, other: Size) -> Size:
        return Size(self.terms + other.terms)

    def __mul__(self, times: int | Fraction) -> Size:
        return Size(tuple((count * times, unit, width) for count, unit, width in self.terms))

    __rmul__ = __mul__

    def __truediv__(self, parts: int) -> Size:
        return self * Fraction(1, parts)

    def of(self, sizes: ShardSizes, sharing: int = 1) -> int | float:
        """Return the number of bytes for these shard sizes: an int if it is whole, else a float."""
        terms = (n * sizes.count(unit, sharing) * sizes.width(p) for n, unit, p in self.terms)
        total = sum(terms, Fraction(0))
        return int(total) if total.denominator == 1 else float(total)

    def shape(self, sizes: ShardSizes) -> Shape:
        """Return a key that is equal for two buffers if they can use the same memory in turn."""
        return tuple((count, unit, sizes.width(precision)) for count, unit, precision in self.terms)


def total_size(sizes: Iterable[Size]) -> Size:
    counts: dict[tuple[Unit, str], Fraction] = {}
    for count, unit, precision in (term for size in sizes for term in size.terms):
        counts[unit, precision] = counts.get((unit, precision), Fraction(0)) + count
    return Size(tuple((count, *what) for what, count in sorted(counts.items())))


def low(unit: Unit) -> Size:
    return Size(((Fraction(1), unit, LOW),))


def high(unit: Unit) -> Size:
    return Size(((Fraction(1), unit, HIGH),))


def as_made(unit: Unit) -> Size:
    return Size(((Fraction(1), unit, MADE),))


def rounded(unit: Unit) -> Size:
    return Size(((Fraction(1), unit, ROUNDED),))


NOTHING = Size()
# Bytes that memory reads and writes. ADDED: reads a result and the sum, writes the sum. COPIED:
# copies a result into the sum, or the sum into a result.
ADDED, COPIED = 2 * high(QUERIES) + low(QUERIES), high(QUERIES) + low(QUERIES)
KEYS_ADDED, KEYS_COPIED = 2 * high(KEYS) + low(KEYS), high(KEYS) + low(KEYS)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One action of a rank. Writing to an existing buffer changes it in place.

    scratch: size of the temporary memory, without that of a kernel's call.
    renames: whether the written buffers take over the memory of the buffers in `frees`.
    """

    step: int
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()
    frees: tuple[Buffer, ...] = ()
    scratch: Size = NOTHING
    renames: ClassVar[bool] = False

    def run(self, state: Executor) -> None:
        raise NotImplementedError

    def read(self, state: Executor) -> list[Any]:
        return [state.tensors[buffer] for buffer in self.reads]


@dataclass(frozen=True, kw_only=True)
class Begin(Operation):
    """Begin a step. computes: whether the step calls the kernel."""

    computes: bool

    def run(self, state: Executor) -> None:
        state.transport.begin_step(self.step)


@dataclass(frozen=True, kw_only=True)
class Post(Operation):
    """Start a transfer. It reads the buffer to send, and writes the one that arrives.

    If a copy leaves, the operation writes the copy second.

    payload: size of one shard, or of the whole tensor if the tensor does not consist of shards.
    """

    transfer: Transfer
    payload: Size
    piece: Part = (0, 1)
    cast: int = 0

    @property
    def sends(self) -> Size:
        """Number of bytes that this rank sends, and receives."""
        return self.payload * (self.transfer.shards * self.transfer.share)


@dataclass(frozen=True, kw_only=True)
class Wait(Operation):
    number: int

    def run(self, state: Executor) -> None:
        state.transport.wait(self.number)


@dataclass(frozen=True, kw_only=True)
class Compute(Operation):
    """Call the kernel once.

    piece: (i, n): the same heads, as a part of the heads that this rank holds.
    with_columns: whether this call also computes the single columns of the index.
    """

    queries: Shard
    keys: Keys
    part: Part
    piece: Part = (0, 1)
    with_columns: bool = True

    def tiles(self, state: Executor) -> Tiles | None:
        """Return the pairs to compute; None if a shard or a stage has none."""
        tiles = state.tiles.for_pair(self.queries, self.keys, self.part, columns=self.with_columns)
        return None if tiles.empty and not isinstance(self.keys, Whole) else tiles


class ComputeColumns(Operation):
    """Compute attention over the gathered single columns of the index."""


@dataclass(frozen=True, kw_only=True)
class Copy(Operation):
    """Copy or add tensors. moves: number of bytes read from and written to memory."""

    moves: Size = NOTHING


class Recompute(Enum):
    """The part of a forward program that activation checkpointing runs again in backward.

    HEAD_TRADES: the two Ulysses all-to-alls, because out and lse were kept but q, k and v were not.
    EVERYTHING: all operations, for all queries of a rank or only for its early queries.
    """

    NOTHING = "nothing"
    HEAD_TRADES = "head_trades"
    EVERYTHING = "everything"

    @staticmethod
    def of(early: int | None, sharing: int) -> Recompute:
        if early != 0:
            return Recompute.EVERYTHING
        return Recompute.HEAD_TRADES if sharing > 1 else Recompute.NOTHING


@dataclass(frozen=True)
class Program:
    """The operations of one rank in one pass.

    saved: the buffers that a forward pass leaves for backward: q, keys, out, lse, and the gathered
        columns if there are any. No operation frees a result or a saved buffer.
    inside: slice of the operations between the two Ulysses all-to-alls; all without Ulysses.
    """

    operations: tuple[Operation, ...]
    inputs: tuple[Buffer, ...]
    results: tuple[Buffer, ...]
    saved: tuple[Buffer, ...]
    sizes: Mapping[Buffer, Size]
    pooled: Set[Buffer]
    inside: slice
    sharing: int = 1

    @property
    def steps(self) -> int:
        return 1 + self.operations[-1].step

    @property
    def posts(self) -> Iterator[Post]:
        return (op for op in self.operations if isinstance(op, Post))

    @property
    def computes(self) -> Iterator[Compute]:
        return (op for op in self.operations if isinstance(op, Compute))

    def recomputed(self, what: Recompute) -> Program:
        """Return the part of this forward program that backward runs again."""
        if what is Recompute.EVERYTHING:
            return self
        start, stop = self.inside.start, self.inside.stop
        kept = self.operations[:start] + self.operations[stop:]
        if what is Recompute.NOTHING:
            start, kept = 0, ()
        trades = (replace(op, computes=False) if isinstance(op, Begin) else op for op in kept)
        return replace(self, operations=tuple(trades), inside=slice(start, start))

    def sent(self, sizes: ShardSizes) -> int | float:
        return sum(op.sends.of(sizes, self.sharing) for op in self.posts)

    def live(self) -> Iterator[tuple[Operation, set[Buffer]]]:
        """Yield each operation with the buffers that exist while it runs."""
        live = set(self.inputs)
        for op in self.operations:
            if op.renames:
                live.difference_update(op.frees)
            live.update(op.writes)
            yield op, live
            live.difference_update(op.frees)

    def _alive(self, buffers: Set[Buffer]) -> Iterator[tuple[Operation, list[Size]]]:
        """Yield operations with the sizes of those of `buffers` that exist while they run."""
        for op, live in self.live():
            yield op, [self.sizes[buffer] for buffer in live & buffers]

    @cached_property
    def _held(self) -> frozenset[tuple[type[Operation], Size]]:
        apart = self.pooled | set(self.inputs)
        alive = self._alive(self.sizes.keys() - apart)
        return frozenset((type(op), total_size([op.scratch, *sizes])) for op, sizes in alive)

    def peak_bytes(self, sizes: ShardSizes, call: int = 0, columns: int = 0) -> int:
        """Return the peak memory of a pass in bytes, without its inputs and the pool."""

        def in_kernel(kind: type[Operation]) -> int:
            return call * issubclass(kind, Compute) + columns * issubclass(kind, ComputeColumns)

        return int(max(held.of(sizes, self.sharing) + in_kernel(kind) for kind, held in self._held))

    @cached_property
    def _pooled_groups(self) -> frozenset[frozenset[tuple[Size, int]]]:
        """The sets of pooled buffers that are live at the same time, as (size, count) pairs."""
        return frozenset(frozenset(Counter(sizes).items()) for _, sizes in self._alive(self.pooled))

    def pooled_at_once(self, sizes: ShardSizes) -> Counter[Shape]:
        """Return by shape the most pooled buffers that live at one time, without saved ones."""
        saved = self.pooled & set(self.saved)
        kept = Counter(self.sizes[buffer].shape(sizes) for buffer in saved)
        most: Counter[Shape] = Counter()
        for group in self._pooled_groups:
            counts: Counter[Shape] = Counter()
            for size, number in group:
                counts[size.shape(sizes)] += number
            most |= counts - kept
        return most


def pool_bytes(programs: Iterable[Program], sizes: ShardSizes) -> int:
    """Return the size in bytes of the pool after these passes have run for many layers.

    If the compute dtype is float32, shards and gradient sums have equal shapes and share buffers.
    """
    most, sharing = Counter[Shape](), 1
    for program in programs:
        most |= program.pooled_at_once(sizes)
        sharing = program.sharing
    terms = ((number, *term) for shape, number in most.items() for term in shape)
    return int(sum(n * count * sizes.count(unit, sharing) * w for n, count, unit, w in terms))
