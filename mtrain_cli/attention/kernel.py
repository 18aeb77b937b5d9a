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
    """The kind of dynamic index that a run's pattern makes.

    chunk: number of keys per chunk if each query chooses its own chunks (`index.GatedBitmap`);
        otherwise 0.
    """

    block: int
    bitmap: bool
    chunk: int = 0


@dataclass(frozen=True)
class KernelRequest:
    """What a run needs from a kernel.

    intervals: most disjoint intervals of keys that the mask lets a query see.
    """

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
    """What a backward call needs besides dout.

    delta: rowsum(out * dout). If None, the kernel computes delta from out.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor | None
    lse: Tensor
    delta: Tensor | None


class Kernel(Protocol):
    """A local attention implementation.

    needs_out: whether backward needs out, from which the kernel computes delta. If False, backward
        needs only delta, and exchanges that circulate queries send delta instead of out.
    skips: whether the kernel skips pairs that a dynamic index leaves out. If False, the kernel
        computes and masks these pairs, so it is no faster than dense attention.
    """

    name: str
    needs_out: bool
    skips: bool

    def unsupported_reason(self, request: KernelRequest) -> str | None:
        """Return why this kernel cannot serve the request, in a few words; None if it can.

        The answer is the same on every machine: it assumes that all packages are installed.
        """

    def missing_package(self, request: KernelRequest) -> str | None:
        """Return which package this machine lacks to serve the request; None if it lacks none."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Pair: ...

    def backward(self, dout: Tensor, saved: Saved, tiles: Tiles, scale: float) -> Triple: ...

    def forward_columns(
        self, q: Tensor, packed: Tensor, columns: SharedColumns, scale: float, partial: Pair | None
    ) -> Pair:
        """Return out and lse over the columns of an index, in the accumulation dtype.

        packed: keys and values of the columns, gathered from all workers, [2, batch, heads,
            width, head_dim].
        partial: (out, lse) over other keys, to include in the result; None to compute the
            columns only.
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
        """Return dq and the gradient of ``packed``, in the accumulation dtype.

        lse, delta: cover the keys of all workers.
        """

    def decode(self, q: Tensor, k: Tensor, v: Tensor, used: Tensor, scale: float) -> Pair:
        """Return out and lse of one query per sequence over the first keys of a cache.

        On a GPU, the call neither waits for the GPU nor reads ``used`` on the host, so a CUDA graph
        can contain it.

        used: number of keys that each query sees, int32 [batch], on the device of q.
        """
