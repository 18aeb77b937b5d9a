"""Lower a schedule to the program of one rank in one pass (`program.Program`).

Each kind of exchange has one function per pass, such as `ring.ring_forward`. The function
emits the operations in order through a `ProgramBuilder`. Under Ulysses, `_trade_heads` adds one
all-to-all before these operations and one after them.
"""

from __future__ import annotations

from mtrain_cli.parallel import buffers
from mtrain_cli.parallel import operations as ops
from mtrain_cli.parallel.buffers import Buffer, Kind, Side
from mtrain_cli.parallel.gather import (
    gather_backward,
    gather_forward,
    joined_size,
    staged_backward,
    staged_forward,
)
from mtrain_cli.parallel.program import KEYS, NOTHING, QUERIES, Program, low
from mtrain_cli.parallel.program_builder import Emit, ProgramBuilder, Traits
from mtrain_cli.parallel.ring import keys_backward, queries_backward, ring_forward
from mtrain_cli.parallel.schedule import Schedule, Steps


def lower(
    schedule: Schedule, rank: int, *, backward: bool = False, traits: Traits | None = None
) -> Program:
    """Return the program of a rank in the forward or the backward pass."""
    b = ProgramBuilder(schedule, rank, traits or Traits())
    steps = (schedule.backward if backward else schedule.forward)[rank]
    if schedule.stages > 1:
        inside = staged_backward if backward else staged_forward
    elif schedule.gathers:
        inside = gather_backward if backward else gather_forward
    elif backward:
        inside = queries_backward if schedule.queries_travel else keys_backward
    else:
        inside = ring_forward
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
    b.trade(steps[0].post[0], leaving, arriving, given)
    b.emit(ops.FromTokens, (arriving,), there, 3 * given, scratch=given)
    b.enclose(inside, tuple(b.without_trade(step) for step in steps[:-1]))
    b.begin(len(steps) - 1, steps[-1])
    leaving, arriving = Buffer(Kind.TOKENS_TO_TRADE), Buffer(Kind.TRADED_TOKENS)
    b.emit(ops.ToTokens, back, (leaving,), 3 * returned, scratch=returned)
    b.trade(steps[-1].post[0], leaving, arriving, returned)
    by_rank = [buffer.on(Side.BY_RANK) for buffer in back]
    b.emit(ops.FromHeads, (arriving,), by_rank, 3 * returned)
    copied = NOTHING
    if backward and b.schedule.gathers:
        copied = joined_size((len(steps) - 1) // b.schedule.stages)
    # The tensors by rank are views of what arrived, which must live until they are copied.
    b.emit(ops.AddHeads, by_rank, [buffer.on(Side.OWN) for buffer in back], copied)
    b.hold(arriving)
