"""Texts that share a sequence get the scores that they get alone."""

from __future__ import annotations

import pytest
from inference.small_models import engine, tokens, write_hf, write_run

from mtrain_cli.composition.compose import compose
from mtrain_extras.lm_eval.packing import packs, score_together


def test_packs_hold_each_text_once_and_no_more_than_fits():
    lengths = [1500, 700, 548, 600, 3000, 1]
    assert packs(compose([]), "cpu", lengths) == [[4], [0, 2], [1, 3, 5]]
    assert packs(compose([]), "cpu", []) == []
    alone = [[4], [0], [1], [3], [2], [5]]
    for words in (
        ["sparsity=vertical_slash"],
        ["mask=sliding_window", "mask.window=64", "mask.global_tokens=4"],
    ):
        assert packs(compose(words), "cuda", lengths) == alone
    for words in (["mask=sliding_window", "mask.window=64"], ["mask=chunked"]):
        assert packs(compose(words), "cuda", lengths) == [[4, 0, 1, 3, 2, 5]]


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_packed_texts_get_the_scores_of_single_ones(tmp_path, family):
    model = engine(write_hf(tmp_path, family, vocab_size=97))
    texts = [tokens(n, n) for n in (3, 40, 17, 130)]
    pairs = [(text[: n + 1], text[n + 1 :]) for n, text in enumerate(texts)]
    # The last continuation is what greedy decoding gives.
    best = next(n for n in range(97) if model.token_scores([*texts[0], n])[1][-1])
    pairs.append((texts[0], [best]))
    found = score_together(model, pairs)
    for (context, rest), (logprob, greedy) in zip(pairs, found, strict=True):
        losses, hits = model.token_scores([*context, *rest])
        assert logprob == pytest.approx(-float(losses[len(context) - 1 :].sum()), abs=1e-4)
        assert greedy == bool(hits[len(context) - 1 :].all())
    assert found[-1][1]
    assert not found[1][1]


@pytest.mark.parametrize("words", [("sliding_window", "window"), ("chunked", "chunk")])
def test_texts_under_a_mask_do_not_see_each_other(tmp_path, words):
    kind, size = words
    write_run(tmp_path / "run", f"mask={kind}", f"mask.{size}=16")
    model = engine(tmp_path / "run")
    first, second = tokens(40, 1), tokens(50, 2)
    together = score_together(model, [(first[:30], first[30:]), (second[:9], second[9:])])
    (alone,) = score_together(model, [(second[:9], second[9:])])
    assert together[1][0] == pytest.approx(alone[0], abs=1e-4)
