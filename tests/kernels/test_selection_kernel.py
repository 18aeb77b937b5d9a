"""The kernel that selects candidates equals PyTorch bit for bit, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from mtrain_cli.kernels.triton import selection

from mtrain_cli.sparsity import pattern
from mtrain_cli.sparsity.pattern import MASS_UNITS, MOST_UNITS, base_rank_keys, rank_keys

LINES = 9000  # candidates have numbers below this


def ranked(rows: tuple[int, ...], width: int, kind: str, device: str = "cpu") -> torch.Tensor:
    """Return the rank keys of candidates, of which every 7th is forced, best first."""
    torch.manual_seed(width)
    units = {
        "random": lambda: (torch.rand(*rows, width) ** 4 / width * MASS_UNITS).long(),
        "ties": lambda: torch.randint(0, 3, (*rows, width)) * (1 << 20),
        "largest": lambda: MOST_UNITS - torch.randint(0, 2, (*rows, width)),
        "none": lambda: torch.zeros(*rows, width, dtype=torch.int64),
    }[kind]()
    numbers = torch.randperm(LINES)[:width]
    keys = rank_keys(units, base_rank_keys(numbers % 7 == 0, numbers, LINES))
    return keys.sort(-1, descending=True).values.to(device)


def check(order: torch.Tensor, share: float | torch.Tensor, at_least: int, crossing: bool) -> float:
    """Compare the kernel with PyTorch on the CPU, and return which part of the candidates stays."""
    total = ((order >> 24) & MOST_UNITS).sum(-1, keepdim=True)
    found = selection.select(order, total, share, at_least, LINES, crossing, 24, 38)
    numbers = share.cpu() if isinstance(share, torch.Tensor) else share
    wanted = pattern.select_ranked(
        order.cpu(), total.cpu(), numbers, at_least, order.shape[-1], LINES, crossing=crossing
    )
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.cpu(), b)
    return float(wanted[1].double().mean())


# Shares at which a sum equals the limit, and one that float32 does not hold.
SHARES = (0.0, 0.25, 0.5, 0.9, 1 / 3, 1.0)


@pytest.mark.parametrize("crossing", [True, False])
@pytest.mark.parametrize("kind", ["random", "ties", "largest", "none"])
@pytest.mark.parametrize("width", [1, 2, 31, 64, 1000, 8192])
def test_the_kernel_selects_what_pytorch_selects(width, kind, crossing):
    order = ranked((2, 3), width, kind)
    for share in SHARES:
        check(order, share, 0, crossing)
    parts = {check(order, 0.9, at_least, crossing) for at_least in (0, 1, 17, width)}
    assert 1.0 in parts
    if width > 2 and kind in ("random", "largest"):
        assert min(parts) < 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_row_may_have_its_own_share(dtype):
    order = ranked((2, 3), 200, "random")
    check(order, torch.rand(2, 3, 1, dtype=dtype), 1, True)
    check(order, torch.rand(3, 1, dtype=dtype), 0, False)
    check(order, torch.tensor(0.7, dtype=dtype), 0, True)


def test_the_limit_is_float64():
    """A share in float32, or a sum in float32, would keep another number of candidates."""
    units = torch.full((1, 8000), MOST_UNITS)
    numbers = torch.arange(8000)
    order = rank_keys(units, base_rank_keys(numbers < 0, numbers, LINES))
    kept = [check(order, share, 0, True) for share in (0.2 - 1e-9, 0.2, 0.2 + 1e-9)]
    assert kept[0] == kept[1] < kept[2]
    none = torch.empty(0, 8, dtype=torch.int64)
    found = selection.select(none, none[:, :1], 0.5, 0, LINES, True, 24, 38)
    assert all(t.shape == (0, 8) for t in found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["random", "ties", "largest", "none"])
@pytest.mark.parametrize("width", [1, 2, 31, 64, 257, 1000, 8192])
def test_a_gpu_selects_what_pytorch_selects(width, kind):
    order = ranked((3, 5), width, kind, "cuda")
    for crossing in (True, False):
        for share in SHARES:
            check(order, share, 3, crossing)
        check(order, torch.rand(3, 5, 1, device="cuda"), 0, crossing)
