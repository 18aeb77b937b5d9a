"""Batches share one causal mask, but every batch has its own index."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mtrain_cli.attention.sdpa import SdpaKernel
from mtrain_cli.parallel.exchange_registry import make_exchange
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.sparsity.fixed import FixedPattern
from mtrain_cli.training.batch import BatchMaker

SEQ = 64


@dataclass(frozen=True)
class Sample:
    tokens: np.ndarray
    labels: np.ndarray
    documents: np.ndarray


def test_batches_share_the_causal_mask_but_not_the_index():
    layout = make_layout("striped", 1, SEQ, 1)
    exchange = make_exchange("all_gather", layout, ContextGroup.alone())
    pattern = FixedPattern(block=16, slashes=2, columns=4, density=0.0, seed=0)
    make = BatchMaker(
        exchange, SdpaKernel(), torch.device("cpu"), document_mask=False, pattern=pattern
    )
    samples = [Sample(*(np.arange(SEQ, dtype=np.int32) for _ in range(3)))] * 2
    first, second = make(samples).attend, make(samples).attend
    assert second.tiles is first.tiles
    q, k, v = (torch.randn(2, SEQ, heads, 8) for heads in (4, 2, 2))
    first(q, k, v, 0)
    assert (len(first.index.records), len(first.index.kept)) == (1, 1)
    third = make(samples).attend
    assert [(attend.index.records, attend.index.kept) for attend in (second, third)] == [
        ([], {})
    ] * 2
