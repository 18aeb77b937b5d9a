"""The kernels that cast to fp8 equal their reference, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from mtrain_cli.kernels.triton import fp8_rows as kernels

from mtrain_cli.model import fp8_rows as reference
from mtrain_cli.model.feed_forward import (
    FeedForwardWeights,
    _gate_backward,
    _gated,
    _join,
    normalized,
)
from mtrain_cli.model.mlp_products import Fp8Products, MlpProducts
from mtrain_cli.model.qkv_products import qkv_products

has_gpu = torch.cuda.is_available()
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(has_gpu, reason="needs Triton's interpreter")),
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not has_gpu, reason="needs a GPU"),
        ],
    ),
]


def rows(number: int, *shape: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    values = torch.randn(shape, generator=generator) * torch.logspace(-3, 2, shape[0])[:, None]
    return values.to(device, torch.bfloat16)


def assert_alike(found, expected):
    """Assert that e4m3 rows are equal, but for the few that Triton's interpreter rounds wrongly."""
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=0)
    wrong = (found[0].float() != expected[0].float()).float().mean()
    assert wrong < (0.01 if found[0].is_cuda else 0.1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("number", "width"), [(1, 16), (5, 48), (3, 1376), (2, kernels._ROUND + 48)]
)
def test_kernels_equal_the_reference(number, width, device):
    gate_up, dinner = (rows(n, number, n * width, device=device) for n in (2, 1))
    dinner[:, -1] *= 50  # the largest number is in the last round
    gate, up = gate_up.chunk(2, 1)
    assert_alike(kernels.cast_rows(dinner), reference.cast_rows(dinner))
    (inner, kept), wanted = kernels.gated_rows(gate, up, True), reference.gated_rows(gate, up, True)
    assert_alike(inner, wanted[0])
    assert_alike(kept, wanted[1])
    alone, nothing = kernels.gated_rows(gate, up, False)
    assert torch.equal(alone.values_SK.float(), inner.values_SK.float())
    assert nothing is None
    for inputs in (kept, (gate, up)):
        *wanted, both = reference.gate_backward_rows(inputs, dinner.clone())
        *found, rounded = kernels.gate_backward_rows(inputs, dinner.clone())
        assert_alike(rounded, both)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0.01, atol=1e-6)
    assert found[1].data_ptr() == gate_up.data_ptr()  # in place


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("width", [16, 1376])
def test_a_norm_equals_the_reference(width, adds, device):
    x, added = (rows(n, 5, width, device=device) for n in (1, 2))
    norm = 1 + 0.01 * rows(3, 1, width, device=device)[0]
    h, n, cast = kernels.normed_rows(x, norm, 1e-6, added if adds else None, True)
    torch.testing.assert_close(h, x + added if adds else x, rtol=0.01, atol=0)
    wanted = reference.normed_rows(h, norm, 1e-6, None, True)[1]
    torch.testing.assert_close(n, wanted, rtol=0.01, atol=1e-6)
    assert torch.equal(n, kernels.normed_rows(h, norm, 1e-6, None, True)[1]), "not of rounded h"
    assert_alike(cast, reference.cast_rows(n))
    again, nothing, alone = kernels.normed_rows(x, norm, 1e-6, added if adds else None, False)
    assert nothing is None
    assert torch.equal(again, h)
    assert torch.equal(alone.values_SK.float(), cast.values_SK.float())
    assert torch.equal(alone.scales_S1, cast.scales_S1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("lengths", "width"), [((1,), 48), ((80, 32), 130), ((64, 300, 1), 48), ((1, 64, 200), 64)]
)
def test_matrices_below_each_other(lengths, width, transposed, device):
    # The largest number is in each of the matrices once, in one of the last places.
    for largest in range(len(lengths)):
        matrices = [torch.randn(n, width).to(device, torch.bfloat16) for n in lengths]
        matrices[largest][-1, -2] = -60.0
        found = kernels.largest_of(matrices)
        assert torch.equal(found, reference.largest_of(matrices))
        assert found.item() == 60.0
        arguments = matrices, found, transposed
        assert_alike(kernels.cast_matrix(*arguments), reference.cast_matrix(*arguments))
        matrices[largest][0, 0] = float("nan")
        assert not kernels.largest_of(matrices).isfinite()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_number_that_is_not_finite_stays_so(value, device):
    row, up, dinner = (rows(n, 2, 48, device=device) for n in (1, 2, 3))
    row[1, 5] = value
    gated, kept = kernels.gated_rows(up, row, True)
    norm = torch.ones(48, device=device, dtype=torch.bfloat16)
    normed = kernels.normed_rows(row, norm, 1e-6, None, False)[2]
    assert not (kept.values_SK[1].float() * kept.scales_S1[1])[:48].isfinite().all()
    in_order = (
        kernels.cast_rows(row), normed, gated, kept,
        kernels.gate_backward_rows(kept, dinner.clone())[3],
        kernels.gate_backward_rows((up, row), dinner)[3],
    )  # fmt: skip
    for values, scales in in_order:
        assert values[0].float().isfinite().all()
        assert not (values[1].float() * scales[1]).isfinite().any()


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_zeros_stay_zeros(device):
    gate, up, dinner = (torch.zeros(2, 48, device=device, dtype=torch.bfloat16) for _ in range(3))
    casts = kernels.cast_rows(gate), *kernels.gated_rows(gate, up, True)
    norms = kernels.normed_rows(gate, gate[0], 1e-6, up, False)[2]
    for values, scales in (*casts, norms, kernels.gate_backward_rows((gate, up), dinner)[3]):
        assert (values.float() == 0).all()
        assert (scales > 0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu, reason="needs a GPU")
