"""Log-probabilities over two processes equal those of one process with the whole logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gloo
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")

from mtrain_cli import api  # noqa: E402
from mtrain_cli.library.context_parallel import ContextParallel  # noqa: E402
from mtrain_cli.model import transformers_models  # noqa: E402

SEQ, VOCABULARY = 150, 96
SPARSE = ("sparsity.block=16", "sparsity.min_columns=4", "sparsity.max_columns=8",
          "sparsity.p_s=0.3")  # fmt: skip
# Two shapes of heads: groups of two and four, tied and not.
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    "qwen3": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16,
              "tie_word_embeddings": True},
}  # fmt: skip
FACTORS = torch.tensor([0.7, -1.3, 2.0], dtype=torch.float64)
Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def model_of(family: str, attention: str = "mtrain", **changed: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    settings = {**sizes, "vocab_size": VOCABULARY, **SHAPES.get(family, {}), **changed}
    config = transformers.AutoConfig.for_model(family, pad_token_id=None, **settings)
    return transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=torch.float64
    )


def batch() -> dict[str, torch.Tensor]:
    """Three sequences: two documents, padding at the end, and one without labels."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCABULARY, (3, SEQ), generator=generator)
    labels = ids.clone()
    labels[0, :20] = labels[0, 60:77] = labels[1, 90:] = labels[1, :40] = labels[2] = -100
    cuts = (61, 90, 7)
    positions = torch.stack([torch.cat([torch.arange(n), torch.arange(SEQ - n)]) for n in cuts])
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def library(**arguments: str) -> ContextParallel:
    words = SPARSE if "sparsity" in arguments else ()
    cp = api.context_parallel(None, "topology.block_size=16", *words, seq=SEQ, **arguments)
    cp.register()
    return cp


