"""Kernels under masks: the masks, their predicates, and the times."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention.mask_definitions import predicate as definition

from mtrain_extras.bench import kernels, masks
from mtrain_extras.bench.kernels import KernelBench, KernelCase
from mtrain_extras.bench.masks import (
    MASKS,
    documents,
    profile_masks,
)

CASE = KernelCase(seq=64, heads=4, kv_heads=2, head_dim=16, block=16)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("seq", [2, 7, 64, 96])
def test_the_predicate_of_a_mask_allows_the_same_pairs(name, seq):
    timed, everywhere = MASKS[name](seq), torch.arange(seq)
    seen = timed.predicate("cpu")(0, 0, everywhere[:, None], everywhere[None])
    spans = timed.mask.spans(everywhere.numpy(), everywhere.numpy())
    assert np.array_equal(np.broadcast_to(seen.numpy(), (seq, seq)), spans.seen())


def test_masks_are_those_of_their_names():
    ids = documents(96)
    same = ids[:, None] == ids[None]
    causal = definition("causal", 96)
    expected = {
        "full": definition("full", 96),
        "causal": causal,
        "documents_full": same,
        "documents": same & causal,
        "window": definition("sliding_window", 96, window=24, global_tokens=0),
        "documents_block_causal": same & definition("block_causal", 96, block=12),
    }
    for name, seen in expected.items():
        mask = MASKS[name](96).mask
        assert np.array_equal(mask.spans(np.arange(96), np.arange(96)).seen(), seen), name


@pytest.mark.parametrize(("seq", "intervals"), [(4096, 9), (32768, 9), (131072, 9), (7, 1)])
def test_a_video_has_nine_intervals_at_usual_lengths(seq, intervals):
    assert MASKS["video"](seq).mask.intervals == intervals


def test_answers_see_the_question_but_not_each_other():
    mask = MASKS["shared_question"](100).mask  # a question of 20 tokens, answers of 10
    assert mask.intervals == 2
    assert (mask.low[:, 35].tolist(), mask.high[:, 35].tolist()) == ([0, 30], [20, 36])


@pytest.mark.parametrize("seq", [2, 64, 32768])
def test_documents_ascend_and_are_not_longer_than_a_quarter(seq):
    ids = documents(seq)
    assert ids.shape == (seq,)
    assert (np.diff(ids) >= 0).all()
    assert np.bincount(ids).max() <= max(1, seq // 4)
    assert np.array_equal(ids, documents(seq))
    assert seq < 64 or len(set(np.bincount(ids))) > 1


def test_flex_comes_first_and_the_ratio_is_its_time_over_the_kernels(monkeypatch):
    def make(predicate, seq, device):
        assert (seq, device) == (64, "cpu")
        assert predicate(0, 0, torch.tensor(3), torch.tensor(3))
        return lambda q, k, v: q * 2 + k[:, :1] + v[:, :1]

    monkeypatch.setattr(masks, "flex_attention", make)
    ticks = iter(range(1, 100))
    monkeypatch.setattr(kernels, "median_ms", lambda call, *_: (call(), float(next(ticks)))[1])
    bench = KernelBench(["sdpa", "reference"], torch.float32, "cpu", 1)
    times = list(profile_masks(bench, ["documents"], [CASE], flex=True))
    assert [t.kernel for t in times] == ["flex", "sdpa", "reference"]
    flex, sdpa, _ = times
    assert (flex.forward_ms, flex.backward_ms, flex.forward_ratio) == (1.0, None, None)
    assert (sdpa.forward_ms, sdpa.backward_ms) == (2.0, 3.0)
    assert (sdpa.forward_ratio, sdpa.backward_ratio) == (0.5, None)
    pairs = 4 * MASKS["documents"](64).mask.pairs
    assert (sdpa.pairs, sdpa.intervals) == (pairs, 1)
    assert sdpa.forward_tflops == pytest.approx(4 * 16 * pairs / 2.0 / 1e9)
    assert sdpa.backward_tflops == pytest.approx(10 * 16 * pairs / 3.0 / 1e9)
    assert flex.backward_tflops is None


def test_flex_attention_computes_the_pairs_of_its_predicate(monkeypatch):
    compiled: list = []
    monkeypatch.setattr(torch, "compile", lambda call, **_: compiled.append(call) or call)
    attend = masks.flex_attention(lambda b, h, q, k: q - k == 1, 5, "cpu")  # noqa: ARG005
    assert [call.__name__ for call in compiled] == ["flex_attention"]
    q, k, v = (torch.randn(1, heads, 5, 16) for heads in (6, 2, 2))
    values = v.repeat_interleave(3, 1)
    torch.testing.assert_close(attend(q, k, v)[:, :, 1:], values[:, :, :-1])
