"""Play programs without tensors: lifetimes of buffers, transfers, and agreement of ranks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import product

import pytest
import torch
from parallel.test_schedule import cases
from training.allocations import LiveBytes

from mtrain_cli.parallel import schedule
from mtrain_cli.parallel.layout import Joined, make_layout
from mtrain_cli.parallel.lowering import ADD_HEADS, CUT, DELTA, JOIN, SHARDS, Traits, lower
from mtrain_cli.parallel.program import (
    WHOLE_SEQUENCE,
    AddColumns,
    Arrange,
    Begin,
    Compute,
    Merge,
    Operation,
    Post,
    Program,
    Reduce,
    ShardSizes,
    Wait,
    pool_bytes,
)
from mtrain_cli.parallel.schedule import (
    DQ,
    UNSCHEDULED,
    Schedule,
    ScheduleOptions,
    Transfer,
    make_schedule,
)

SIZES = ShardSizes(tokens=64, heads=48, kv_heads=24, head_dim=8, dtype_bytes=2)
# 640 elements of queries, and 320 of keys and values.
FEW = ShardSizes(tokens=10, heads=8, kv_heads=2, head_dim=8, dtype_bytes=2)


def play(program: Program) -> None:
    """Raise AssertionError if a buffer is used before it is written, or after it is freed."""
    there, freed = set(program.inputs), set()
    posted: dict[int, Post] = {}
    under_way: dict[str, int] = {}
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


def traits_of(schedule: Schedule) -> list[Traits]:
    if schedule.gathers:
        return [Traits(), Traits(needs_out=True, copies_parts=True)]
    return [Traits(*found) for found in product((False, True), repeat=2)]


def check(schedule: Schedule, rank: int) -> None:
    for backward, traits in product((False, True), traits_of(schedule)):
        program = lower(schedule, rank, backward=backward, traits=traits)
        play(program)
        steps = (schedule.backward if backward else schedule.forward)[rank]
        scheduled = [p.transfer for p in program.posts if p.transfer.number != UNSCHEDULED]
        assert sorted(scheduled, key=lambda t: t.number) == sorted(
            (t for step in steps for t in step.transfers), key=lambda t: t.number
        )
        order: dict[tuple[str, bool], list[int]] = defaultdict(list)
        for t in scheduled:
            order[t.channel, t.payload.startswith("d")].append(t.number)
        assert all(numbers == sorted(numbers) for numbers in order.values())
        heads, at = schedule.heads, 0
        computed = [step for step in steps if step.keys]
        for op, step in zip(program.computes, computed, strict=True):
            at = op.step
            assert (op.queries, op.part) == ((step.queries[0] // heads,), step.part)
            assert op.keys == (WHOLE_SEQUENCE if schedule.gathers else (step.keys[0] // heads,))
            assert step is steps[at]
        assert [op.step for op in program.operations] == sorted(
            op.step for op in program.operations
        )
        assert program.steps == len(steps)


@pytest.mark.parametrize("exchange", sorted({name for name, _ in cases()}))
def test_programs_use_live_buffers_and_send_what_is_scheduled(exchange):
    for name, options in cases():
        if name == exchange:
            schedule = make_schedule(name, options)
            for rank in {0, options.workers // 2, options.workers - 1}:
                check(schedule, rank)


def alike(mine: Operation, theirs: Operation) -> bool:
    """Return whether two ranks do the same, apart from the shards that they do it with."""
    if isinstance(mine, Post) and isinstance(theirs, Post):
        return (mine.payload, mine.piece, mine.transfer.number, mine.transfer.after) == (
            theirs.payload,
            theirs.piece,
            theirs.transfer.number,
            theirs.transfer.after,
        )
    plain = {"reads": (), "writes": (), "frees": ()}
    if isinstance(mine, Compute) and isinstance(theirs, Compute):
        plain |= {"queries": (), "keys": (), "part": (0, 1)}
    elif isinstance(mine, Merge) and isinstance(theirs, Merge):
        plain |= {"begins": ()}
    return replace(mine, **plain) == replace(theirs, **plain)


@pytest.mark.parametrize(
    ("exchange", "options"),
    [
        ("ring", ScheduleOptions(6, 3, prefetch=2)),
        ("ring", ScheduleOptions(8, 4, heads=2, circulates="queries")),
        ("hierarchical_ring", ScheduleOptions(8, 4)),
        ("hierarchical_ring", ScheduleOptions(12, 3, circulates="queries")),
        ("all_gather", ScheduleOptions(4, 4, chunks=2)),
        ("hierarchical_all_gather", ScheduleOptions(8, 4, chunks=2)),
        ("all_gather", ScheduleOptions(8, 8, heads=4)),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_all_ranks_have_the_same_program(exchange, options, backward):
    schedule = make_schedule(exchange, options)
    traits = Traits(columns=not schedule.gathers)
    first = lower(schedule, 0, backward=backward, traits=traits)
    for rank in range(1, options.workers):
        other = lower(schedule, rank, backward=backward, traits=traits)
        assert len(first.operations) == len(other.operations)
        for mine, theirs in zip(first.operations, other.operations, strict=True):
            assert type(mine) is type(theirs)
            assert alike(mine, theirs), (mine, theirs)
            assert [len(n) for n in (mine.reads, mine.writes, mine.frees)] == [
                len(n) for n in (theirs.reads, theirs.writes, theirs.frees)
            ]
        assert first.sent(SIZES) == other.sent(SIZES)


def test_playing_finds_a_buffer_that_is_freed_early_or_never():
    program = lower(make_schedule("ring", ScheduleOptions(4, 4)), 1, backward=True)
    at, wait = next((i, op) for i, op in enumerate(program.operations) if op.frees)
    never = list(program.operations)
    never[at] = replace(wait, frees=())
    with pytest.raises(AssertionError):
        play(replace(program, operations=tuple(never)))
    post = next(i for i, op in enumerate(program.operations) if isinstance(op, Post))
    early = list(program.operations)
    early[post] = replace(early[post], frees=early[post].reads)
    with pytest.raises(AssertionError):
        play(replace(program, operations=tuple(early)))
    lost = [op for op in program.operations if not isinstance(op, Wait)]
    with pytest.raises(AssertionError):
        play(replace(program, operations=tuple(lost)))


def test_a_ring_of_keys_step_by_step():
    """The second of four ranks receives its predecessors' keys, one hop ahead."""
    program = lower(make_schedule("ring", ScheduleOptions(4, 4)), 1)
    kinds = [type(op).__name__ for op in program.operations if op.step == 1]
    assert kinds == ["Begin", "Post", "Wait", "Compute", "Merge"]
    assert [op.keys for op in program.computes] == [(1,), (0,), (3,), (2,)]
    assert [(p.reads, p.writes) for p in program.posts] == [
        (("kv 1",), ("kv 0",)),
        (("kv 0",), ("kv 3",)),
        (("kv 3",), ("kv 2",)),
    ]
    assert program.saved == ("q", "kv 2", "out", "lse")
    # One shard leaves, one is computed and one arrives. The last one is saved, not pooled; the
    # first one is not pooled, either.
    assert pool_bytes([program], SIZES) == 2 * 2 * 64 * 24 * 8 * 2
    merges = [op for op in program.operations if isinstance(op, Merge)]
    rows = SIZES.tokens * SIZES.heads * SIZES.head_dim
    assert [op.moves.of(SIZES) for op in merges] == [0, 16 * rows, 10 * rows, 10 * rows]


