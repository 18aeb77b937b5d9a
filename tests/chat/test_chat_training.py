"""Training on conversations: the loss is that of transformers on its own labels, and a resumed run
goes on exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gloo
import pytest
import torch
import transformers
from chat_tokenizers import template, write_tokenizer
from conversations import made_up, write
from slow_cases import mostly_slow

from mtrain_cli.composition.compose import compose
from mtrain_cli.data.open_dataset import open_dataset
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.training.loop import train

MARKED = ("qwen3_instruct_2507_training", "llama3_training", "gemma3_training")
SEQ = 384


def run(
    rank: int, world: int, folder: str, words: list[str], cp: int, resume: bool = False
) -> None:
    run_dir = RunDir(Path(folder))
    run_dir.path.mkdir(exist_ok=True)
    train(compose(words), run_dir, gloo.environment(rank, world, cp), resume)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def prepared(folder: Path, name: str) -> tuple[list[str], list[Any]]:
    """Write a model, a tokenizer and conversations that fill four sequences.

    Return the words of a run that trains on all of them in one step, and the conversations.
    """
    tokenizer = write_tokenizer(folder / "tokenizer", template(name))
    vocabulary = len(transformers.AutoTokenizer.from_pretrained(tokenizer.parent))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "qwen2", vocab_size=-(-vocabulary // 8) * 8, tie_word_embeddings=True, **sizes, **heads
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder / "model")
    words = ["data=chat", f"data.path={folder / 'chat.jsonl'}", f"data.tokenizer={tokenizer}"]
    words += [f"seq={SEQ}", f"train.init_from={folder / 'model'}", "train.global_batch=4"]
    words += ["topology.block_size=32", "optim.warmup_steps=0", "run.loggers=[]"]
    conversations = made_up(40)
    while True:
        write(folder / "chat.jsonl", conversations)
        if len(open_dataset(compose(words))) == 4:
            return words, conversations
        conversations.pop()


def of_transformers(folder: Path, conversations: list[Any]) -> tuple[float, float, int]:
    """Return loss, gradient norm and number of targets of transformers, one conversation a time."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32, attn_implementation="eager"
    )
    losses, count = torch.zeros(()), 0
    for messages in conversations:
        one = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
        )
        labels = torch.where(torch.as_tensor(one["assistant_masks"]).bool(), one["input_ids"], -100)
        logits = model(input_ids=one["input_ids"]).logits
        losses = losses + torch.nn.functional.cross_entropy(
            logits[0, :-1], labels[0, 1:], ignore_index=-100, reduction="sum"
        )
        count += int((labels[0, 1:] != -100).sum())
    (losses / count).backward()
    norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters()))
    return losses.item() / count, norm.item(), count


@mostly_slow(("name", "cp"), [(name, cp) for name in MARKED for cp in (1, 2)], keep=(0, 3))
def test_loss_and_gradient_equal_those_of_transformers(tmp_path: Path, name: str, cp: int) -> None:
    """On two workers: two context groups, and one of two."""
    words, conversations = prepared(tmp_path, name)
    gloo.run(2, run, str(tmp_path / "run"), [*words, "train.steps=1"], cp)
    (step,) = metrics(tmp_path / "run")
    loss, norm, count = of_transformers(tmp_path, conversations)
    assert step["targets"] == count
    assert step["loss"] == pytest.approx(loss, rel=1e-6)
    assert step["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_a_resumed_run_goes_on_exactly(tmp_path: Path) -> None:
    words, _ = prepared(tmp_path, MARKED[0])
    words = [*words, "train.global_batch=1", "optim.schedule=constant", "optim.lr=0.01"]
    gloo.run(1, run, str(tmp_path / "whole"), [*words, "train.steps=6"], 1)
    gloo.run(1, run, str(tmp_path / "parts"), [*words, "train.steps=3"], 1)
    gloo.run(1, run, str(tmp_path / "parts"), [*words, "train.steps=6"], 1, True)
    whole, parts = (
        [(one["step"], one["loss"], one["targets"]) for one in metrics(tmp_path / name)]
        for name in ("whole", "parts")
    )
    assert parts[3:] == whole[3:]
