"""Train in the Trainer of transformers: all processes share each sequence.

    torchrun --nproc-per-node 2 examples/hf_trainer.py FILE [--sparsity vertical_slash]

The bytes of the file are the tokens."""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from mtrain_cli import api
from mtrain_cli.integrations.trainer import ContextParallelMixin


class ContextParallelTrainer(ContextParallelMixin, Trainer):
    pass


parser = argparse.ArgumentParser()
parser.add_argument("file", type=Path)
parser.add_argument("--sparsity", default="dense")
options = parser.parse_args()

# The training arguments start the processes.
arguments = TrainingArguments(
    "hf-trainer", max_steps=4, per_device_train_batch_size=1, learning_rate=3e-3, logging_steps=1,
    save_strategy="no", report_to=[], disable_tqdm=True, gradient_checkpointing=True, seed=0,
    use_cpu=not torch.cuda.is_available(),
)  # fmt: skip
cp = api.context_parallel(seq=1024, sparsity=options.sparsity)
cp.register()
torch.manual_seed(0)  # the same weights on all processes
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
config = AutoConfig.for_model("llama", num_attention_heads=4, num_key_value_heads=2, **sizes)
model = AutoModelForCausalLM.from_config(config, attn_implementation="mtrain")
text = options.file.read_bytes()
rows = [list(text[at : at + cp.seq]) for at in range(0, len(text) - cp.seq + 1, cp.seq)]
data = Dataset.from_dict({"input_ids": rows, "labels": rows})
trainer = ContextParallelTrainer(
    model, arguments, train_dataset=data, data_collator=default_data_collator, cp=cp
)
trainer.train()
trainer.end()
