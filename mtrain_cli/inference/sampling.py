"""Choose the next token from logits. The options can be checked without importing torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mtrain_cli.config.problem import ConfigError, cli_option

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Sampling:
    """How to choose a token.

    seed: random numbers depend only on it, the number of the prompt and that of the token, so
        batches and workers do not change a sample.
    """

    temperature: float = 0.0  # divides the logits; 0 always takes the token with the largest logit
    top_p: float = 1.0  # keep the fewest most likely tokens with at least this probability together
    top_k: int = 0  # keep this many most likely tokens; 0 keeps all
    seed: int = 0

    def require_valid(self) -> None:
        """Raise ConfigError with a line for each value out of range."""
        allowed = {
            "temperature": (0 <= self.temperature < math.inf, "0 (always the most likely token)"
                            " or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "top_k": (self.top_k >= 0, "0 (no limit) or more"),
            "seed": (0 <= self.seed < 2**63, "between 0 and 2^63 - 1"),
        }  # fmt: skip
        problems = [
            f"{cli_option(name, getattr(self, name))}: must be {text}"
            for name, (is_valid, text) in allowed.items()
            if not is_valid
        ]
        if problems:
            raise ConfigError(*problems)

    def uniforms(self, prompt: int, tokens: int) -> np.ndarray:
        """Return a random number in [0, 1) for each token of a prompt, float64 [tokens]."""
        return np.random.default_rng([self.seed, prompt]).random(tokens)

    def choose(self, logits_BV: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
        """Return the chosen id of each row, int64 [batch]. uniforms_B: float64, of `uniforms`."""
        import torch

        if self.temperature == 0:
            return logits_BV.argmax(-1)
        cumulative_BV = self.probabilities(logits_BV).cumsum(-1)
        # The order of ids, not of probabilities: rounding may swap two equally likely tokens.
        wanted_B1 = uniforms_B[:, None] * cumulative_BV[:, -1:]
        chosen_B1 = torch.searchsorted(cumulative_BV, wanted_B1, right=True)
        return chosen_B1.squeeze(1).clamp_(max=logits_BV.shape[-1] - 1)

    def probabilities(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """Return the probabilities after temperature (above 0), top-k and top-p, float64.

        The rows need not add up to 1. Top-k also keeps tokens as likely as its last one.
        """
        logits_BV = logits_BV.double()
        # The largest becomes 0, so that a tiny temperature gives no infinity minus infinity.
        logits_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) / self.temperature
        if 0 < self.top_k < logits_BV.shape[-1]:
            least_B1 = logits_BV.topk(self.top_k, dim=-1).values[:, -1:]
            logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -math.inf)
        likely_BV = logits_BV.softmax(-1)
        if self.top_p == 1:
            return likely_BV
        sorted_BV, order_BV = likely_BV.sort(dim=-1, descending=True, stable=True)
        before_BV = sorted_BV.cumsum(-1) - sorted_BV
        kept_BV = sorted_BV.masked_fill(before_BV >= self.top_p, 0.0)
        return likely_BV.new_zeros(likely_BV.shape).scatter_(-1, order_BV, kept_BV)