@pytest.mark.parametrize("circulates", ["kv", "queries"])
@pytest.mark.parametrize(("name", "per_node"), [("ring", 6), ("hierarchical_ring", 3)])
def test_a_ring_frees_the_shards_of_a_step_at_its_end(name, per_node, circulates):
    """Gradients of a step, which may have the same shape, cannot take over their memory."""
    schedule = make_schedule(name, ScheduleOptions(6, per_node, circulates=circulates))
    for backward in (False, True):
        program = lower(schedule, 1, backward=backward)
        begins = [at for at, op in enumerate(program.operations) if isinstance(op, Begin)]
        last = {after - 1 for after in begins[1:]}
        word = "queries" if backward and circulates == "queries" else "kv"
        found = [
            at
            for at, op in enumerate(program.operations)
            for name in op.frees
            if name.startswith(f"{word} ")
        ]
        assert len(found) >= 5
        # After the last step the pass casts its results.
        assert all(at in last or at > begins[-1] for at in found), found


@pytest.mark.parametrize("name", ["all_gather", "hierarchical_all_gather"])
def test_one_part_of_the_heads_is_scattered_at_a_time(name):
    """The shards of a part take over the memory of the part before."""
    schedule = make_schedule(name, ScheduleOptions(4, 2, chunks=4))
    program = lower(schedule, 0, backward=True)
    live: set[str] = set()
    most = 0
    for op in program.operations:
        live.update(op.writes)
        most = max(most, sum(name.startswith("shards ") for name in live))
        live.difference_update(op.frees)
    assert most == 1


