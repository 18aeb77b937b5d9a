"""Train a decoder with torch's own parallelism: the peer of measurements on several GPUs.

The model is that of `mtrain_cli.model` in plain torch, with the same names of weights. Two ways to
share a step among workers:

- `tensor`: torch's `parallelize_module` with the plan of its documents for tensor and sequence
  parallelism. Attention is `scaled_dot_product_attention`, causal.
- `context`: torch's context parallelism for FlexAttention, which gathers all keys. `PTRR` balances
  the blocks of the mask.

FSDP2 shards the embedding over all workers, and the layers over all workers of `context`. Every
layer is compiled on GPUs and recomputed in the backward pass. The loss is computed in chunks. AdamW
is fused on GPUs.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
)
from torch.utils.checkpoint import checkpoint

from mtrain_cli.config.schema import ModelConfig

LOSS_CHUNK = 2048  # tokens
TENSOR, CONTEXT = "tensor", "context"


@dataclass(frozen=True)
class Peer:
    """What the peer trains.

    model: the shape; tied embeddings.
    ids: token ids, ``[seq + 1]``, the same in each step.
    way: `TENSOR` or `CONTEXT`.
    device: ``cuda`` or ``cpu``.
    steps: number of training steps.
    documents: the document of each id, ``[seq + 1]``; None is one document. Only with `CONTEXT`.
    window: number of keys that a query sees; 0 sees all before it. Only with `CONTEXT`.
    state: file with the initial weights; None draws random weights.
    """

    model: ModelConfig
    ids: Tensor
    way: str
    device: str
    steps: int
    documents: Tensor | None = None
    window: int = 0
    state: Path | None = None

    @property
    def labels(self) -> Tensor:
        """The next id of each token, or -100 if that begins another document, ``[seq]``."""
        if self.documents is None:
            return self.ids[1:]
        return self.ids[1:].where(self.documents[1:] == self.documents[:-1], -100)


@dataclass(frozen=True)
class PeerTimes:
    """Loss of each step, median seconds of a step after the first two, peak of a GPU in GiB."""

    losses: list[float]
    seconds: float
    peak_gib: float


class Attention(nn.Module):
    """Attention of one layer, with the heads that this worker computes."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width, d = model.hidden_size, model.head_dim
        self.head_dim = d
        for name, heads in (("q", model.num_heads), ("k", model.num_kv_heads)):
            setattr(self, f"{name}_proj", nn.Linear(width, heads * d, model.qkv_bias))
        self.v_proj = nn.Linear(width, model.num_kv_heads * d, model.qkv_bias)
        self.o_proj = nn.Linear(model.num_heads * d, width, bias=False)
        self.inner = Inner()

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: BlockMask | None) -> Tensor:
        """Return the output projection's result. x: ``[1, S, C]``."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = self.inner(_rotated(q, *rotary), _rotated(k, *rotary), v, block_mask=mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Inner(nn.Module):
    """Attention without weights. A module of its own, because torch hooks its inputs."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask | None
    ) -> Tensor:
        """Return the outputs, ``[1, heads, S, D]``."""
        if block_mask is None:
            return functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )
        if query.device.type == "cpu":  # FlexAttention has no backward pass there
            sizes = query.shape[2], key.shape[2]
            seen = create_mask(block_mask.mask_mod, 1, 1, *sizes, device="cpu")
            return functional.scaled_dot_product_attention(query, key, value, seen, enable_gqa=True)
        return flex_attention(query, key, value, block_mask=block_mask, enable_gqa=True)


