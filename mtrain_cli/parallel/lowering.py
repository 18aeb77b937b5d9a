"""Lower a schedule to the program of one rank in one pass (`program.Program`).

Each kind of exchange has one function per pass, such as `_ring_forward`. The function emits the
operations in order through `_Builder`. Under Ulysses, `_trade_heads` adds one all-to-all before
these operations and one after them.

A buffer's name is its kind and a number. "kv 2", "dkv 2" and "queries 2" belong to shard 2.
"keys 1", "part 1", "dq 1" and "dkeys 1" belong to step 1. "gathered 3" and "sum 3" arrive by
transfer 3. `_Builder.program` derives from the operations when each buffer is freed.

The simulator charges time for the bytes that an operation's `moves` gives. If one charge covers
several copies, only the first copy carries the charge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

from mtrain_cli.parallel.program import (
    COLUMNS,
    KEYS,
    MADE,
    NOTHING,
    OWN_KEYS,
    RECEIVED,
    ROWS,
    SENT,
    STATS,
    WHOLE_SEQUENCE,
    WIDE_COLUMNS,
    AddColumns,
    Arrange,
    Begin,
    Buffer,
    Compute,
    ComputeColumns,
    Merge,
    Operation,
    Part,
    Post,
    Program,
    Reduce,
    Shards,
    Size,
    Wait,
    high,
    low,
)
from mtrain_cli.parallel.schedule import COLUMNS as COLUMN_PAYLOAD
from mtrain_cli.parallel.schedule import (
    CONTEXT,
    DKV,
    DQ,
    GROUP_CAST,
    GROUP_REDUCE,
    HEADS,
    KV,
    QUERIES,
    SUM,
    UNSCHEDULED,
    Schedule,
    ScheduleStep,
    Transfer,
)

# What `Arrange` does.
PACK = "pack"  # stack k and v into one message
PICK = "pick"  # copy single columns out of this rank's keys
DELTA = "delta"  # sum out * dout over each row, and start the sum of dq at 0
MESSAGE = "message"  # pack what others need to compute gradients of these queries
ZERO = "zero"  # start the sum of this rank's key gradients
TAKE_SUM = "take_sum"  # take a buffer, which the next `Merge` fills
RESULT = "result"  # cast the output to the compute dtype
GRADIENTS = "gradients"  # cast the gradients to the compute dtype
TAKE = "take"  # copy one part of the heads from this rank's keys
ORDER = "order"  # bring gathered keys into sequence order
JOIN_OUT = "join_out"  # concatenate out over all parts of the heads
CUT = "cut"  # copy one part of the heads from lse
PLACE = "place"  # write one part's gradients into the whole tensor
SHARDS = "shards"  # cut key gradients into the ranks' shards
MERGE_ROWS = "merge_rows"  # bring own keys and those of a group cast into sequence order
SPLIT_ROWS = "split_rows"  # bring key gradients into the order in which the rows arrived
OWN_ROWS = "own_rows"  # take this rank's rows out of the summed gradients
OWN = "own"  # concatenate the key gradients that returned
JOIN = "join"  # concatenate dq over all parts of the heads
TO_HEADS, FROM_TOKENS = "to_heads", "from_tokens"  # before and after tokens are traded for heads
TO_TOKENS, FROM_HEADS = "to_tokens", "from_heads"  # before and after heads are traded for tokens
ADD_HEADS = "add_heads"  # concatenate heads, and add the gradients of repeated ones

# Bytes that memory reads and writes. ADDED: reads a result and the sum, writes the sum. COPIED:
# copies a result into the sum, or the sum into a result.
_ADDED, _COPIED = 2 * high(ROWS) + low(ROWS), high(ROWS) + low(ROWS)
_KEYS_ADDED, _KEYS_COPIED = 2 * high(KEYS) + low(KEYS), high(KEYS) + low(KEYS)
# By payload of a gradient: the first word of its buffers, and the bytes that adding it moves.
_GRADIENTS = {DKV: ("dkv", 3 * high(KEYS)), DQ: ("dqueries", 3 * high(ROWS))}

Steps = Sequence[ScheduleStep]
_Lowering = Callable[["_Builder", Steps], None]


@dataclass(frozen=True)
class Traits:
    """Properties of the kernel, the index and the layout on which a program depends.

    needs_out: whether the kernel reads out in backward and derives delta from it.
    columns: whether single columns of the index are gathered once, outside the steps of a ring.
    copies_parts: whether the kernel copies out, dout and lse when it computes a part of the heads,
        and allocates a placeholder for an out that it does not get.
    zigzag: whether the layout is zigzag, so that cutting a sequence into shards reverses the order
        of half of its pieces.
    """

    needs_out: bool = False
    columns: bool = False
    copies_parts: bool = False
    zigzag: bool = False


def query_message(traits: Traits) -> Size:
    """Return the size of the message from which other ranks compute gradients of queries.

    The message holds q, dout and lse. It also holds out if the kernel needs out, and delta
    otherwise.
    """
    return 2 * low(ROWS) + high(STATS) + (low(ROWS) if traits.needs_out else high(STATS))


@cache
def _payload(payload: str, parts: int, traits: Traits) -> Size:
    """Return the size of one rank's shard of a payload, such as KV, for 1 / parts of the heads."""
    message = query_message(traits)
    return {KV: low(KEYS), DKV: high(KEYS), DQ: high(ROWS), QUERIES: message}[payload] / parts


