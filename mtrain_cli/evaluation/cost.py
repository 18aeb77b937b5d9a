"""What an evaluation computes, by arithmetic."""

from __future__ import annotations

from dataclasses import replace

from mtrain_cli.config.schema import Config
from mtrain_cli.training.flops import allowed_pairs, parameters

_UNITS = ("", "K", "M", "G", "T", "P", "E")


def forward_flop(config: Config, length: int) -> float:
    """Return the FLOP of one forward pass over a sequence, with dense attention.

    2 per matmul parameter and token, and 4 * head_dim per layer, head and pair that the mask allows
    (`training.flops.FlopsPerToken`). A sparse pattern computes fewer pairs.
    """
    model = config.model
    width = model.num_layers * model.num_heads * model.head_dim
    pairs = allowed_pairs(replace(config, seq=length))
    return 2.0 * parameters(model).matmul * length + 4.0 * width * pairs


def format_flop(flop: float) -> str:
    """Return ``1.2 PFLOP``."""
    unit = 0
    while flop >= 1000 and unit < len(_UNITS) - 1:
        flop, unit = flop / 1000, unit + 1
    return f"{flop:.3g} {_UNITS[unit]}FLOP"
