"""Linear layers of 4 bits, which bitsandbytes computes."""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.nn import Linear4bit
from torch import nn


class EmptyLinear(Linear4bit):
    """A frozen layer of 4 bits that has no weight yet."""

    def __init__(self, layer: nn.Linear, kind: str) -> None:
        """Take sizes and bias of ``layer``. kind: nf4."""
        with torch.device("meta"):
            super().__init__(layer.in_features, layer.out_features, bias=False, quant_type=kind)
        self.bias = layer.bias
        nothing = torch.empty(0, device=layer.weight.device)
        self.weight = nn.Parameter(nothing, requires_grad=False)

    def _save_to_state_dict(self, *arguments: Any) -> None:
        """Name the weight without its scales: a checkpoint leaves out what is frozen."""
        nn.Module._save_to_state_dict(self, *arguments)
