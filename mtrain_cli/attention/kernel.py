"""The contract of a local attention implementation, and the arithmetic that several of them share.

Shapes: q, out, dout ``[batch, queries, heads, head_dim]``; k, v ``[batch, keys, kv_heads, head_dim]``, never repeated; lse and delta
float32 (float64 for float64 inputs), natural logarithm, ``[batch, heads, queries]``. A row that sees nothing gives out 0 and lse -inf.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from mtrain_cli.attention.cupy_kernels import cuda_kernels_usable
from mtrain_cli.attention.tiles import Tiles

if TYPE_CHECKING:
    from mtrain_cli.attention.shared_columns import SharedColumns


@dataclass(frozen=True)
class IndexRequest:
    """The dynamic index that a run's pattern makes. block: tokens of a block; bitmap: listed blocks instead of diagonals and columns;
    chunk: keys of a chunk where each query of a bitmap chooses its own chunks (`index.GatedBitmap`); 0 for whole blocks.
    """

    block: int
    bitmap: bool
    chunk: int = 0


@dataclass(frozen=True)
class KernelRequest:
    """What a run asks of a kernel. capability: CUDA compute capability such as (9, 0), or None; dtype: torch's name, such as
    ``bfloat16``; index: None for dense attention.
    """

    device: str
    capability: tuple[int, int] | None
    dtype: str
    head_dim: int
    num_heads: int
    num_kv_heads: int
    deterministic: bool = False
    index: IndexRequest | None = None


class Kernel(Protocol):
    """One local attention implementation.

    needs_out: backward cannot use a given delta, so out must travel with queries in its place. skips: what a dynamic index leaves out is
    not computed; otherwise it is computed and hidden, no faster than dense.
    """

    name: str
    needs_out: bool
    skips: bool

    def unsupported_reason(self, request: KernelRequest) -> str | None:
        """Why this kernel cannot serve the request, in a few words; None if it can."""
        ...

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: Tiles, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> out, lse over the keys given."""
        ...

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor,
        delta: torch.Tensor | None,
        tiles: Tiles,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """-> dq, dk, dv over the keys given. out, lse and delta are those of the whole row, over all keys of all workers.

        delta = rowsum(out * dout) [batch, heads,
        queries]. One of out and delta may be None: out where queries came from another worker,
        delta where the kernel is to derive it.
        """
        ...

    def forward_columns(
        self,
        q: torch.Tensor,
        packed: torch.Tensor,
        columns: SharedColumns,
        scale: float,
        partial: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> out, lse in the accumulation dtype, over columns that were gathered once. packed [2, batch, heads, width, head_dim]. partial:
        out and lse over other keys, which these continue.
        """
        ...

    def backward_columns(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        packed: torch.Tensor,
        lse: torch.Tensor,
        delta: torch.Tensor,
        columns: SharedColumns,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> dq and the gradients of packed, in the accumulation dtype; lse and delta are those of whole rows."""
        ...


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Partial results are added in float32, or float64 where the inputs are."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge(
    out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Adds the attention over more keys to out and lse, in place.

    With w = sigmoid(part_lse - lse): out += w (part_out - out), lse -= logsigmoid(lse - part_lse). Bounded, unlike exp(part_lse - lse), and
    rows that have seen nothing on either side (lse -inf) stay what they are.
    out, part_out [batch, queries, heads, head_dim]; lse, part_lse [batch, heads, queries]; out and lse float32 or float64.
    """
    if _fused_merge(out, lse, part_out, part_lse):
        return
    difference = part_lse - lse
    nothing_new = torch.isneginf(part_lse)
    weight = torch.sigmoid(difference).masked_fill_(nothing_new, 0.0)
    out.lerp_(part_out.to(out.dtype), weight.transpose(1, 2).unsqueeze(-1).to(out.dtype))
    grown = lse - torch.nn.functional.logsigmoid(-difference)
    # lse = -inf: the difference is +inf and the sum above is inf - inf; the new part alone counts.
    grown = torch.where(torch.isneginf(lse), part_lse, grown)
    lse.copy_(torch.where(nothing_new, lse, grown))


def _fused_merge(
    out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor
) -> bool:
    """`merge` by mtrain's own CUDA kernel, which reads and writes each number once; False where it cannot serve."""
    if not (out.dtype == lse.dtype == part_lse.dtype == torch.float32 and cuda_kernels_usable(out)):
        return False
    tensors = (out, lse, part_out, part_lse)
    if part_out.dtype not in (torch.float32, torch.bfloat16) or not all(
        t.is_contiguous() for t in tensors
    ):
        return False
    import numpy as np

    from mtrain_cli.kernels.cuda.nvrtc import launch

    batch, queries, heads, dim = out.shape
    rows = batch * queries * heads
    kernel = f"merge_{str(part_out.dtype).removeprefix('torch.')}"
    launch(
        "merge",
        kernel,
        (-(-rows // 8), 1),
        256,
        *tensors,
        np.int64(rows),
        np.int64(queries),
        heads,
        dim,
    )
    return True


def row_delta(out: torch.Tensor, dout: torch.Tensor) -> torch.Tensor:
    """rowsum(out * dout), [batch, heads, queries] in the accumulation dtype."""
    if (
        out.is_cuda
        and out.dtype != torch.float64
        and importlib.util.find_spec("triton") is not None
    ):
        from mtrain_cli.kernels.triton import sparse

        return sparse.row_delta(out, dout)
    high = accumulation_dtype(out.dtype)
    return (out.to(high) * dout.to(high)).sum(-1).transpose(1, 2).contiguous()


class DefinitionColumns:
    """Columns gathered once, from their definition: for kernels that are not made for speed."""

    skips = False

    def forward_columns(self, q, packed, columns, scale, partial):
        from mtrain_cli.attention.shared_columns import columns_forward

        out, lse = columns_forward(q, packed, columns, scale)
        if partial is None:
            return out, lse
        whole, whole_lse = partial[0].to(out.dtype, copy=True), partial[1].clone()
        merge(whole, whole_lse, out, lse)
        return whole, whole_lse

    def backward_columns(self, dout, q, packed, lse, delta, columns, scale):
        from mtrain_cli.attention.shared_columns import columns_backward

        return columns_backward(dout, q, packed, lse, delta, columns, scale)
