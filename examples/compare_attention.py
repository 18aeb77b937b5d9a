"""Time steps of a transformers model with mtrain's attention and with Ulysses, in one script.

    torchrun --nproc-per-node 2 examples/compare_attention.py

On GPUs, with flash-attn-4 and liger-kernel installed: 12 layers of the shape of Qwen2.5-3B on 128K
random tokens, with FSDP2, checkpointing, AdamW and Liger's kernels. Only attention differs between
the rows. On CPUs, a toy shows that dense attention gives the same loss."""

import os
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mtrain_cli import api

on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    from flash_attn.cute.interface import flash_attn_func
    from liger_kernel import transformers as liger

    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
rank, workers = dist.get_rank(), dist.get_world_size()
seq, hidden, inner, layers, heads, vocabulary = 131072, 2048, 11008, 12, 16, 151936
if not on_gpu:
    seq, hidden, inner, layers, heads, vocabulary = 4096, 64, 128, 2, 4, 256


class Swap(torch.autograd.Function):
    """Deal heads instead of rows, or rows instead of heads: [tokens, heads, head_dim]."""

    @staticmethod
    def forward(ctx, x, to_heads):
        ctx.to_heads = to_heads
        tokens, count, width = x.shape
        if to_heads:
            x = x.view(tokens, workers, count // workers, width).transpose(0, 1)
        moved = torch.empty_like(x := x.contiguous())
        dist.all_to_all_single(moved, x)
        if to_heads:
            return moved.view(workers * tokens, count // workers, width)
        moved = moved.view(workers, tokens // workers, count, width).transpose(0, 1)
        return moved.reshape(tokens // workers, workers * count, width)

    @staticmethod
    def backward(ctx, gradient):
        return Swap.apply(gradient, not ctx.to_heads), None


def ulysses(_, q, k, v, __, scaling=None, **___):
    """Attention of a peer: each process computes some heads of all tokens."""
    if (copies := workers // k.shape[1]) > 1:
        k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
    q, k, v = (Swap.apply(x[0].transpose(0, 1), True) for x in (q, k, v))
    if on_gpu:
        out = flash_attn_func(q[None], k[None], v[None], softmax_scale=scaling, causal=True)
        out = out[0] if isinstance(out, tuple) else out
    else:
        rows = (x.transpose(0, 1) for x in (q, k, v))
        out = functional.scaled_dot_product_attention(
            *rows, is_causal=True, scale=scaling, enable_gqa=True
        ).transpose(0, 1)
    return Swap.apply(out.reshape(seq, -1, hidden // heads), False)[None], None


ALL_ATTENTION_FUNCTIONS.register("ulysses", ulysses)
api.context_parallel(seq=seq).register()
torch.manual_seed(0)
sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
sizes |= {"num_attention_heads": heads, "num_key_value_heads": 2, "vocab_size": vocabulary}
config = AutoConfig.for_model("qwen2", **sizes, max_position_embeddings=seq, use_cache=False)
model = AutoModelForCausalLM.from_config(config, attn_implementation="ulysses").to(device).train()
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
if on_gpu:
    liger.apply_liger_kernel_to_qwen2(fused_linear_cross_entropy=False, model=model)
    head_loss = liger.LigerFusedLinearCrossEntropyLoss()


class Step(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model

    def forward(self, ids, positions, labels, **inputs):
        states = model.model(ids, position_ids=positions, use_cache=False, **inputs)[0][0]
        if on_gpu:
            return head_loss(model.lm_head.weight, states, labels[0])
        return functional.cross_entropy(model.lm_head(states).float(), labels[0])


step, precision = Step(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
mesh = init_device_mesh(device.type, (workers,))
for part in (*model.model.layers, step):
    fully_shard(part, mesh=mesh, mp_policy=precision)


def measure(name, cp=None):
    """Print the median time of steps after the second."""
    model.set_attn_implementation("ulysses" if cp is None else "mtrain")
    optimizer, seconds = torch.optim.AdamW(step.parameters(), lr=0.0), []
    for number in range(5):
        torch.manual_seed(number)
        ids = torch.randint(vocabulary, (1, seq), device=device)
        dist.barrier()
        begin = time.perf_counter()
        if cp is None:
            labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
            positions = torch.arange(seq, device=device)[None]
            loss = step(*(x.chunk(workers, 1)[rank] for x in (ids, positions, labels)))
        else:
            own = cp.inputs(ids, labels=ids)
            ids, positions, labels = (own[x] for x in ("input_ids", "position_ids", "labels"))
            loss = step(ids, positions, labels, mtrain=own["mtrain"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        loss = loss.item() / workers  # waits for the GPU
        seconds.append(time.perf_counter() - begin)
    if rank == 0:
        middle = statistics.median(seconds[2:])
        print(f"{name}: {middle:.3f} s/step, {seq / middle / workers:,.0f} tokens/s/worker, "
              f"loss {loss:.4f}", flush=True)  # fmt: skip


measure("peer: Ulysses")
measure("dense", api.context_parallel(seq=seq))
words = [f"sparsity.columns={seq // 64}", "sparsity.density=0.15"]
measure("fixed, 15 %", api.context_parallel(None, *words, seq=seq, sparsity="fixed"))
if on_gpu:
    measure("block_topk, 15 %", api.context_parallel(seq=seq, sparsity="block_topk"))
dist.destroy_process_group()
