"""Which tensors micro-batches share, and which each one builds."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.attention.sdpa import SdpaKernel
from mtrain_cli.parallel.exchange import make_exchange
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.sparsity.moba import MobaPattern
from mtrain_cli.training.batch import AttentionSetup, Batches, Layouts

SEQ = 64


def sample(*lengths):
    documents = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
    return SimpleNamespace(
        tokens=np.zeros(SEQ, np.int32),
        labels=np.zeros(SEQ, np.int32),
        documents=documents,
        slices=None,
        positions=None,
    )


def test_documents_that_fill_their_sequences_share_the_causal_mask():
    exchange = make_exchange("all_gather", make_layout("contiguous", 1, SEQ, 16), ContextGroup())
    pattern = MobaPattern(16, 16, 1, "query")
    setup = AttentionSetup(SdpaKernel(), MaskRule(document_mask=True), pattern)
    make = Batches(Layouts(exchange), {"": setup}, torch.device("cpu"))
    one, other, packed = (make([s]) for s in (sample(SEQ), sample(SEQ), sample(20, 44)))
    assert one.attend.index.masked.tables.per_block is other.attend.index.masked.tables.per_block
    assert one.attend.index.kept is not other.attend.index.kept
    assert one.pairs == other.pairs == SEQ * (SEQ + 1) // 2
    assert packed.pairs == 20 * 21 // 2 + 44 * 45 // 2
    assert int(packed.attend.index.masked.tables.per_block.sum()) == packed.pairs
    assert int(one.attend.index.masked.tables.per_block.sum()) == one.pairs
