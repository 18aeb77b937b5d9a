"""What tests of programs share: sizes of shards, and playing a program without tensors."""

from __future__ import annotations

from typing import TypeVar

from mtrain_cli.parallel import operations
from mtrain_cli.parallel.buffers import Buffer
from mtrain_cli.parallel.operations import Arrange
from mtrain_cli.parallel.program import Copy, Post, Program, ShardSizes, Wait

Copying = TypeVar("Copying", bound=Copy)
ARRANGEMENTS = {
    kind
    for kind in vars(operations).values()
    if isinstance(kind, type) and issubclass(kind, Arrange)
} - {Arrange}
SIZES = ShardSizes(tokens=64, heads=48, kv_heads=24, head_dim=8, dtype_bytes=2)
# 640 elements of queries, and 320 of keys and values.
FEW = ShardSizes(tokens=10, heads=8, kv_heads=2, head_dim=8, dtype_bytes=2)


def play(program: Program) -> None:
    """Raise AssertionError if a buffer is used before it is written, or after it is freed."""
    there, freed = set(program.inputs), set()
    posted: dict[int, Post] = {}
    under_way: dict[Buffer, int] = {}
    for op in program.operations:
        for name in op.reads:
            assert name in there, f"{op} reads what is not there"
        for name in (*op.reads, *op.writes):
            assert name not in freed, f"{op} uses {name}, which is gone"
            sends_on = isinstance(op, Post) and op.transfer.after == under_way.get(name)
            assert name not in under_way or sends_on, f"{op} uses {name}, which is under way"
        there.update(op.writes)
        if isinstance(op, Post):
            assert op.transfer.number not in posted
            posted[op.transfer.number] = op
            under_way.update(dict.fromkeys(op.writes, op.transfer.number))
        if isinstance(op, Wait):
            done = posted[op.number]
            sent = {*done.reads, *done.writes[1:]}  # a copy of what leaves is written second
            assert sent <= there, "what is sent is gone before it has left"
            for name in [n for n, number in under_way.items() if number == op.number]:
                del under_way[name]
            # The transfer that this one forwarded has arrived, too.
            for name in [n for n, number in under_way.items() if number == done.transfer.after]:
                del under_way[name]
        assert set(op.frees) <= there
        assert not freed & set(op.frees)
        freed.update(op.frees)
        there.difference_update(op.frees)
    assert there == {*program.results, *program.saved}
    waits = [op.number for op in program.operations if isinstance(op, Wait)]
    assert sorted(waits) == sorted(posted)


def copies(program: Program, kind: type[Copying]) -> list[Copying]:
    return [op for op in program.operations if isinstance(op, kind)]
