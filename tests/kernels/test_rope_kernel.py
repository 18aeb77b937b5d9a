"""The kernel of rotary positions equals the operations of training, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from mtrain_cli.model import rope as rope_operations

pytest.importorskip("triton")

from mtrain_cli.kernels.triton import rope


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "dim"), [(1, 1, 1, 2), (3, 1, 5, 24), (2, 4, 8, 64)]
)
def test_the_kernel_equals_rotate(batch, tokens, heads, dim, dtype):
    torch.manual_seed(heads)
    x = torch.randn(batch, tokens, heads, dim).to(dtype)
    positions = torch.randint(0, 1_000_000, (batch, tokens))
    angles = rope_operations.rotation(positions, 10_000.0 ** -torch.rand(dim // 2), 1.25)
    want = rope_operations.rotate(x, angles.cos_BN1F, angles.sin_BN1F)
    # A column slice of a wider product is not contiguous.
    wide = torch.cat([x, x], dim=-1)[..., :dim]
    found = rope.rotate(wide, angles.cos_BN1F, angles.sin_BN1F)
    assert (found.dtype, found.shape, found.is_contiguous()) == (dtype, x.shape, True)
    precision = 1e-6 if dtype == torch.float32 else 2**-10
    torch.testing.assert_close(found, want, atol=precision, rtol=precision)


@pytest.mark.parametrize("tokens", [1, 2])
def test_training_and_cpus_keep_the_operations(tokens, monkeypatch):
    monkeypatch.setattr(rope, "rotate", None)
    x = torch.randn(1, tokens, 2, 8)
    angles = rope_operations.rotation(torch.zeros(1, tokens), torch.ones(4), 1.0)
    torch.testing.assert_close(
        rope_operations.rotate(x, angles.cos_BN1F, angles.sin_BN1F), x, atol=0, rtol=0
    )
