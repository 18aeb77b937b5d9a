"""Collect the operations of one rank's program, with the lifetimes and the sizes of its buffers.

A buffer's name is its kind and a number. "kv 2", "dkv 2" and "queries 2" belong to shard 2.
"keys 1", "part 1", "dq 1" and "dkeys 1" belong to step 1. "gathered 3" and "sum 3" arrive by
transfer 3. `ProgramBuilder.program` derives from the operations when each buffer is freed.

The simulator charges time for the bytes that an operation's `moves` gives. If one charge covers
several copies, only the first copy carries the charge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from mtrain_cli.parallel.arrangements import TAKE_SUM
from mtrain_cli.parallel.program import (
    KEYS,
    NOTHING,
    OWN_KEYS,
    QUERIES,
    RECEIVED,
    SENT,
    STATS,
    WIDE_COLUMNS,
    Arrange,
    Begin,
    Buffer,
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
    SUM,
    UNSCHEDULED,
    Schedule,
    ScheduleStep,
    Transfer,
)
from mtrain_cli.parallel.schedule import QUERIES as QUERY_PAYLOAD

# Bytes that memory reads and writes. ADDED: reads a result and the sum, writes the sum. COPIED:
# copies a result into the sum, or the sum into a result.
ADDED, COPIED = 2 * high(QUERIES) + low(QUERIES), high(QUERIES) + low(QUERIES)
KEYS_ADDED, KEYS_COPIED = 2 * high(KEYS) + low(KEYS), high(KEYS) + low(KEYS)

Steps = Sequence[ScheduleStep]
Emit = Callable[["ProgramBuilder", Steps], None]


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
    return 2 * low(QUERIES) + high(STATS) + (low(QUERIES) if traits.needs_out else high(STATS))


@cache
def _payload(payload: str, parts: int, traits: Traits) -> Size:
    """Return the size of one rank's shard of a payload, such as KV, for 1 / parts of the heads."""
    message = query_message(traits)
    sizes = {KV: low(KEYS), DKV: high(KEYS), DQ: high(QUERIES), QUERY_PAYLOAD: message}
    return sizes[payload] / parts


