"""Train transformers' Qwen3MoE with FSDP2: the peer of measurements with experts.

Weights are float32 and computed in bfloat16 on GPUs. FSDP2 gathers one layer at a time, and each
layer is recomputed in the backward pass. Each worker trains on a sequence of its own, because
transformers does not share a sequence. The loss is computed in chunks of tokens. AdamW is fused on
GPUs.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mtrain_cli.config.schema import ModelConfig

LOSS_CHUNK = 2048  # tokens


@dataclass(frozen=True)
class ExpertPeer:
    """What the peer trains.

    model: the shape.
    seq: tokens of a sequence. Each worker has one.
    device: ``cuda`` or ``cpu``.
    steps: number of training steps.
    """

    model: ModelConfig
    seq: int
    device: str
    steps: int


@dataclass(frozen=True)
class ExpertPeerTimes:
    """Loss of each step, median seconds of a step after the first two, peak of a GPU in GiB."""

    losses: list[float]
    seconds: float
    peak_gib: float


def qwen3_moe_config(model: ModelConfig, seq: int) -> Any:
    """Return the configuration of transformers for a shape."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        intermediate_size=model.intermediate_size,
        moe_intermediate_size=model.moe.expert_size,
        num_experts=model.moe.experts,
        num_experts_per_tok=model.moe.top_k,
        norm_topk_prob=model.moe.normalize,
        rms_norm_eps=model.rms_norm_eps,
        max_position_embeddings=seq,
        tie_word_embeddings=False,
        use_cache=False,
        output_router_logits=False,
    )


class WithLoss(nn.Module):
    """A causal model of transformers that returns the sum of its token losses."""

    def __init__(self, causal: nn.Module) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.causal.model(input_ids=ids, use_cache=False).last_hidden_state[0]
        weight = self.causal.lm_head.weight
        total = hidden.new_zeros((), dtype=torch.float32)
        for own, label in zip(hidden.split(LOSS_CHUNK), labels.split(LOSS_CHUNK), strict=True):
            total = total + checkpoint(_chunk_loss, own, weight, label, use_reentrant=False)
        return total


def _chunk_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy((hidden @ weight.t()).float(), labels, reduction="sum")


def train(rank: int, workers: int, peer: ExpertPeer) -> ExpertPeerTimes:
    """Train as a worker of a `Pool`."""
    device = torch.device(peer.device, rank if peer.device == "cuda" else None)
    module = _sharded(peer, workers, device)
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=1e-5, betas=(0.9, 0.95), fused=peer.device == "cuda"
    )
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(peer.model.vocab_size, (peer.seq + 1,), generator=generator).to(device)
    losses, seconds = [], []
    for _ in range(peer.steps):
        dist.barrier()
        began = time.perf_counter()
        loss = module(ids[None, :-1], ids[1:]) / peer.seq
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))  # waits for the GPU
        if peer.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / 2**30 if peer.device == "cuda" else 0.0
    return ExpertPeerTimes(losses, statistics.median(seconds[2:] or seconds), peak)


def _sharded(peer: ExpertPeer, workers: int, device: torch.device) -> nn.Module:
    """Return the model with random weights, sharded over all workers."""
    from transformers import AutoModelForCausalLM

    config = qwen3_moe_config(peer.model, peer.seq)
    with torch.device("meta"):
        causal = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32,
            attn_implementation="sdpa",
            experts_implementation="grouped_mm",
        )
    rotary = type(causal.model.rotary_emb)
    module = WithLoss(causal).train()
    low = torch.bfloat16 if peer.device == "cuda" else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)
    mesh = init_device_mesh(peer.device, (workers,))
    layers = causal.model.layers
    for number, layer in enumerate(layers):
        layers[number] = checkpoint_wrapper(layer, preserve_rng_state=False)
        fully_shard(layers[number], mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    for unit in (module, *layers):
        unit.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply
        unit.set_gradient_divide_factor(1.0)
    module.to_empty(device=device)
    causal.model.rotary_emb = rotary(config).to(device)  # its frequencies are no parameters
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "norm" in name:
                weight.fill_(1)
            else:
                weight.to_local().normal_(std=0.02)  # type: ignore[attr-defined]
    return module
