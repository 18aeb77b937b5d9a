"""Rows of a sparsity profile match index, mask and recall; checkpoints measure the same inputs."""

from __future__ import annotations

import dataclasses
from itertools import combinations

import numpy as np
import pytest
import torch

from mtrain_cli.attention.index import VerticalSlash
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.profiling.pattern_quality import (
    Place,
    _heads,
    profile_checkpoints,
    sampled_rows,
    worker_alone,
)
from mtrain_cli.sparsity.fixed import FixedPattern
from mtrain_cli.sparsity.moba import MobaPattern
from mtrain_cli.sparsity.pattern import MaskedPositions, Pattern
from mtrain_cli.sparsity.recall import recall
from mtrain_cli.sparsity.vertical_slash import VerticalSlashPattern
from mtrain_cli.training.checkpointer import write_model_state
from mtrain_studies.attention import choices as attention_choices
from mtrain_studies.attention.analysis import AttentionAnalyzer
from mtrain_studies.attention.choices import Choices
from mtrain_studies.attention.files import COLUMNS, KEYS, SLASHES
from mtrain_studies.attention.request import AttentionRequest
from mtrain_studies.attention.top_keys import TopKeys

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


SMALL = [
    "seq=128",
    "topology.workers=1",
    "topology.block_size=16",
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.head_dim=8",
    "model.intermediate_size=48",
    "train.dtype=float32",
    "data.eval_sequences=3",
    "optim.lr=0.03",
    "optim.warmup_steps=0",
]
PATTERNS: list[Pattern] = [
    VerticalSlashPattern(
        block=16, last_q=16, windows=1, p_v=0.5, p_s=0.5, joint=False, sink_tokens=0,
        min_columns=0, max_columns=20, min_slashes=1, max_slashes=0, index_per="query_head",
    ),
    MobaPattern(16, 32, 1, "query"),
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Checkpoints 1 and 2 with equal weights, and 3 with others; and the held-out losses."""
    folder = tmp_path_factory.mktemp("run")
    config = compose(SMALL)
    losses = {}
    with worker_alone(config) as trainer:
        for step in (1, 3):
            for _ in range(4 * (step - 1)):
                trainer.train_step(False)
            weights = {n: p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach()
                       for n, p in trainer.decoder.named_parameters()}  # fmt: skip
            means = []
            for sample in trainer.held_out:
                make = trainer.next_batch_maker()
                batch = make.to_device(make.on_host([sample]))
                given = batch.tokens, batch.positions, batch.labels, batch.attention
                means.append(float(trainer.decoder.token_losses(*given).sum()) / batch.valid)
            losses[step] = means
            write_model_state(folder, step, weights)
            if step == 1:
                write_model_state(folder, 2, weights)
    return config, [folder / f"step-{step}" for step in (1, 2, 3)], losses


def profile(run, samples: int, **wanted):
    config, folders, _ = run
    analyzer, seen = AttentionAnalyzer(AttentionRequest(**wanted, compares=True)), []
    records = profile_checkpoints(
        config, folders, PATTERNS, samples, 30, lambda *at: seen.append(at), analyzer
    )
    analyzer.finish()
    return records, analyzer.files, dict(seen)


def test_equal_checkpoints_overlap_fully_and_others_do_not(run):
    records, files, losses = profile(run, 2, top_k=(4, 16))
    assert {(r.step, r.pattern) for r in records} == {
        (step, pattern.name) for step in (1, 2, 3) for pattern in PATTERNS
    }
    expected = run[2]
    assert losses[1] == losses[2] == pytest.approx(sum(expected[1][:2]) / 2, rel=1e-4)
    assert losses[3] == pytest.approx(sum(expected[3][:2]) / 2, rel=1e-4)
    assert abs(losses[3] - losses[1]) > 0.05
    kinds = {(row.kind, row.k, row.pattern) for row in files.overlap}
    assert kinds == {
        *((KEYS, 4, ""), (KEYS, 16, "")),
        *((SLASHES, 0, "vertical_slash"), (COLUMNS, 0, "vertical_slash")),
    }
    pairs = set(combinations((1, 2, 3), 2))
    assert {(row.first, row.second) for row in files.overlap} == pairs
    assert len(files.overlap) == len(pairs) * len(kinds) * 2 * 2 * 4  # samples, layers, heads
    for row in files.overlap:
        if (row.first, row.second) == (1, 2):
            assert row.jaccard == 1
    for kind, k, _ in kinds:
        far = [r.jaccard for r in files.overlap if (r.kind, r.k, r.second) == (kind, k, 3)]
        assert 0 < sum(far) / len(far) < 1


def test_checkpoints_measure_the_same_queries_and_samples_differ(run):
    _, files, _ = profile(run, 2, top_k=(4,))
    queries = {(r.step, r.sample): tuple(r.queries) for r in files.top_keys}
    assert queries[1, 0] == queries[2, 0] == queries[3, 0]
    assert queries[1, 1] == queries[3, 1] != queries[1, 0]


def test_maps_need_no_training(run):
    """The maps of equal checkpoints are equal, so a backward pass changes no weight."""
    _, files, losses = profile(run, 1, maps=((0, 1),), cells=8)
    one, two, three = files.maps
    assert (one.step, two.step, three.step) == (1, 2, 3)
    assert (one.gradient[-1] == two.gradient[-1]).all()
    assert (one.gradient[-1] != three.gradient[-1]).any()
    assert losses[3] == pytest.approx(run[2][3][0], rel=1e-4)


def test_too_many_samples_are_refused(run):
    with pytest.raises(ConfigError, match="--samples 4: the data of the run holds out 3 sequences"):
        profile(run, 4)


def test_largest_keys_that_do_not_fit_the_host_are_refused(run, monkeypatch):
    monkeypatch.setattr(attention_choices, "host_memory", lambda: 1 << 14)
    with pytest.raises(ConfigError, match="--rows 30: the 16 largest keys of 30 queries take"):
        profile(run, 1, top_k=(4, 16))
    profile(run, 1)


def test_a_checkpoint_of_another_model_is_refused(run):
    config, folders, _ = run
    wider = dataclasses.replace(config.model, intermediate_size=64)
    other = dataclasses.replace(config, model=wider)
    with pytest.raises(ConfigError, match="step-1: the checkpoint is of another model"):
        profile((other, folders, None), 1)


def test_queries_that_see_too_few_keys_do_not_count():
    """Of two queries, one sees only 3 keys, so its 3 largest keys are no choice."""
    choices = Choices()
    empty = VerticalSlash(4, 2, torch.zeros(1, 1, 2).bool(), torch.full((1, 1, 1), 8).int())
    for step, keys in ((1, [[0, 1, 2], [4, 5, 6]]), (2, [[2, 1, 0], [4, 5, 7]])):
        largest = TopKeys(torch.empty(0), torch.tensor([keys]).int(), torch.tensor([3, 8]))
        choices.keep(Place(step, 0, 0), largest, {"vertical_slash": empty})
    by_count = {
        row.k: row.jaccard
        for row in choices.overlap((2, 3), torch.device("cpu"))
        if row.kind == KEYS
    }
    assert by_count == {2: pytest.approx((1 / 3 + 1) / 2), 3: 0.5}
