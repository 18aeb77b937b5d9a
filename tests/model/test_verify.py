"""The decoder's logits equal those of transformers' models with the same random weights."""

from __future__ import annotations

import pytest
import torch
from tiny_models import LLAMA3, PLAIN, SEQ, YARN, export, make_decoder, tiny_model

from mtrain_cli.model.verify import causal_attend, compare, verify

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("rope", [PLAIN, YARN, LLAMA3], ids=["plain", "yarn", "llama3"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "qwen3_moe", "mixtral"])
def test_logits_equal_transformers(tmp_path, family, rope, num_kv_heads, tied):
    model = tiny_model(family, num_kv_heads=num_kv_heads, tied=tied, rope=rope)
    decoder = make_decoder(model)
    export(tmp_path / "hf", model)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32
    ).eval()
    tokens = torch.randint(model.vocab_size, (2, SEQ), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        theirs = reference(input_ids=tokens, use_cache=False).logits
        ours = decoder.logits(tokens, torch.arange(SEQ).expand(2, SEQ), causal_attend)
    assert theirs.abs().max() > 1.0
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


def test_verify_sees_agreement_and_disagreement(tmp_path):
    export(tmp_path / "hf", tiny_model(rope=YARN))
    agreement = verify(tmp_path / "hf", tokens=100)
    assert agreement.tokens == 100
    assert agreement.largest_difference < 1e-4
    assert agreement.mean_kl < 1e-9
    ours = torch.randn(1, 5, 7, generator=torch.Generator().manual_seed(0))
    other = ours.clone()
    other[0, 3, 2] += 0.5
    assert compare(ours, other).largest_difference == pytest.approx(0.5)
    assert compare(ours, other).mean_kl > 1e-3
