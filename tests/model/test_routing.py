"""The decisions, the losses and the logits of routers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from moe_models import moe_model
from torch.nn import functional

from mtrain_cli.model import routing as routing_module
from mtrain_cli.model.routing import (
    PADDING,
    RouterOptions,
    Routing,
    SharingGroup,
    choose,
    decide_alone,
    part_of,
    router_logits,
)

SEQ, LENGTHS, E = 8, (8, 5), 6


def routing(settings: dict, **options) -> Routing:
    """Two sequences; the second has three tokens of padding."""
    slots = torch.arange(2 * SEQ).view(2, SEQ)
    slots = torch.where(torch.arange(SEQ) < torch.tensor(LENGTHS)[:, None], slots, PADDING)
    moe = moe_model(moe=settings).moe
    return Routing(slots, LENGTHS, SEQ, moe, 3, RouterOptions(sequences=4, **options))


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(
    ("scores", "bias", "triton", "by_kernel"),
    [
        (torch.float32, torch.float32, True, True),
        (torch.float32, torch.float32, False, False),
        (torch.float64, torch.float32, True, False),
        (torch.float32, torch.float64, True, False),
        (torch.float64, torch.float64, True, False),
    ],
)
def test_a_kernel_chooses_only_float32_scores_on_a_gpu(
    monkeypatch, scores, bias, triton, by_kernel
):
    pytest.importorskip("triton")
    from mtrain_cli.kernels.triton import router

    monkeypatch.setattr(router, "chosen_experts", lambda *_: "by the kernel")
    monkeypatch.setattr(routing_module, "has_triton", lambda: triton)
    scores_TE = torch.tensor([[0.1, 0.3, 0.2]], dtype=scores).as_subclass(OnGpu)
    found = choose(scores_TE, torch.tensor([0.5, 0.0, 0.0], dtype=bias), 1)
    assert found == "by the kernel" if by_kernel else found.tolist() == [[0]]


def logits(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2 * SEQ, E, dtype=torch.float64, generator=generator)


def scored(values: torch.Tensor, settings: dict) -> torch.Tensor:
    return values.sigmoid() if settings.get("score") == "sigmoid" else values.softmax(-1)


def by_definition(values, chosen, settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two losses, summed over sequences, token by token."""
    scores, balance, z = scored(values, settings), 0.0, 0.0
    for number, length in enumerate(LENGTHS):
        rows = range(number * SEQ, number * SEQ + length)
        f, p = [0.0] * E, [0.0] * E
        for row in rows:
            for expert in chosen[row].tolist():
                f[expert] += E / (chosen.shape[1] * length)
            for expert in range(E):
                p[expert] = p[expert] + scores[row, expert] / scores[row].sum() / length
            z = z + values[row].exp().sum().log() ** 2 / length
        balance = balance + sum(a * b for a, b in zip(f, p, strict=True))
    return balance, z


