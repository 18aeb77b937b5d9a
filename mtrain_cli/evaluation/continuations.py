"""Score continuations of contexts, many in one sequence: log p, and whether they are greedy.

Under dense attention, a document mask keeps the texts of a sequence apart, so each gets the scores
that it would get alone. A sparse pattern chooses keys for a sequence as a whole. So each of its
sequences holds one text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mtrain_cli.config.schema import Config
from mtrain_cli.evaluation.forced import forced
from mtrain_cli.inference.scorer import Scorer

Pair = tuple[Sequence[int], Sequence[int]]
Score = tuple[float, bool]
_PACKED = {"cpu": 2048, "cuda": 16384}  # most tokens of a sequence that holds several texts


def pack_size(config: Config, device: str) -> int:
    """Return the most tokens of a sequence that holds several texts; 0 if each text is alone."""
    mask = config.mask
    alike = mask.keeps_causal_intervals and not (mask.counts_from_start or mask.is_mixed)
    return _PACKED[device] if alike and config.sparsity.pattern == "dense" else 0


def packs(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Divide n texts among sequences: first fit, the longest text first.

    Args:
        lengths: tokens of each text.
        most: most tokens of a sequence with several texts. A longer text is alone.

    Returns:
        The numbers of the texts of each sequence.
    """
    order = sorted(range(len(lengths)), key=lambda n: (-lengths[n], n))
    found = [[number] for number in order if lengths[number] > most]
    order = order[len(found) :]
    free = np.full(len(order), most)  # tokens of each sequence
    packed: list[list[int]] = []
    for number in order:
        place = int(np.argmax(free >= lengths[number]))
        free[place] -= lengths[number]
        if place == len(packed):
            packed.append([])
        packed[place].append(number)
    return found + packed


def score_together(scorer: Scorer, pairs: Sequence[Pair]) -> list[Score]:
    """Score texts in one sequence. All workers call this together and get the same result.

    Args:
        pairs: context and continuation of each text, token ids. Neither is empty.

    Returns:
        For each text, the sum of log p over the continuation, in nats, and whether each of its
        tokens is the most likely one.
    """
    ids: list[int] = []
    places: list[int] = []
    for context, continuation in pairs:
        assert len(context) > 0 < len(continuation)
        places += range(len(ids) + len(context), len(ids) + len(context) + len(continuation))
        ids += [*context, *continuation]
    counts = [len(context) + len(continuation) for context, continuation in pairs]
    documents = np.repeat(np.arange(len(pairs), dtype=np.int32), counts)
    hits, losses = forced(scorer, ids, places, documents if len(pairs) > 1 else None)
    scores = []
    end = 0
    for _, continuation in pairs:
        own = slice(end, end + len(continuation))
        end += len(continuation)
        scores.append((-float(losses[own].sum()), bool(hits[own].all())))
    return scores
