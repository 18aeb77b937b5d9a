"""DPO over two processes equals TRL's trainer in one, and folders of weights equal the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gloo
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import logsigmoid
from torch.nn.parallel import DistributedDataParallel

for package in ("transformers", "trl", "peft", "accelerate", "datasets"):
    pytest.importorskip(package)

from integrations import loops  # noqa: E402
from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from mtrain_cli.config.problem import ConfigError  # noqa: E402
from mtrain_cli.library.context_parallel import ContextParallel  # noqa: E402

Steps = list[tuple[float, dict[str, torch.Tensor]]]
BETA = 0.1


def model_of(reference: bool, with_lora: bool) -> Any:
    model = loops.model_of("qwen2", reference, len(loops.tokenizer()))
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(model, lora) if with_lora else model


def pair_of(row: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The chosen and the rejected answer behind the prompt, with labels of the answers."""
    text = loops.tokenizer()
    ids, labels = torch.zeros(2, loops.SEQ, dtype=torch.long), torch.full((2, loops.SEQ), -100)
    documents = torch.ones(2, loops.SEQ, dtype=torch.long)
    for number, name in enumerate(("chosen", "rejected")):
        prompt = text.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        whole = text.apply_chat_template(row["prompt"] + row[name], return_dict=True)["input_ids"]
        assert whole[: len(prompt)] == prompt
        ids[number, : len(whole)] = torch.tensor(whole)
        labels[number, len(prompt) : len(whole)] = torch.tensor(whole[len(prompt) :])
        documents[number, : len(whole)] = 0
    return {"input_ids": ids, "labels": labels, "documents": documents}


def margin(cp: ContextParallel, model: Any, pair: dict[str, torch.Tensor]) -> torch.Tensor:
    chosen, rejected = cp.logprobs(model, cp.inputs(**pair))[0]
    return chosen - rejected


def dpo(rank: int, world: int, with_lora: bool) -> Steps:
    loops.start(rank, world)
    cp, model = loops.library(layout="zigzag"), model_of(False, with_lora)
    pairs = [pair_of(row) for row in loops.preferences()]
    with torch.no_grad():
        if with_lora:
            with model.disable_adapter():
                references = [margin(cp, model, pair) for pair in pairs]
        else:
            references = [margin(cp, model, pair) for pair in pairs]
    wrapped = DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)  # Adam would enlarge rounding
    made = []
    for step in range(len(pairs) // 2):
        total = 0.0
        for number in (2 * step, 2 * step + 1):
            loss = -logsigmoid(BETA * (margin(cp, wrapped, pairs[number]) - references[number])) / 2
            (world * loss).backward()
            total += loss.item()
        named = model.named_parameters()
        made.append((total, {name: p.grad.clone() for name, p in named if p.grad is not None}))
        optimizer.step()
        optimizer.zero_grad()
    return made


def saved(folder: Path, with_lora: bool, wrapper: str) -> torch.Tensor:
    """Train a step, save as docs/library.md says, and return the logits of the trained model."""
    cp, model = loops.library(), model_of(False, with_lora)
    row = loops.rows(1)[0]
    ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
    if wrapper == "FSDP2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model.base_model.model if with_lora else model).model.layers:
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    else:
        wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    (dist.get_world_size() * wrapped(**cp.inputs(ids, labels)).loss).backward()
    optimizer.step()
    logits = cp.gather(wrapped(**cp.inputs(ids)).logits)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state, max_shard_size="40KB")
    return logits


FOLDERS = [(with_lora, wrapper) for with_lora in (False, True) for wrapper in ("FSDP2", "DDP")]


def run_all(rank: int, world: int, folder: str) -> tuple[list[Steps], list[torch.Tensor]]:
    steps = [dpo(rank, world, with_lora) for with_lora in (False, True)]
    return steps, [saved(Path(folder, f"{w}-{lora}"), lora, w) for lora, w in FOLDERS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def on_two(folder: Path) -> list[tuple[list[Steps], list[torch.Tensor]]]:
    return gloo.run(2, run_all, str(folder))


@pytest.mark.parametrize("with_lora", [False, True])
def test_dpo_over_two_processes_equals_trl_in_one(with_lora, on_two, tmp_path):
    """TRL takes the model before training as reference, and of adapters their copy."""
    loops.start(0, 1)
    expected = loops.dpo_of_trl(
        tmp_path, model_of(True, with_lora), loops.preferences(),
        precompute_ref_log_probs=not with_lora,
    )  # fmt: skip
    assert len(expected) == 3
    assert abs(expected[2][0] - expected[0][0]) > 0.01
    for found, _ in on_two:
        for (loss, gradients), (other, others) in zip(found[with_lora], expected, strict=True):
            assert loss == pytest.approx(other, rel=1e-6)
            assert gradients.keys() == others.keys()
            for name, gradient in gradients.items():
                error = (gradient - others[name]).abs().max()
                assert error <= 2e-6 * others[name].abs().max(), name


@pytest.mark.parametrize("number", range(len(FOLDERS)), ids=map(str, FOLDERS))
def test_folders_of_weights_give_the_logits_of_the_model(number, on_two, folder):
    with_lora, wrapper = FOLDERS[number]
    at, whole = folder / f"{wrapper}-{with_lora}", model_of(True, False)
    names = {file.name for file in at.iterdir()}
    if with_lora:
        assert names >= {"adapter_config.json", "adapter_model.safetensors"}
        keys = load_file(at / "adapter_model.safetensors")
        assert len(keys) == 8
        assert all(key.startswith("base_model.model.model.layers.") for key in keys)
        assert all(tensor.abs().max() > 0 for tensor in keys.values())
        model = PeftModel.from_pretrained(whole, at)
    else:
        assert "model.safetensors.index.json" in names
        assert len(list(at.glob("model-*.safetensors"))) > 1
        settings = json.loads((at / "config.json").read_text())
        assert settings["architectures"] == ["Qwen2ForCausalLM"]
        assert "mtrain" not in str(settings)
        index = json.loads((at / "model.safetensors.index.json").read_text())["weight_map"]
        assert index.keys() == whole.state_dict().keys()
        model = AutoModelForCausalLM.from_pretrained(at, attn_implementation="eager")
        assert (model.lm_head.weight - whole.lm_head.weight).abs().max() > 1e-4
    with torch.no_grad():
        logits = model(torch.tensor([loops.rows(1)[0]["input_ids"]])).logits
    for _, found in on_two:
        torch.testing.assert_close(found[number], logits, rtol=1e-5, atol=1e-6)


def test_an_adapter_of_the_head_is_refused():
    loops.start(0, 1)
    cp, model = loops.library(), loops.model_of("qwen2", False, 64)
    model = get_peft_model(model, LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM"))
    ids = torch.tensor([loops.rows(1)[0]["input_ids"]])
    with pytest.raises(ConfigError) as raised:
        cp.logprobs(model, cp.inputs(ids, ids))
    assert str(raised.value) == (
        "model: the LM head of PeftModelForCausalLM is Linear; it must be an nn.Linear without a "
        "bias or an adapter"
    )