def test_the_ring_step_in_the_docstring_is_the_program():
    schedule_ = make_schedule("ring", ScheduleOptions(3, 3))
    step = schedule_.forward[0][1]
    (hop,) = step.post
    assert (step.queries, step.keys, step.wait) == ((0,), (2,), (0,))
    assert hop == Transfer(
        1, "p2p", "kv", "context", sends=(2,), receives=(1,), to=1, source=2, after=0
    )
    lines = (schedule.__doc__ or "").splitlines()
    start = next(at for at, line in enumerate(lines) if line.strip().startswith("operation  reads"))
    table = [line[4:34] for line in lines[start + 1 : lines.index("", start)]]
    shown = [(row[:11].strip(), row[11:23].strip(), row[23:].strip()) for row in table]
    assert shown == [
        (type(op).__name__, ", ".join(op.reads) or "-", ", ".join(op.writes) or "-")
        for op in lower(schedule_, 0).operations
        if op.step == 1
    ]


def test_gradients_of_queries_come_home():
    program = lower(
        make_schedule("ring", ScheduleOptions(3, 3, circulates="queries")), 0, backward=True
    )
    hops = [p for p in program.posts if p.transfer.payload == DQ]
    assert [(p.reads, p.writes) for p in hops] == [
        (("dqueries 2",), ("dqueries 1 by 2",)),
        (("dqueries 1",), ("dqueries 0 by 3",)),
    ]
    assert [op.writes for op in program.operations if isinstance(op, Reduce)] == [
        ("dqueries 1",),
        ("dqueries 0",),
        ("dq_sum",),
    ]
    begins = [op.computes for op in program.operations if isinstance(op, Begin)]
    assert begins == [True, True, True, False]


@pytest.mark.parametrize("backward", [False, True])
def test_columns_are_summed_over_the_ranks_that_hold_the_same_heads(backward):
    schedule = make_schedule("ring", ScheduleOptions(8, 8, heads=2))
    for rank in range(8):
        program = lower(schedule, rank, backward=backward, traits=Traits(columns=True))
        (post,) = (p for p in program.posts if p.transfer.number == UNSCHEDULED)
        assert post.transfer.peers == ((1, 3, 5, 7) if rank % 2 else (0, 2, 4, 6))
        assert post.transfer.part == (rank % 2, 2)


def copies(program: Program, what: str) -> list[Arrange]:
    return [op for op in program.operations if isinstance(op, Arrange) and op.what == what]


@pytest.mark.parametrize(
    ("chunks", "heads", "moved"),
    [
        # Keys: reads 4 bytes per element and writes 2. Several parts of dq: reads 2 and writes 2.
        (1, 1, {JOIN: [6 * 320], ADD_HEADS: []}),
        (2, 1, {JOIN: [6 * 320 + 4 * 640], ADD_HEADS: []}),
        (1, 2, {JOIN: [0], ADD_HEADS: [6 * 320]}),
        (4, 2, {JOIN: [0], ADD_HEADS: [6 * 320 + 4 * 640]}),
    ],
)
def test_one_operation_is_charged_for_joining_the_gradients(chunks, heads, moved):
    schedule = make_schedule("all_gather", ScheduleOptions(8, 8, chunks=chunks, heads=heads))
    program = lower(schedule, 0, backward=True)
    assert moved == {
        what: [op.moves.of(FEW, heads) for op in copies(program, what)] for what in moved
    }


@pytest.mark.parametrize("backward", [False, True])
def test_traded_tokens_live_until_their_views_are_copied(backward):
    schedule = make_schedule("ring", ScheduleOptions(4, 4, heads=2))
    program = lower(schedule, 0, backward=backward)
    (op,) = copies(program, ADD_HEADS)
    assert op == program.operations[-1]
    assert "traded tokens" in op.frees


