"""The oracle: attention by its definition in float64, with the boolean mask materialised."""

from __future__ import annotations

import torch

from mtrain_cli.attention.kernel import DefinitionColumns, KernelRequest
from mtrain_cli.attention.partials import accumulation_dtype
from mtrain_cli.attention.tiles import Tiles


class ReferenceKernel(DefinitionColumns):
    """Slow and exact; O(queries x keys) memory. Tests compare every other kernel with it."""

    name = "reference"
    needs_out = False

    def unsupported_reason(self, request: KernelRequest) -> str | None:  # noqa: ARG002
        return None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: Tiles, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores, _, v_BHKD = _scores(q, k, v, tiles, scale)
        lse = scores.logsumexp(-1)
        probabilities = torch.exp(scores - lse.masked_fill(torch.isneginf(lse), 0.0).unsqueeze(-1))
        out = (probabilities @ v_BHKD).transpose(1, 2)
        return out.to(q.dtype), lse.to(accumulation_dtype(q.dtype))

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
        group = q.shape[2] // k.shape[2]
        scores, k_BHKD, v_BHKD = _scores(q, k, v, tiles, scale)
        if delta is None:
            assert out is not None
            delta = (out.double() * dout.double()).sum(-1).transpose(1, 2)
        p = torch.exp(scores - lse.double().masked_fill(torch.isneginf(lse), 0.0).unsqueeze(-1))
        do = dout.double().transpose(1, 2)
        ds = p * (do @ v_BHKD.transpose(-1, -2) - delta.double().unsqueeze(-1)) * scale
        dq = (ds @ k_BHKD).transpose(1, 2)
        dk = ds.transpose(-1, -2) @ q.double().transpose(1, 2)
        dv = p.transpose(-1, -2) @ do
        dk, dv = (t.unflatten(1, (-1, group)).sum(2).transpose(1, 2) for t in (dk, dv))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: Tiles, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return masked scores [batch, heads, queries, keys], and k, v [batch, heads, keys, head_dim].

    All are float64.
    """
    group = q.shape[2] // k.shape[2]
    k_BHKD, v_BHKD = (t.double().repeat_interleave(group, 2).transpose(1, 2) for t in (k, v))
    scores = q.double().transpose(1, 2) @ k_BHKD.transpose(-1, -2) * scale
    return scores.masked_fill(~tiles.seen(), float("-inf")), k_BHKD, v_BHKD
