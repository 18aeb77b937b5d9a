"""Experts in chunks of tokens give the results of one chunk, and need less memory."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from moe_models import make_module, moe_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from mtrain_cli.model.expert_tiles import ExpertExecution, WeightGradients
from mtrain_cli.model.experts import compute_experts
from mtrain_cli.model.routing import Decision, decide_alone

TOKENS, EXPERTS = 23, 6
NAMES = "out", "x", "scores", "gate_up", "down"


def decision(tokens: int) -> Decision:
    """Return a decision with an empty expert, and the last of its pairs beyond the capacity."""
    chosen = torch.rand(tokens, EXPERTS - 1, generator=torch.Generator().manual_seed(3)).topk(2)
    found = decide_alone(chosen.indices, EXPERTS)
    ends = found.ends_E.clamp(max=2 * tokens - 5)
    return found._replace(ends_E=ends)


def computed(
    execution: ExpertExecution, dtype: torch.dtype = torch.float64, tokens: int = TOKENS
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
    bounds = execution.bounds(inputs[0], model.moe, degree=1)
    options: Any = {"bounds": bounds, "recompute": execution.recompute, "inputs_only": False}
    out = compute_experts(*inputs, module.experts, decision(tokens), **options)
    out.backward(grad.to(dtype))
    found = (out.detach(), *(each.grad for each in inputs))
    weights = module.experts.gate_up.grad, module.experts.down.grad
    return dict(zip(NAMES, (*found, *weights), strict=True))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("chunks", [2, 5, TOKENS])
def test_chunks_give_output_and_gradients_of_one_chunk(chunks, recompute):
    expected = computed(ExpertExecution())
    found = computed(ExpertExecution(chunks=chunks, recompute=recompute))
    for name in NAMES:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-12, msg=name)


def test_low_precision_gradients_of_weights_are_summed_in_float32():
    exact, one, many = (
        computed(ExpertExecution(chunks=chunks), dtype, tokens=200)
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
        computed(ExpertExecution(chunks=3, recompute=recompute))
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
    execution = ExpertExecution(tile_bytes=tile, recompute=recompute)
    bounds = execution.bounds(x, model.moe, degree=1)
    assert len(bounds) > 4
    chosen = torch.rand(tokens, 6).topk(4).indices
    arguments = x.requires_grad_(), torch.rand(tokens, 4).requires_grad_(), module.experts
    largest = {}
    for limits in ([0, tokens], bounds):
        with Largest() as mode:
            compute_experts(
                *arguments, decide_alone(chosen, 6),
                bounds=limits, recompute=recompute, inputs_only=False,
            ).sum().backward()  # fmt: skip
        largest[len(limits)] = mode.bytes
    assert largest[2] > tile > largest[len(bounds)], largest


def test_bounds_split_the_tokens_evenly():
    x = torch.empty(10, 40)
    for chunks in (1, 3, 10, 99):
        bounds = ExpertExecution(chunks=chunks).bounds(x, moe_model().moe, degree=2)
        assert (bounds[0], bounds[-1]) == (0, 10)
        assert {end - begin for begin, end in pairwise(bounds)} <= {10, 3, 4, 1}
        assert len(bounds) == min(chunks, 10) + 1
