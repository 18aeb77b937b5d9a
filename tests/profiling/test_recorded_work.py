"""Work of a recorded iteration: each layer and micro-batch under its own index and masks."""

from __future__ import annotations

import numpy as np
import torch

from mtrain_cli.attention.index import VerticalSlash
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.attention.named_masks import SlidingWindow
from mtrain_cli.attention.sdpa import SdpaKernel
from mtrain_cli.data.dataset import Sample
from mtrain_cli.parallel.exchange import make_exchange
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.profiling.record_collector import Estimated, estimated, own_work
from mtrain_cli.training.batch import AttentionSetup, Batches, Layouts

SEQ, BLOCK, HEADS = 64, 16, 2


def slashes(*chosen: int) -> VerticalSlash:
    on = torch.zeros(1, HEADS, SEQ // BLOCK, dtype=torch.bool)
    on[..., list(chosen)] = True
    return VerticalSlash(BLOCK, SEQ // BLOCK, on, torch.full((1, HEADS, 1), SEQ, dtype=torch.int32))


def test_every_layer_of_every_micro_batch_has_its_own_work():
    exchange = make_exchange(
        "all_gather", make_layout("striped", 1, SEQ, BLOCK, unit=BLOCK), ContextGroup.alone()
    )
    causal = [SequenceMask.causal(SEQ, SEQ)]
    documents = [SequenceMask.from_documents(np.repeat([0, 1], SEQ // 2), SEQ)]
    indices = {0: slashes(0), 1: slashes(0, 1)}
    found = own_work(
        exchange,
        HEADS,
        range(2),
        [
            Estimated(exchange.layout, *computed)
            for computed in ((causal, indices), (documents, indices), (causal, None))
        ],
    )
    own, next_to_it = BLOCK * (BLOCK + 1) // 2, BLOCK * BLOCK
    wanted = {
        (0, 0): 4 * own,
        (0, 1): 4 * own + 3 * next_to_it,
        (1, 0): 4 * own,
        (1, 1): 4 * own + 2 * next_to_it,  # none between the documents
        (2, 0): SEQ * (SEQ + 1) // 2,
        (2, 1): SEQ * (SEQ + 1) // 2,
    }
    assert {key: int(work["forward"].pairs.sum()) for key, work in found.items()} == {
        key: HEADS * pairs for key, pairs in wanted.items()
    }


def test_each_kind_of_layer_has_the_work_of_its_masks():
    layout = make_layout("striped", 1, SEQ, BLOCK, unit=BLOCK)
    exchange = make_exchange("all_gather", layout, ContextGroup.alone())
    rule = MaskRule(True, SlidingWindow(5, full_every=3))
    setups = AttentionSetup(SdpaKernel(), rule).by_kind(7)
    make = Batches(Layouts(exchange), setups, torch.device("cpu"), layers=7)
    documents = np.repeat(np.arange(2, dtype=np.int32), SEQ // 2)
    tokens = np.zeros(SEQ, np.int32)
    batches = [make([Sample(tokens, tokens, of)]) for of in (documents, np.zeros_like(documents))]
    found = own_work(
        exchange, HEADS, range(7), [estimated(b.attention.with_kept_indices()) for b in batches]
    )
    for micro, parts in enumerate((2, 1)):
        length = SEQ // parts
        full, window = length * (length + 1) // 2, 5 * length - 10
        pairs = [int(found[micro, layer]["forward"].pairs.sum()) for layer in range(7)]
        assert pairs == [
            HEADS * parts * (full if layer in (2, 5) else window) for layer in range(7)
        ]