@pytest.mark.parametrize("tokens", [1, 37, 4096])
def test_products_of_a_gpu_err_as_those_of_a_cpu(tokens):
    shapes = (512, 64), (512,), (1376, 512), (1376, 512), (512, 1376)
    weights = [torch.randn(shape).mul(0.03).bfloat16() for shape in shapes]
    x, grad = (torch.randn(tokens, 512).bfloat16() for _ in range(2))
    results = []
    for device, dtype, kind in (
        ("cpu", torch.float64, exact),
        ("cpu", torch.bfloat16, in_fp8),
        ("cuda", torch.bfloat16, in_fp8),
    ):
        mlp = kind(FeedForwardWeights(*(w.to(device, dtype) for w in weights)))
        gate_up = mlp.gate_up(mlp.rows(x.to(device, dtype)))
        out = torch.empty(tokens, 512, dtype=dtype, device=device)
        result = mlp.down(mlp.gated(gate_up, False)[0], out=out).clone()
        grad = grad.to(device, dtype)
        dinner = mlp.down_back(mlp.rows(grad))
        inner, dgate, dup, both = mlp.gate_backward(gate_up, dinner)
        output, back = mlp.output(x[:, :64].to(device, dtype)), mlp.output_back(grad)
        results.append([result, inner, dgate, dup, mlp.gate_up_back(both), output, back])
    for wanted, *found in zip(*results, strict=True):
        on_cpu, on_gpu = (float((each.cpu().double() - wanted).norm()) for each in found)
        assert 0 < on_gpu < 1.2 * on_cpu


def exact(weights: FeedForwardWeights) -> MlpProducts:
    return MlpProducts(weights, (_join, _gated, _gate_backward))


def in_fp8(weights: FeedForwardWeights) -> MlpProducts:
    return Fp8Products(weights, of_output=True)


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu, reason="needs a GPU")
@pytest.mark.parametrize("tokens", [37, 4096])
def test_products_of_q_k_and_v_of_a_gpu_err_as_those_of_a_cpu(tokens):
    generator = torch.Generator().manual_seed(3)
    shapes = (512,), (1024, 512), (128, 512), (128, 512)
    weights = [torch.randn(shape, generator=generator) * 0.05 for shape in shapes]
    x, grad = (torch.randn(1, tokens, n, generator=generator) for n in (512, 1280))
    results = []
    for device, dtype in (("cpu", torch.bfloat16), ("cuda", torch.bfloat16)):
        leaves = [t.to(device, dtype).requires_grad_() for t in (x, *weights)]
        qkv = qkv_products(leaves[0], leaves[1], 1e-6, tuple(leaves[2:]), normalized)
        gradients = torch.autograd.grad(qkv, leaves, grad.to(device, dtype))
        results.append([qkv, *gradients])
    leaves = [t.bfloat16().double().requires_grad_() for t in (x, *weights)]
    n = torch.nn.functional.rms_norm(leaves[0], (512,), leaves[1], 1e-6)
    qkv = n @ torch.cat(leaves[2:]).t()
    exact = [qkv, *torch.autograd.grad(qkv, leaves, grad.bfloat16().double())]
    for wanted, *found in zip(exact, *results, strict=True):
        on_cpu, on_gpu = (float((each.cpu().double() - wanted).norm()) for each in found)
        assert 0 < on_gpu < 1.2 * on_cpu
