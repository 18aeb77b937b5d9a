"""Log-probabilities over two processes equal those of one process with the whole logits."""

from __future__ import annotations

from typing import Any

import gloo
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

transformers = pytest.importorskip("transformers")

from slow_cases import mostly_slow  # noqa: E402

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


def library(*words: str, **arguments: str) -> ContextParallel:
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


def expected_of(family: str) -> Found:
    """By eager attention and the log-softmax of whole logits."""
    given, model = batch(), model_of(family, "eager")
    labels = given["labels"].clone()
    labels[given["position_ids"] == 0] = -100
    inputs = {name: given[name] for name in ("input_ids", "position_ids")}
    logits = torch.cat([
        model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits
        for ids, positions in zip(*inputs.values(), strict=True)
    ])  # fmt: skip
    ahead = torch.cat([labels[:, 1:], torch.full((3, 1), -100)], 1)
    every = logits.log_softmax(-1).gather(2, ahead.clamp(min=0)[..., None])[..., 0]
    tokens = every.masked_fill(ahead == -100, 0)
    sums, counts = tokens.sum(1), (ahead != -100).sum(1)
    loss_of(sums, counts).backward()
    return sums.detach(), counts, tokens.detach(), gradients(model)


def found_by(
    model: Any, cp: ContextParallel, averaged: bool = False, **changed: torch.Tensor
) -> Found:
    inputs = cp.inputs(**{**batch(), **changed})
    sums, counts, tokens = cp.logprobs(model, inputs)
    world = dist.get_world_size() if dist.is_initialized() else 1
    (loss_of(sums, counts) * (world if averaged else 1)).backward()
    found = gradients(model)
    if world > 1 and not averaged:
        for gradient in found.values():
            dist.all_reduce(gradient)
    return sums.detach(), counts, inputs["mtrain"].gather(tokens), found


def assert_equal(found: Found, expected: Found, tolerance: float = 1e-6) -> None:
    assert found[1].tolist() == expected[1].tolist()
    for own, other in zip((found[0], found[2]), (expected[0], expected[2]), strict=True):
        torch.testing.assert_close(own.double(), other.double(), rtol=tolerance, atol=tolerance)
    assert found[3].keys() == expected[3].keys()
    for name, gradient in found[3].items():
        error = (gradient - expected[3][name]).abs().max()
        assert error <= tolerance * expected[3][name].abs().max(), name


def on_two(
    _rank: int, _world: int, family: str, way: str, words: tuple[str, ...], arguments: dict[str, str]
) -> Found:  # fmt: skip
    # Of the labels on a process, so that chunks have unequal numbers of them.
    transformers_models._CHUNK_BYTES = 8 * VOCABULARY * 7
    cp, model = library(*words, **arguments), model_of(family)
    cp.check(model)
    if way == "DDP":
        model = DistributedDataParallel(model)
    if way.startswith("FSDP2"):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in [*model.model.layers, *([model.lm_head] if way == "FSDP2 head" else [])]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return found_by(model, cp, averaged=way != "plain")


@pytest.mark.parametrize(
    ("family", "way"),
    [("llama", "plain"), ("qwen3", "plain"), ("llama", "FSDP2"), ("llama", "FSDP2 head"),
     ("qwen3", "FSDP2"), ("qwen3", "DDP")],
)  # fmt: skip
def test_two_processes_find_the_log_probabilities_and_gradients_of_whole_logits(family, way):
    expected = expected_of(family)
    found = gloo.run(2, on_two, family, way, (), {"layout": "zigzag", "exchange": "ring"})
    for one in found:
        assert_equal(one, expected)
        assert one[0][2] == one[1][2] == 0
    assert torch.equal(found[0][0], found[1][0])