@pytest.mark.parametrize("heads", [1, 2])
def test_a_rank_adds_its_own_share_of_the_columns(heads):
    """Keys and values of 6 columns per head. Each of 4 elements is read twice and written once."""
    sizes = replace(FEW, columns=6, column_width=128)
    schedule = make_schedule("ring", ScheduleOptions(8, 8, heads=heads))
    program = lower(schedule, 0, backward=True, traits=Traits(columns=True))
    (added,) = (op for op in program.operations if isinstance(op, AddColumns))
    assert added.moves.of(sizes, heads) == 3 * 4 * (2 * 6 * (8 // heads) * 8) / 8


def test_backward_of_queries_is_charged_for_the_message():
    """Bytes per element of the queries: reads out and dout, and starts dq in float32.

    The message reads and writes q and dout.
    """
    for circulates, each in (("kv", 2 * 2 + 4), ("queries", 2 * 2 + 4 + 4 * 2)):
        schedule = make_schedule("ring", ScheduleOptions(4, 4, circulates=circulates))
        (delta,) = copies(lower(schedule, 1, backward=True), DELTA)
        assert delta.moves.of(FEW) == each * 640


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize(("chunks", "heads"), [(1, 1), (2, 1), (4, 2)])
def test_shards_need_copies_in_another_order(chunks, heads, zigzag):
    """All keys of a part of the heads are cut into shards.

    A hierarchical reduce-scatter sorts their float32 gradients by node. Otherwise, ranks that share
    heads sort dk and dv in turn, in the kernel's dtype. So does a zigzag layout, which also copies
    the half that it reverses.
    """
    options, traits = ScheduleOptions(8, 4, chunks=chunks, heads=heads), Traits(zigzag=zigzag)
    flat, tree = (
        copies(lower(make_schedule(name, options), 0, backward=True, traits=traits), SHARDS)
        for name in ("all_gather", "hierarchical_all_gather")
    )
    keys = 320 * (8 // heads) // chunks
    share = 1 / 2 if heads > 1 else 3 / 4 * zigzag
    for made_bytes in (2, 4):
        sizes = replace(FEW, made_bytes=made_bytes)
        assert [op.scratch.of(sizes, heads) for op in flat] == [made_bytes * keys * share] * chunks
        assert [op.scratch.of(sizes, heads) for op in tree] == [4 * keys] * chunks


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped"])
def test_cutting_shards_allocates_the_scratch_of_the_program(name, heads):
    schedule = make_schedule("all_gather", ScheduleOptions(4, 4, heads=heads))
    traits = Traits(zigzag=name == "zigzag")
    (op,) = copies(lower(schedule, 0, backward=True, traits=traits), SHARDS)
    sizes = ShardSizes(tokens=8, heads=4, kv_heads=4, head_dim=16, dtype_bytes=2)
    base = make_layout(name, 4, 32, 4)
    layout = base if heads == 1 else Joined.of(base, heads)
    kv = torch.zeros(2, 1, 32, 4 // heads, 16, dtype=torch.bfloat16)
    shards = torch.empty(layout.workers, 2, 1, 8 * heads, 4 // heads, 16)
    with LiveBytes([kv, shards]) as live:
        for i in (0, 1):
            layout.copy_to_shards(kv[i], shards[:, i])
    # A layout of joined shards keeps the order of its tokens.
    assert live.peak - live.now() == op.scratch.of(sizes, heads)


def test_the_gradients_of_a_kernel_stay_until_the_reduce_scatter_has_started():
    for name, sent in (("all_gather", 1), ("hierarchical_all_gather", 2)):
        schedule = make_schedule(name, ScheduleOptions(4, 2, chunks=2))
        program = lower(schedule, 0, backward=True)
        for step in (0, 1):
            posts = [p for p in program.posts if p.step == step and p.transfer.payload == "dkv"]
            assert len(posts) == sent
            assert [f"dkeys {step}" in post.frees for post in posts] == [False] * (sent - 1) + [
                True
            ]


@pytest.mark.parametrize(
    ("workers", "chunks", "copying", "moved"),
    [
        (4, 1, True, [0]),
        (4, 2, False, [0, 0]),
        (4, 2, True, [8 * 640 / 2] * 2),  # reads and writes out and dout, 2 bytes per element
        (4, 4, True, [8 * 640 / 4] * 4),
        (1, 2, True, [0, 0]),
    ],
)
def test_a_kernel_that_copies_parts_is_charged_for_each(workers, chunks, copying, moved):
    schedule = make_schedule("all_gather", ScheduleOptions(workers, 4, chunks=chunks))
    program = lower(schedule, 0, backward=True, traits=Traits(copies_parts=copying))
    assert [op.moves.of(FEW) for op in copies(program, CUT)] == moved
    # out and dout in 2 bytes per element, lse in 4 bytes
    copied = (4 * 640 + 4 * 80) / chunks if copying and chunks > 1 else 0
    assert [op.scratch.of(FEW) for op in program.computes] == [copied] * chunks


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize(("copying", "bytes_each"), [(False, 0), (True, 2)])
def test_a_kernel_that_copies_parts_allocates_an_out_for_messages(copying, bytes_each, heads):
    """A message has no out, even if all ranks share heads and no message leaves its rank."""
    traits = Traits(copies_parts=copying)
    for circulates, allocated in (("kv", 0), ("queries", bytes_each * 640)):
        schedule = make_schedule("ring", ScheduleOptions(4, 4, circulates=circulates, heads=heads))
        program = lower(schedule, 1, backward=True, traits=traits)
        assert [op.scratch.of(FEW, heads) for op in program.computes] == [allocated] * (4 // heads)
