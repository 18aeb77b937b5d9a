"""The keys under ``model.moe``: the experts of a model and how its router chooses among them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from mtrain_cli.config.option import ABOVE_ZERO, NOT_NEGATIVE, option

SOFTMAX, SIGMOID = SCORES = ("softmax", "sigmoid")
_EXPERTS = NOT_NEGATIVE.up_to(65_536, "a router has a score for each of them")
_WIDTH = NOT_NEGATIVE.up_to(2**22, "ten times the widest model known")


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """The experts of each layer: small MLPs, of which a router chooses a few for each token.

    experts: number of experts per layer; 0 = a dense model, which has one MLP per layer
    top_k: number of experts that compute each token
    expert_size: width of an expert's SwiGLU MLP
    shared_size: width of one more MLP, which computes all tokens; 0 = none
    score: score of an expert: softmax = over all experts; sigmoid = of each expert alone
    normalize: divide the scores of a token's chosen experts by their sum
    scale: factor of the chosen experts' scores
    dense_layers: number of layers at the start of the model that have an MLP of
        model.intermediate_size instead of experts
    """

    experts: int = option(_EXPERTS, default=0)
    top_k: int = option(_EXPERTS, default=0)
    expert_size: int = option(_WIDTH, default=0)
    shared_size: int = option(_WIDTH, default=0)
    score: str = option(SCORES, default=SOFTMAX)
    normalize: bool = option(default=True)
    scale: float = option(ABOVE_ZERO.up_to(10**6, "float32 would overflow"), default=1.0)
    dense_layers: int = option(
        NOT_NEGATIVE.up_to(10_000, "the maximum of model.num_layers"), default=0
    )


DENSE = MoeConfig()
# {key: value} of a model without experts. Files of models may leave these keys out.
DENSE_KEYS: dict[str, Any] = {
    f"model.moe.{item.name}": getattr(DENSE, item.name) for item in fields(MoeConfig)
}
