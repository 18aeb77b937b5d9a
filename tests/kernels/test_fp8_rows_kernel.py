"""The kernels that cast to fp8 equal their reference, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from mtrain_cli.kernels.triton import fp8_rows as kernels

from mtrain_cli.model import fp8_rows as reference
from mtrain_cli.model.feed_forward import FeedForwardWeights, _gate_backward, _gated
from mtrain_cli.model.mlp_products import Fp8Products, MlpProducts

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
    assert_alike(kernels.gated_rows(gate, up), reference.gated_rows(gate, up))
    *wanted, both = reference.gate_backward_rows(gate, up, dinner)
    *found, rounded = kernels.gate_backward_rows(gate, up, dinner)
    assert_alike(rounded, both)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0.01, atol=1e-6)
    assert found[1].data_ptr() == gate_up.data_ptr()  # in place


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_below_each_other(transposed, device):
    matrices = [torch.randn(n, 48).to(device, torch.bfloat16) for n in (80, 32)]
    scale = reference.scale_of(matrices[0])
    arguments = matrices, scale, transposed
    found, expected = kernels.cast_matrix(*arguments), reference.cast_matrix(*arguments)
    assert_alike(found, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_number_that_is_not_finite_stays_so(value, device):
    row, up, dinner = (rows(n, 2, 48, device=device) for n in (1, 2, 3))
    row[1, 5] = value
    gated = kernels.gated_rows(up, row)
    in_order = (kernels.cast_rows(row), gated, kernels.gate_backward_rows(up, row, dinner)[3])
    for values, scales in in_order:
        assert values[0].float().isfinite().all()
        assert not (values[1].float() * scales[1]).isfinite().any()


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_zeros_stay_zeros(device):
    gate, up, dinner = (torch.zeros(2, 48, device=device, dtype=torch.bfloat16) for _ in range(3))
    casts = kernels.cast_rows(gate), kernels.gated_rows(gate, up)
    for values, scales in (*casts, kernels.gate_backward_rows(gate, up, dinner)[3]):
        assert (values.float() == 0).all()
        assert (scales > 0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu, reason="needs a GPU")
@pytest.mark.parametrize("tokens", [1, 37, 4096])
def test_products_of_a_gpu_err_as_those_of_a_cpu(tokens):
    shapes = (64, 64), (64,), (1376, 512), (1376, 512), (512, 1376)
    weights = [torch.randn(shape).mul(0.03).bfloat16() for shape in shapes]
    x, grad = (torch.randn(tokens, 512).bfloat16() for _ in range(2))
    results = []
    for device, dtype, kind in (
        ("cpu", torch.float64, exact),
        ("cpu", torch.bfloat16, Fp8Products),
        ("cuda", torch.bfloat16, Fp8Products),
    ):
        mlp = kind(FeedForwardWeights(*(w.to(device, dtype) for w in weights)))
        gate, up = mlp.gate_up(mlp.rows(x.to(device, dtype)))
        out = torch.empty(tokens, 512, dtype=dtype, device=device)
        result = mlp.down(mlp.gated(gate, up), out=out).clone()
        dinner = mlp.down_back(mlp.rows(grad.to(device, dtype)))
        inner, dgate, dup, both = mlp.gate_backward(gate, up, dinner)
        results.append([result, inner, dgate, dup, mlp.gate_up_back(both)])
    for wanted, *found in zip(*results, strict=True):
        on_cpu, on_gpu = (float((each.cpu().double() - wanted).norm()) for each in found)
        assert 0 < on_gpu < 1.2 * on_cpu


def exact(weights: FeedForwardWeights) -> MlpProducts:
    return MlpProducts(weights, (_gated, _gate_backward))