def loss_of(sums: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """A loss that is not linear in the sums, and a mean."""
    return (FACTORS * sums / counts.clamp(min=1)).tanh().square().sum() + 0.01 * sums.sum()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Of each parameter, whole, without prefixes of wrappers."""
    found = {}
    for name, parameter in model.named_parameters():
        whole = parameter.grad
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        found[name.removeprefix("module.")] = whole.clone()
    return found


def of_whole_logits(model: Any, inputs: dict[str, Any], given: dict[str, torch.Tensor]) -> Found:
    """By the log-softmax of whole logits."""
    labels = given["labels"].masked_fill(given["position_ids"] == 0, -100)
    ahead = torch.cat([labels[:, 1:], torch.full((len(labels), 1), -100)], 1)
    logits = model(**inputs).logits[:, :SEQ]
    every = logits.log_softmax(-1).gather(2, ahead.clamp(min=0)[..., None])[..., 0]
    tokens = every.masked_fill(ahead == -100, 0)
    sums, counts = tokens.sum(1), (ahead != -100).sum(1)
    loss_of(sums, counts).backward()
    return sums.detach(), counts, tokens.detach(), gradients(model)


def expected_of(family: str, settings: dict[str, str]) -> Found:
    """By transformers alone; under a pattern, which it has not, by the logits of one process."""
    given = batch()
    if "sparsity" in settings:
        cp = library(**settings)
        inputs = cp.inputs(given["input_ids"], position_ids=given["position_ids"])
        return of_whole_logits(model_of(family), inputs, given)
    seen = given["position_ids"].eq(0).cumsum(1)
    seen = (seen[:, :, None] == seen[:, None]).tril()[:, None]
    inputs = {name: given[name] for name in ("input_ids", "position_ids")}
    return of_whole_logits(
        model_of(family, "eager"),
        {**inputs, "attention_mask": torch.where(seen, 0.0, -torch.inf), "use_cache": False},
        given,
    )


def found_by(model: Any, cp: ContextParallel, averaged: bool, one_by_one: bool) -> Found:
    """averaged: whether the model averages gradients over the processes, as DDP does.

    one_by_one: three batches under way, of a sequence each.
    """
    whole = batch()
    rows = [slice(n, n + 1) for n in range(3)] if one_by_one else [slice(3)]
    parts = [cp.inputs(**{name: tensor[at] for name, tensor in whole.items()}) for at in rows]
    results = [cp.logprobs(model, inputs) for inputs in parts]
    sums, counts = (torch.cat(of_parts) for of_parts in list(zip(*results, strict=True))[:2])
    tokens = [
        inputs["mtrain"].gather(own) for inputs, (*_, own) in zip(parts, results, strict=True)
    ]
    loss = loss_of(sums, counts)
    (loss * dist.get_world_size() if averaged else loss).backward()
    found = gradients(model)
    if not averaged:
        for gradient in found.values():
            dist.all_reduce(gradient)
    return sums.detach(), counts, torch.cat(tokens), found


def assert_equal(found: Found, expected: Found) -> None:
    assert found[1].tolist() == expected[1].tolist()
    for own, other in zip((found[0], found[2]), (expected[0], expected[2]), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-6)
    assert found[3].keys() == expected[3].keys()
    for name, gradient in found[3].items():
        error = (gradient - expected[3][name]).abs().max()
        assert error <= 1e-6 * expected[3][name].abs().max(), name


def few_rows(rows: int) -> None:
    """Limit a chunk to this number of rows of float64 logits."""
    size = 8 * VOCABULARY * rows
    transformers_models._BY_ROW = replace(transformers_models._BY_ROW, chunk_bytes=size)


DENSE, RING = {"layout": "balanced", "exchange": "group_cast"}, {"layout": "zigzag"}
CASES = {
    "plain": ("llama", "all_reduce", RING),
    "tied": ("qwen3", "all_reduce", DENSE),
    "DDP": ("qwen3", "DDP", RING),
    "FSDP2": ("llama", "FSDP2", DENSE),
    "FSDP2 of the head": ("llama", "FSDP2 head", RING),
    "FSDP2 tied": ("qwen3", "FSDP2", RING),
    "FSDP2 one by one": ("llama", "FSDP2", RING),
    "sparse": ("llama", "all_reduce", {"sparsity": "vertical_slash", **RING}),
    "sparse FSDP2": ("qwen3", "FSDP2", {"sparsity": "vertical_slash", **RING}),
}


def prepared(model: Any, way: str) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if way == "DDP":
        return DistributedDataParallel(model)
    if way.startswith("FSDP2"):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in [*model.model.layers, *([model.lm_head] if way == "FSDP2 head" else [])]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


ADVANTAGES = torch.tensor([[0.9], [-0.4], [0.3]], dtype=torch.float64)


def grpo(tokens: torch.Tensor, old: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The clipped gain of each token."""
    ratio = (tokens - old).exp()
    gain = torch.minimum(ratio * ADVANTAGES, ratio.clamp(0.9, 1.1) * ADVANTAGES)
    return gain.masked_fill(labels == -100, 0)


def rollout() -> torch.Tensor:
    """Log-probabilities of each token that another engine gave, near those of the model."""
    return -4.55 + torch.rand(3, SEQ, generator=torch.Generator().manual_seed(5)).double() * 0.4


def grpo_step(world: int) -> tuple[float, dict[str, torch.Tensor]]:
    """By docs/library.md."""
    cp, model = library(layout="zigzag"), model_of("llama")
    inputs = cp.inputs(**batch())
    own = inputs["mtrain"]
    _, counts, tokens = cp.logprobs(model, inputs)
    gain = grpo(tokens, own.shard(rollout().roll(-1, 1)), inputs["shift_labels"])
    loss = -(own.sum(gain) / counts.clamp(min=1)).mean()
    loss.backward()
    found = gradients(model)
    if world > 1:
        for gradient in found.values():
            dist.all_reduce(gradient)
    return loss.item(), found


def run_all(_rank: int, world: int) -> dict[str, Any]:
    made: dict[str, Any] = {"reward": rewards_of(world), "grpo": grpo_step(world)}
    few_rows(7)
    for name, (family, way, settings) in CASES.items():
        cp, model = library(**settings), model_of(family)
        cp.check(model)
        made[name] = found_by(
            prepared(model, way), cp, way != "all_reduce", name.endswith("one by one")
        )
    return made


@pytest.fixture(scope="module")
def on_two() -> list[dict[str, Any]]:
    return gloo.run(2, run_all)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_find_what_whole_logits_give(name, on_two):
    family, _, settings = CASES[name]
    expected = expected_of(family, settings)
    assert expected[1].tolist() == [113, 50, 0]
    for found in on_two:
        assert_equal(found[name], expected)
        assert found[name][0][2] == 0
    assert torch.equal(on_two[0][name][0], on_two[1][name][0])


def test_a_pattern_changes_the_log_probabilities():
    dense, sparse = (expected_of("llama", CASES[name][2])[0] for name in ("plain", "sparse"))
    assert (dense - sparse)[:2].abs().min() > 1e-6


class Shapes(TorchDispatchMode):
    """The numbers of rows of all tensors as wide as the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (VOCABULARY,):
                self.rows.add(tensor.numel() // VOCABULARY)
        return out


def test_both_passes_have_the_logits_of_few_labels(monkeypatch):
    monkeypatch.setattr(transformers_models, "_BY_ROW", transformers_models._BY_ROW)
    few_rows(40)  # more than the rows of the weight, transposed
    cp, model = library(), model_of("llama")
    with Shapes() as forward:
        sums, counts, _ = cp.logprobs(model, cp.inputs(**batch()))
    with Shapes() as backward:
        sums.sum().backward()
    assert counts.sum() == 163
    assert forward.rows - {1} == {0, 32, 40, 3}
    assert backward.rows - {1} == {32, 40, 3}


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_rounds_no_logits(autocast):
    cp, model = library(), model_of("llama").to(torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        inputs = [cp.inputs(**batch()) for _ in range(2)]
        tokens = cp.logprobs(model, inputs[0])[2]
        tokens.sum().backward()
        found = gradients(model)
        model.zero_grad()
        labels = inputs[1]["shift_labels"]
        given = {name: inputs[1][name] for name in ("input_ids", "position_ids", "mtrain")}
        hidden = model.model(**given, use_cache=False).last_hidden_state
    weight = model.lm_head.weight.bfloat16().float()
    logits = hidden.bfloat16().float() @ weight.t()
    every = logits.log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    expected = every.masked_fill(labels == -100, 0)
    expected.sum().backward()
    assert tokens.dtype == torch.float32
    torch.testing.assert_close(tokens, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients(model).items():
        error = (gradient - found[name]).abs().max()
        assert error <= 2**-6 * gradient.abs().max(), name


def test_no_gradient_is_kept_without_one():
    cp, model = library(), model_of("llama")
    with torch.no_grad():
        sums, _, tokens = cp.logprobs(model, cp.inputs(**batch()))
    assert not sums.requires_grad
    assert not tokens.requires_grad
    torch.testing.assert_close(sums, cp.logprobs(model, cp.inputs(**batch()))[0])


def given(**changed: torch.Tensor) -> dict[str, Any]:
    return library().inputs(**{**batch(), **changed})


def label(number: int) -> torch.Tensor:
    labels = batch()["labels"]
    labels[1, 60] = number
    return labels


@pytest.mark.parametrize(
    ("family", "inputs", "problem"),
    [
        ("llama", lambda: library().inputs(batch()["input_ids"]),
         "inputs: must be what cp.inputs(input_ids, labels) returns"),
        ("llama", lambda: batch()["input_ids"],
         "inputs: must be what cp.inputs(input_ids, labels) returns"),
        ("llama", lambda: given() | {"shift_labels": batch()["labels"][:, 1:]},
         "shift_labels: has the shape [3, 149]; a process's tokens have the shape [3, 160, ...] "
         "(seq=150)"),
        ("llama", lambda: given() | {"shift_labels": batch()["labels"] >= 0},
         "shift_labels: has the shape [3, 150] and is bool on cpu; give a tensor of int16, int32 "
         "or int64, [sequences, tokens]"),
        ("llama", lambda: given(labels=label(VOCABULARY)),
         "labels: 96 is outside the vocabulary of 96 tokens"),
        ("llama", lambda: given(labels=label(-1)),
         "labels: -1 is outside the vocabulary of 96 tokens"),
        ("gemma2", given,
         "model: Gemma2ForCausalLM scales, caps or rounds its logits, which is unsupported"),
        ("granite", given,
         "model: GraniteForCausalLM scales, caps or rounds its logits, which is unsupported"),
        ("phi", given,
         "model: the LM head of PhiForCausalLM is Linear; it must be an nn.Linear without a bias "
         "or an adapter"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(family, inputs, problem):
    more = {"granite": {"logits_scaling": 2.0}, "gemma2": {"num_attention_heads": 4}}
    model = model_of(family, **more.get(family, {}))
    with pytest.raises(api.ConfigError) as raised:
        library().logprobs(model, inputs())
    assert str(raised.value) == problem


def test_a_model_without_a_head_is_refused():
    for model, name in ((model_of("llama").model, "LlamaModel"), (torch.nn.ReLU(), "ReLU")):
        with pytest.raises(api.ConfigError) as raised:
            library().logprobs(model, given())
        assert str(raised.value) == (
            f"model: the LM head of {name} is NoneType; it must be an nn.Linear without a bias or "
            "an adapter"
        )


def test_values_of_other_tokens_have_no_sum():
    with pytest.raises(api.ConfigError, match=r"^values: has the shape \[3, 149\]; this process's"):
        library().batch(sequences=3).sum(torch.zeros(3, SEQ - 1))


def rewards_of(world: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Scores of the last tokens by a head of one output, and gradients of a loss of all."""
    cp, settings = library(layout="zigzag"), model_of("llama").config
    settings.num_labels, settings.classifier_dropout = 1, 0.0
    torch.manual_seed(1)
    model = transformers.AutoModelForTokenClassification.from_config(
        settings, attn_implementation="mtrain", dtype=torch.float64
    )
    cp.check(model)
    given = batch()
    inputs = cp.inputs(given["input_ids"], position_ids=given["position_ids"])
    last = torch.zeros(3, SEQ)
    last[range(3), [149, 89, 20]] = 1
    own = inputs["mtrain"]
    scores = own.sum(model(**inputs).logits[..., 0] * own.shard(last))
    (scores * FACTORS).tanh().sum().backward()
    found = gradients(model)
    if world > 1:
        for gradient in found.values():
            dist.all_reduce(gradient)
    return scores.detach(), found


def test_a_reward_is_the_sum_of_one_token(on_two):
    scores, expected = rewards_of(1)
    for made in on_two:
        own, found = made["reward"]
        torch.testing.assert_close(own, scores, rtol=1e-6, atol=1e-6)
        for name, gradient in found.items():
            assert (gradient - expected[name]).abs().max() <= 1e-6 * expected[name].abs().max()


def test_a_step_of_grpo_clips_ratios_of_whole_logits(on_two):
    given, model = batch(), model_of("llama")
    labels = given["labels"].masked_fill(given["position_ids"] == 0, -100)[:, 1:]
    cp = library()
    inputs = cp.inputs(given["input_ids"], position_ids=given["position_ids"])
    logits = model(**inputs).logits[:, : SEQ - 1]
    tokens = logits.log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    gain = grpo(tokens, rollout()[:, 1:], labels)
    ratio = (tokens - rollout()[:, 1:]).exp()[labels != -100]
    assert 0.1 < float(((ratio < 0.9) | (ratio > 1.1)).double().mean()) < 0.9
    loss = -(gain.sum(1) / (labels != -100).sum(1).clamp(min=1)).mean()
    loss.backward()
    expected = gradients(model)
    for found in on_two:
        own, of_own = found["grpo"]
        assert own == pytest.approx(loss.item(), rel=1e-6)
        for name, gradient in of_own.items():
            assert (gradient - expected[name]).abs().max() <= 1e-6 * expected[name].abs().max()


def test_documents_of_a_sequence_have_sums_of_their_own():
    cp, model = library(), model_of("llama")
    given, inputs = batch(), cp.inputs(**batch())
    whole, _, tokens = cp.logprobs(model, inputs)
    documents = given["position_ids"].eq(0).cumsum(1) - 1
    own = inputs["mtrain"].shard(documents, padding=-1)[..., None] == torch.arange(2)
    sums = inputs["mtrain"].sum(tokens[..., None] * own)
    torch.testing.assert_close(sums.sum(1), whole)
    assert sums[0].abs().min() > 1
    labels = given["labels"].clone()
    labels[documents == 1] = -100
    first = cp.logprobs(model, cp.inputs(**{**given, "labels": labels}))[0]
    torch.testing.assert_close(sums[:, 0], first)
