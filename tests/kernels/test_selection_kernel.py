"""The kernel that selects candidates equals PyTorch bit for bit, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from sparsity import small_batch

pytest.importorskip("triton")

from mtrain_cli.sparsity import pattern
from mtrain_cli.sparsity.pattern import (
    MASS_UNITS,
    MOST_UNITS,
    Selection,
    base_rank_keys,
    rank_keys,
)

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
    chosen = Selection(order, total, share, at_least, LINES, crossing)
    number = share.cpu() if isinstance(share, torch.Tensor) else share
    wanted = Selection(order.cpu(), total.cpu(), number, at_least, LINES, crossing)
    (numbers, none), (nothing, flags) = chosen._run("numbers"), chosen._run("flags")
    assert none is nothing is None
    found = (*chosen._run("pairs"), numbers, flags)
    for a, b in zip(found, (*wanted.pairs(), wanted.numbers(), wanted.flags()), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.cpu(), b)
    return float(wanted.pairs()[1].double().mean())


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


def test_no_rows_give_no_candidates():
    none = torch.empty(0, 8, dtype=torch.int64)
    check(none, 0.5, 0, True)


def test_all_candidates_give_all_flags():
    """Then the kernel does not clear the flags before."""
    torch.manual_seed(0)
    units = torch.randint(0, 1000, (5, 33))
    numbers = torch.arange(33)
    order = rank_keys(units, base_rank_keys(numbers < 2, numbers, 33))
    chosen = Selection.of(order, units.sum(-1, keepdim=True), 0.5, 1, 33, 33)
    assert torch.equal(chosen._run("flags")[1], chosen.flags())


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"max_slashes": 4, "max_columns": 0},
        {"joint": True, "p_v": 0.9, "index_per": "kv_group"},
        {"joint": True, "p_v": 0.9, "p_of": "rest", "min_slashes": 2},
        {"slash_unit": "token", "max_slashes": 70, "min_slashes": 2},
    ],
)
def test_the_pattern_makes_the_same_index(changed, documents, monkeypatch):
    q, k, masked = small_batch.inputs(1, documents, length=small_batch.SEQ - 3)
    chosen = small_batch.pattern(**changed)
    want = chosen.estimate(q, k, masked, 0)
    launched = []
    run = Selection._run
    monkeypatch.setattr(pattern, "selection_usable", lambda _: True)
    monkeypatch.setattr(Selection, "_run", lambda *args: launched.append(args[1]) or run(*args))
    found = chosen.estimate(q, k, masked, 0)
    assert len(launched) == 2
    assert torch.equal(found.slashes, want.slashes)
    assert torch.equal(found.columns, want.columns)
    assert found.columns.is_contiguous()
    assert found.slashes.is_contiguous()


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
