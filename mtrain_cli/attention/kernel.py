"""The contract of a local attention implementation, and arithmetic that several of them share.

Shapes: q, out, dout ``[batch, queries, heads, head_dim]``; k, v ``[batch, keys, kv_heads,
    head_dim]``, never repeated; lse and delta ``[batch, heads, queries]``, float32 (float64 for
    float64 inputs), natural logarithm. A row without keys has out 0 and lse -inf.
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
    """The kind of dynamic index that a run's pattern makes.

    block: tokens per block.
    bitmap: listed blocks rather than diagonals and columns.
    chunk: keys per chunk if each query of a bitmap chooses its own chunks (`index.GatedBitmap`); 0
        for whole blocks.
    """

    block: int
    bitmap: bool
    chunk: int = 0


@dataclass(frozen=True)
class KernelRequest:
    """What a run needs from a kernel.

    capability: CUDA compute capability such as (9, 0); None without a GPU.
    dtype: torch's name, such as ``bfloat16``.
    deterministic: results must be bitwise repeatable.
    index: None for dense attention.
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
    """A local attention implementation.

    needs_out: backward cannot use a given delta, so out must travel with the queries instead.
    skips: the kernel does not compute what a dynamic index leaves out. Otherwise it computes and
        masks it, no faster than dense attention.
    """

    name: str
    needs_out: bool
    skips: bool

    def unsupported_reason(self, request: KernelRequest) -> str | None:
        """Return in a few words why this kernel cannot serve the request, or None if it can."""
        ...

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: Tiles, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and lse over the given keys."""
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
        """Return dq, dk and dv over the given keys.

        Args:
            out, lse, delta: of whole rows, over the keys of all workers; delta = rowsum(out *
                dout).

        Either out or delta may be None: out if the queries came from another worker, delta if the
        kernel must compute it.
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
        """Return out and lse, in the accumulation dtype, over columns that were gathered once.

        Args:
            packed: keys and values of the columns, [2, batch, heads, width, head_dim].
            partial: out and lse over other keys, to continue from.
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
        """Return dq and the gradient of packed, in the accumulation dtype.

        lse and delta are those of whole rows.
        """
        ...


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of partial sums: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge(
    out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Merge the attention over more keys into out and lse, in place.

    With w = sigmoid(part_lse - lse): out += w (part_out - out) and lse -= logsigmoid(lse -
    part_lse). Unlike exp(part_lse - lse), w is bounded. Rows without keys on both sides (lse -inf)
    do not change.

    Args:
        out, part_out: [batch, queries, heads, head_dim]; out float32 or float64.
        lse, part_lse: [batch, heads, queries]; lse float32 or float64.
    """
    if _fused_merge(out, lse, part_out, part_lse):
        return
    difference = part_lse - lse
    no_new_keys = torch.isneginf(part_lse)
    weight = torch.sigmoid(difference).masked_fill_(no_new_keys, 0.0)
    out.lerp_(part_out.to(out.dtype), weight.transpose(1, 2).unsqueeze(-1).to(out.dtype))
    merged_lse = lse - torch.nn.functional.logsigmoid(-difference)
    # For lse = -inf the line above gives inf - inf: take the new part's lse.
    merged_lse = torch.where(torch.isneginf(lse), part_lse, merged_lse)
    lse.copy_(torch.where(no_new_keys, lse, merged_lse))


def _fused_merge(
    out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor
) -> bool:
    """Merge with mtrain's CUDA kernel, which reads and writes each number once.

    Return False if that kernel cannot process these tensors.
    """
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
    """Return rowsum(out * dout), [batch, heads, queries] in the accumulation dtype."""
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
    """Attention over gathered columns by its definition, for kernels not built for speed."""

    skips = False

    def forward_columns(self, q, packed, columns, scale, partial):
        from mtrain_cli.attention.shared_columns import columns_forward

        out, lse = columns_forward(q, packed, columns, scale)
        if partial is None:
            return out, lse
        total, total_lse = partial[0].to(out.dtype, copy=True), partial[1].clone()
        merge(total, total_lse, out, lse)
        return total, total_lse

    def backward_columns(self, dout, q, packed, lse, delta, columns, scale):
        from mtrain_cli.attention.shared_columns import columns_backward

        return columns_backward(dout, q, packed, lse, delta, columns, scale)
