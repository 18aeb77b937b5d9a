"""Forced scoring: does the model give the expected tokens, in one forward pass?

Greedy decoding begins with an answer exactly if, with the answer in the text, the largest logit
before each of its tokens is that of the token. No cache is needed, and a text may hold many
answers. Under a sparse pattern the rows of the answer are sparse, too; when a model generates, they
are dense.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mtrain_cli.inference.scorer import Scorer


def forced(
    scorer: Scorer,
    ids: Sequence[int],
    places: Sequence[int],
    documents: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Score tokens of a text. All workers call this together and get the same result.

    Args:
        places: positions of the tokens in the text, increasing, from 1.
        documents: document of each token, int32 [tokens]; None if all tokens are one document.

    Returns:
        hits: whether each token has the largest logit of all, bool [places]. If several logits are
            equal, the lowest id counts as the largest.
        losses: -log p of each token, in nats, float64 [places].
    """
    losses, hits = scorer.token_scores(ids, documents, places)
    at = np.asarray(places) - 1
    return hits.numpy()[at], losses.double().numpy()[at]
