"""Small models with experts, and their definition: one token and one expert after another."""

from __future__ import annotations

from typing import Any

import torch
from model.tiny_models import tiny_model
from torch import Tensor
from torch.nn import functional

from mtrain_cli.config.schema import ModelConfig, MoeConfig
from mtrain_cli.model.experts import MixtureOfExperts


def moe_model(family: str = "qwen3_moe", moe: dict[str, Any] | None = None, **changes: Any):
    """Return a small model of a family with 6 experts, 2 of which compute each token."""
    settings = {"experts": 6, "top_k": 2, "expert_size": 24} | (moe or {})
    return tiny_model(family, moe=MoeConfig(**settings), **changes)


def layer_by_definition(module: MixtureOfExperts, x_BNC: Tensor, chosen: Tensor) -> Tensor:
    """Return the output of a mixture of experts, with a loop over tokens.

    chosen: the experts of each token, [tokens, top_k]; -1 for none.
    """
    moe, rows = module.moe, []
    for x, experts in zip(x_BNC.flatten(0, 1), chosen.tolist(), strict=True):
        scores = module.gate.weight.double() @ x.double()
        scores = scores.sigmoid() if moe.score == "sigmoid" else scores.softmax(0)
        first = [e for e in experts if e >= 0]
        weights = {e: scores[e] for e in first}
        if moe.normalize:
            total = sum(scores[e] for e in scores_of_choice(module, scores))
            weights = {e: weight / total for e, weight in weights.items()}
        out = torch.zeros_like(x)
        for e, weight in weights.items():
            gate, up = (module.experts.gate_up[e] @ x).chunk(2)
            out = out + module.experts.down[e] @ (functional.silu(gate) * up) * weight * moe.scale
        if module.shared is not None:
            out = out + module.shared(x)
        rows.append(out)
    return torch.stack(rows).view_as(x_BNC)


def scores_of_choice(module: MixtureOfExperts, scores: Tensor) -> list[int]:
    """Return the experts that a router chooses from a token's scores."""
    biased = scores + module.selection_bias.double()
    return sorted(range(len(scores)), key=lambda e: -float(biased[e].detach()))[: module.moe.top_k]


def choices(module: MixtureOfExperts, x_BNC: Tensor) -> Tensor:
    """Return the experts that a router chooses for each token, [tokens, top_k]."""
    scores = x_BNC.flatten(0, 1).double() @ module.gate.weight.double().T
    scores = scores.sigmoid() if module.moe.score == "sigmoid" else scores.softmax(-1)
    return torch.tensor([scores_of_choice(module, each) for each in scores])


def make_module(model: ModelConfig, shared: Any = None, seed: int = 0) -> MixtureOfExperts:
    """Return a mixture of experts with random float64 weights."""
    generator = torch.Generator().manual_seed(seed)
    module = MixtureOfExperts(model, 0, shared).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    module.selection_bias = torch.zeros(model.moe.experts)
    return module
