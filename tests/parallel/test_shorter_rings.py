"""Shorter rings need the memory of the ring for which they stand, and their bytes add up to its."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from slow_cases import mostly_slow

from mtrain_cli.parallel.lowering import Traits, lower
from mtrain_cli.parallel.program import ShardSizes, pool_bytes
from mtrain_cli.parallel.ring import shorter_rings
from mtrain_cli.parallel.schedule import KV, QUERIES, ScheduleOptions, make_schedule

SIZES = ShardSizes(256, 16, 2, 128, 2, columns=2048, column_width=2048)
CASES = list(itertools.product(("ring", "hierarchical_ring"), (KV, QUERIES), (1, 2, 5)))
SHAPES = ((256, 8, 1), (256, 2, 1), (256, 1, 1), (256, 4, 2), (240, 12, 1), (1024, 8, 1))


@mostly_slow(("exchange", "circulates", "prefetch"), CASES, keep=(0, 9))
def test_memory_and_bytes_are_those_of_the_long_ring(exchange, circulates, prefetch):
    for workers, per_node, heads in SHAPES:
        more = {"prefetch": prefetch, "circulates": circulates, "heads": heads}
        whole = ScheduleOptions(workers, per_node, **more)
        shorter = shorter_rings(exchange, whole)
        assert sum(weight for weight, _ in shorter) == 1
        if workers == 1024:
            assert [options.workers < 200 for _, options in shorter] == [True, True]
        for traits in (Traits(), Traits(columns=True, copies_parts=True)):
            memory, sent = [], []
            for options in (whole, *(options for _, options in shorter)):
                schedule = make_schedule.__wrapped__(exchange, options)
                passes = [
                    lower(schedule, 0, backward=backward, traits=traits)
                    for backward in (False, True)
                ]
                peaks = [of.peak_bytes(SIZES, 77, 55) for of in passes]
                saved = {buffer.kind: passes[0].sizes[buffer] for buffer in passes[0].saved}
                memory.append((pool_bytes(passes, SIZES), peaks, saved))
                sent.append([Fraction(of.sent(SIZES)) for of in passes])
            about = (workers, per_node, heads, traits)
            assert all(of == memory[0] for of in memory[1:]), about
            if not traits.columns:  # the sum of columns takes (n - 1) / n of its bytes
                weighted = [
                    sum(weight * of[at] for (weight, _), of in zip(shorter, sent[1:], strict=True))
                    for at in (0, 1)
                ]
                assert weighted == sent[0], about


@pytest.mark.parametrize("exchange", ["all_gather", "group_cast"])
def test_other_exchanges_stand_for_themselves(exchange):
    options = ScheduleOptions(1024, 8)
    assert shorter_rings(exchange, options) == ((1, options),)
