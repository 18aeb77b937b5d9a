"""transformers models whose tokens see later tokens, over two processes, equal one process."""

from __future__ import annotations

import gloo
import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

from library.test_transformers_models import COMMON, SEQ, assert_equal, gradients  # noqa: E402
from slow_cases import mostly_slow  # noqa: E402

from mtrain_cli import api  # noqa: E402

# The first 60 tokens see each other; the rest sees itself and them.
SLICES = np.array([(0, 60, 0, 60, 0), (60, SEQ, 0, SEQ, 0)])
WAYS = (("zigzag", "ring"), ("balanced", "group_cast"))
FAMILIES = {
    "llama": {},
    "bert": {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0,
             "max_position_embeddings": SEQ},
}  # fmt: skip


def bidirectional(family: str, attention: str):
    """A model that predicts masked tokens; a Llama becomes one as others make it one."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **COMMON, **FAMILIES[family])
    maker = transformers.AutoModelForMaskedLM if family == "bert" else (
        transformers.AutoModelForCausalLM
    )  # fmt: skip
    model = maker.from_config(config, attn_implementation=attention, dtype=torch.float32)
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
    return model.train()


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """ids, of which a third is masked, and the ids."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(3, 64, (1, SEQ), generator=generator)
    hidden = torch.rand(1, SEQ, generator=generator) < 0.3
    return labels.masked_fill(hidden, 1), labels.masked_fill(~hidden, -100)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )


def trained(_rank: int, _world: int, family: str, given: str):
    found = []
    for layout, exchange in WAYS:
        mask = "full" if given == "full" else "causal"
        cp = api.context_parallel(
            None, "topology.block_size=16", seq=SEQ, layout=layout, exchange=exchange, mask=mask
        )
        cp.register()
        model, (ids, labels) = bidirectional(family, "mtrain"), tokens()
        inputs = cp.inputs(ids, slices=None if given == "full" else SLICES)
        cp.check(model)
        own = inputs["mtrain"].shard(labels, padding=-100)
        loss = loss_of(model(**inputs).logits, own)
        loss.backward()
        total, of_parameters = loss.detach(), gradients(model)
        for tensor in (total, *of_parameters.values()):
            torch.distributed.all_reduce(tensor)
        found.append((total.item(), of_parameters))
    return found


def without_key_bias(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out gradients that only rounding keeps from 0: a softmax ignores a bias of all keys."""
    return {name: of for name, of in gradients.items() if not name.endswith("key.bias")}


@mostly_slow(
    ("family", "given"), [("llama", "full"), ("llama", "slices"), ("bert", "slices")], keep=(0,)
)
def test_a_model_without_causality_trains_under_a_mask_that_shows_later_tokens(family, given):
    model, (ids, labels) = bidirectional(family, "eager"), tokens()
    seen = torch.ones(SEQ, SEQ)
    if given == "slices":
        seen[:60, 60:] = 0
    hidden = (1 - seen)[None, None] * torch.finfo(torch.float32).min
    loss = loss_of(model(input_ids=ids, attention_mask=hidden).logits, labels)
    loss.backward()
    expected = loss.item(), without_key_bias(gradients(model))
    for ways in gloo.run(2, trained, family, given):
        for loss, of_parameters in ways:
            assert_equal((loss, without_key_bias(of_parameters)), expected)


def refusal(call) -> str:
    with pytest.raises(api.ConfigError) as raised:
        call()
    return str(raised.value)


def test_a_model_without_causality_needs_such_a_mask():
    cp, (ids, labels) = api.context_parallel(seq=SEQ), tokens()
    cp.register()
    model = bidirectional("llama", "mtrain")
    rule = (
        "attention to later tokens (is_causal=False) needs mask=full, or a batch with slices that "
        "show them"
    )
    assert refusal(lambda: cp.check(model)) == f"model.layers.0.self_attn: {rule}"
    assert refusal(lambda: model(**cp.inputs(ids))) == f"layer 0: {rule}"
    cp.inputs(ids, slices=SLICES)
    cp.check(model)
    api.context_parallel(seq=SEQ, mask="full").check(model)
    assert refusal(lambda: cp.inputs(ids, labels, slices=np.array([(0, SEQ, 0, SEQ, 0)]))) == (
        "labels: none counts, since the mask shows each token its next one; leave them out, and "
        "compute a loss of your own from the model's logits"
    )
