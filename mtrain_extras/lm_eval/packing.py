"""Score several texts in one sequence, kept apart by a document mask."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mtrain_cli.config.schema import Config
from mtrain_cli.inference.scorer import Scorer
from mtrain_extras.lm_eval.requests import Pair, Score

_PACKED = {"cpu": 2048, "cuda": 16384}  # most tokens of a sequence that holds several texts


def score_together(scorer: Scorer, pairs: Sequence[Pair]) -> list[Score]:
    """Score continuations of contexts in one sequence, kept apart by a document mask.

    Return for each text the sum of log p over the continuation, in nats, and whether each of
    its tokens is the most likely one. No context or continuation is empty.
    """
    ids: list[int] = []
    places: list[int] = []
    for context, continuation in pairs:
        assert len(context) > 0 < len(continuation)
        ids += [*context, *continuation]
        places += range(len(ids) - len(continuation), len(ids))
    counts = [len(context) + len(rest) for context, rest in pairs]
    documents = np.repeat(np.arange(len(pairs), dtype=np.int32), counts)
    losses, hits = scorer.token_scores(ids, documents if len(pairs) > 1 else None, places)
    ends = np.cumsum([len(continuation) for _, continuation in pairs])[:-1]
    nats, right = np.split(losses.double().numpy(), ends), np.split(hits.numpy(), ends)
    return [(-float(n.sum()), bool(r.all())) for n, r in zip(nats, right, strict=True)]


def packs(config: Config, device: str, lengths: Sequence[int]) -> list[list[int]]:
    """Divide texts among sequences: first fit, the longest text first. Return their numbers.

    Under dense attention, each text gets the scores that it would get alone. A sparse pattern
    chooses keys for a sequence as a whole, so there each sequence holds one text.
    """
    mask = config.mask
    alike = mask.keeps_causal_intervals and not (mask.counts_from_start or mask.is_mixed)
    most = _PACKED[device] if alike and config.sparsity.pattern == "dense" else 0
    order = sorted(range(len(lengths)), key=lambda n: (-lengths[n], n))
    alone = [[number] for number in order if lengths[number] > most]
    order = order[len(alone) :]
    free = np.full(len(order), most)  # tokens of each sequence
    packed: list[list[int]] = []
    for number in order:
        place = int(np.argmax(free >= lengths[number]))
        free[place] -= lengths[number]
        if place == len(packed):
            packed.append([])
        packed[place].append(number)
    return alone + packed
