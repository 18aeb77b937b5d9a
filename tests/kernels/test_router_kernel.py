"""The kernel that chooses experts equals `topk`, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from mtrain_cli.kernels.triton import router


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 1, 1), (37, 6, 2), (33, 128, 8), (5, 200, 3), (0, 8, 2)]
)
def test_the_kernel_chooses_the_experts_of_topk(tokens, experts, top_k):
    generator = torch.Generator().manual_seed(experts)
    scores = torch.rand(tokens, experts, generator=generator).softmax(-1)
    bias = 0.01 * torch.rand(experts, generator=generator)
    found = router.chosen_experts(scores, bias, top_k)
    assert found.dtype == torch.int64
    assert torch.equal(found, (scores + bias).topk(top_k).indices)


def test_of_equal_experts_the_first_are_chosen_and_the_bias_decides():
    scores, bias = torch.full((3, 6), 0.25), torch.zeros(6)
    assert router.chosen_experts(scores, bias, 3).tolist() == [[0, 1, 2]] * 3
    bias[4] = 0.1
    assert router.chosen_experts(scores, bias, 2).tolist() == [[4, 0]] * 3


def test_scores_that_are_no_numbers_choose_experts_that_exist():
    scores = torch.full((2, 5), torch.nan)
    scores[1] = torch.tensor([0.1, torch.nan, 0.3, 0.2, 0.0])
    found = router.chosen_experts(scores, torch.zeros(5), 3)
    assert found.tolist() == [[0, 1, 2], [1, 2, 3]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_chooses_what_topk_chooses():
    scores = torch.rand(4099, 128, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    found = router.chosen_experts(scores, torch.zeros(128, device="cuda"), 8)
    values = scores.gather(1, found)
    assert torch.equal(values, scores.topk(8).values)