class MLP(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width, inner = model.hidden_size, model.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the result, as wide as ``x``."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width, eps = model.hidden_size, model.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.self_attn = Attention(model)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        self.mlp = MLP(model)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: BlockMask | None) -> Tensor:
        """Return the hidden states after the layer."""
        x = x + self.self_attn(self.input_layernorm(x), rotary, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """The model. Its embedding is its LM head, too."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        assert model.tie_word_embeddings
        assert not model.qk_norm
        self.embed_tokens = nn.Embedding(model.vocab_size, model.hidden_size)
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.num_layers))
        self.norm = nn.RMSNorm(model.hidden_size, model.rms_norm_eps)
        self.head_dim, self.theta = model.head_dim, model.rope.theta

    def forward(
        self, ids: Tensor, labels: Tensor, positions: Tensor, mask: BlockMask | None
    ) -> Tensor:
        """Return the sum of the losses of this worker's tokens.

        Args:
            ids, labels: of this worker's tokens, ``[1, R]``.
            positions: of all tokens that its attention sees as queries, ``[1, S]``.
        """
        x = self.embed_tokens(ids)
        rotary = _rotary(positions[0], self.head_dim, self.theta, x.dtype)
        for layer in self.layers:
            x = checkpoint(layer, x, rotary, mask, use_reentrant=False)
        x, loss = self.norm(x), x.new_zeros((), dtype=torch.float32)
        for hidden, wanted in zip(x[0].split(LOSS_CHUNK), labels[0].split(LOSS_CHUNK), strict=True):
            weight = self.embed_tokens.weight
            loss = loss + checkpoint(_loss, hidden, weight, wanted, use_reentrant=False)
        return loss


def _loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = functional.linear(hidden, weight).float()
    return functional.cross_entropy(logits, labels, reduction="sum")


def _rotary(positions: Tensor, dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    steps = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32)
    angles = torch.outer(positions.float(), theta ** (-steps / dim)).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def train(rank: int, workers: int, peer: Peer) -> PeerTimes:
    """Train as one of ``workers`` processes, in their process group."""
    device = torch.device(peer.device, rank if peer.device == "cuda" else None)
    torch.manual_seed(0)
    with torch.device("meta"):
        decoder = Decoder(peer.model)
    decoder.to_empty(device=device)
    _initialize(decoder, peer.state)
    mesh = init_device_mesh(peer.device, (1, workers), mesh_dim_names=("one", "all"))
    if peer.way == TENSOR:
        _cut_layers(decoder, mesh["all"])
        inputs = _own_parts(peer, rank, workers, device)
    else:
        inputs = _sharded_context(peer, decoder, mesh["all"], device)
    _shard(decoder, mesh["one" if peer.way == TENSOR else "all"], mesh["all"], device)
    optimizer = torch.optim.AdamW(
        decoder.parameters(),
        lr=1e-5,
        betas=(0.9, 0.95),
        weight_decay=0,
        fused=peer.device == "cuda",
    )
    losses, seconds = [], []
    valid = int((peer.labels >= 0).sum())
    for _ in range(peer.steps):
        began = time.perf_counter()
        loss = decoder(*inputs) / valid
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(float(total))  # waits for the GPU
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / 2**30 if peer.device == "cuda" else 0.0
    return PeerTimes(losses, statistics.median(seconds[2:] or seconds), peak)


def _initialize(decoder: Decoder, state: Path | None) -> None:
    """Load the weights of a file, or draw the same random weights on all workers."""
    if state is not None:
        decoder.load_state_dict(torch.load(state, weights_only=True))
        return
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            if "norm" in name:
                weight.fill_(1)
            elif name.endswith("bias"):
                weight.zero_()
            else:
                weight.normal_(std=0.02)


def _cut_layers(decoder: Decoder, mesh: Any) -> None:
    """Cut the matrices of each layer, and its tokens between them."""
    whole = PrepareModuleInput(
        input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
    )
    plan = {
        "input_layernorm": SequenceParallel(),
        "self_attn": whole,
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    for layer in decoder.layers:
        parallelize_module(layer, mesh, plan)


def _own_parts(peer: Peer, rank: int, workers: int, device: torch.device) -> tuple[Any, ...]:
    """Return ids, labels, positions and mask: this worker has an equal part of the tokens."""
    ids = peer.ids.to(device)
    seq = len(ids) - 1
    assert seq % workers == 0, f"{seq} tokens among {workers} workers"
    own = slice(rank * seq // workers, (rank + 1) * seq // workers)
    positions = torch.arange(seq, device=device)[None]
    return ids[:-1][own][None], peer.labels.to(device)[own][None], positions, None


def _sharded_context(
    peer: Peer, decoder: Decoder, mesh: Any, device: torch.device
) -> tuple[Any, ...]:
    """Make attention gather keys. Return ids, labels, positions and mask of this worker."""
    from torch.distributed.tensor.experimental import _attention as context

    ids = peer.ids.to(device)
    mask = block_mask(peer, device)
    balancer = context._PTRRLoadBalancer(mask, mesh.size())
    style = context._ContextParallel(2, context._ContextParallel.AttentionType.FLEX)
    for layer in decoder.layers:
        parallelize_module(layer.self_attn.inner, mesh, style)
    positions = torch.arange(len(ids) - 1, device=device)
    numbers = [ids[:-1][None], peer.labels.to(device)[None], positions[None]]
    numbers = context._context_parallel_shard(mesh, numbers, [1, 1, 1], balancer)
    (mask,) = context._context_parallel_shard(mesh, [mask], [2], balancer)
    return *(number.contiguous() for number in numbers), mask


def block_mask(peer: Peer, device: torch.device) -> BlockMask:
    """Return the mask of a sequence: causal, in documents or a window or both."""
    seq, window = len(peer.ids) - 1, peer.window
    documents = None if peer.documents is None else peer.documents.to(device)

    def seen(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = query >= key
        if window:
            allowed = allowed & (query - key < window)
        if documents is not None:
            allowed = allowed & (documents[query] == documents[key])
        return allowed

    compiled = device.type == "cuda"  # else the mask of all pairs would be in memory at once
    make = torch.compile(create_block_mask) if compiled else create_block_mask
    return make(seen, 1, 1, seq, seq, device=device)


def _shard(decoder: Decoder, layers: Any, everything: Any, device: torch.device) -> None:
    """Shard layers over the mesh ``layers``, the rest over ``everything``. Compile the layers."""
    low = torch.bfloat16 if device.type == "cuda" else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)
    for layer in decoder.layers:
        if device.type == "cuda":
            layer.compile()
        fully_shard(layer, mesh=layers, mp_policy=policy)
    fully_shard(decoder, mesh=everything, mp_policy=policy)
    for unit in (decoder, *decoder.layers):
        unit.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply
        unit.set_gradient_divide_factor(1.0)  # add gradients up: the loss has the global divisor
