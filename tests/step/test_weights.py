"""The collectives of FSDP2 in a step."""

from __future__ import annotations

import pytest

from mtrain_cli.step.interpreters import traffic
from mtrain_cli.step.layer import weight_messages
from mtrain_cli.step.program import Message, Post, Repeat

GATHER, AGAIN, REDUCE = Message.GATHER, Message.GATHER_AGAIN, Message.REDUCE


@pytest.mark.parametrize("shard", ["full", "gradients", "optimizer"])
@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_groups_cover_a_step_and_reduce_what_the_shards_need(shard, micro_batches):
    """`full` gathers weights in every pass; else the first micro-batch gathers them once."""
    found = weight_messages(shard, micro_batches)
    assert sum(group.times for group in found) == micro_batches
    assert all(group.times for group in found)
    full = shard == "full"
    assert traffic(found, {GATHER: 1}) == (micro_batches if full else 1)
    assert traffic(found, {AGAIN: 1}) == (micro_batches if full else 0)
    assert traffic(found, {REDUCE: 1}) == (1 if shard == "optimizer" else micro_batches)
    assert Post(REDUCE) in found[-1].body


def test_the_first_micro_batch_gathers_and_the_last_reduces():
    assert weight_messages("optimizer", 3) == [
        Repeat(1, (Post(GATHER),)), Repeat(1, ()), Repeat(1, (Post(REDUCE),))
    ]  # fmt: skip