def lower(
    schedule: Schedule, rank: int, *, backward: bool = False, traits: Traits | None = None
) -> Program:
    """Return the program of a rank in the forward or the backward pass."""
    b = _Builder(schedule, rank, traits or Traits())
    steps = (schedule.backward if backward else schedule.forward)[rank]
    if schedule.gathers:
        inside = _gather_backward if backward else _gather_forward
    elif backward:
        inside = _queries_backward if schedule.queries_travel else _keys_backward
    else:
        inside = _ring_forward
    own = ""
    if schedule.heads > 1:
        own = "own "
        _trade_heads(b, steps, inside, backward=backward)
    else:
        b.enclose(inside, steps)
    if backward:
        return b.program((f"{own}dq", f"{own}dk", f"{own}dv"))
    kept = f"kv {b.shard(schedule.keeps[rank])}"
    columns = ("columns",) if b.traits.columns else ()
    return b.program((f"{own}out", "lse"), ("q", kept, "out", "lse", *columns))


def _ring_forward(b: _Builder, steps: Steps) -> None:
    """Circulate key shards; merge the attention over each shard into the output so far."""
    b.begin(0, steps[0])
    b.arrange(PACK, ("k", "v"), (f"kv {b.own}",), 2 * low(KEYS))
    if b.traits.columns:
        b.arrange(PICK, (f"kv {b.own}",), ("columns",), 2 * low(COLUMNS))
        b.sum_columns("columns", low(WIDE_COLUMNS))
    # The first merge moves nothing: its result becomes the output so far. The second merge casts
    # the output to float32.
    merged = {0: NOTHING, 1: _ADDED + _COPIED}
    for at, step in enumerate(steps):
        b.begin(at, step)
        b.hops(step.post)
        b.wait(step.wait)
        keys, part = f"kv {b.shard(step.keys)}", f"part {at}"
        b.compute(step, ("q", keys), (part,))
        b.emit(Merge, (part,), ("total",), moves=merged.get(at, _ADDED))
        if at == 0 and b.traits.columns:
            b.wait((UNSCHEDULED,))
            b.emit(ComputeColumns, ("q", "columns", "total"), ("total",))
        b.end_step(step, keys)
    b.arrange(RESULT, ("q", "total"), ("out", "lse"), _COPIED)


