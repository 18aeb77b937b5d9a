"""The keys of ``sparsity=a_shape``."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from mtrain_cli.config.option import POSITIVE, option
from mtrain_cli.config.pattern_settings import SparseSettings


@dataclass(frozen=True)
class AShapeSettings(SparseSettings):
    """The first tokens and a window of the nearest block diagonals, for every head.

    sinks: number of tokens at the start of the sequence that all queries see
    nearest: number of nearest block diagonals
    """

    name: ClassVar[str] = "a_shape"
    module: ClassVar[str] = "mtrain_a_shape.pattern"

    sinks: int = option(POSITIVE)
    nearest: int = option(POSITIVE)

    def problems(self, seq: int) -> Iterator[str]:
        if self.nearest * self.block > seq:
            yield f"sparsity.nearest={self.nearest}: at most {seq // self.block} fit seq={seq}"

    @property
    def column_bound(self) -> int:
        return self.sinks

    def slash_bound(self, blocks: int) -> int:
        return self.nearest