@pytest.mark.parametrize("settings", [{}, {"score": "sigmoid", "top_k": 3}], ids=str)
def test_losses_and_their_gradients_are_the_definition(settings):
    given = routing(settings, balance_loss=0.3, z_loss=0.05)
    values, again = logits().requires_grad_(), logits().requires_grad_()
    chosen = scored(values, settings).topk(given.moe.top_k).indices
    decision = given.decide(chosen, 1)
    loss = given.loss(values, scored(values, settings), decision, 1, count=True)
    balance, z = by_definition(again, chosen, settings)
    torch.testing.assert_close(loss, (0.3 * balance + 0.05 * z) / 4, rtol=1e-12, atol=0)
    found = torch.autograd.grad(loss, values)[0]
    wanted = torch.autograd.grad((0.3 * balance + 0.05 * z) / 4, again)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-15)
    torch.testing.assert_close(
        given.loads[1, E : E + 2], torch.stack([balance, z]).detach(), rtol=1e-12, atol=0
    )
    real = [row for row in range(16) if row % SEQ < LENGTHS[row // SEQ]]
    shares = scored(logits(), settings)
    shares = shares / shares.sum(-1, keepdim=True)
    entropy = sum(float(-(shares[r] * shares[r].log()).sum()) / LENGTHS[r // SEQ] for r in real)
    assert float(given.loads[1, E + 2]) == pytest.approx(entropy, rel=1e-6)
    assert given.loads[1, :E].tolist() == chosen[real].flatten().bincount(minlength=E).tolist()
    assert given.loads[[0, 2]].abs().max() == 0


def test_padding_is_not_computed_and_pairs_are_ordered_by_expert():
    given = routing({})
    chosen = logits().topk(2).indices
    decision = given.decide(chosen, 0)
    experts = chosen.flatten()[decision.order_S]
    real = int(decision.ends_E[-1])
    assert real == sum(LENGTHS) * 2
    assert experts[:real].tolist() == sorted(experts[:real].tolist())
    assert all(int(s) // 2 - SEQ >= LENGTHS[1] for s in decision.order_S[real:])
    assert torch.equal(decision.order_S[decision.place_S], torch.arange(32))


@pytest.mark.parametrize("experts", [6, 128])
def test_of_equal_experts_the_first_are_chosen(experts):
    scores, bias = torch.full((40, experts), 0.25), torch.zeros(experts)
    assert choose(scores, bias, 3).tolist() == [[0, 1, 2]] * 40
    scores[:, experts // 2 :] = 0.5
    bias[-1] = 1.0
    expected = [experts - 1, experts // 2, experts // 2 + 1]
    assert choose(scores, bias, 3).tolist() == [expected] * 40


class Meeting:
    """Threads that play the workers of a group exchange values in rank order."""

    def __init__(self, size: int) -> None:
        self.values, self.barrier = [torch.empty(0)] * size, threading.Barrier(size, timeout=20)

    def exchange(self, rank: int, value: torch.Tensor) -> torch.Tensor:
        self.values[rank] = value.clone()
        self.barrier.wait()
        values = torch.stack(self.values)
        self.barrier.wait()
        return values


@pytest.mark.parametrize(("inner", "outer"), [(2, 3), (3, 2), (1, 4)])
def test_workers_of_two_groups_add_up_the_loads_of_one_worker(monkeypatch, inner, outer):
    """As with tensor parallelism inside context parallelism. Tokens are dealt one by one."""
    monkeypatch.setattr(
        routing_module.dist,
        "all_reduce",
        lambda own, group: own.copy_(group[0](group[1], own).sum(0)),
    )
    workers, moe = inner * outer, moe_model().moe
    seq, options = 12 * workers, RouterOptions(sequences=1)
    generator = torch.Generator().manual_seed(3)
    chosen = torch.randn(seq, moe.experts, generator=generator).topk(moe.top_k).indices

    def decided(slots, groups=()):
        given = Routing(slots[None], [seq], seq, moe, 1, options, groups)
        return given.decide(chosen[slots], 0).load_BE

    within = [Meeting(inner).exchange for _ in range(outer)]
    across = [Meeting(outer).exchange for _ in range(inner)]

    def of_worker(number):
        o, i = divmod(number, inner)
        groups = [
            SharingGroup((within[o], i), nullcontext),
            SharingGroup((across[i], o), nullcontext),
        ]
        return decided(torch.arange(number, seq, workers), groups)

    with ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(of_worker, range(workers)))
    load = decided(torch.arange(seq))
    for shared_load in found:
        torch.testing.assert_close(shared_load, load)


def test_a_part_of_a_decision_has_the_pairs_of_its_tokens():
    chosen = torch.tensor([[0, 2], [2, 1], [2, 0], [1, 2]])
    whole = decide_alone(chosen, 4)
    assert whole.order_S.tolist() == [0, 5, 3, 6, 1, 2, 4, 7]
    # No expert computes the last pair, as with padding.
    whole = whole._replace(ends_E=torch.tensor([2, 4, 7, 7], dtype=torch.int32))
    part = part_of(whole, 2, 4)
    assert part.chosen_TK.tolist() == [[2, 0], [1, 2]]
    assert part.order_S.tolist() == [1, 2, 0, 3], "padding comes last"
    assert part.place_S.tolist() == [2, 0, 1, 3]
    assert part.ends_E.tolist() == [1, 2, 3, 3]
    for name, value in part_of(whole, 0, 4)._asdict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, getattr(whole, name)), name


TOKENS, HIDDEN, EXPERTS = 37, 64, 6


@pytest.fixture
def as_on_gpus(monkeypatch):
    """Take the way of GPUs. A float32 product of the same numbers is that of tensor cores."""
    monkeypatch.setattr(routing_module, "_on_tensor_cores", lambda x, _: x.dtype == torch.bfloat16)


def tensors(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = (TOKENS, HIDDEN), (EXPERTS, HIDDEN), (TOKENS, EXPERTS)
    x, weight, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), grad * 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logits_and_gradients_equal_a_linear_layer_in_high_precision(dtype):
    x, weight, grad = tensors(dtype)
    high = torch.promote_types(dtype, torch.float32)
    found = router_logits(x, weight)
    again = [each.detach().clone().requires_grad_() for each in (x, weight)]
    wanted = functional.linear(*(each.to(high) for each in again))
    assert found.dtype == high
    assert torch.equal(found, wanted)
    found.backward(grad.to(high))
    wanted.backward(grad.to(high))
    for given, other in zip((x, weight), again, strict=True):
        assert torch.equal(given.grad, other.grad)


@pytest.mark.usefixtures("as_on_gpus")
def test_the_way_of_gpus_rounds_gradients_only_once():
    x, weight, grad = tensors(torch.bfloat16)
    out = router_logits(x, weight)
    torch.testing.assert_close(out, x.float() @ weight.float().t())
    out.backward(grad)
    exact = [grad.double() @ weight.double(), grad.double().t() @ x.double()]
    for given, wanted in zip((x, weight), exact, strict=True):
        assert given.grad.dtype == torch.bfloat16
        once = wanted.bfloat16()
        # One rounding: at most a neighbour where the exact value lies between two numbers.
        assert (given.grad != once).float().mean() < 0.02
        torch.testing.assert_close(given.grad, once, rtol=2**-7, atol=1e-9)


@pytest.mark.usefixtures("as_on_gpus")
def test_autograd_keeps_only_the_inputs():
    x, weight, _ = tensors(torch.bfloat16)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        router_logits(x, weight)
    assert {each.data_ptr() for each in kept} == {x.data_ptr(), weight.data_ptr()}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensor_cores_give_the_logits_of_float32():
    x, weight, grad = (each.detach().cuda() for each in tensors(torch.bfloat16))
    x.requires_grad_(), weight.requires_grad_()
    out = router_logits(x, weight)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-4)
    out.backward(grad)
    exact = grad.double() @ weight.double(), grad.double().t() @ x.double()
    for given, wanted in zip((x, weight), exact, strict=True):
        torch.testing.assert_close(given.grad, wanted.bfloat16(), rtol=2**-7, atol=1e-8)
