"""AdamW on the parts that a worker holds is PyTorch's AdamW, bit for bit."""

from __future__ import annotations

import copy

import gloo
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from training.test_sparse_training import trainer

from mtrain_cli.training.optimizer import ShardedAdamW, local_gradients, set_hyperparameters


def both(rank: int, world: int, offload: bool) -> dict[str, bool]:
    """Trains twice, with PyTorch's optimizer and with ours, and stops and loads in between."""
    words = ["sparsity=vertical_slash", f"optim.offload={str(offload).lower()}", "optim.weight_decay=0.3"]
    ours, theirs = (trainer(rank, world, world, words) for _ in range(2))
    assert type(ours.optimizer) is ShardedAdamW
    of = theirs.host_states or theirs
    of.optimizer = theirs.optimizer = AdamW([{"params": group["params"]} for group in theirs.optimizer.param_groups], fused=True)
    set_hyperparameters(theirs.optimizer, theirs.config.optim)
    for at in range(4):
        if at == 2:
            ours.optimizer.load_state_dict(copy.deepcopy(theirs.optimizer.state_dict()))
        for one in (ours, theirs):
            one.train_step(False)
    pairs = [
        (a, b)
        for mine, others in zip(ours.optimizer.param_groups, theirs.optimizer.param_groups, strict=True)
        for a, b in zip(mine["params"], others["params"], strict=True)
    ]
    states = [(ours.optimizer.state[a], theirs.optimizer.state[b]) for a, b in pairs]
    return {
        "weights": all(torch.equal(whole(a), whole(b)) for a, b in pairs),
        "states": all(torch.equal(whole(a[name]), whole(b[name])) for a, b in states for name in ("exp_avg", "exp_avg_sq", "step")),
        "kinds": all(type(a["exp_avg"]) is type(b["exp_avg"]) for a, b in states),
        "four steps": all(a["step"].item() == 4 for a, _ in states),
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


@pytest.mark.parametrize("offload", [False, True])
def test_weights_and_states_are_bitwise_those_of_pytorch(offload):
    for found in gloo.run(2, both, offload):
        assert all(found.values()), found


def test_what_has_no_gradient_is_left_alone_and_may_come_later():
    torch.manual_seed(0)
    mine, others = ([nn.Parameter(t.clone()) for t in start] for start in [[torch.randn(3, 4), torch.randn(5)]] * 2)
    ours, theirs = (
        make([{"params": p[:1], "weight_decay": 0.2}, {"params": p[1:]}], lr=0.1, fused=True)
        for make, p in ((ShardedAdamW, mine), (AdamW, others))
    )
    for with_gradient in ((0,), (0,), (0, 1), (1,), (0, 1)):
        for at in range(2):
            gradient = torch.randn_like(mine[at]) if at in with_gradient else None
            mine[at].grad, others[at].grad = gradient, None if gradient is None else gradient.clone()
        for group in (*ours.param_groups, *theirs.param_groups):
            group["lr"] *= 0.9
        ours.step()
        theirs.step()
        assert all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))
    assert [ours.state[p]["step"].item() for p in mine] == [4, 3]


def test_gradients_are_no_part_of_a_graph():
    parameter = nn.Parameter(torch.randn(3))
    parameter.grad = torch.ones(3)
    without = nn.Parameter(torch.randn(3))
    (found,) = local_gradients([parameter, without])
    assert found is parameter.grad
