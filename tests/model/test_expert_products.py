"""The experts of one worker: grouped products, chunks of tokens, and fused operations."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from moe_models import make_module, moe_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from mtrain_cli.model import expert_products
from mtrain_cli.model.expert_products import (
    ChunkedExperts,
    WeightGradients,
    grouped_rows,
    grouped_rows_back,
    grouped_sums,
    token_bounds,
)
from mtrain_cli.model.routing import Decision, decide_alone
from mtrain_cli.model.tiling import LayerExecution

TOKENS, EXPERTS = 23, 6
NAMES = "out", "x", "scores", "gate_up", "down"


def decision(tokens: int, beyond: int) -> Decision:
    """Return a decision with an empty expert, and with pairs of padding."""
    chosen = torch.rand(tokens, EXPERTS - 1, generator=torch.Generator().manual_seed(3)).topk(2)
    found = decide_alone(chosen.indices, EXPERTS)
    return found._replace(ends_E=found.ends_E.clamp(max=2 * tokens - beyond))


def computed(
    execution: LayerExecution,
    dtype: torch.dtype = torch.float64,
    tokens: int = TOKENS,
    beyond: int = 5,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Return output and gradients of the experts of some tokens.

    All inputs are numbers that bfloat16 represents exactly.
    """
    model = moe_model()
    module = make_module(model).bfloat16().to(dtype)
    generator = torch.Generator().manual_seed(1)
    x, grad, scores = (
        torch.randn(tokens, width, generator=generator).bfloat16() for width in (40, 40, 2)
    )
    inputs = x.to(dtype), scores.to(torch.promote_types(dtype, torch.float32))
    for each in inputs:
        each.requires_grad_()
    bounds = options.get("bounds", token_bounds(inputs[0], model.moe, execution, degree=1))
    out = ChunkedExperts.apply(
        *inputs, *module.experts.parameters(), decision(tokens, beyond), bounds,
        execution.recompute, options.get("compile", False), False,
    )  # fmt: skip
    out.backward(grad.to(dtype))
    found = (out.detach(), *(each.grad for each in inputs))
    weights = module.experts.gate_up.grad, module.experts.down.grad
    return dict(zip(NAMES, (*found, *weights), strict=True))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("chunks", [2, 5, TOKENS])
def test_chunks_give_output_and_gradients_of_one_chunk(chunks, recompute):
    expected = computed(LayerExecution())
    found = computed(LayerExecution(expert_chunks=chunks, recompute=recompute))
    for name in NAMES:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-12, msg=name)


def test_low_precision_gradients_of_weights_are_summed_in_float32():
    exact, one, many = (
        computed(LayerExecution(expert_chunks=chunks), dtype, tokens=200)
        for chunks, dtype in ((1, torch.float64), (1, torch.bfloat16), (200, torch.bfloat16))
    )
    for name in ("gate_up", "down"):
        errors = [float((each[name].double() - exact[name]).norm()) for each in (one, many)]
        assert errors[1] < 1.3 * errors[0], name
        assert many[name].dtype == torch.bfloat16


def test_the_sum_of_one_or_two_chunks_keeps_its_dtype_and_memory():
    left, right = torch.ones(4, 2, dtype=torch.bfloat16), torch.ones(4, 3, dtype=torch.bfloat16)
    ends = torch.tensor([1, 4], dtype=torch.int32)
    sums = {count: WeightGradients(count) for count in (1, 2, 3)}
    for each in sums.values():
        each.add("down", left, right, ends)
    dtypes = {count: each._sums["down"].dtype for count, each in sums.items()}
    assert dtypes == {1: torch.bfloat16, 2: torch.bfloat16, 3: torch.float32}
    assert sums[3].take("down", left)[:, 0, 0].tolist() == [1, 3]


def test_the_sum_of_two_chunks_is_a_float32_sum_that_is_rounded_once():
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor([20, 64], dtype=torch.int32)
    chunks = [
        [torch.randn(64, width, generator=generator).bfloat16() for width in (16, 24)]
        for _ in range(2)
    ]
    two, alone = WeightGradients(2), []
    for left, right in chunks:
        two.add("down", left, right, ends)
        one = WeightGradients(1)
        one.add("down", left, right, ends)
        alone.append(one.take("down", left).float())
    assert torch.equal(two.take("down", chunks[0][0]), (alone[0] + alone[1]).bfloat16())


@pytest.mark.parametrize(("recompute", "more"), [(False, 3), (True, 0)])
def test_a_checkpointed_layer_keeps_no_products(recompute, more):
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.shape) or tensor, lambda tensor: tensor
    ):
        computed(LayerExecution(expert_chunks=3, recompute=recompute))
    assert len(kept) == 4 + more, "the inputs, and gate and up of each chunk"


class Largest(TorchDispatchMode):
    """The largest tensor that an operation makes, in bytes."""

    bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        made = [t.untyped_storage().nbytes() for t in tree_iter(result)
                if isinstance(t, torch.Tensor)]  # fmt: skip
        self.bytes = max([self.bytes, *made])
        return result


