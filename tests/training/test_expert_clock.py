"""The clocks of an expert group follow programs of parts, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from mtrain_cli.training.expert_clock import GroupClocks, MessageCost
from mtrain_cli.training.expert_rows import (
    FORWARD_CHUNK,
    ROWS,
    ROWS_BACK,
    SCORED,
    SCORED_BACK,
    backward_chunk,
)


def clocks(program, units: int, us: float, computing: list[float]) -> GroupClocks:
    kinds = ROWS, SCORED, ROWS_BACK, SCORED_BACK
    messages = dict.fromkeys(kinds, MessageCost(us, us / 2, 10.0))
    return GroupClocks(program, units, messages, np.array(computing))


def test_one_part_waits_for_both_messages():
    found = clocks(FORWARD_CHUNK, 1, 5.0, [30.0, 30.0])
    assert (found.span, found.exposed, found.hidden) == (40.0, 10.0, 0.0)
    assert (found.sending, found.busy, found.size) == (10.0, 5.0, 20.0)


def test_of_several_parts_only_the_first_and_the_last_message_are_exposed():
    found = clocks(FORWARD_CHUNK, 4, 2.0, [40.0, 40.0])
    assert found.exposed == pytest.approx(4.0)
    assert found.hidden == pytest.approx(12.0)


def test_messages_longer_than_the_products_follow_each_other():
    found = clocks(FORWARD_CHUNK, 3, 10.0, [3.0, 3.0])
    assert found.span == pytest.approx(60.0)


def test_all_workers_wait_for_the_one_with_the_most_rows():
    found = clocks(FORWARD_CHUNK, 1, 5.0, [10.0, 30.0])
    assert (found.span, found.exposed) == (40.0, 10.0)


def test_without_checkpointing_backward_waits_for_one_message():
    """Products of the weights hide the message back: half of the backward pass."""
    assert clocks(backward_chunk("none"), 1, 5.0, [60.0]).exposed == pytest.approx(5.0)
    # The second message travels during the product that is computed again, of 60 * 2 / 8.
    assert clocks(backward_chunk("full"), 1, 5.0, [60.0]).exposed == pytest.approx(5.0)


def test_the_product_of_gate_and_up_is_twice_that_of_down():
    """Products take 1 and 2. The third message begins at 13, before the last two products."""
    assert clocks(backward_chunk("full"), 1, 5.0, [8.0]).span == pytest.approx(18.0)
