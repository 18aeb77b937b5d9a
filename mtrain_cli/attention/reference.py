"""The oracle, with which tests compare every other kernel."""

from __future__ import annotations

from torch import Tensor

from mtrain_cli.attention.kernel import (
    Kernel,
    KernelRequest,
    Saved,
    by_definition,
    gradients_by_definition,
    per_query_head,
)
from mtrain_cli.attention.partials import Pair, Triple, accumulation_dtype
from mtrain_cli.attention.tiles import Tiles


class ReferenceKernel(Kernel):
    """Attention by its definition in float64."""

    name = "reference"

    def unsupported_reason(self, request: KernelRequest) -> str | None:  # noqa: ARG002
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Pair:
        out, lse = by_definition(*per_query_head(q, k, v), tiles.seen(), scale, self.softcap)
        return out.transpose(1, 2).to(q.dtype), lse.to(accumulation_dtype(q.dtype))

    def backward(self, dout: Tensor, saved: Saved, tiles: Tiles, scale: float) -> Triple:
        q, k, v, out, lse, delta = saved
        group = q.shape[2] // k.shape[2]
        if delta is None:
            assert out is not None
            delta = (out.double() * dout.double()).sum(-1).transpose(1, 2)
        dout = dout.double().transpose(1, 2)
        dq, dk, dv = gradients_by_definition(
            dout, *per_query_head(q, k, v), lse.double(), delta.double(), tiles.seen(), scale,
            self.softcap,
        )  # fmt: skip
        dk, dv = (t.unflatten(1, (-1, group)).sum(2).transpose(1, 2) for t in (dk, dv))
        return dq.transpose(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