def _keys_backward(b: _Builder, steps: Steps) -> None:
    """Send key shards back to their owners.

    The gradient of a shard follows one step behind the shard. Each rank adds its own part to the
    gradient.
    """
    b.begin(0, steps[0])
    rows = b.begin_backward(2 * low(ROWS) + high(ROWS))
    for at, step in enumerate(steps):
        b.begin(at, step)
        b.hops(step.post)
        b.wait(step.wait)
        shard, made = b.shard(step.keys), (f"dq {at}", f"dkeys {at}")
        total = f"dkv {shard}"
        b.take_sum(total)
        b.compute(step, (*rows, f"kv {shard}"), made)
        b.emit(Merge, made, ("dq_sum", total), begins=(total,), moves=_ADDED + _KEYS_COPIED)
        b.exchange_gradients(step)
        b.end_step(step, f"kv {shard}")
    b.end_backward(f"dkv {b.own}")


def _queries_backward(b: _Builder, steps: Steps) -> None:
    """Keep the keys on their rank, and circulate query messages. The queries' gradients follow."""
    b.begin(0, steps[0])
    rows = b.begin_backward(6 * low(ROWS) + high(ROWS))  # includes the message
    placeholder = low(ROWS) if b.traits.copies_parts else NOTHING
    b.arrange(MESSAGE, rows, (f"queries {b.own}",))
    b.arrange(ZERO, (f"kv {b.own}",), ("dkv sum",), timed=False)
    for at, step in enumerate(steps):
        b.begin(at, step)
        b.hops(step.post)
        b.wait(step.wait)
        computed = [f"queries {b.shard(step.queries)}"] if step.queries else []
        if step.queries:
            total, made = f"dqueries {b.shard(step.queries)}", (f"dq {at}", f"dkeys {at}")
            b.take_sum(total)
            b.compute(step, (*computed, f"kv {b.own}"), made, placeholder)
            moves = _COPIED + _KEYS_ADDED
            b.emit(Merge, made, (total, "dkv sum"), begins=(total,), moves=moves)
        b.exchange_gradients(step)
        b.end_step(step, *computed)
    b.emit(Reduce, (f"dqueries {b.own}",), ("dq_sum",))
    b.end_backward("dkv sum")


def _gather_forward(b: _Builder, steps: Steps) -> None:
    """Gather each part of the heads while the previous part is computed."""
    b.begin(0, steps[0])
    b.arrange(PACK, ("k", "v"), (f"kv {b.own}",), 2 * low(KEYS))
    parts = []
    for at, step in enumerate(steps):
        b.begin(at, step)
        keys = b.gather_keys(at, step)
        parts.append(f"part {at}")
        b.compute(step, ("q", keys), (parts[-1],))
    b.arrange(JOIN_OUT, parts, ("out", "lse"), 2 * low(ROWS) if len(parts) > 1 else NOTHING)
    b.wait(b.under_way)


def _gather_backward(b: _Builder, steps: Steps) -> None:
    """Gather keys as in forward. Reduce-scatter the gradients of a part during the next part."""
    parts = len(steps)
    cut = (low(KEYS) + high(KEYS)) * b.schedule.groups / parts
    copied = (2 * low(ROWS) + high(STATS)) / parts
    copies = b.traits.copies_parts and parts > 1
    own, dq, sums = f"kv {b.own}", [], []
    for at, step in enumerate(steps):
        b.begin(at, step)
        keys, piece = b.gather_keys(at, step), b.piece(step.part)
        moves = 4 * low(ROWS) / parts if copies and b.schedule.groups > 1 else NOTHING
        b.arrange(CUT, ("lse",), (f"lse {at}",), moves, piece=piece)
        made = ("dq" if parts == 1 else f"dq {at}", f"dkeys {at}")
        reads = ("q", "dout", "out", f"lse {at}", keys)
        b.compute(step, reads, made, copied if copies else NOTHING)
        if not step.send:
            b.arrange(PLACE, ("q", own, *made), ("dq", "dkv"), cut, piece=piece)
            continue
        dq.append(made[0])
        # The previous part is sent from a buffer of the same size as the next one. Free it first.
        b.wait(step.collect)
        if b.schedule.traits.by_mask:
            b.add_returned_rows(at - 1)
            sums.append(b.return_rows(at, step, made[1]))
        else:
            sums.append(b.scatter_gradients(at, step, made[1], cut))
    b.wait(b.under_way)
    b.add_returned_rows(parts - 1)
    b.arrange(OWN, (own, *(sums or ["dkv"])), ("dk", "dv"), timed=False, renames=not sums)
    # Under Ulysses the last operation, ADD_HEADS, carries this charge.
    moves = NOTHING if b.sharing > 1 else _joined(parts)
    b.arrange(JOIN, dq or ["dq"], ("dq",), moves, timed=False)


