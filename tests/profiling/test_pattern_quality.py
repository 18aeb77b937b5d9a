"""Rows of a sparsity profile match index, mask and recall; sampled queries were not probed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.profiling.pattern_quality import (
    Place,
    _heads,
    sampled_rows,
)
from mtrain_cli.sparsity.fixed import FixedPattern
from mtrain_cli.sparsity.moba import MobaPattern
from mtrain_cli.sparsity.pattern import MaskedPositions
from mtrain_cli.sparsity.recall import recall
from mtrain_cli.sparsity.vertical_slash import VerticalSlashPattern

SEQ, BLOCK, HEADS = 100, 16, 4


@pytest.mark.parametrize(
    "pattern", [FixedPattern(BLOCK, 2, 6, 0.0, 0), MobaPattern(BLOCK, 32, 1, "query")]
)
def test_rows_match_index_mask_and_recall(pattern):
    torch.manual_seed(0)
    q, k = torch.randn(1, SEQ, HEADS, 8), torch.randn(1, SEQ, 2, 8)
    mask = SequenceMask.from_documents(
        np.repeat([0, 1, 2], [40, 37, 20]), SEQ
    )  # 3 tokens are padding
    masked = MaskedPositions.make([mask], BLOCK, bitmap=pattern.request().bitmap)
    index = pattern.estimate(q, k, masked, 5)
    place, everyone = Place(7, 0, 5), np.arange(mask.length)
    rows = list(_heads(pattern.name, index, q, k, masked, place, everyone, SEQ))
    everywhere = torch.arange(SEQ)
    real = everywhere[: mask.length]
    pairs = (
        (index.allowed(real, everywhere)[0] & masked.visible(0, real, SEQ)).sum((-1, -2)).tolist()
    )
    kept = recall(index, q, k, masked, real)[0]
    assert [(row.step, row.pattern, row.layer, row.head) for row in rows] == [
        (7, pattern.name, 5, head) for head in range(HEADS)
    ]
    for row, computed, shares in zip(rows, pairs, kept, strict=True):
        assert row.density == computed / 5050
        assert row.of_mask == computed / (820 + 703 + 210)
        assert row.density < row.of_mask < 1
        assert row.recall == float(shares.mean())
        assert row.worst == float(shares.min()) < row.recall
    lines = [(row.slashes, row.columns) for row in rows]
    if pattern.name == "moba":
        assert lines == [(0, 0)] * HEADS
    else:
        assert lines == [(2, int((columns < mask.length).sum())) for columns in index.columns[0]]


def probing(last_q: int, windows: int) -> VerticalSlashPattern:
    return VerticalSlashPattern(
        block=BLOCK, last_q=last_q, windows=windows, p_v=0.9, p_s=0.9, joint=False, sink_tokens=0,
        min_columns=0, max_columns=8,
        min_slashes=2, max_slashes=0, index_per="query_head",
    )  # fmt: skip


def test_no_sampled_query_was_probed():
    probes = [probing(8, 1), probing(16, 3)]
    probed = {row for p in probes for row in p.probed_rows(97).tolist()}
    everything = sampled_rows([MobaPattern(BLOCK, 32, 1, "query"), *probes], 97, 7, 1000)
    assert set(everything.tolist()) == set(range(97)) - probed
    few = sampled_rows(probes, 97, 7, 20)
    assert len(few) == len(set(few.tolist())) == 20
    assert set(few.tolist()) <= set(everything.tolist())
    assert few.tolist() != sampled_rows(probes, 97, 8, 20).tolist(), "another step samples others"
    with pytest.raises(ConfigError, match="the patterns probe all 97 queries of a sequence"):
        sampled_rows([probing(97, 1)], 97, 7, 20)
