"""mtrain's CUDA merge kernel equals the definition in float64."""

import pytest
import torch

from mtrain_cli.attention import partials as module
from mtrain_cli.attention.partials import merge

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_merge_is_the_softmax_over_both_sets_of_keys(dtype, dim):
    torch.manual_seed(0)
    shape = (2, 77, 6, dim)
    out, part = (torch.randn(shape, device="cuda") for _ in range(2))
    part = part.to(dtype)
    lse, part_lse = (30 * torch.randn(2, 6, 77, device="cuda") for _ in range(2))
    lse[0, 0, :9], part_lse[0, 0, 5:20] = float("-inf"), float("-inf")
    out[0, :9, 0], part[0, 5:20, 0] = 0.0, 0.0
    both = torch.stack([lse, part_lse]).double()
    whole = both.logsumexp(0)
    shares = torch.exp(both - whole.masked_fill(whole.isneginf(), 0.0)).transpose(2, 3)[..., None]
    expected = shares[0] * out.double() + shares[1] * part.double()
    assert module._fused_merge(out, lse, part, part_lse), "the CUDA kernel must run"
    assert torch.allclose(out.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.allclose(lse.double(), whole, rtol=1e-6, atol=1e-6)
    assert bool(lse[0, 0, 5:9].isneginf().all())


def test_unsupported_tensors_use_pytorch():
    out, lse = (
        torch.zeros(1, 4, 2, 8, device="cuda", dtype=torch.float64),
        torch.zeros(1, 2, 4, device="cuda", dtype=torch.float64),
    )
    merge(out, lse, torch.ones_like(out), lse.clone())
    assert torch.allclose(out, torch.full_like(out, 0.5))
