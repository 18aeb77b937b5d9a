"""Lower a schedule to the program of one rank in one pass (`program.Program`).

Each kind of exchange has one function per pass, such as `ring.ring_forward`, which emits operations
through a `ProgramBuilder`. `_trade_heads` puts them between the all-to-alls of Ulysses. If the
bytes of an operation's `moves` cover several copies, only the first copy carries the charge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from mtrain_cli.parallel import buffers
from mtrain_cli.parallel import operations as ops
from mtrain_cli.parallel.buffers import Buffer, Kind, Side
from mtrain_cli.parallel.gather import gather_backward, gather_forward, joined_size, staged_backward
from mtrain_cli.parallel.program import (
    KEYS,
    NOTHING,
    OWN_KEYS,
    QUERIES,
    RECEIVED,
    SENT,
    STATS,
    WIDE_COLUMNS,
    Begin,
    Compute,
    Keys,
    Operation,
    Part,
    Post,
    Program,
    Shard,
    Size,
    Stage,
    Unit,
    Wait,
    Whole,
    as_made,
    high,
    low,
    rounded,
)
from mtrain_cli.parallel.ring import keys_backward, queries_backward, ring_forward
from mtrain_cli.parallel.schedule import COLUMNS as COLUMN_PAYLOAD
from mtrain_cli.parallel.schedule import (
    CONTEXT,
    DKV,
    DQ,
    GROUP_CAST,
    KV,
    SUM,
    UNSCHEDULED,
    Schedule,
    ScheduleStep,
    Steps,
    Transfer,
)
from mtrain_cli.parallel.schedule import QUERIES as QUERY_PAYLOAD

Emit = Callable[["ProgramBuilder", Steps], None]


@dataclass(frozen=True)
class Traits:
    """Properties of the kernel, the index and the layout on which a program depends.

    copies_parts: whether the kernel copies out, dout and lse when it computes a part of the heads,
        and allocates a placeholder for an out that it does not get.
    zigzag: whether cutting a sequence into shards reverses half of its pieces.
    """

    columns: bool = False
    copies_parts: bool = False
    zigzag: bool = False


QUERY_MESSAGE = 2 * low(QUERIES) + 2 * high(STATS)  # q, dout, lse and delta


@cache
def _payload(payload: str, parts: int, rounds: bool) -> Size:
    """Return the size of one rank's shard of a payload, such as KV, for 1 / parts of the heads."""
    sent = rounded if rounds else high
    sizes = {KV: low(KEYS), DKV: sent(KEYS), DQ: sent(QUERIES), QUERY_PAYLOAD: QUERY_MESSAGE}
    return sizes[payload] / parts


