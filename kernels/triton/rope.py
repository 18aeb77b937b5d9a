"""Rotary position embedding in one kernel, for the few tokens of a decoding step.

In eager mode, the operations of `mtrain_cli.model.rope.rotate` are many short kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rotate(
    X, COS, SIN, OUT, HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, ROWS)[:, None]
    pair = tl.arange(0, WIDTH)[None, :]
    valid = (head < HEADS) & (pair < HALF)
    at = (token * HEADS + head) * (2 * HALF) + pair
    cos = tl.load(COS + token * HALF + pair, mask=pair < HALF, other=0.0)
    sin = tl.load(SIN + token * HALF + pair, mask=pair < HALF, other=0.0)
    a = tl.load(X + at, mask=valid, other=0.0).to(tl.float32)
    b = tl.load(X + at + HALF, mask=valid, other=0.0).to(tl.float32)
    tl.store(OUT + at, a * cos - b * sin, mask=valid)
    tl.store(OUT + at + HALF, b * cos + a * sin, mask=valid)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair of dimensions (i, i + D/2) of every head by the token's angle.

    The result is contiguous and has the dtype of the input. There is no backward pass.

    Args:
        x: [batch, tokens, heads, head_dim], float32, bfloat16 or float16.
        cos, sin: float32 [batch, tokens, 1, head_dim / 2].
    """
    x = x.contiguous()
    batch, tokens, heads, dim = x.shape
    out = torch.empty_like(x)
    _rotate[(batch * tokens,)](
        x, cos.contiguous(), sin.contiguous(), out, HEADS=heads, HALF=dim // 2,
        ROWS=triton.next_power_of_2(heads), WIDTH=triton.next_power_of_2(dim // 2),
    )  # fmt: skip
    return out
