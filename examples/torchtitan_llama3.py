"""Train torchtitan's Llama 3 with mtrain's attention: all processes share each sequence.

    torchrun --nproc-per-node 2 examples/torchtitan_llama3.py FILE [--sparsity vertical_slash]

The bytes of the file are the tokens. The batch goes through the model in place of the masks."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torchtitan.models.llama3 import llama3_configs
from torchtitan.protocols.module import Module

from mtrain_cli import api


class ContextParallelAttention(Module):
    """The inner attention of a layer. q, k, v: [sequences, tokens, heads, head_dim]."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        layer: int

    def __init__(self, config: Config):
        super().__init__()
        self.layer = config.layer

    def forward(self, q, k, v, *, attention_masks, scale=None, enable_gqa=False):  # noqa: ARG002
        if scale is not None:
            q = q * (scale * q.shape[-1] ** 0.5)  # mtrain divides by the square root
        return attention_masks.attention(q, k, v, self.layer)


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
config = llama3_configs["debugmodel"](attn_backend="flex")
for number, layer in enumerate(config.layers):
    layer.attention.inner_attention = ContextParallelAttention.Config(layer=number)
torch.manual_seed(0)  # the same weights on all processes
model = config.build()
model.init_states()
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
text = torch.tensor(list(options.file.read_bytes()), device=device)
for step, ids in enumerate(text[: 4 * cp.seq].view(4, 1, cp.seq), 1):
    batch = cp.batch()
    targets = batch.targets(ids)
    tokens, own = batch.shard(ids), batch.shard(targets, padding=-100)
    positions = torch.from_numpy(batch.positions).to(device)[None]
    logits = model(tokens, positions, batch)
    loss = cross_entropy(logits[0].float(), own[0], reduction="sum") / (targets != -100).sum()
    loss.backward()
    for tensor in (loss.detach(), *(parameter.grad for parameter in model.parameters())):
        dist.all_reduce(tensor)  # each process has its part of the sum
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
