"""Programs by hand: bytes, work, the order of units, clocks, and the collectives of FSDP2."""

from __future__ import annotations

import numpy as np
import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.parallel.recording import BACKWARD, FORWARD, RECOMPUTE
from mtrain_cli.step.program import (
    EXPERTS_IN,
    EXPERTS_OUT,
    Compute,
    Layer,
    Message,
    MessageCost,
    Next,
    PassTime,
    Post,
    Repeat,
    Wait,
    in_turns,
    layers,
    time,
    traffic,
    weight_messages,
    work,
)

HIDDEN, ROWS, BACK = Message.HIDDEN, Message.ROWS, Message.ROWS_BACK
# Two products and two messages on two links, then three times a product and a message.
TEN = [
    Compute("o", rows=2),
    Post(HIDDEN, 2, 0),
    Post(ROWS, 3, 1),
    Compute("o", BACKWARD, 2),
    Wait(1),
    Wait(0),
    Repeat(3, [Compute("down", rows=5), Post(ROWS, 1, 2), Wait(2)]),
]


def test_bytes_are_those_of_the_messages_that_have_a_size():
    assert traffic(TEN, {HIDDEN: 10, ROWS: 100}) == 2 * 10 + (3 + 3) * 100
    assert traffic(TEN, {HIDDEN: 10}) == 20
    assert traffic(TEN, {BACK: 7}) == 0


def test_bytes_of_several_ranks_are_an_array():
    assert traffic(TEN, {ROWS: np.array([1, 0, 5])}).tolist() == [6, 0, 30]


def test_work_counts_rows_by_direction():
    assert work(TEN, {"o": 7, "down": 1}) == {FORWARD: 2 * 7 + 3 * 5, BACKWARD: 14}
    assert work(TEN, {"down": 1})[RECOMPUTE] == 0


def test_units_take_turns_at_each_message():
    """The newest unit runs first. Each waits for its own oldest message."""
    unit = (Post(HIDDEN), Post(ROWS), Next(), Wait(), Compute("o"), Wait())
    assert in_turns(unit, [3, 4]) == [
        *(Post(HIDDEN, 3, 0), Post(ROWS, 3, 1)),
        *(Post(HIDDEN, 4, 6), Post(ROWS, 4, 7)),
        *(Wait(0), Compute("o", rows=3), Wait(1)),
        *(Wait(6), Compute("o", rows=4), Wait(7)),
    ]


def costs(us: dict[Message, float]):
    return lambda post: (
        MessageCost(us[post.message], us[post.message] / 2, 10.0) if post.message in us else None
    )


def test_links_work_at_the_same_time_and_keep_their_order():
    program = [
        Post(HIDDEN, 1, 0), Post(ROWS, 1, 1), Post(BACK, 1, 2), Compute("o"), Wait(0), Wait(2),
    ]  # fmt: skip
    found = time(program, {"o": 4.0}, costs({HIDDEN: 5.0, ROWS: 3.0, BACK: 3.0}))
    # Hidden states arrive at 5, rows at 3, and rows back, on the same link, at 6.
    assert found == PassTime(span=6.0, exposed=2.0, late=0.0, hidden=9.0, busy=5.5, size=30.0)
    unsent = time(program, {"o": 4.0}, costs({HIDDEN: 5.0}))
    assert (unsent.span, unsent.size) == (5.0, 10.0)


def test_computing_is_dealt_out_by_the_work_of_products():
    program = [Compute("o"), Post(HIDDEN), Compute("down"), Wait()]
    found = time(program, {"o": 1, "down": 3}, costs({HIDDEN: 50.0}), computing=40.0)
    assert (found.span, found.exposed) == (60.0, 20.0)


def test_the_mean_of_layers_weighs_their_numbers():
    found = PassTime.mean([PassTime(*[1.0] * 6), PassTime(*[5.0] * 6)], [3, 1])
    assert found == PassTime(*[2.0] * 6)


