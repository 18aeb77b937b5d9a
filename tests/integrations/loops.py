"""Training loops of other libraries, each on one process or on several that share sequences.

A loop returns the loss and the norm of the gradient of each step, and losses of evaluations.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
import trl
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer

from mtrain_cli import api
from mtrain_cli.integrations.trainer import ContextParallelMixin
from mtrain_cli.library.context_parallel import ContextParallel

SEQ, STEPS = 128, 4
SPARSE = ("sparsity.block=16", "sparsity.min_columns=4", "sparsity.max_columns=8",
          "sparsity.p_s=0.3")  # fmt: skip
LEARNED = ("sparsity.block=16", "sparsity.score=learned", "sparsity.rank=4",
           "sparsity.density=0.7")  # fmt: skip
SHARDED = {
    "fsdp": "full_shard",
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
}
Steps = list[tuple[float, ...]]


class ContextParallelTrainer(ContextParallelMixin, Trainer):
    pass


class ContextParallelSFTTrainer(ContextParallelMixin, trl.SFTTrainer):
    pass


def start(rank: int, world: int) -> None:
    """Let accelerate see the processes, anew for each loop."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for name in ("accelerate", "trl"):
        logging.getLogger(name).setLevel(logging.ERROR)
    ContextParallel.register()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in [*os.environ]:
        if name.startswith(("FSDP_", "ACCELERATE_")):
            del os.environ[name]
    if world > 1:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
        }  # fmt: skip


def model_of(family: str, reference: bool, vocabulary: int = 64) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    config = AutoConfig.for_model(
        family, **sizes, num_attention_heads=4, num_key_value_heads=2, vocab_size=vocabulary,
        pad_token_id=None, bos_token_id=None, eos_token_id=None, use_cache=False,
    )  # fmt: skip
    attention = "sdpa" if reference else "mtrain"
    return AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=torch.float32
    )


def quantized(model: Any, folder: Path, reference: bool) -> Any:
    """The model with weights of 4 bits, from a folder that one process, the reference, writes."""
    if reference:
        model.save_pretrained(folder)
    made = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=model.config._attn_implementation, dtype=torch.float32,
        device_map={"": "cpu"}, quantization_config=transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        ),
    )  # fmt: skip
    for module in made.modules():
        # Evaluation packs weights for such CPUs, and fails at those of fewer than 64 inputs.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return made