def _joined(parts: int) -> Size:
    return _KEYS_COPIED + 2 * low(ROWS) if parts > 1 else _KEYS_COPIED


def _trade_heads(b: _Builder, steps: Steps, inside: _Lowering, *, backward: bool) -> None:
    """Emit the operations of an exchange between two Ulysses all-to-alls.

    The first all-to-all trades tokens for heads, the second undoes this trade. ``inside`` emits the
    operations of the exchange.
    """
    queries, both = low(ROWS), low(ROWS) + low(KEYS)
    there, given = (["dout"], queries) if backward else (["q", "k", "v"], both)
    back, returned = (["dq", "dk", "dv"], both) if backward else (["out"], queries)
    b.begin(0, steps[0])
    b.arrange(TO_HEADS, [f"own {name}" for name in there], ("heads to trade",), 3 * given)
    b.trade(steps[0].post[0], "heads to trade", "traded heads", given)
    b.arrange(FROM_TOKENS, ("traded heads",), there, 3 * given, scratch=given)
    b.enclose(inside, [b.without_trade(step) for step in steps[:-1]])
    b.begin(len(steps) - 1, steps[-1])
    b.arrange(TO_TOKENS, back, ("tokens to trade",), 3 * returned, scratch=returned)
    b.trade(steps[-1].post[0], "tokens to trade", "traded tokens", returned)
    by_rank = [f"{name} by rank" for name in back]
    b.arrange(FROM_HEADS, ("traded tokens",), by_rank, 3 * returned)
    joined = _joined(len(steps) - 1) if backward and b.schedule.gathers else NOTHING
    # The tensors by rank are views of "traded tokens", which must live until they are copied.
    b.arrange(ADD_HEADS, by_rank, [f"own {name}" for name in back], joined, timed=False)
    b.hold("traded tokens")


def _made(unit: str) -> Size:
    """Return the size of one ``unit`` in the dtype of a kernel's dk and dv."""
    return Size(((Fraction(1), unit, MADE),))


