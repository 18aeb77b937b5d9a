"""The oracle: attention by its definition in float64, with the mask of all pairs materialized."""

from __future__ import annotations

import torch

from mtrain_cli.attention import definition
from mtrain_cli.attention.definition import per_query_head
from mtrain_cli.attention.kernel import DefinitionColumns, KernelRequest, Saved
from mtrain_cli.attention.partials import accumulation_dtype
from mtrain_cli.attention.tiles import Tiles


class ReferenceKernel(DefinitionColumns):
    """The oracle, with which tests compare every other kernel."""

    name = "reference"
    needs_out = False

    def unsupported_reason(self, request: KernelRequest) -> str | None:  # noqa: ARG002
        return None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: Tiles, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = definition.forward(*per_query_head(q, k, v), tiles.seen(), scale)
        return out.transpose(1, 2).to(q.dtype), lse.to(accumulation_dtype(q.dtype))

    def backward(
        self, dout: torch.Tensor, saved: Saved, tiles: Tiles, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v, out, lse, delta = saved
        group = q.shape[2] // k.shape[2]
        if delta is None:
            assert out is not None
            delta = (out.double() * dout.double()).sum(-1).transpose(1, 2)
        dout = dout.double().transpose(1, 2)
        dq, dk, dv = definition.backward(
            dout, *per_query_head(q, k, v), lse.double(), delta.double(), tiles.seen(), scale
        )
        dk, dv = (t.unflatten(1, (-1, group)).sum(2).transpose(1, 2) for t in (dk, dv))
        return dq.transpose(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
