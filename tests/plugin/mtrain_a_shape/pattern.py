"""The pattern of ``sparsity=a_shape``."""

from dataclasses import dataclass

import torch

from mtrain_a_shape.settings import AShapeSettings
from mtrain_cli.attention.index import VerticalSlash
from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.sparsity.pattern import NO_ROWS, MaskedPositions


@dataclass(frozen=True)
class AShapePattern(AShapeSettings):
    """Keeps the same pairs whatever the queries and keys are."""

    def request(self) -> IndexRequest:
        return IndexRequest(self.block, bitmap=False)

    def describe(self) -> str:
        return f"{self.sinks} sink tokens and the nearest {self.nearest} block diagonals"

    def probed_rows(self, length: int) -> torch.Tensor:
        return NO_ROWS  # no query decides for the others

    def estimate(
        self, q: torch.Tensor, k: torch.Tensor, masked: MaskedPositions, layer: int
    ) -> VerticalSlash:
        batch, _, heads, _ = q.shape
        blocks = masked.geometry.blocks
        slashes = torch.zeros(batch, heads, blocks, dtype=torch.bool, device=q.device)
        slashes[..., : self.nearest] = True
        sinks = torch.arange(self.sinks, dtype=torch.int32, device=q.device)
        columns = sinks.expand(batch, heads, -1).contiguous()
        return VerticalSlash(self.block, blocks, slashes, columns, self.nearest)


def make_pattern(settings: AShapeSettings, seed: int) -> AShapePattern:
    return AShapePattern(**vars(settings))
