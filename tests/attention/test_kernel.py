"""What every kernel promises, and attention over gathered columns by its definition."""

from __future__ import annotations

import inspect

import pytest
import torch
from attention.sparse_problems import Problem, make_problem

from mtrain_cli.attention.kernel import Kernel, KernelRequest, Saved
from mtrain_cli.attention.kernel_registry import make_kernel
from mtrain_cli.attention.packed_columns import SharedColumns
from mtrain_cli.attention.reference import ReferenceKernel
from mtrain_cli.config.schema import KERNELS

SCALE = 0.3
NAMES = [name for name in KERNELS if name != "auto"]


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_has_the_attributes_and_arguments_of_the_contract(name):
    kernel = make_kernel(name)
    assert kernel.name == name
    assert isinstance(kernel.skips, bool)
    for method in ("forward", "backward", "forward_columns", "backward_columns"):
        expected = list(inspect.signature(getattr(Kernel, method)).parameters)[1:]
        assert list(inspect.signature(getattr(kernel, method)).parameters) == expected
    request = KernelRequest("cpu", None, "float64", 7, 2, 1)
    reason = kernel.unsupported_reason(request)
    assert (reason is None) == (name in ("sdpa", "reference"))


def columns_problem(kind: str) -> tuple[Problem, SharedColumns, torch.Tensor]:
    """Return a problem in float64, its columns, and their keys and values."""
    p = make_problem(1, kind, seq=61, dim=8, dtype=torch.float64)
    columns = SharedColumns.make(p.tiles, p.tiles)
    assert columns is not None
    return p, columns, columns.pack(p.k, p.v)


def test_columns_continue_from_other_keys_to_the_whole_index():
    p, columns, packed = columns_problem("both")
    kernel = oracle = ReferenceKernel()
    want, want_lse = oracle.forward(p.q, p.k, p.v, p.tiles, SCALE)
    diagonals = p.tiles.with_index(p.tiles.index.without_columns())
    partial = oracle.forward(p.q, p.k, p.v, diagonals, SCALE)
    before = [t.clone() for t in partial]
    out, lse = kernel.forward_columns(p.q, packed, columns, SCALE, partial)
    torch.testing.assert_close(out, want, atol=1e-12, rtol=0)
    torch.testing.assert_close(lse, want_lse, atol=1e-12, rtol=0)
    assert all(torch.equal(a, b) for a, b in zip(partial, before, strict=True)), (
        "the partial result is not changed"
    )


def test_gradients_of_columns_alone_equal_the_oracle():
    p, columns, packed = columns_problem("columns")
    kernel = oracle = ReferenceKernel()
    out, lse = kernel.forward_columns(p.q, packed, columns, SCALE, None)
    torch.testing.assert_close(out, oracle.forward(p.q, p.k, p.v, p.tiles, SCALE)[0])
    want = oracle.backward(p.dout, Saved(p.q, p.k, p.v, out, lse, None), p.tiles, SCALE)
    delta = (out * p.dout).sum(-1).transpose(1, 2)
    dq, gradients = kernel.backward_columns(p.dout, p.q, packed, lse, delta, columns, SCALE)
    dk, dv = torch.zeros_like(p.k), torch.zeros_like(p.v)
    columns.add_gradients(dk, dv, gradients)
    for got, expected in zip((dq, dk, dv), want, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)
