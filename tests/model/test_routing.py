"""Losses of routers and capacities against their definitions, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from moe_models import moe_model

from mtrain_cli.model.routing import (
    PADDING,
    RouterOptions,
    Routing,
    _grouped,
    decide_alone,
    part_of,
)

SEQ, LENGTHS, E = 8, (8, 5), 6


def routing(settings: dict, **options) -> Routing:
    """Two sequences; the second has three tokens of padding."""
    slots = torch.arange(2 * SEQ).view(2, SEQ)
    slots = torch.where(torch.arange(SEQ) < torch.tensor(LENGTHS)[:, None], slots, PADDING)
    moe = moe_model(moe=settings).moe
    return Routing(slots, LENGTHS, SEQ, moe, 3, RouterOptions(sequences=4, **options))


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
    decision = given.decide(chosen, scored(values, settings).detach(), 1)
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


@pytest.mark.parametrize("z_loss", [0.0, 0.05])
def test_losses_do_not_depend_on_what_is_counted(z_loss):
    found = []
    for count in (False, True):
        given = routing({}, balance_loss=0.3, z_loss=z_loss)
        decision = given.decide(logits().topk(2).indices, scored(logits(), {}), 1)
        found.append(given.loss(logits(), scored(logits(), {}), decision, 1, count=count))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=0)


def test_pairs_of_many_experts_keep_their_order():
    keys = torch.tensor([[32_768, 0], [32_767, 1]])
    order, ends = _grouped(keys, 32_768)
    assert order.tolist() == [1, 3, 2, 0]
    assert (int(ends[0]), int(ends[-1])) == (1, 3)


def test_padding_is_not_computed_and_pairs_are_ordered_by_expert():
    given = routing({})
    chosen = logits().topk(2).indices
    decision = given.decide(chosen, logits(), 0)
    experts = chosen.flatten()[decision.order_S]
    real = int(decision.ends_E[-1])
    assert real == sum(LENGTHS) * 2
    assert experts[:real].tolist() == sorted(experts[:real].tolist())
    assert all(int(s) // 2 - SEQ >= LENGTHS[1] for s in decision.order_S[real:])
    assert torch.equal(decision.order_S[decision.place_S], torch.arange(32))


@pytest.mark.parametrize("equal_scores", [False, True])
def test_an_expert_computes_the_best_tokens_of_each_sequence(equal_scores):
    given = routing({}, capacity=0.7)
    scores = torch.full((2 * SEQ, E), 0.5) if equal_scores else logits().softmax(-1)
    chosen = logits().topk(2).indices
    decision = given.decide(chosen, scores, 0)
    kept = set(decision.order_S[: int(decision.ends_E[-1])].tolist())
    wanted = set()
    for number, length in enumerate(LENGTHS):
        for expert in range(E):
            pairs = [
                (-float(scores[row, expert]), row, 2 * row + k)
                for row in range(number * SEQ, number * SEQ + length)
                for k in range(2)
                if chosen[row, k] == expert
            ]
            most = math.ceil(0.7 * 2 * length / E)
            wanted |= {pair for _, _, pair in sorted(pairs)[:most]}
    assert kept == wanted
    dropped = 2 * sum(LENGTHS) - len(wanted)
    assert dropped > 0
    assert given.loads[0, -1] == dropped


def test_a_part_of_a_decision_has_the_pairs_of_its_tokens():
    chosen = torch.tensor([[0, 2], [2, 1], [2, 0], [1, 2]])
    whole = decide_alone(chosen, 4)
    assert whole.order_S.tolist() == [0, 5, 3, 6, 1, 2, 4, 7]
    # The last pair of expert 2 is beyond its capacity.
    whole = whole._replace(ends_E=torch.tensor([2, 4, 7, 7], dtype=torch.int32))
    part = part_of(whole, 2, 4)
    assert part.chosen_TK.tolist() == [[2, 0], [1, 2]]
    assert part.order_S.tolist() == [1, 2, 0, 3], "dropped pairs come last"
    assert part.place_S.tolist() == [2, 0, 1, 3]
    assert part.ends_E.tolist() == [1, 2, 3, 3]
    for name, value in part_of(whole, 0, 4)._asdict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, getattr(whole, name)), name
