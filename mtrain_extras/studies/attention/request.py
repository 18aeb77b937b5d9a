"""What `mtrain profile sparsity` analyzes besides patterns. This module does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mtrain_cli.config.schema import Config, ConfigError

CELLS = 512  # of a map, if the user gives no number


@dataclass(frozen=True)
class AttentionRequest:
    """What to analyze.

    top_k: numbers of keys, ascending.
    maps: (layer, head) of each map.
    cells: largest number of cells along a side of a map.
    rope: whether to compare scores with the prediction of rotary embedding.
    """

    top_k: tuple[int, ...] = ()
    maps: tuple[tuple[int, int], ...] = ()
    cells: int = CELLS
    rope: bool = False

    def __bool__(self) -> bool:
        return bool(self.top_k or self.maps or self.rope)

    def flop(self, config: Config, rows: int) -> float:
        """Return about how many FLOP the analysis of one sequence takes, with causal attention.

        Args:
            rows: sampled queries per layer.
        """
        seq, model = config.seq, config.model
        heads, dim = model.num_layers * model.num_heads, model.head_dim
        # Scores and their gradients, 2 * dim each, for half of all pairs.
        flop = len(self.maps) * 2.0 * seq * seq * dim
        if self.top_k:
            flop += heads * 2.0 * rows * seq * dim
        if self.rope:
            # Sums of squares: one outer product and two quadratic forms per token, and its scores
            # with a chunk of 512. Correlation: about two Fourier transforms of twice the length.
            squares = 6.0 * dim * dim + 4.0 * 512 * dim
            transform = 2 * 5.0 * dim * math.log2(2 * seq)
            flop += heads * seq * (squares + transform)
        return flop

    def require_fit(self, config: Config) -> None:
        """Check the request against a configuration."""
        model, data, lines = config.model, config.data, []
        if (largest := max(self.top_k, default=0)) > config.seq:
            lines.append(f"--top-k {largest}: must be at most seq={config.seq}")
        lines += [
            f"--maps {layer}:{head}: model={model.name} has layers 0 to {model.num_layers - 1} and "
            f"heads 0 to {model.num_heads - 1}"
            for layer, head in self.maps
            if layer >= model.num_layers or head >= model.num_heads
        ]
        if self.rope and data.positions_key is not None:
            lines.append(
                "--rope: needs positions that rise by 1 per token, but data.positions_key="
                f"{data.positions_key} takes them from the data; leave out one of the two"
            )
        if lines:
            raise ConfigError(*lines)