class _Builder:
    """Collect the operations of one rank.

    The shards of the ranks that share heads count as one shard.
    """

    def __init__(self, schedule: Schedule, rank: int, traits: Traits) -> None:
        self.schedule, self.traits = schedule, traits
        self.rank, self.sharing = rank, schedule.heads
        self.own = rank // self.sharing
        # Number 0 is the first Ulysses all-to-all, if there is one.
        self._first_number = 1 if self.sharing > 1 else 0
        self._operations: list[Operation] = []
        self._step = -1
        self._transfers: dict[int, Post] = {}
        self._in_flight: dict[int, Post] = {}
        self._returned: dict[int, str] = {}  # step -> the gradients that a group reduce returns
        self._held: dict[str, int] = {}  # buffer -> the operation up to which it must live
        self._pooled: set[str] = set()
        self._inside = slice(None)

    def shard(self, members: Shards) -> int:
        return members[0] // self.sharing

    def emit(
        self, kind: type[Operation], reads: Sequence[str], writes: Sequence[str], **fields
    ) -> None:
        self._operations.append(
            kind(step=self._step, reads=tuple(reads), writes=tuple(writes), **fields)
        )

    def begin(self, at: int, step: ScheduleStep) -> None:
        """Begin step number ``at``, unless it has begun."""
        if at != self._step:
            self._step = at
            self.emit(Begin, (), (), computes=bool(step.queries))

    def arrange(
        self,
        what: str,
        reads: Sequence[str],
        writes: Sequence[str],
        moves: Size = NOTHING,
        **fields,
    ) -> None:
        self.emit(Arrange, reads, writes, what=what, moves=moves, **fields)

    def take_sum(self, name: str) -> None:
        self._pooled.add(name)
        self.arrange(TAKE_SUM, (), (name,), timed=False)

    def compute(
        self,
        step: ScheduleStep,
        reads: Sequence[str],
        writes: Sequence[str],
        scratch: Size = NOTHING,
    ) -> None:
        self.emit(
            Compute,
            reads,
            writes,
            queries=(self.shard(step.queries),),
            keys=WHOLE_SEQUENCE if self.schedule.gathers else (self.shard(step.keys),),
            part=step.part,
            piece=self.piece(step.part),
            with_columns=not self.traits.columns,
            scratch=scratch,
        )

    def wait(self, numbers: Sequence[int]) -> None:
        """Wait for the transfers with these numbers, which must be in flight."""
        for number in numbers:
            assert number in self._in_flight, f"transfer {number} is not in flight"
            del self._in_flight[number]
            self.emit(Wait, (), (), number=number)

    @property
    def under_way(self) -> tuple[int, ...]:
        return tuple(self._in_flight)

    def trade(self, transfer: Transfer, leaves: str, arrives: str, payload: Size) -> None:
        self._post(transfer, (leaves,), (arrives,), payload)
        self.wait((transfer.number,))

    def hops(self, transfers: Sequence[Transfer]) -> None:
        """Send shards to the next rank, and receive other shards into pooled buffers."""
        for t in transfers:
            leaves, arrives = (f"{t.payload} {self.shard(s)}" for s in (t.sends, t.receives))
            self._pooled.add(arrives)
            self._post(t, (leaves,), (arrives,), _payload(t.payload, t.part[1], self.traits))

    def hold(self, *names: str) -> None:
        """Keep these buffers alive until the end of the last operation emitted so far."""
        self._held |= dict.fromkeys(names, len(self._operations) - 1)

    def end_step(self, step: ScheduleStep, *computed: str) -> None:
        """End a step. Free the shards that it computed and the buffers that it finished sending.

        If these buffers were freed earlier, the step's gradients could reuse their memory.
        """
        left = (self._transfers[n].reads for n in step.wait if n in self._transfers)
        self.hold(*computed, *(name for names in left for name in names))

    def sum_columns(self, name: str, size: Size) -> None:
        """Sum single columns, or their gradients, over all ranks that hold the same heads."""
        peers = tuple(range(self.rank % self.sharing, self.schedule.workers, self.sharing))
        part = self.rank % self.sharing, self.sharing
        transfer = Transfer(
            UNSCHEDULED, SUM, COLUMN_PAYLOAD, CONTEXT, (), (), peers=peers, part=part
        )
        self._post(transfer, (name,), (name,), size)

    def gather_keys(self, at: int, step: ScheduleStep) -> str:
        """Post the gathers of a step, and put the step's keys in order of position.

        Return the name of the buffer with the ordered keys.
        """
        own, keys = f"kv {self.own}", f"keys {at}"
        if self.schedule.traits.by_mask and step.wait:
            return self._cast_keys(at, step)
        for t in step.post:
            source, piece, leaving = f"gathered {t.after}", (0, 1), []
            if not self._forwards(t):
                source, piece = own, self.piece(t.part)
                # A part of the heads leaves from a copy.
                leaving = [f"leaving {t.number}"] if piece[1] > 1 else []
            payload = _payload(t.payload, t.part[1], self.traits)
            self._post(t, (source,), (f"gathered {t.number}", *leaving), payload, piece=piece)
        self.wait(step.wait)
        if not step.wait:
            self.arrange(TAKE, (own,), (keys,), piece=self.piece(step.part))
            return keys
        last = self._transfers[step.wait[-1]].transfer
        moves = 2 * low(KEYS) * self.schedule.groups / (step.part[1] // self.sharing)
        among = len(last.peers) if self._forwards(last) else 0
        self.arrange(ORDER, (f"gathered {last.number}",), (keys,), moves, among=among)
        return keys

    def scatter_gradients(self, at: int, step: ScheduleStep, made: str, moves: Size) -> str:
        """Cut key gradients into shards and reduce-scatter the shards.

        Return the name of the buffer with the sum.

        made: name of the buffer with the dk and dv that the kernel returned.
        """
        name = f"shards {at}"
        among = len(step.send[0].peers) if len(step.send) > 1 else 0
        scratch = self._scratch_of_shards(among) * self.schedule.groups / self.piece(step.part)[1]
        self.arrange(SHARDS, (made,), (name,), moves, among=among, scratch=scratch)
        for t in step.send:
            self._post(
                t, (name,), (f"sum {t.number}",), _payload(t.payload, t.part[1], self.traits)
            )
            name = f"sum {t.number}"
        # The kernel's dk and dv stay until the reduce-scatter has started.
        self.hold(made)
        return name

    def _cast_keys(self, at: int, step: ScheduleStep) -> str:
        """Post the group casts of a step, and put the step's keys in order of position.

        Return the name of the buffer with the ordered keys.
        """
        own, keys = f"kv {self.own}", f"keys {at}"
        for t in step.post:
            sources: tuple[str, ...] = (own,)
            cast = 0
            if self._forwards(t):
                sources, cast = (own, f"gathered {t.after}"), 1
            payload, arrives = low(SENT[cast]) / self.piece(t.part)[1], f"gathered {t.number}"
            # The rows leave from a copy.
            writes = arrives, f"leaving {t.number}"
            self._post(t, sources, writes, payload, self.piece(t.part), cast)
        self.wait(step.wait)
        last = self._transfers[step.wait[-1]].transfer
        arrived: tuple[str, ...] = (f"gathered {last.number}",)
        if self._forwards(last):
            assert last.after is not None
            self.wait((last.after,))
            arrived = f"gathered {last.after}", *arrived
        piece = self.piece(step.part)
        moves = 2 * self._cast_size(low) / piece[1]
        self.arrange(MERGE_ROWS, (own, *arrived), (keys,), moves, piece=piece)
        return keys

    def return_rows(self, at: int, step: ScheduleStep, made: str) -> str:
        """Return the gradients of received rows to the rows' owners.

        Return the name of the buffer with the sum for this rank's own rows, which
        `add_returned_rows` makes.

        made: name of the buffer with the dk and dv that the kernel returned.
        """
        rows, parts = f"rows {at}", self.piece(step.part)[1]
        moves = (self._cast_size(low) + self._cast_size(high)) / parts
        scratch = self._cast_size(_made) / (2 * parts)
        self.arrange(SPLIT_ROWS, (made,), (rows,), moves, scratch=scratch)
        sources: tuple[str, ...] = (rows,)
        for cast, t in zip(reversed(range(len(step.send))), step.send, strict=True):
            returned = f"returned {t.number}"
            self._post(t, sources, (returned,), high(RECEIVED[cast]) / parts, cast=cast)
            sources = rows, returned
        self._returned[at] = returned
        return f"own rows {at}"

    def add_returned_rows(self, at: int) -> None:
        """Add the gradients that other ranks returned to those of this rank's own rows."""
        if at not in self._returned:
            return
        returned, rows = self._returned[at], f"rows {at}"
        post = self._transfers[int(returned.split()[1])]
        parts = self.piece(post.transfer.part)[1]
        moves = 3 * high(SENT[post.cast]) / parts
        self.emit(Reduce, (returned,), (rows,), moves=moves, cast=post.cast)
        self.arrange(OWN_ROWS, (rows,), (f"own rows {at}",), 2 * high(KEYS) / parts)

    def _cast_size(self, width: Callable[[str], Size]) -> Size:
        """Return the size of the keys with which a rank computes after the group casts."""
        posts = (op for op in self._operations if isinstance(op, Post))
        casts = {op.cast for op in posts if op.transfer.kind == GROUP_CAST}
        return sum((width(RECEIVED[cast]) for cast in sorted(casts)), width(KEYS))

    def _scratch_of_shards(self, among: int) -> Size:
        """Return the memory of the copies that cut a rank's share of gradients into shards.

        dk and dv are cut in turn. Shards in node order are a copy of those in rank order, which is
        never smaller than the other copies. Ranks that share heads bring a gradient into rank
        order, which copies it. A zigzag layout also copies the half of the pieces that it reverses.
        Other layouts write shards in rank order directly.
        """
        if among:
            return high(KEYS)
        if self.sharing > 1:
            return _made(KEYS) / 2
        return 3 * _made(KEYS) / 4 if self.traits.zigzag else NOTHING

    def exchange_gradients(self, step: ScheduleStep) -> None:
        """Add the gradients that arrived, then send the gradients that this step completes."""
        for number in step.collect:
            post = self._in_flight[number]
            self.wait((number,))
            word, moves = _GRADIENTS[post.transfer.payload]
            total = f"{word} {self.shard(post.transfer.receives)}"
            self.emit(Reduce, post.writes, (total,), moves=moves)
        for t in step.send:
            word, _ = _GRADIENTS[t.payload]
            leaves = f"{word} {self.shard(t.sends)}"
            arrives = f"{word} {self.shard(t.receives)} by {t.number}"
            self._pooled |= {leaves, arrives}
            self._post(t, (leaves,), (arrives,), _payload(t.payload, t.part[1], self.traits))

    def begin_backward(self, moves: Size) -> tuple[str, ...]:
        """Begin a ring's backward pass: compute delta if needed, and start the sum of dq.

        If columns are gathered, compute their gradients first. Return the names of the buffers that
        a kernel reads in addition to the keys.
        """
        columns = self.traits.columns
        delta = ("delta",) if columns or not self.traits.needs_out else ()
        rows = ("q", "dout", "out", "lse", *delta)
        self.arrange(DELTA, rows[:3], (*delta, *(() if columns else ("dq_sum",))), moves)
        if columns:
            self.emit(ComputeColumns, (*rows, "columns"), ("dq_sum", "dcolumns"))
            self.sum_columns("dcolumns", high(WIDE_COLUMNS))
        return rows

    def end_backward(self, gradient: str) -> None:
        """End a ring's backward pass: cast the sums of gradients to the compute dtype.

        If columns are gathered, add their gradients first.
        """
        self._pooled.add(gradient)
        if self.traits.columns:
            self.wait((UNSCHEDULED,))
            # Each rank adds only those columns that are among its own keys.
            moves = 3 * high(COLUMNS) / self.schedule.workers
            self.emit(AddColumns, ("dcolumns",), (gradient,), moves=moves)
        reads = ("q", "dq_sum", gradient)
        self.arrange(GRADIENTS, reads, ("dq", "dk", "dv"), _COPIED + _KEYS_COPIED)

    def enclose(self, inside: _Lowering, steps: Steps) -> None:
        """Emit the operations between the two Ulysses all-to-alls and remember their range."""
        start = len(self._operations)
        inside(self, steps)
        self._inside = slice(start, len(self._operations))

    def without_trade(self, step: ScheduleStep) -> ScheduleStep:
        post = tuple(t for t in step.post if t.payload != HEADS)
        return replace(step, post=post, wait=tuple(n for n in step.wait if n >= self._first_number))

    def program(self, results: tuple[str, ...], saved: tuple[str, ...] = ()) -> Program:
        assert not self._in_flight, "every transfer is waited for"
        inputs: dict[str, None] = {}
        written: dict[str, None] = {}
        for op in self._operations:
            inputs.update(dict.fromkeys(name for name in op.reads if name not in written))
            written.update(dict.fromkeys(op.writes))
        frees: dict[int, list[str]] = {}
        for name, at in self._last_uses().items():
            if name not in (*results, *saved):
                frees.setdefault(at, []).append(name)
        operations = tuple(
            replace(op, frees=tuple(frees[at])) if at in frees else op
            for at, op in enumerate(self._operations)
        )
        sizes = self._sizes()
        buffers = {
            name: Buffer(self._size(name, sizes), name in self._pooled) for name in inputs | written
        }
        return Program(
            operations, tuple(inputs), results, saved, buffers, self._inside, self.sharing
        )

    def _last_uses(self) -> dict[str, int]:
        """Return the index of the last operation that uses each buffer.

        A buffer that a transfer sends is in use until the transfer's `Wait`.
        """
        waits = {op.number: at for at, op in enumerate(self._operations) if isinstance(op, Wait)}
        found = dict(self._held)
        for at, op in enumerate(self._operations):
            for name in (*op.reads, *op.writes):
                found[name] = max(at, found.get(name, 0))
            if isinstance(op, Post):
                for name in (*op.reads, *op.writes[1:]):
                    found[name] = max(found[name], waits[op.transfer.number])
        return found

    def piece(self, part: Part) -> Part:
        """Convert (i, n) from parts of the model's heads to parts of this rank's heads."""
        own = part[1] // self.sharing
        return part[0] % own, own

    def _forwards(self, t: Transfer) -> bool:
        """Return whether a transfer forwards a shard that another transfer delivered."""
        return t.after is not None and t.after >= self._first_number

    def _post(
        self,
        transfer: Transfer,
        reads: tuple[str, ...],
        writes: tuple[str, ...],
        payload: Size,
        piece: Part = (0, 1),
        cast: int = 0,
    ) -> None:
        post = Post(
            step=self._step,
            reads=reads,
            writes=writes,
            transfer=transfer,
            payload=payload,
            piece=piece,
            cast=cast,
        )
        self._operations.append(post)
        self._in_flight[transfer.number] = self._transfers[transfer.number] = post

    def _size(self, name: str, sizes: dict[str, Size]) -> Size:
        """Return the size of a buffer.

        sizes: the result of `_sizes`. The keys are the first words of buffer names.
        """
        word, _, number = name.partition(" ")
        if word in ("gathered", "leaving", "sum", "returned"):
            post = self._transfers[int(number)]
            t = post.transfer
            if t.kind in (GROUP_CAST, GROUP_REDUCE):
                parts = self.piece(t.part)[1]
                arrives = low(RECEIVED[post.cast]) if word == "gathered" else high(SENT[post.cast])
                return post.payload if word == "leaving" else arrives / parts
            if word == "leaving":
                return post.payload * len(t.sends)
            return post.payload * (len(t.receives) + (len(t.sends) if word == "gathered" else 0))
        if name.endswith(" by rank"):
            return NOTHING  # a view
        if word == "own" and number.startswith("rows"):
            return sizes["own rows"]
        if word == "own":
            return low(OWN_KEYS) / 2 if number in ("k", "v", "dk", "dv") else sizes[number]
        if word in ("heads", "traded", "tokens"):
            (post,) = (p for p in self._transfers.values() if name in (*p.reads, *p.writes))
            return post.payload
        return sizes[f"{word} of a part" if number.isdigit() and word in ("lse", "dq") else word]

    def _sizes(self) -> dict[str, Size]:
        gathers, groups = self.schedule.gathers, self.schedule.groups
        n = max(op.piece[1] for op in self._operations if isinstance(op, Compute))
        rows, keys, stats = low(ROWS), low(KEYS), high(STATS)
        # A part of lse is a view. So are the keys of one rank that computes all heads at once.
        by_mask = self.schedule.traits.by_mask
        gathered, made = (
            self._cast_size(width) if by_mask else width(KEYS) * groups for width in (low, _made)
        )
        return {
            "q": rows, "k": keys / 2, "v": keys / 2, "out": rows, "dout": rows, "lse": stats,
            "dq": rows, "dk": keys / 2, "dv": keys / 2, "delta": stats, "kv": keys,
            "lse of a part": NOTHING, "dq of a part": rows / n, "part": (rows + stats) / n,
            "queries": query_message(self.traits), "total": high(ROWS) + stats,
            "dq_sum": high(ROWS), "dqueries": high(ROWS),
            "dkv": keys if gathers else high(KEYS),
            "dkeys": made / n if gathers else _made(KEYS),
            "keys": gathered / n if groups > 1 or n > 1 else NOTHING,
            "rows": self._cast_size(high) / n, "own rows": high(KEYS) / n,
            "shards": high(KEYS) * groups / n,
            "columns": low(WIDE_COLUMNS), "dcolumns": high(WIDE_COLUMNS),
        }  # fmt: skip
