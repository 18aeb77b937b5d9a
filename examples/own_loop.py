"""Train a model of transformers in a loop of your own: all processes share each sequence.

    torchrun --nproc-per-node 2 examples/own_loop.py FILE [--sparsity vertical_slash]

The bytes of the file are the tokens."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from mtrain_cli import api

parser = argparse.ArgumentParser()
parser.add_argument("file", type=Path)
parser.add_argument("--sparsity", default="dense")
options = parser.parse_args()

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
cp = api.context_parallel(seq=1024, sparsity=options.sparsity)
cp.register()
torch.manual_seed(0)  # the same weights on all processes
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
config = AutoConfig.for_model("llama", num_attention_heads=4, num_key_value_heads=2, **sizes)
model = AutoModelForCausalLM.from_config(config, attn_implementation="mtrain").to(device)
cp.check(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
text = torch.tensor(list(options.file.read_bytes()), device=device)
for step, ids in enumerate(text[: 4 * cp.seq].view(4, 1, cp.seq), 1):
    loss = model(**cp.inputs(ids, labels=ids)).loss
    loss.backward()
    for tensor in (loss.detach(), *(parameter.grad for parameter in model.parameters())):
        dist.all_reduce(tensor)  # each process has its part of the sum
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