class ProgramBuilder:
    """Collects the operations of one rank. Ranks that share heads hold one shard together."""

    def __init__(self, schedule: Schedule, rank: int, traits: Traits, *, backward: bool) -> None:
        self.schedule, self.traits, self.backward = schedule, traits, backward
        self.stages = schedule.stages_backward if backward else schedule.stages
        same = schedule.stages == schedule.stages_backward
        self._first_cast = 0 if same or not backward else schedule.casts
        self.rank, self.sharing = rank, schedule.heads
        self.own = rank // self.sharing
        self.rounds = schedule.rounds
        # Number 0 is the first Ulysses all-to-all, if there is one.
        self._first_number = 1 if self.sharing > 1 else 0
        self._operations: list[Operation] = []
        self._step = -1
        self.posted: dict[int, Post] = {}
        self.in_flight: dict[int, Post] = {}
        self._held: dict[Buffer, int] = {}  # the operation up to which a buffer must live
        self.pooled: set[Buffer] = set()
        self.sized: dict[Buffer, Size] = {}  # sizes of buffers whose kinds do not tell them
        self._inside = slice(None)

    def shard(self, members: tuple[int, ...]) -> int:
        return members[0] // self.sharing

    @property
    def kv(self) -> Buffer:
        return Kind.KV.of(self.own)

    def emit(
        self,
        kind: type[Operation],
        reads: Sequence[Buffer],
        writes: Sequence[Buffer],
        moves: Size | None = None,
        **fields,
    ) -> None:
        """Append an operation. moves: bytes that a `Copy` moves; None for other operations."""
        if moves is not None:
            fields["moves"] = moves
        operation = kind(step=self._step, reads=tuple(reads), writes=tuple(writes), **fields)
        self._operations.append(operation)

    def begin(self, at: int, step: ScheduleStep) -> None:
        if at != self._step:
            self._step = at
            self.emit(Begin, (), (), computes=bool(step.queries))

    def compute(
        self,
        kind: type[Compute],
        step: ScheduleStep,
        reads: Sequence[Buffer],
        writes: Sequence[Buffer],
        scratch: Size = NOTHING,
    ) -> None:
        keys: Keys = Whole()
        if step.stage:
            keys = Stage(step.stage, self.stages)
        elif step.stage == 0 or not self.schedule.gathers:
            keys = Shard(self.shard(step.keys))
        fields: dict[str, Any] = {"queries": Shard(self.shard(step.queries)), "keys": keys}
        fields |= {"part": step.part, "piece": self.piece(step.part), "scratch": scratch}
        self.emit(kind, reads, writes, **fields, with_columns=not self.traits.columns)

    def wait(self, numbers: Sequence[int] | None = None) -> None:
        """Wait for the transfers with these numbers, or for all that are in flight."""
        for number in tuple(self.in_flight) if numbers is None else numbers:
            assert number in self.in_flight, f"transfer {number} is not in flight"
            del self.in_flight[number]
            self.emit(Wait, (), (), number=number)

    def payload(self, t: Transfer) -> Size:
        return _payload(t.payload, t.part[1], self.rounds)

    def sent(self, unit: Unit) -> Size:
        """Return the size of gradients as they travel."""
        return rounded(unit) if self.rounds else high(unit)

    def trade(self, transfer: Transfer, leaves: Buffer, arrives: Buffer, payload: Size) -> None:
        self.sized[leaves] = self.sized[arrives] = payload
        self.post(transfer, (leaves,), (arrives,), payload)
        self.wait((transfer.number,))

    def hold(self, *buffers: Buffer) -> None:
        """Keep these buffers alive until the end of the last operation emitted so far."""
        self._held |= dict.fromkeys(buffers, len(self._operations) - 1)

    def end_step(self, step: ScheduleStep, *computed: Buffer) -> None:
        """End a step. Free the shards that it computed and the buffers that it finished sending."""
        left = (self.posted[n].reads for n in step.wait if n in self.posted)
        self.hold(*computed, *(buffer for buffers in left for buffer in buffers))

    def sum_columns(self, columns: Buffer, size: Size) -> None:
        """Sum single columns, or their gradients, over all ranks that hold the same heads."""
        peers = tuple(range(self.rank % self.sharing, self.schedule.workers, self.sharing))
        part = self.rank % self.sharing, self.sharing
        kind = SUM, COLUMN_PAYLOAD, CONTEXT
        transfer = Transfer(UNSCHEDULED, *kind, (), (), peers=peers, part=part)
        self.post(transfer, (columns,), (columns,), size)

    @property
    def casts(self) -> range:
        posts = (op for op in self._operations if isinstance(op, Post))
        return range(len({op.cast for op in posts if op.transfer.kind == GROUP_CAST}))

    def cast_size(self, width: Callable[[Unit], Size]) -> Size:
        """Return the size of the keys with which a rank computes after the group casts."""
        return sum((width(self.arriving_rows(cast)) for cast in self.casts), width(KEYS))

    def leaving_rows(self, cast: int) -> Unit:
        return Unit(SENT, self._first_cast + cast)

    def arriving_rows(self, cast: int) -> Unit:
        return Unit(RECEIVED, self._first_cast + cast)

    def enclose(self, inside: Emit, steps: Steps) -> None:
        """Emit the operations between the two Ulysses all-to-alls and remember their range."""
        start = len(self._operations)
        inside(self, steps)
        self._inside = slice(start, len(self._operations))

    def program(self, results: tuple[Buffer, ...], saved: tuple[Buffer, ...] = ()) -> Program:
        assert not self.in_flight, "every transfer is waited for"
        inputs: dict[Buffer, None] = {}
        written: dict[Buffer, None] = {}
        for op in self._operations:
            inputs.update(dict.fromkeys(buffer for buffer in op.reads if buffer not in written))
            written.update(dict.fromkeys(op.writes))
        frees: dict[int, list[Buffer]] = {}
        for buffer, at in self._last_uses().items():
            if buffer not in (*results, *saved):
                frees.setdefault(at, []).append(buffer)
        operations = tuple(
            replace(op, frees=tuple(frees[at])) if at in frees else op
            for at, op in enumerate(self._operations)
        )
        by_kind = self._sizes()
        sizes = {buffer: self._size(buffer, by_kind) for buffer in inputs | written}
        pooled = self.pooled.intersection(sizes)
        return Program(
            operations, tuple(inputs), results, saved, sizes, pooled, self._inside, self.sharing
        )

    def _last_uses(self) -> dict[Buffer, int]:
        waits = {op.number: at for at, op in enumerate(self._operations) if isinstance(op, Wait)}
        last = dict(self._held)
        for at, op in enumerate(self._operations):
            for buffer in (*op.reads, *op.writes):
                last[buffer] = max(at, last.get(buffer, 0))
            if isinstance(op, Post):
                for buffer in (*op.reads, *op.writes[1:]):
                    last[buffer] = max(last[buffer], waits[op.transfer.number])
        return last

    def piece(self, part: Part) -> Part:
        """Convert (i, n) from parts of the model's heads to parts of this rank's heads."""
        own = part[1] // self.sharing
        return part[0] % own, own

    def forwards(self, t: Transfer) -> bool:
        """Return whether a transfer forwards a shard that another transfer delivered."""
        return t.after is not None and t.after >= self._first_number

    def post(
        self,
        transfer: Transfer,
        reads: tuple[Buffer, ...],
        writes: tuple[Buffer, ...],
        payload: Size,
        piece: Part = (0, 1),
        cast: int = 0,
        scratch: Size = NOTHING,
    ) -> None:
        fields: dict[str, Any] = {"payload": payload, "piece": piece, "cast": cast}
        fields["scratch"] = scratch
        fields |= {"step": self._step, "reads": reads, "writes": writes}
        post = ops.POSTS[transfer.kind](transfer=transfer, **fields)
        self._operations.append(post)
        self.in_flight[transfer.number] = self.posted[transfer.number] = post
        self.sized.update(zip(writes, self._sizes_of_post(post), strict=False))

    def _sizes_of_post(self, post: Post) -> tuple[Size, ...]:
        """Return the sizes of the buffers that a collective writes; () for other transfers."""
        t, payload, cast = post.transfer, post.payload, post.cast
        parts = self.piece(t.part)[1]
        match post:
            case ops.PostCast():
                return low(self.arriving_rows(cast)) / parts, payload
            case ops.PostReturn():
                return self.sent(self.leaving_rows(cast)) / parts, payload
            case ops.PostGather():
                return payload * (len(t.receives) + len(t.sends)), payload * len(t.sends)
            case ops.PostScatter():
                # Rounded shards arrive one by one. A rank that forwards their sum copies it.
                arriving = payload * len(t.receives)
                return arriving * (len(t.peers) if self.rounds else 1), payload * len(t.peers)
        return ()

    def _size(self, buffer: Buffer, by_kind: dict[Kind, Size]) -> Size:
        if buffer in self.sized:
            return self.sized[buffer]
        kind = buffer.kind
        part_of_lse = kind is Kind.LSE and buffer.generation is not None
        if part_of_lse or buffer.side is Side.BY_RANK:
            return NOTHING  # a view
        if buffer.side is Side.OWN and kind in (Kind.K, Kind.V, Kind.DK, Kind.DV):
            return low(OWN_KEYS) / 2
        return by_kind[Kind.DQ_PART if kind is Kind.DQ and buffer.generation is not None else kind]

    def _sizes(self) -> dict[Kind, Size]:
        gathers, groups = self.schedule.gathers, self.schedule.groups
        n = max(op.piece[1] for op in self._operations if isinstance(op, Compute))
        queries, keys, stats = low(QUERIES), low(KEYS), high(STATS)
        # The keys of one rank that computes all heads at once are a view.
        by_mask = self.schedule.traits.by_mask
        gathered, made = (
            self.cast_size(width) if by_mask else width(KEYS) * groups for width in (low, as_made)
        )
        return {
            Kind.Q: queries, Kind.K: keys / 2, Kind.V: keys / 2,
            Kind.OUT: queries, Kind.DOUT: queries, Kind.LSE: stats, Kind.DELTA: stats,
            Kind.DQ: queries, Kind.DQ_PART: queries / n, Kind.DK: keys / 2, Kind.DV: keys / 2,
            Kind.KV: keys, Kind.DKV: keys if gathers else high(KEYS), Kind.DKV_SUM: high(KEYS),
            Kind.QUERIES: QUERY_MESSAGE, Kind.DQUERIES: high(QUERIES),
            Kind.PART: (queries + stats) / n, Kind.TOTAL: (high(QUERIES) + stats) / n,
            Kind.RESULT: (queries + stats) / n,
            Kind.DQ_SUM: high(QUERIES), Kind.DKEYS: made / n if gathers else as_made(KEYS),
            Kind.KEYS: gathered / n if groups > 1 or n > 1 else NOTHING,
            Kind.ROWS: self.cast_size(high) / n, Kind.OWN_ROWS: high(KEYS) / n,
            Kind.SHARDS: self.sent(KEYS) * groups / n,
            Kind.COLUMNS: low(WIDE_COLUMNS), Kind.DCOLUMNS: high(WIDE_COLUMNS),
        }  # fmt: skip