@pytest.mark.parametrize("recompute", [False, True])
def test_no_temporary_tensor_is_larger_than_a_tile(recompute):
    model = moe_model(moe={"top_k": 4, "expert_size": 32})
    tokens, tile = 4096, 1 << 20
    module = make_module(model).float()
    x = torch.randn(tokens, 40)
    execution = LayerExecution(tile_bytes=tile, recompute=recompute)
    bounds = token_bounds(x, model.moe, execution, degree=1)
    assert len(bounds) > 4
    chosen = torch.rand(tokens, 6).topk(4).indices
    arguments = x.requires_grad_(), torch.rand(tokens, 4).requires_grad_()
    arguments = *arguments, *module.experts.parameters()
    largest = {}
    for limits in ([0, tokens], bounds):
        with Largest() as mode:
            out = ChunkedExperts.apply(
                *arguments, decide_alone(chosen, 6), limits, recompute, False, False
            )
            out.sum().backward()
        largest[len(limits)] = mode.bytes
    assert largest[2] > tile > largest[len(bounds)], largest


def test_bounds_split_the_tokens_evenly():
    x = torch.empty(10, 40)
    for chunks in (1, 3, 10, 99):
        bounds = token_bounds(x, moe_model().moe, LayerExecution(expert_chunks=chunks), degree=2)
        assert (bounds[0], bounds[-1]) == (0, 10)
        assert {end - begin for begin, end in pairwise(bounds)} <= {10, 3, 4, 1}
        assert len(bounds) == min(chunks, 10) + 1


@pytest.fixture
def rows_behind_the_last_group(monkeypatch):
    """Fill them with NaN, as a grouped product on a GPU may."""
    product = expert_products.grouped_rows_back

    def poisoned(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        result = product(rows, weights, ends)
        result[int(ends[-1]) :] = torch.nan
        return result

    monkeypatch.setattr(expert_products, "grouped_rows_back", poisoned)


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.setattr(expert_products, "_compiled", lambda function: function)


@pytest.mark.parametrize("bounds", [[0, TOKENS], [0, 8, 15, TOKENS]])
@pytest.mark.parametrize("beyond", [0, 5, 2 * TOKENS])
@pytest.mark.usefixtures("uncompiled", "rows_behind_the_last_group")
def test_output_and_gradients_equal_those_of_separate_operations(bounds, beyond):
    for recompute in (False, True):
        execution = LayerExecution(recompute=recompute)
        expected, found = (
            computed(execution, beyond=beyond, bounds=bounds, compile=each)
            for each in (False, True)
        )
        for name in NAMES:
            assert expected[name].isfinite().all(), name
            torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_compiled_operations_in_bfloat16_are_as_close_as_separate_ones():
    exact, apart, fused = (
        computed(LayerExecution(), dtype, compile=compiled)
        for dtype, compiled in (
            (torch.float64, False),
            (torch.bfloat16, False),
            (torch.bfloat16, True),
        )
    )
    for name in NAMES:
        errors = [float((each[name].double() - exact[name]).norm()) for each in (apart, fused)]
        assert errors[1] < 1.2 * errors[0], name


ENDS = torch.tensor([3, 3, 10, 12], dtype=torch.int32)  # the second group is empty


def problem(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    sizes = (15, 8), (15, 16), (4, 16, 8)
    return tuple(torch.randn(s, generator=generator).to(dtype) for s in sizes)


COMPUTED = 12  # rows before the end of the last group


def by_loop(rows_SA, rows_SB, weights_EBA) -> tuple[torch.Tensor, ...]:
    forward = torch.zeros(COMPUTED, 16).to(rows_SA)
    back = torch.zeros(COMPUTED, 8).to(rows_SA)
    sums = torch.zeros_like(weights_EBA)
    for e, (begin, end) in enumerate([(0, 3), (3, 3), (3, 10), (10, 12)]):
        for s in range(begin, end):
            forward[s] = weights_EBA[e] @ rows_SA[s]
            back[s] = rows_SB[s] @ weights_EBA[e]
            sums[e] += torch.outer(rows_SB[s], rows_SA[s])
    return forward, back, sums


def found(rows_SA, rows_SB, weights_EBA) -> tuple[torch.Tensor, ...]:
    return (
        grouped_rows(rows_SA, weights_EBA, ENDS)[:COMPUTED],
        grouped_rows_back(rows_SB, weights_EBA, ENDS)[:COMPUTED],
        grouped_sums(rows_SB, rows_SA, ENDS),
    )


def test_products_are_those_of_each_row():
    given = problem(torch.float64)
    torch.testing.assert_close(found(*given), by_loop(*given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pytorch_gives_the_same_on_a_cpu_too(dtype, monkeypatch):
    given = problem(dtype)
    expected = found(*given)
    try:
        torch._grouped_mm(given[0], given[2].transpose(1, 2), offs=ENDS)
    except RuntimeError as error:
        pytest.skip(f"this PyTorch has none on a CPU: {error}")
    monkeypatch.setattr(expert_products, "_runs_grouped", lambda *_: True)
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(found(*given), expected, **tolerance)


def test_no_rows_give_no_rows_and_zero_sums():
    """On a GPU, too, a worker that receives no row must not call PyTorch's product."""
    rows_SA, rows_SB, weights_EBA = problem(torch.float32)
    ends = torch.zeros_like(ENDS)
    assert grouped_rows(rows_SA[:0], weights_EBA, ends).shape == (0, 16)
    assert grouped_rows_back(rows_SB[:0], weights_EBA, ends).shape == (0, 8)
    sums = grouped_sums(rows_SB[:0], rows_SA[:0], ends)
    assert sums.shape == weights_EBA.shape
    assert not sums.any()
