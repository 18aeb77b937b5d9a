"""Fine-tune on conversations in TRL's SFTTrainer: all processes share each sequence.

    torchrun --nproc-per-node 2 examples/trl_sft.py MODEL CHAT.jsonl [--seq 8k]

Each line of the file is an object whose ``messages`` have a role and a content. Conversations are
packed into sequences, and only what the assistant says is trained on."""

import argparse

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from mtrain_cli import api
from mtrain_cli.integrations.trainer import ContextParallelMixin


class ContextParallelSFTTrainer(ContextParallelMixin, SFTTrainer):
    pass


parser = argparse.ArgumentParser()
parser.add_argument("model", help="a folder or a name of the Hugging Face Hub")
parser.add_argument("file")
parser.add_argument("--seq", default="8k")
parser.add_argument("--steps", type=int, default=4)
options = parser.parse_args()

has_gpu = torch.cuda.is_available()
seq = api.compose(f"seq={options.seq}").seq
# The training arguments start the processes.
arguments = SFTConfig(
    "trl-sft", max_length=seq, packing=True, assistant_only_loss=True, learning_rate=1e-5,
    per_device_train_batch_size=1, max_steps=options.steps, logging_steps=1, report_to=[],
    disable_tqdm=True, seed=0, bf16=has_gpu, use_cpu=not has_gpu,
)  # fmt: skip
cp = api.context_parallel(seq=seq)
cp.register()
trainer = ContextParallelSFTTrainer(
    AutoModelForCausalLM.from_pretrained(options.model, attn_implementation="mtrain"),
    arguments,
    train_dataset=load_dataset("json", data_files=options.file, split="train"),
    processing_class=AutoTokenizer.from_pretrained(options.model),
    cp=cp,
)
trainer.train()
trainer.save_model()
trainer.end()
