"""Combinations of exchange options that tests try, on CPUs and GPUs, and attention with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mtrain_cli.attention.kernel import Kernel
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.launch.environment import ParallelDims
from mtrain_cli.parallel.activation_offload import ActivationOffload
from mtrain_cli.parallel.context_attention import ContextAttention
from mtrain_cli.parallel.exchange import Exchange, Plan
from mtrain_cli.parallel.mesh import ContextGroup, make_context_group
from mtrain_cli.sparsity.pattern import Pattern


@dataclass(frozen=True)
class Way:
    """One combination of options for `make_exchange` and `make_context_group`."""

    exchange: str
    per_node: int = 8
    chunks: int = 1
    prefetch: int = 1
    circulates: str = "kv"
    heads: int = 1
    shared_columns: bool = True
    stages: int = 0
    stages_backward: int | None = None  # None: those of forward
    rounds: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The options of `make_exchange`."""
        names = "chunks", "prefetch", "circulates", "stages", "shared_columns", "rounds"
        options = {name: getattr(self, name) for name in names}
        later = self.stages if self.stages_backward is None else self.stages_backward
        return options | {"stages_backward": later}

    def __str__(self) -> str:
        more = " ".join(map(str, self.options.values()))
        return f"{self.exchange} nodes of {self.per_node} {self.heads} heads {more}"

    def fits(self, world: int, kv_heads: int) -> bool:
        if world % self.heads or (self.per_node < world and world % self.per_node):
            return False
        if self.per_node < world and self.per_node % self.heads and self.heads % self.per_node:
            return False
        if self.chunks > 1 and max(1, kv_heads // self.heads) % self.chunks:
            return False
        return self.heads == 1 or kv_heads % self.heads == 0 or self.heads % kv_heads == 0


def make_attention(
    exchange: Exchange,
    kernel: Kernel,
    masks: Sequence[SequenceMask],
    device: torch.device | str,
    pattern: Pattern | None = None,
    *,
    keep: float = 0.0,
    offload: ActivationOffload | None = None,
) -> ContextAttention:
    """Plan a batch and make its attention."""
    request = None if pattern is None else pattern.request()
    plan = Plan.make(exchange, masks, request, keep=keep).to(device)
    return ContextAttention.of(exchange, kernel, plan, pattern, offload)


def group_of(rank: int, world: int, **options: Any) -> ContextGroup:
    """Return the context group of all processes on CPUs."""
    dims = ParallelDims.of(world, cp=world)
    return make_context_group(rank, dims, torch.device("cpu"), **options)


def qkv(tokens: int, heads: int, kv_heads: int, head_dim: int) -> list[torch.Tensor]:
    """Draw q, k and v, [1, tokens, heads, head_dim], which need gradients."""
    shapes = ((1, tokens, n, head_dim) for n in (heads, kv_heads, kv_heads))
    return [torch.randn(shape, requires_grad=True) for shape in shapes]
