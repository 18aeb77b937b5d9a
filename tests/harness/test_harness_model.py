"""lm-eval gets from mtrain what it gets from transformers, and from a plain forward pass."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from data.framed_tokenizers import write_framed
from evaluation.small_tokenizer import write_small_tokenizer
from inference.small_models import write_hf

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance

from mtrain_cli import api
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.tokenizers import NO_BEGIN, open_tokenizer
from mtrain_cli.inference.text import TextCodec
from mtrain_extras.lm_eval.model import HarnessModel
from mtrain_extras.lm_eval.requests import Plan

LONG = "The grass is green. The sky is blue. " * 400  # more tokens than the model has positions


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random model with 2,048 positions, and its tokenizer."""
    root = tmp_path_factory.mktemp("harness")
    tokenizer = write_small_tokenizer(root / "tokenizer")
    write_hf(root / "hf", vocab_size=open_tokenizer(str(tokenizer)).vocab_size)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(root / "tokenizer" / name, root / "hf")
    return root / "hf"


@pytest.fixture(scope="module")
def ours(folder) -> HarnessModel:
    loaded = api.load(folder, "train.dtype=float32", "train.kernel=sdpa", device="cpu")
    return loaded.lm_eval()


@pytest.fixture(scope="module")
def theirs(folder):
    pytest.importorskip("accelerate")
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=3)


def instances(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, one, n, ("task", n, 1)) for n, one in enumerate(arguments)]


PAIRS = [
    ("The grass is", " green"), ("The sky", " is blue, the sun"), ("", " Here we go"),
    ("Question: 1 + 1\nAnswer: ", "2"), ("There and back again " * 30, " Memorize"),
    ("<|endoftext|>The", " sun"),
]  # fmt: skip
PROMPTS = [
    *((f"Question {n}: the sky is", {"until": ["\n", "a"], "max_gen_toks": 12}) for n in range(3)),
    ("Memorize", {"until": [], "max_gen_toks": 8, "do_sample": False}),
]


def test_scores_texts_and_perplexities_equal_those_of_transformers(ours, theirs):
    requests = instances("loglikelihood", PAIRS)
    found, expected = ours.loglikelihood(requests), theirs.loglikelihood(requests, True)
    for (mine, greedy), (other, greedy_too) in zip(found, expected, strict=True):
        assert mine == pytest.approx(other, abs=1e-4)
        assert greedy == greedy_too
    # The long text has several windows of its own context.
    requests = instances("loglikelihood_rolling", [("The grass is green.",), ("sun",), (LONG,)])
    found, expected = (m.loglikelihood_rolling(requests, True) for m in (ours, theirs))
    assert found == pytest.approx(expected, abs=1e-4, rel=1e-6)
    requests = instances("generate_until", PROMPTS)
    assert ours.generate_until(requests) == theirs.generate_until(requests, True)


def test_scores_equal_a_plain_forward_pass(ours, folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for (context, rest), (mine, greedy) in zip(
        PAIRS[:2], ours.loglikelihood(instances("loglikelihood", PAIRS[:2])), strict=True
    ):
        ids, begin = ours.tok_encode(context + rest), len(ours.tok_encode(context))
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, begin - 1 : -1]
        chosen = torch.tensor(ids[begin:])
        expected = logits.log_softmax(-1).gather(1, chosen[:, None]).sum()
        assert mine == pytest.approx(float(expected), abs=1e-4)
        assert greedy == bool((logits.argmax(-1) == chosen).all())


def test_a_request_that_is_too_long_is_refused_whole(ours):
    with pytest.raises(ConfigError, match="more than the 2,048 positions of the model"):
        ours.loglikelihood(instances("loglikelihood", [(LONG, " green")]))
    with pytest.raises(ConfigError, match="and 256 new ones"):
        ours.generate_until(instances("generate_until", [(LONG[:9000], {})]))


def test_each_window_of_a_long_text_starts_with_the_begin_token(tmp_path):
    tokenizer = open_tokenizer(str(write_framed(tmp_path)))
    codec = TextCodec(tokenizer, frozenset(), first=tokenizer.begin.ids[0])
    asked: list[tuple[list[int], list[int]]] = []

    class Kept:
        def scores(self, pairs):
            asked.extend(pairs)
            return [(-1.0, False)] * len(pairs)

    model = HarnessModel(codec, 64, Kept())  # type: ignore[arg-type]
    begin, plain = [*tokenizer.begin.ids], codec.encode_plain(LONG)
    model.loglikelihood_rolling(instances("loglikelihood_rolling", [("The sky",), (LONG,)]))
    (context, rest), *windows = asked
    assert (context, rest) == (begin, codec.encode_plain("The sky"))
    assert len(windows) > 2
    assert all(len(context) + len(rest) - 1 <= 64 for context, rest in windows)
    assert [token for _, rest in windows for token in rest] == plain
    done = 0
    for context, rest in windows:
        earlier = len(context) - 1  # the last window fills up with tokens of the one before
        assert context == [*begin, *plain[done - earlier : done]]
        assert (earlier > 0) == (done > 0)
        done += len(rest)
    asked.clear()
    pairs = [("The sky", " is"), ("", "The sky"), ("<begin>The sky", " is")]
    model.loglikelihood(instances("loglikelihood", pairs))
    assert asked[0] == asked[2] == (codec.encode("The sky"), codec.encode_plain(" is"))
    assert asked[1] == (begin, codec.encode_plain("The sky"))


def test_a_text_without_context_needs_a_token_to_begin_with():
    class Bare:
        vocab_size, begin = 256, NO_BEGIN

        def encode(self, pieces):
            import numpy as np

            return [np.frombuffer(piece.encode(), dtype=np.uint8) for piece in pieces]

    codec = TextCodec(Bare(), frozenset())  # type: ignore[arg-type]
    model = HarnessModel(codec, 64, Plan(64, 256))
    with pytest.raises(ConfigError, match="no begin or end token"):
        model.loglikelihood(instances("loglikelihood", [("", "a")]))
    with pytest.raises(ConfigError, match="has no tokenizer"):
        HarnessModel(TextCodec(None, frozenset(), "x: has no tokenizer"), 64, Plan(64, 256))
