"""The operations of group casts: what they read, and the order in which gradients return."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from parallel.programs import FEW, copies

from mtrain_cli.parallel.buffers import Kind
from mtrain_cli.parallel.lowering import lower
from mtrain_cli.parallel.operations import MergeRows, OwnRows, ReduceRows, SplitRows
from mtrain_cli.parallel.schedule import DKV, KV, ScheduleOptions, make_schedule

# A rank sends and receives half as many rows as it has in the first cast, 3 times as many in the
# second.
CAST = replace(FEW, casts=((Fraction(1, 2), Fraction(1, 2)), (Fraction(3), Fraction(3))))
TREE = make_schedule("hierarchical_group_cast", ScheduleOptions(4, 2))


def test_the_cast_inside_a_node_forwards_rows_of_the_cast_across_nodes():
    program = lower(TREE, 1)
    assert [(p.reads, p.writes, p.cast, p.transfer.payload) for p in program.posts] == [
        ((Kind.KV.of(1),), (Kind.GATHERED.at(0), Kind.LEAVING.at(0)), 0, KV),
        ((Kind.KV.of(1), Kind.GATHERED.at(0)), (Kind.GATHERED.at(1), Kind.LEAVING.at(1)), 1, KV),
    ]
    (merge,) = copies(program, MergeRows)
    assert merge.reads == (Kind.KV.of(1), Kind.GATHERED.at(0), Kind.GATHERED.at(1))
    # 320 elements in 2 bytes, read and written
    assert merge.moves.of(CAST) == 2 * 2 * 320 * (1 + 0.5 + 3)


def test_gradients_of_rows_return_in_the_reverse_order():
    program = lower(TREE, 1, backward=True)
    inner, outer = (p for p in program.posts if p.transfer.payload == DKV)
    assert (inner.cast, outer.cast) == (1, 0)
    # Before the rows of the first cast return, this rank adds what returned for them.
    assert outer.reads == (Kind.ROWS.at(0), *inner.writes)
    assert inner.sends.of(CAST) == 4 * 320 * 3
    assert outer.sends.of(CAST) == 4 * 320 / 2
    (reduce,) = (op for op in program.operations if isinstance(op, ReduceRows))
    assert (reduce.reads, reduce.writes, reduce.cast) == (outer.writes, (Kind.ROWS.at(0),), 0)
    (split,) = copies(program, SplitRows)
    (own,) = copies(program, OwnRows)
    assert split.moves.of(CAST) == (2 + 4) * 320 * 4.5
    assert split.scratch.of(CAST) == 2 * 320 * 4.5 / 2
    assert own.moves.of(CAST) == 2 * 4 * 320
