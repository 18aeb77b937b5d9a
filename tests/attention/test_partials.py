"""Merged parts equal the whole, and delta equals its definition."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType

import numpy as np
import pytest
import torch
from attention.dense_problems import SCALE, make_dense_problem

from mtrain_cli.attention import partials
from mtrain_cli.attention.mask import KeySpans
from mtrain_cli.attention.partials import (
    accumulation_dtype,
    cuda_kernels_usable,
    cupy_unsupported_reason,
    merge,
    row_delta,
)
from mtrain_cli.attention.reference import ReferenceKernel
from mtrain_cli.attention.tiles import Tiles


@pytest.mark.parametrize("seed", range(6))
def test_merged_parts_equal_the_whole(seed):
    spans, q, k, v, _ = make_dense_problem(seed, 4, 2)
    kernel, keys = ReferenceKernel(), k.shape[1]
    want_out, want_lse = kernel.forward(q, k, v, Tiles.make(spans), SCALE)
    edges = sorted({0, keys // 3, keys // 2, keys})
    out = torch.zeros_like(q)
    lse = torch.full(want_lse.shape, float("-inf"), dtype=torch.float64)
    for a, b in pairwise(edges):
        part = Tiles.make(
            [KeySpans(np.clip(s.low, a, b) - a, np.clip(s.high, a, b) - a, b - a) for s in spans]
        )
        merge(out, lse, *kernel.forward(q, k[:, a:b], v[:, a:b], part, SCALE))
    torch.testing.assert_close(out, want_out, atol=1e-12, rtol=0)
    torch.testing.assert_close(lse, want_lse, atol=1e-12, rtol=0)


def test_merging_handles_very_different_scores():
    out, lse = torch.zeros(1, 2, 1, 1), torch.tensor([[[-400.0, 400.0]]])
    merge(out, lse, torch.ones(1, 2, 1, 1), torch.tensor([[[400.0, -400.0]]]))
    assert out.flatten().tolist() == [1.0, 0.0]
    assert lse.flatten().tolist() == [400.0, 400.0]


def test_a_row_without_keys_on_either_side_keeps_what_the_other_side_has():
    infinite, nothing = torch.tensor(float("-inf")), torch.zeros(1, 3, 1, 1)
    out, lse = torch.tensor([0.0, 5.0, 0.0]).view(1, 3, 1, 1), torch.tensor([[[0.0, 2.0, 0.0]]])
    lse[..., 0] = lse[..., 2] = infinite
    part_lse = torch.tensor([[[3.0, 0.0, 0.0]]])
    part_lse[..., 1] = part_lse[..., 2] = infinite
    merge(out, lse, nothing + 7, part_lse)
    assert out.flatten().tolist() == [7.0, 5.0, 0.0]
    assert lse.flatten().tolist() == [3.0, 2.0, float("-inf")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_delta_is_summed_in_the_accumulation_dtype(dtype):
    torch.manual_seed(0)
    out, dout = torch.randn(2, 2, 5, 3, 64).to(dtype)
    delta = row_delta(out, dout)
    assert delta.dtype == accumulation_dtype(dtype)
    assert delta.shape == (2, 3, 5)
    want = torch.einsum("bqhd,bqhd->bhq", out.double(), dout.double())
    torch.testing.assert_close(delta.double(), want, atol=2e-5, rtol=0)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Forget the reason that other tests found."""
    cupy_unsupported_reason.cache_clear()
    yield
    cupy_unsupported_reason.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, check) -> None:
    """Pretend that CuPy is installed and that ``check`` compiles the smallest kernel."""
    monkeypatch.setattr(partials.importlib.util, "find_spec", lambda name: name)
    module = ModuleType("nvrtc")
    if check is not None:
        module.check = check  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mtrain_cli.kernels.cuda.nvrtc", module)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(partials.importlib.util, "find_spec", lambda _: None)
    assert cupy_unsupported_reason() == "CuPy is not installed"


def test_a_broken_installation_is_one_line(monkeypatch):
    install(monkeypatch, None)
    reason = cupy_unsupported_reason()
    assert reason is not None
    assert reason.startswith("CuPy cannot be imported: ")
    assert "\n" not in reason


@pytest.mark.parametrize(
    ("error", "shown"), [(RuntimeError("no nvrtc\nat all"), "no nvrtc"), (OSError(), "OSError")]
)
def test_a_failing_compiler_is_one_line(monkeypatch, error, shown):
    def check() -> None:
        raise error

    install(monkeypatch, check)
    assert cupy_unsupported_reason() == f"CuPy cannot compile here: {shown}"


def test_the_kernels_are_usable_for_tensors_on_a_gpu_only(monkeypatch):
    compiled = []
    install(monkeypatch, lambda: compiled.append(1))
    assert cupy_unsupported_reason() is None
    assert not cuda_kernels_usable(torch.zeros(1))

    class OnGpu:
        is_cuda = True

    assert cuda_kernels_usable(OnGpu())
    assert compiled == [1], "the check runs once"
