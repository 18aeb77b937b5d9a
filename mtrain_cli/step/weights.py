"""The collectives of FSDP2 for one of its units in an optimizer step."""

from __future__ import annotations

from mtrain_cli.step.program import Message, Post, Repeat

_GATHER, _AGAIN, _REDUCE = (
    Post(message) for message in (Message.GATHER, Message.GATHER_AGAIN, Message.REDUCE)
)


def weight_messages(shard: str, micro_batches: int) -> list[Repeat]:
    """Return the micro-batches of a step, grouped by their collectives.

    `fsdp.begin_micro_batch` decides on the same collectives in a run. `Message.GATHER_AGAIN` exists
    only for layers: the weights outside them stay gathered during the micro-batch.

    shard: value of ``train.shard``.
    """
    if shard == "full":
        return [Repeat(micro_batches, (_GATHER, _AGAIN, _REDUCE))]
    each = (_REDUCE,) if shard == "gradients" else ()
    if micro_batches == 1:
        return [Repeat(1, (_GATHER, _REDUCE))]
    between = [Repeat(micro_batches - 2, each)] if micro_batches > 2 else []
    return [Repeat(1, (_GATHER, *each)), *between, Repeat(1, (_REDUCE,))]
