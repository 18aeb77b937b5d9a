"""The rows that travel to experts: how many, their bytes, and their copies (`step.layer`)."""

from __future__ import annotations

import numpy as np

from mtrain_cli.model.tiling import ONE_ADDITION, scored_row
from mtrain_cli.step.program import Message

# Time per layer and micro-batch that a degree above 1 takes beyond products, rows, copies and
# messages, in microseconds. In the forward pass of each layer the host waits for the numbers of
# rows, so it cannot queue work ahead. Two H100s of one host, 8 layers of Qwen3-30B-A3B, degree 2
# against 1 (profiles/notes.md, 2026-11-26): 2.2 ms at 32K and 5.7 ms at 8K, where less computation
# hides the host. This is their mean.
HOST_WAIT_US = 4000.0


def message_bytes(hidden: int, dtype_bytes: int) -> dict[Message, int]:
    """Return the bytes of a pair in each kind of message.

    hidden: size of a hidden state.
    """
    row, scored = hidden * dtype_bytes, scored_row(hidden, dtype_bytes) * dtype_bytes
    sizes = {Message.ROWS: row, Message.ROWS_BACK: row}
    return sizes | {Message.SCORED: scored, Message.SCORED_BACK: scored}


def travelling(pairs_PE: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how many rows each worker of a group receives from others: as experts, and back.

    Args:
        pairs_PE: pairs of each worker's tokens by expert, [workers, experts]. Each worker holds an
            equal, consecutive part of the experts.
    """
    workers = len(pairs_PE)
    from_to = pairs_PE.reshape(workers, workers, -1).sum(-1)
    own = from_to.diagonal()
    return from_to.sum(0) - own, from_to.sum(1) - own


def copied_rows(degree: int, checkpoint: str) -> tuple[float, float]:
    """Return how often a pair's row is read or written because rows travel: forward, backward.

    Rows that leave, and those that return, are copied before their message; rows of own experts are
    copied to where others return.

    checkpoint: value of ``train.activation_checkpoint``.
    """
    if degree == 1:
        return 0.0, 0.0
    leave, messages = (degree - 1) / degree, 1 if checkpoint == "none" else 2
    return 2 * leave + 2, 2 * leave * messages + 2


def summed_gradients(weights: float, e: int, chunks: int, parts: int) -> float:
    """Return the bytes that adding up the gradients of experts reads and writes.

    Args:
        weights: number of elements of the worker's experts.
        e: bytes of the compute dtype.
        chunks: number of chunks of tokens. More than two are added up in float32.
        parts: number of parts of the experts, whose gradients move to one tensor.
    """
    if chunks > ONE_ADDITION:
        return weights * ((8 + 2 * e) * chunks + 4 + e)
    return weights * e * (3 * (chunks > 1) + 2 * (parts > 1))