def clocks(program, us: float, computing: list[float]) -> PassTime:
    """Run a program of experts in which every message of rows takes equal time."""
    kinds = ROWS, Message.SCORED, BACK, Message.SCORED_BACK
    products = {EXPERTS_IN: 2, EXPERTS_OUT: 1}
    return time(program, products, costs(dict.fromkeys(kinds, us)), np.array(computing))


def forward(units: int):
    return Layer(experts=True, units=units).forward()


def backward(*, checkpointed: bool):
    return Layer(experts=True, checkpointed=checkpointed).backward()


def test_one_part_waits_for_both_messages():
    found = clocks(forward(1), 5.0, [30.0, 30.0])
    assert (found.span, found.exposed, found.hidden) == (40.0, 10.0, 0.0)
    assert (found.busy, found.size) == (5.0, 20.0)


def test_parts_share_the_rows_of_a_layer():
    assert traffic(forward(4), {Message.SCORED: 8, BACK: 4}) == 8 + 4
    assert work(forward(4), {EXPERTS_IN: 3})[FORWARD] == 3


def test_of_several_parts_only_the_first_and_the_last_message_are_exposed():
    found = clocks(forward(4), 2.0, [40.0, 40.0])
    assert found.exposed == pytest.approx(4.0)
    assert found.hidden == pytest.approx(12.0)


def test_messages_longer_than_the_products_follow_each_other():
    found = clocks(forward(3), 10.0, [3.0, 3.0])
    assert found.span == pytest.approx(60.0)


def test_all_workers_wait_for_the_one_with_the_most_rows():
    found = clocks(forward(1), 5.0, [10.0, 30.0])
    assert (found.span, found.exposed, found.late) == (40.0, 10.0, 10.0)


def test_without_checkpointing_backward_waits_for_one_message():
    """Products of the weights hide the message back: half of the backward pass."""
    assert clocks(backward(checkpointed=False), 5.0, [60.0]).exposed == pytest.approx(5.0)
    # The second message travels during the product that is computed again, of 60 * 2 / 8.
    assert clocks(backward(checkpointed=True), 5.0, [60.0]).exposed == pytest.approx(5.0)


def test_the_product_of_gate_and_up_is_twice_that_of_down():
    """Products take 1 and 2. The third message begins at 13, before the last two products."""
    assert clocks(backward(checkpointed=True), 5.0, [8.0]).span == pytest.approx(18.0)


def test_kinds_of_layers_add_up_to_a_model():
    model = compose(["model=tiny_moe", "model.num_layers=5", "model.moe.dense_layers=3"]).model
    found = layers(model, checkpointed=True, tiled=False, keep_mlp=1)
    assert [(n, layer.experts, layer.keeps) for n, layer in found] == [
        (2, False, False), (1, False, True), (2, True, False)
    ]  # fmt: skip
    plain = layers(model, checkpointed=False, tiled=False, keep_mlp=False)
    assert [(n, layer.keeps) for n, layer in plain] == [(3, True), (2, False)]


@pytest.mark.parametrize("shard", ["full", "gradients", "optimizer"])
@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_groups_cover_a_step_and_reduce_what_the_shards_need(shard, micro_batches):
    """`full` gathers weights in every pass; else the first micro-batch gathers them once."""
    found = weight_messages(shard, micro_batches)
    assert sum(group.times for group in found) == micro_batches
    assert all(group.times for group in found)
    full = shard == "full"
    assert traffic(found, {Message.GATHER: 1}) == (micro_batches if full else 1)
    assert traffic(found, {Message.GATHER_AGAIN: 1}) == (micro_batches if full else 0)
    assert traffic(found, {Message.REDUCE: 1}) == (1 if shard == "optimizer" else micro_batches)
    assert Post(Message.GATHER) in found[0].body
    assert Post(Message.REDUCE) in found[-1].body