class ProgramBuilder:
    """Collects the operations of one rank.

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
        self.posted: dict[int, Post] = {}
        self.in_flight: dict[int, Post] = {}
        self._held: dict[str, int] = {}  # buffer -> the operation up to which it must live
        self.pooled: set[str] = set()
        self.sized: dict[str, Size] = {}  # sizes of buffers whose names do not tell them
        self._inside = slice(None)

    def shard(self, members: tuple[int, ...]) -> int:
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
        self.pooled.add(name)
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
            queries=Shard(self.shard(step.queries)),
            keys=self._keys(step),
            part=step.part,
            piece=self.piece(step.part),
            with_columns=not self.traits.columns,
            scratch=scratch,
        )

    def _keys(self, step: ScheduleStep) -> Keys:
        if step.stage:
            return Stage(step.stage)
        one = step.stage == 0 or not self.schedule.gathers
        return Shard(self.shard(step.keys)) if one else Whole()

    def wait(self, numbers: Sequence[int]) -> None:
        """Wait for the transfers with these numbers, which must be in flight."""
        for number in numbers:
            assert number in self.in_flight, f"transfer {number} is not in flight"
            del self.in_flight[number]
            self.emit(Wait, (), (), number=number)

    def payload(self, t: Transfer) -> Size:
        """Return the size of one shard of a transfer."""
        return _payload(t.payload, t.part[1], self.traits)

    @property
    def under_way(self) -> tuple[int, ...]:
        return tuple(self.in_flight)

    def trade(self, transfer: Transfer, leaves: str, arrives: str, payload: Size) -> None:
        self.post(transfer, (leaves,), (arrives,), payload)
        self.wait((transfer.number,))

    def hold(self, *names: str) -> None:
        """Keep these buffers alive until the end of the last operation emitted so far."""
        self._held |= dict.fromkeys(names, len(self._operations) - 1)

    def end_step(self, step: ScheduleStep, *computed: str) -> None:
        """End a step. Free the shards that it computed and the buffers that it finished sending.

        If these buffers were freed earlier, the step's gradients could reuse their memory.
        """
        left = (self.posted[n].reads for n in step.wait if n in self.posted)
        self.hold(*computed, *(name for names in left for name in names))

    def sum_columns(self, name: str, size: Size) -> None:
        """Sum single columns, or their gradients, over all ranks that hold the same heads."""
        peers = tuple(range(self.rank % self.sharing, self.schedule.workers, self.sharing))
        part = self.rank % self.sharing, self.sharing
        transfer = Transfer(
            UNSCHEDULED, SUM, COLUMN_PAYLOAD, CONTEXT, (), (), peers=peers, part=part
        )
        self.post(transfer, (name,), (name,), size)

    @property
    def casts(self) -> range:
        """The numbers of the group casts."""
        posts = (op for op in self._operations if isinstance(op, Post))
        return range(len({op.cast for op in posts if op.transfer.kind == GROUP_CAST}))

    def cast_size(self, width: Callable[[Unit], Size]) -> Size:
        """Return the size of the keys with which a rank computes after the group casts."""
        return sum((width(RECEIVED[cast]) for cast in self.casts), width(KEYS))

    def enclose(self, inside: Emit, steps: Steps) -> None:
        """Emit the operations between the two Ulysses all-to-alls and remember their range."""
        start = len(self._operations)
        inside(self, steps)
        self._inside = slice(start, len(self._operations))

    def without_trade(self, step: ScheduleStep) -> ScheduleStep:
        post = tuple(t for t in step.post if t.payload != HEADS)
        return replace(step, post=post, wait=tuple(n for n in step.wait if n >= self._first_number))

    def program(self, results: tuple[str, ...], saved: tuple[str, ...] = ()) -> Program:
        assert not self.in_flight, "every transfer is waited for"
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
            name: Buffer(self._size(name, sizes), name in self.pooled) for name in inputs | written
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

    def forwards(self, t: Transfer) -> bool:
        """Return whether a transfer forwards a shard that another transfer delivered."""
        return t.after is not None and t.after >= self._first_number

    def post(
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
        self.in_flight[transfer.number] = self.posted[transfer.number] = post

    def _size(self, name: str, sizes: dict[str, Size]) -> Size:
        """Return the size of a buffer.

        sizes: the result of `_sizes`. The keys are the first words of buffer names.
        """
        if name in self.sized:
            return self.sized[name]
        word, _, number = name.partition(" ")
        if word in ("gathered", "leaving", "sum", "returned"):
            post = self.posted[int(number)]
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
            (post,) = (p for p in self.posted.values() if name in (*p.reads, *p.writes))
            return post.payload
        return sizes[f"{word} of a part" if number.isdigit() and word in ("lse", "dq") else word]

    def _sizes(self) -> dict[str, Size]:
        gathers, groups = self.schedule.gathers, self.schedule.groups
        n = max(op.piece[1] for op in self._operations if isinstance(op, Compute))
        queries, keys, stats = low(QUERIES), low(KEYS), high(STATS)
        # A part of lse is a view. So are the keys of one rank that computes all heads at once.
        by_mask = self.schedule.traits.by_mask
        gathered, made = (
            self.cast_size(width) if by_mask else width(KEYS) * groups for width in (low, as_made)
        )
        return {
            "q": queries, "k": keys / 2, "v": keys / 2, "out": queries, "dout": queries,
            "dq": queries, "dk": keys / 2, "dv": keys / 2, "kv": keys, "lse": stats, "delta": stats,
            "lse of a part": NOTHING, "dq of a part": queries / n, "part": (queries + stats) / n,
            "queries": query_message(self.traits), "total": high(QUERIES) + stats,
            "dq_sum": high(QUERIES), "dqueries": high(QUERIES),
            "dkv": keys if gathers else high(KEYS),
            "dkeys": made / n if gathers else as_made(KEYS),
            "keys": gathered / n if groups > 1 or n > 1 else NOTHING,
            "rows": self.cast_size(high) / n, "own rows": high(KEYS) / n,
            "shards": high(KEYS) * groups / n,
            "columns": low(WIDE_COLUMNS), "dcolumns": high(WIDE_COLUMNS),
        }  # fmt: skip
