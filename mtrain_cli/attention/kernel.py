"""The interface that every kernel, or local attention implementation, provides.

q, out, dout: [batch, queries, heads, head_dim].
k, v: [batch, keys, kv_heads, head_dim]. Query heads that share a KV head read the same memory.
lse, delta: [batch, heads, queries], float32 (float64 for float64 inputs). lse is a natural
    logarithm.

A query that sees no key has out 0 and lse -inf.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from mtrain_cli.attention.packed_columns import SharedColumns
from mtrain_cli.attention.partials import Pair, Triple
from mtrain_cli.attention.tiles import Tiles


@dataclass(frozen=True)
class IndexRequest:
    """The dynamic index of a pattern. chunk: keys per chunk of a `GatedBitmap`, else 0."""

    block: int
    bitmap: bool
    chunk: int = 0


@dataclass(frozen=True)
class KernelRequest:
    """What a run needs from a kernel. intervals: most intervals of keys that a query sees."""

    device: str
    capability: tuple[int, int] | None
    dtype: str
    head_dim: int
    num_heads: int
    num_kv_heads: int
    deterministic: bool = False
    index: IndexRequest | None = None
    intervals: int = 1


class Saved(NamedTuple):
    """What a backward call needs besides dout; delta: rowsum(out * dout), or None to compute it."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor | None
    lse: Tensor
    delta: Tensor | None


class Kernel(Protocol):
    """A local attention implementation.

    needs_out: whether backward needs out. If False, delta suffices, and exchanges that circulate
        queries send delta instead.
    skips: whether the kernel skips pairs that an index leaves out, or only masks them.
    """

    name: str
    needs_out: bool
    skips: bool

    def unsupported_reason(self, request: KernelRequest) -> str | None:
        """Return why no machine with all packages can serve the request; None if one can."""

    def missing_package(self, request: KernelRequest) -> str | None:
        """Return which package this machine lacks to serve the request; None for none."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Pair: ...

    def backward(self, dout: Tensor, saved: Saved, tiles: Tiles, scale: float) -> Triple: ...

    def forward_columns(
        self, q: Tensor, packed: Tensor, columns: SharedColumns, scale: float, partial: Pair | None
    ) -> Pair:
        """Return out and lse over the columns of an index, in the accumulation dtype.

        packed: keys and values from all workers, [2, batch, heads, width, head_dim].
        partial: (out, lse) over other keys, to include in the result.
        """

    def backward_columns(
        self,
        dout: Tensor,
        q: Tensor,
        packed: Tensor,
        lse: Tensor,
        delta: Tensor,
        columns: SharedColumns,
        scale: float,
    ) -> Pair:
        """Return dq and the gradient of ``packed``; lse and delta cover the keys of all workers."""

    def decode(self, q: Tensor, k: Tensor, v: Tensor, used: Tensor, scale: float) -> Pair:
        """Return out and lse of one query per sequence over the first ``used`` keys of a cache.

        used: int32 [batch] on the device. A GPU call fits into a CUDA graph: the host reads
            nothing.
        """
