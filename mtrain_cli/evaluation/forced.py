"""Forced scoring: does the model give the expected tokens, in one forward pass?

Greedy decoding begins with an answer exactly if, with the answer in the text, the largest logit
before each of its tokens is that of the token. No cache is needed, and a text may hold many
answers. Under a sparse pattern the rows of the answer are sparse, too; when a model generates, they
are dense.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from mtrain_cli.inference.engine import Engine


@torch.no_grad()
def forced(
    engine: Engine,
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
    hidden_1NC, layout = engine.hidden(ids, documents=documents)
    own = layout.positions(engine.group.rank)
    wanted = np.asarray(places) - 1  # the logits for a token stand one place before it
    slots = np.flatnonzero(np.isin(own, wanted))
    found = torch.zeros(2, len(wanted), dtype=torch.float64)
    if len(slots):
        rows_NC = hidden_1NC[0, torch.from_numpy(slots).to(hidden_1NC.device)]
        at = np.searchsorted(wanted, own[slots])
        labels_N = torch.tensor([ids[place + 1] for place in wanted[at]], device=rows_NC.device)
        found[:, torch.from_numpy(at)] = _score(engine, rows_NC, labels_N)
    if engine.group.size > 1:
        shared = found.to(hidden_1NC.device)
        dist.all_reduce(shared, group=engine.group.whole)
        found = shared.cpu()
    hits, losses = found.numpy()
    return hits > 0.5, losses


def _score(engine: Engine, rows_NC: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """Return the hits and the losses of rows, float64 [2, N] on the CPU."""
    scores = torch.empty(2, len(labels_N), dtype=torch.float64)
    vocabulary = engine.config.model.vocab_size
    chunk = max(1, engine.decoder.loss.chunk_bytes // (8 * vocabulary))
    for first in range(0, len(labels_N), chunk):
        labels = labels_N[first : first + chunk]
        logits = engine.decoder.head(rows_NC[None, first : first + chunk])[0].double()
        losses = logits.logsumexp(-1) - logits.gather(-1, labels[:, None])[:, 0]
        scores[0, first : first + chunk] = (logits.argmax(-1) == labels).double().cpu()
        scores[1, first : first + chunk] = losses.cpu()
    return scores
