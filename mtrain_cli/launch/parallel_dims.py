"""The dimensions of parallelism: their degrees, and the coordinates of each rank."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from math import prod


@dataclass(frozen=True)
class ParallelDims:
    """The degree of each dimension. The product of the degrees is the number of workers.

    Ranks are row-major in the order of the fields. A stage holds some of the layers, tensor
    parallelism cuts their matrices into ``tp`` parts, and FSDP shards those over ``dp`` and ``cp``.
    """

    pp: int = field(default=1, metadata={"name": "pipeline"})  # stages
    dp: int = field(default=1, metadata={"name": "data"})  # context groups
    cp: int = field(default=1, metadata={"name": "context"})  # workers that share a sequence
    tp: int = field(default=1, metadata={"name": "tensor"})  # workers that share heads and MLPs

    @classmethod
    def of(cls, workers: int, **degrees: int) -> ParallelDims:
        """Return dimensions for the given degrees, where ``dp`` takes the rest of the workers.

        Raises ValueError if a degree is below 1, or the product does not divide the workers.
        """
        if min(degrees.values(), default=1) < 1:
            raise ValueError(f"{degrees}: degrees must be at least 1")
        dp, rest = divmod(workers, prod(degrees.values()))
        if rest or not dp:
            raise ValueError(f"{degrees}: the product must divide the {workers} workers")
        return cls(dp=dp, **degrees)

    @property
    def sizes(self) -> dict[str, int]:
        """The degree of each dimension, by name. Ranks are consecutive along the last dimension."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def workers(self) -> int:
        return prod(self.sizes.values())

    def coordinate(self, dim: str, rank: int) -> int:
        assert 0 <= rank < self.workers, (rank, self)
        return rank // self._stride(dim) % self.sizes[dim]

    def group(self, dim: str, rank: int) -> tuple[int, ...]:
        """Return ``rank`` and the ranks that differ from it only in the coordinate ``dim``."""
        stride = self._stride(dim)
        first = rank - self.coordinate(dim, rank) * stride
        return tuple(range(first, first + self.sizes[dim] * stride, stride))

    def groups(self, dim: str) -> list[tuple[int, ...]]:
        """Return all groups of a dimension. Every rank is in exactly one."""
        return sorted({self.group(dim, rank) for rank in range(self.workers)})

    def __str__(self) -> str:
        """Return the degrees, such as ``2 data x 4 context``. ``pp`` and ``tp`` only above 1."""
        shown = [f for f in fields(self) if f.name in ("dp", "cp") or getattr(self, f.name) > 1]
        return " x ".join(f"{getattr(self, f.name)} {f.metadata['name']}" for f in shown)

    def _stride(self, dim: str) -> int:
        """Return the difference in rank between neighbors along a dimension."""
        names = list(self.sizes)
        return prod(self.sizes[name] for name in names[names.index(dim) + 1 :])