def library(size: int | None = None, *words: str, **arguments: str) -> ContextParallel:
    """size: processes of a context group; None for all."""
    group = None
    if size is not None:
        first = dist.get_rank() // size * size
        groups = [
            dist.new_group([*range(at, at + size)]) for at in range(0, dist.get_world_size(), size)
        ]
        group = groups[first // size]
    return api.context_parallel(group, "topology.block_size=16", *words, seq=SEQ, **arguments)


def rows(count: int, *, shorter: bool = False) -> Dataset:
    """Packed rows of unequal labels. shorter: not packed, and padded by the collator."""
    generator, made = torch.Generator().manual_seed(1), []
    for number in range(count):
        length = SEQ - 9 * (number % 5) if shorter else SEQ
        ids = torch.randint(3, 64, (length,), generator=generator)
        labels = ids.clone()
        labels[: 15 * (number % 8)] = -100
        row = {"input_ids": ids.tolist(), "labels": labels.tolist()}
        if not shorter:
            cut = 30 + 37 * number % 60
            row["position_ids"] = [*range(cut), *range(SEQ - cut)]
            row["labels"][0] = row["labels"][cut] = -100
        made.append(row)
    return Dataset.from_list(made)


def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad on the right as collators of transformers do."""
    longest = max(len(row["input_ids"]) for row in batch)
    made = {
        name: torch.tensor([[*row[name], *[fill] * (longest - len(row[name]))] for row in batch])
        for name, fill in (("input_ids", 0), ("labels", -100), ("position_ids", 0))
        if name in batch[0]
    }
    if "position_ids" not in made:
        lengths = torch.tensor([[len(row["input_ids"])] for row in batch])
        made["attention_mask"] = (torch.arange(longest) < lengths).long()
    return made


def trainer_of(
    folder: Path, reference: bool, cp_size: int | None = None, *, shorter: bool = False,
    replicas: int = 1, learned: bool = False, **settings: Any,
) -> Trainer:  # fmt: skip
    """transformers' Trainer, with evaluation. learned: block_topk with learned scores."""
    arguments = transformers.TrainingArguments(**{
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1, "gradient_accumulation_steps": 4 // replicas,
        "learning_rate": 1e-2, "logging_steps": 1, "report_to": [], "save_strategy": "no",
        "use_cpu": True, "seed": 1, "eval_strategy": "steps", "eval_steps": STEPS,
        "prediction_loss_only": True, "optim": "adamw_torch", "disable_tqdm": True, **settings,
    })  # fmt: skip
    data = {"train_dataset": rows(10, shorter=shorter), "eval_dataset": rows(3, shorter=shorter)}
    model = model_of("llama", reference)
    if reference:
        return Trainer(model, arguments, data_collator=collate, **data)
    cp = library(cp_size, *LEARNED, sparsity="block_topk") if learned else library(cp_size)
    return ContextParallelTrainer(model, arguments, data_collator=collate, cp=cp, **data)


def log_of(trainer: Trainer) -> Steps:
    """Loss, norm of the gradient, and what else TRL logs, of each step; then evaluations."""
    log = trainer.state.log_history
    names = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")
    steps = [
        tuple(float(entry[name]) for name in names if name in entry)
        for entry in log
        if "grad_norm" in entry
    ]
    return [*steps, *((entry["eval_loss"],) for entry in log if "eval_loss" in entry)]


def hf_trainer(folder: Path, reference: bool, *arguments: Any, **settings: Any) -> Steps:
    trainer = trainer_of(folder, reference, *arguments, **settings)
    trainer.train()
    return log_of(trainer)


def of_three_rows(folder: Path, reference: bool) -> Steps:
    """Batches of three of ten rows, and of two of three, so that the last ones are smaller."""
    return hf_trainer(
        folder, reference, max_steps=-1, num_train_epochs=1, per_device_train_batch_size=3,
        gradient_accumulation_steps=1, per_device_eval_batch_size=2,
    )  # fmt: skip


def resumed(folder: Path, reference: bool) -> Steps:
    """A run whose last two steps begin at a checkpoint."""
    if reference:
        return hf_trainer(folder, True)
    own = trainer_of(folder, False, save_strategy="steps", save_steps=2)
    own.train()
    trainer = trainer_of(folder, False)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    return log_of(trainer)


def fsdp(folder: Path, reference: bool) -> Steps:
    return hf_trainer(folder, reference, **({} if reference else SHARDED))


def own_loop(reference: bool, prepare: Callable[[Any, Any, Any], tuple[Any, Any]]) -> Steps:
    """A loop of two micro-batches a step, over a model that averages gradients over processes."""
    model = model_of("llama", reference)
    cp = None if reference else library()
    if cp is not None:
        cp.check(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = prepare(model, optimizer, reference)
    world, made = (1, []) if reference else (dist.get_world_size(), [])
    data = DataLoader(rows(2 * STEPS), 2, collate_fn=list)
    for pair in data:
        batches = [collate([row]) for row in pair]
        inputs = [
            {**batch, "use_cache": False} if cp is None else cp.inputs(**batch) for batch in batches
        ]
        labels = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        losses = []
        for keywords in inputs:
            loss = model(**{**keywords, "num_items_in_batch": labels}).loss
            (world * loss).backward()
            losses.append(loss.detach())
        total = torch.stack(losses).sum()
        if world > 1:
            dist.all_reduce(total)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        made.append((total.item(), norm.item()))
        optimizer.step()
        optimizer.zero_grad()
    return made


def ddp(_folder: Path, reference: bool) -> Steps:
    def prepare(model: Any, optimizer: Any, reference: bool) -> tuple[Any, Any]:
        return (model if reference else DistributedDataParallel(model)), optimizer

    return own_loop(reference, prepare)


def fsdp2(_folder: Path, reference: bool) -> Steps:
    def prepare(model: Any, optimizer: Any, reference: bool) -> tuple[Any, Any]:
        if reference:
            return model, optimizer
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh), torch.optim.AdamW(model.parameters(), lr=1e-2)

    return own_loop(reference, prepare)


def accelerated(_folder: Path, reference: bool) -> Steps:
    def prepare(model: Any, optimizer: Any, reference: bool) -> tuple[Any, Any]:
        return (model, optimizer) if reference else Accelerator(cpu=True).prepare(model, optimizer)

    return own_loop(reference, prepare)


def tokenizer() -> PreTrainedTokenizerFast:
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *special]
    raw = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(special)
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    made.chat_template = Path(trl.__file__).with_name("chat_templates").joinpath(
        "qwen2_5_training.jinja"
    ).read_text()  # fmt: skip
    return made


