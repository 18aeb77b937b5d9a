"""AdamW on a worker's shards equals PyTorch's AdamW bitwise; learning-rate schedules."""

from __future__ import annotations

import copy

import gloo
import pytest
import torch
from slow_cases import mostly_slow
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from training.test_sparse_training import trainer

from mtrain_cli.composition.compose import compose
from mtrain_cli.training.optimizer import (
    LearningRateSchedule,
    ShardedAdamW,
    local_gradients,
)


def compare_with_pytorch(rank: int, world: int, offload: bool) -> dict[str, bool]:
    """Train with PyTorch's optimizer and with ours, resuming in between; compare bitwise."""
    words = [
        "sparsity=vertical_slash",
        f"optim.offload={str(offload).lower()}",
        "optim.weight_decay=0.3",
    ]
    ours, reference = (trainer(rank, world, world, words) for _ in range(2))
    assert type(ours.optimizer) is ShardedAdamW
    of = reference.states
    of.optimizer = AdamW([{**group, "fused": True} for group in reference.optimizer.param_groups])
    for at in range(4):
        if at == 2:
            ours.optimizer.load_state_dict(copy.deepcopy(reference.optimizer.state_dict()))
        for one in (ours, reference):
            one.train_step(False)
    pairs = [
        (a, b)
        for our_group, other_group in zip(
            ours.optimizer.param_groups, reference.optimizer.param_groups, strict=True
        )
        for a, b in zip(our_group["params"], other_group["params"], strict=True)
    ]
    states = [(ours.optimizer.state[a], reference.optimizer.state[b]) for a, b in pairs]
    return {
        "weights": all(torch.equal(whole(a), whole(b)) for a, b in pairs),
        "states": all(
            torch.equal(whole(a[name]), whole(b[name]))
            for a, b in states
            for name in ("exp_avg", "exp_avg_sq", "step")
        ),
        "kinds": all(type(a["exp_avg"]) is type(b["exp_avg"]) for a, b in states),
        "four steps": all(a["step"].item() == 4 for a, _ in states),
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


@mostly_slow("offload", [False, True], keep=(1,))
def test_weights_and_states_equal_pytorchs_bitwise(offload):
    for results in gloo.run(2, compare_with_pytorch, offload):
        assert all(results.values()), results


def test_a_parameter_without_gradient_is_unchanged_and_may_get_one_later():
    torch.manual_seed(0)
    parameters, others = (
        [nn.Parameter(t.clone()) for t in start]
        for start in [[torch.randn(3, 4), torch.randn(5)]] * 2
    )
    ours, reference = (
        make([{"params": p[:1], "weight_decay": 0.2}, {"params": p[1:]}], lr=0.1, fused=True)
        for make, p in ((ShardedAdamW, parameters), (AdamW, others))
    )
    for with_gradient in ((0,), (0,), (0, 1), (1,), (0, 1)):
        for at in range(2):
            gradient = torch.randn_like(parameters[at]) if at in with_gradient else None
            parameters[at].grad, others[at].grad = (
                gradient,
                None if gradient is None else gradient.clone(),
            )
        for group in (*ours.param_groups, *reference.param_groups):
            group["lr"] *= 0.9
        ours.step()
        reference.step()
        assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))
    assert [ours.state[p]["step"].item() for p in parameters] == [4, 3]


def test_local_gradients_are_not_part_of_a_graph():
    parameter = nn.Parameter(torch.randn(3))
    parameter.grad = torch.ones(3)
    without = nn.Parameter(torch.randn(3))
    (gradient,) = local_gradients([parameter, without])
    assert gradient is parameter.grad


def rates(*words: str, steps: int = 100) -> list[float]:
    schedule = LearningRateSchedule.of(
        compose(
            [
                "optim.warmup_steps=10",
                "optim.min_lr_ratio=0.1",
                "optim.lr=1.0",
                "train.steps=100",
                *words,
            ]
        )
    )
    return [schedule.rate(step) for step in range(steps)]


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
def test_the_learning_rate_warms_up_and_ends_at_its_floor(kind):
    results = rates(f"optim.schedule={kind}", steps=150)
    assert results[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert max(results) == pytest.approx(1.0)
    assert results[9:99] == sorted(results[9:99], reverse=True), "it never rises again"
    floor = 1.0 if kind == "constant" else 0.1
    assert results[99:] == pytest.approx([floor] * 51), "the rate stays after the last step"
    assert (results[98] > floor) == (kind != "constant")


@pytest.mark.parametrize("begin", [0, 40])
@pytest.mark.parametrize(
    ("steps", "falls", "end"),
    [
        (10, False, "1.00e+00"),
        (11, False, "1.00e+00"),
        (12, True, "9.90e-01"),
        (99, True, "1.10e-01"),
        (100, True, ""),
    ],
)
def test_the_description_says_where_a_short_run_ends(begin, steps, falls, end):
    """The rate is at its peak until step 11 of the schedule, and at its floor in step 100."""
    schedule = LearningRateSchedule(
        kind="linear", peak=1.0, ratio=0.1, warmup=10, begin=begin, steps=100, decay=89
    )
    fall = f", decay to 1.00e-01 from step {begin + 11} to step {begin + 100}"
    stop = f"; train.steps={begin + steps} ends the run at {end}"
    first = f"linear{', from step 41' if begin else ''}: warm up over 10 steps to a peak of "
    expected = f"{first}1.00e+00{fall * falls}{stop * bool(end)}"
    assert schedule.describe(begin + steps) == expected


def test_each_schedule_has_its_shape():
    assert rates("optim.schedule=cosine")[10 + 89 // 2] == pytest.approx(0.55, abs=0.01)
    linear = rates("optim.schedule=linear")
    assert (
        linear[11] - linear[12] == pytest.approx(linear[80] - linear[81]) == pytest.approx(0.9 / 89)
    )
    wsd = rates("optim.schedule=wsd", "optim.decay_steps=20")
    assert wsd[79] == 1.0 > wsd[80]
    assert wsd[89] == pytest.approx(0.55)
    assert rates("optim.schedule=wsd")[81] == 1.0 > rates("optim.schedule=wsd")[82], (
        "the last 20 % of the 89 steps after the warm-up"
    )
    whole = rates("optim.schedule=wsd", "optim.decay_steps=89")
    assert whole[10] == 1.0 > whole[11], "the decay fills the steps after the warm-up"
    assert whole[99] == pytest.approx(0.1)
    short = rates("optim.schedule=linear", "optim.decay_steps=40")
    assert short[50:] == pytest.approx([0.1] * 50)
    assert short[30] == pytest.approx(0.55)