def lower(
    schedule: Schedule, rank: int, *, backward: bool = False, traits: Traits | None = None
) -> Program:
    """Return the program of a rank in the forward or the backward pass."""
    b = ProgramBuilder(schedule, rank, traits or Traits(), backward=backward)
    steps = (schedule.backward if backward else schedule.forward)[rank]
    if not backward:
        inside = gather_forward if schedule.gathers else ring_forward
    elif schedule.gathers:
        inside = staged_backward if b.stages else gather_backward
    else:
        inside = queries_backward if schedule.queries_travel else keys_backward
    side = Side.OWN if schedule.heads > 1 else Side.INSIDE
    if side is Side.OWN:
        _trade_heads(b, steps, inside, backward=backward)
    else:
        b.enclose(inside, steps)
    if backward:
        return b.program(tuple(buffer.on(side) for buffer in (buffers.DQ, buffers.DK, buffers.DV)))
    kept = Kind.KV.of(b.shard(schedule.keeps[rank]))
    columns = (buffers.COLUMNS,) if b.traits.columns else ()
    return b.program(
        (buffers.OUT.on(side), buffers.LSE), (buffers.Q, kept, buffers.OUT, buffers.LSE, *columns)
    )


def _trade_heads(b: ProgramBuilder, steps: Steps, inside: Emit, *, backward: bool) -> None:
    """Emit the operations of an exchange between two Ulysses all-to-alls."""
    queries, both = low(QUERIES), low(QUERIES) + low(KEYS)
    there, given = [buffers.Q, buffers.K, buffers.V], both
    back, returned = [buffers.OUT], queries
    if backward:
        there, given = [buffers.DOUT], queries
        back, returned = [buffers.DQ, buffers.DK, buffers.DV], both
    leaving, arriving = Buffer(Kind.HEADS_TO_TRADE), Buffer(Kind.TRADED_HEADS)
    b.begin(0, steps[0])
    b.emit(ops.ToHeads, [buffer.on(Side.OWN) for buffer in there], (leaving,), 3 * given)
    first, *between, last = steps
    b.trade(first.post[0], leaving, arriving, given)
    b.emit(ops.FromTokens, (arriving,), there, 3 * given, scratch=given)
    b.enclose(inside, (replace(first, post=first.post[1:], wait=first.wait[1:]), *between))
    b.begin(len(steps) - 1, last)
    leaving, arriving = Buffer(Kind.TOKENS_TO_TRADE), Buffer(Kind.TRADED_TOKENS)
    b.emit(ops.ToTokens, back, (leaving,), 3 * returned, scratch=returned)
    b.trade(last.post[0], leaving, arriving, returned)
    by_rank = [buffer.on(Side.BY_RANK) for buffer in back]
    b.emit(ops.FromHeads, (arriving,), by_rank, 3 * returned)
    copied = NOTHING
    if backward and b.schedule.gathers:
        copied = joined_size((len(steps) - 1) // (b.stages + 1))
    # The tensors by rank are views of what arrived, which must live until they are copied.
    b.emit(ops.AddHeads, by_rank, [buffer.on(Side.OWN) for buffer in back], copied)
    b.hold(arriving)