def conversations() -> Dataset:
    """One or two turns each, short enough that several fill a row."""
    made = []
    for number in range(24):
        turns = []
        for turn in range(1 + number % 2):
            turns.append({"role": "user", "content": "ab" * (2 + (number + turn) % 4)})
            turns.append({"role": "assistant", "content": "cde" * (1 + number % 5)})
        made.append({"messages": [{"role": "system", "content": "x"}, *turns]})
    return Dataset.from_list(made)


def sft(
    folder: Path,
    reference: bool,
    *words: str,
    lora: bool = False,
    bits4: bool = False,
    **library_of: str,
) -> Steps:
    """TRL: packed conversations, loss on the assistant's turns; lora: with checkpointing.

    bits4: with quantized weights.
    """
    text = tokenizer()
    arguments = trl.SFTConfig(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=1,
        gradient_accumulation_steps=3, learning_rate=1e-2, logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, bf16=False, seed=1, gradient_checkpointing=lora,
        gradient_checkpointing_kwargs={"use_reentrant": False}, max_length=SEQ, packing=True,
        assistant_only_loss=True, disable_tqdm=True,
        # A sparse index depends on how rows are padded, which mtrain does without TRL.
        pad_to_multiple_of=SEQ if reference else None,
    )  # fmt: skip
    peft = (
        LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]) if lora else None
    )
    model = model_of("qwen2", reference, len(text))
    model = quantized(model, folder / "base", reference) if bits4 else model
    given: dict[str, Any] = {
        "model": model, "args": arguments, "train_dataset": conversations(),
        "processing_class": text, "peft_config": peft,
    }  # fmt: skip
    if reference:
        trainer = trl.SFTTrainer(**given)
    else:
        trainer = ContextParallelSFTTrainer(cp=library(None, *words, **library_of), **given)
    if bits4:  # TRL makes them bfloat16, which would round losses to 1e-5
        for parameter in filter(lambda p: p.requires_grad, trainer.model.parameters()):
            parameter.data = parameter.data.float()
    torch.manual_seed(5)
    trainer.train()
    return log_of(trainer)


def lora(folder: Path, reference: bool) -> Steps:
    return sft(folder, reference, lora=True)


def qlora(folder: Path, reference: bool) -> Steps:
    return sft(folder, reference, lora=True, bits4=True)


def unpacked(folder: Path, reference: bool) -> Steps:
    """Rows that are shorter than a sequence, with checkpointing."""
    return hf_trainer(folder, reference, shorter=True, gradient_checkpointing=True)


def sparse_lora(folder: Path, _reference: bool) -> Steps:
    """No other library computes this: the reference is mtrain in one process."""
    return sft(folder, False, *SPARSE, lora=True, sparsity="vertical_slash")


def preferences(count: int = 6) -> list[dict[str, Any]]:
    """Prompts with a chosen and a rejected answer, of unequal lengths."""

    def said(role: str, text: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text}]

    return [
        {
            "prompt": said("user", "ab" * (number + 1)),
            "chosen": said("assistant", "cde" * (number // 2 + 1)),
            "rejected": said("assistant", "xy" * (6 - number)),
        }
        for number in range(count)
    ]


def dpo_of_trl(
    folder: Path, model: Any, pairs: list[dict[str, Any]], **settings: Any
) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Loss and all gradients of each step of two pairs, by TRL's trainer in one process."""
    arguments = trl.DPOConfig(**{
        "output_dir": str(folder), "max_steps": len(pairs) // 2, "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2, "learning_rate": 0.2, "optim": "sgd",
        "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": [],
        "save_strategy": "no", "use_cpu": True, "bf16": False, "disable_tqdm": True,
        "train_sampling_strategy": "sequential", "max_length": None, "warmup_steps": 0,
        "gradient_checkpointing": False, "max_grad_norm": 0.0, **settings,
    })  # fmt: skip
    made: list[dict[str, torch.Tensor]] = []

    class Gradients(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            named = model.named_parameters()
            made.append({name: p.grad.clone() for name, p in named if p.grad is not None})

    trainer = trl.DPOTrainer(
        model, args=arguments, train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer(), callbacks=[Gradients()],
    )  # fmt: skip
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "learning_rate" in entry]
    return list(zip(losses, made, strict=True))
