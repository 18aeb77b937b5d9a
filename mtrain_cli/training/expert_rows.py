"""The rows that travel to experts: their order among the products of a layer, and their bytes.

With expert parallelism, each pair of a token and an expert has a row, which travels to the worker
of the expert, and back. A row is a hidden state or a gradient of one. A score travels with it.

The programs list what `model.expert_parallel` does with a part of the experts, in its order. Tests
compare both. `IN` and `OUT` are products with the experts' weights: gate and up together, and down.
"""

from __future__ import annotations

import numpy as np

# Messages of hidden states and of scores, to the experts and back. NEXT lets the other chunks go
# on, WAIT waits for the oldest message.
ROWS, SCORES, ROWS_BACK, SCORES_BACK = "rows", "scores", "rows back", "scores back"
NEXT, WAIT = "next", "wait"
IN, OUT = "gate and up", "down"
FORWARD_CHUNK = (ROWS, SCORES, NEXT, WAIT, WAIT, IN, OUT, ROWS_BACK, NEXT, WAIT)
_GRADIENTS = (OUT, IN, ROWS_BACK, SCORES_BACK, OUT, IN, NEXT, WAIT, WAIT)
KEPT_BACKWARD_CHUNK = (ROWS, NEXT, WAIT, *_GRADIENTS)
# With activation checkpointing, the rows travel again, and gate and up are computed again. Scores
# are kept.
BACKWARD_CHUNK = (ROWS, ROWS, NEXT, WAIT, IN, WAIT, *_GRADIENTS)
_SCORE = 4  # bytes: scores are float32


def backward_chunk(checkpoint: str) -> tuple[str, ...]:
    """Return the program of a chunk's backward pass.

    checkpoint: value of ``train.activation_checkpoint``.
    """
    return KEPT_BACKWARD_CHUNK if checkpoint == "none" else BACKWARD_CHUNK


def message_bytes(hidden: int, dtype_bytes: int) -> dict[str, int]:
    """Return the bytes of a pair in each kind of message.

    hidden: size of a hidden state.
    """
    row = hidden * dtype_bytes
    return {ROWS: row, ROWS_BACK: row, SCORES: _SCORE, SCORES_BACK: _SCORE}


def pair_bytes(hidden: int, dtype_bytes: int, checkpoint: str) -> int:
    """Return the bytes that a pair receives in both passes, if its expert is on another worker.

    checkpoint: value of ``train.activation_checkpoint``.
    """
    size = message_bytes(hidden, dtype_bytes)
    return sum(size.get(word, 0) for word in FORWARD_CHUNK + backward_chunk(checkpoint))


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
