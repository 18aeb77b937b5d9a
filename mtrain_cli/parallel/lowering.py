"""Lower a schedule to the program of one rank in one pass (`program.Program`).

Each kind of exchange has one function per pass, such as `ring_programs.ring_forward`. The function
emits the operations in order through a `ProgramBuilder`. Under Ulysses, `_trade_heads` adds one
all-to-all before these operations and one after them.
"""

from __future__ import annotations

from mtrain_cli.parallel.arrangements import ADD_HEADS, FROM_HEADS, FROM_TOKENS, TO_HEADS, TO_TOKENS
from mtrain_cli.parallel.gather_programs import gather_backward, gather_forward, joined_size
from mtrain_cli.parallel.program import KEYS, NOTHING, QUERIES, Program, low
from mtrain_cli.parallel.program_builder import Emit, ProgramBuilder, Steps, Traits
from mtrain_cli.parallel.ring_programs import keys_backward, queries_backward, ring_forward
from mtrain_cli.parallel.schedule import Schedule
from mtrain_cli.parallel.staged_programs import staged_backward, staged_forward


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


def _trade_heads(b: ProgramBuilder, steps: Steps, inside: Emit, *, backward: bool) -> None:
    """Emit the operations of an exchange between two Ulysses all-to-alls.

    The first all-to-all trades tokens for heads, the second undoes this trade. ``inside`` emits the
    operations of the exchange.
    """
    queries, both = low(QUERIES), low(QUERIES) + low(KEYS)
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
    copied = NOTHING
    if backward and b.schedule.gathers:
        copied = joined_size((len(steps) - 1) // b.schedule.stages)
    # The tensors by rank are views of "traded tokens", which must live until they are copied.
    b.arrange(ADD_HEADS, by_rank, [f"own {name}" for name in back], copied, timed=False)
    b.hold("traded tokens")
