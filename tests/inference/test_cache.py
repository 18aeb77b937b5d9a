"""The cache keeps every token once, on the worker that holds it."""

from __future__ import annotations

import pytest
import torch
from model.tiny_models import tiny_model

from mtrain_cli.inference.cache import KvCache, StoringAttention, capacity_for, most_held
from mtrain_cli.parallel.layout import make_layout

MODEL = tiny_model(num_layers=2)


def cache(batch: int = 2, capacity: int = 5) -> KvCache:
    return KvCache(MODEL, batch, capacity, torch.float32, torch.device("cpu"))


def keys(tokens: int, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, tokens, MODEL.num_kv_heads, MODEL.head_dim)


def test_prompts_and_tokens_lie_one_after_another():
    found, first, second = cache(), keys(3), keys(1)
    for layer in range(2):
        found.store(layer, 0, first, -first)
        found.store(layer, 1, second, -second)
    found.used[0], found.used[1] = 3, 1
    token = keys(1, batch=2)
    slots = found.take_token(torch.tensor([True]))
    assert slots.tolist() == [3, 1]
    found.append(1, token, -token, slots)
    assert found.used.tolist() == [4, 2]
    assert torch.equal(found.keys[1][0, :4], torch.cat([first[0], token[0]]))
    assert torch.equal(found.values[1][1, :2], -torch.cat([second[0], token[1]]))
    assert not found.keys[0][0, 3].any()


def test_the_token_of_another_worker_does_not_count():
    found, prompt = cache(), keys(5)
    found.store(0, 0, prompt, prompt)
    found.used[0] = 5
    for mine, used in ((False, [5, 0]), (False, [5, 0]), (True, [6, 1])):
        token = keys(1, batch=2)
        found.append(0, token, token, found.take_token(torch.tensor([mine])))
        assert found.used.tolist() == used
    assert torch.equal(found.keys[0][0, :5], prompt[0])
    assert torch.equal(found.keys[0][1, 0], token[1, 0])
    assert not found.keys[0][1, 1:].any()


def test_reset_forgets_all_sequences():
    found = cache()
    found.take_token(torch.tensor([True]))
    found.reset()
    assert found.used.tolist() == [0, 0]
    assert (found.batch, found.capacity) == (2, 5)


def test_a_prompt_longer_than_the_capacity_is_an_error():
    with pytest.raises(AssertionError):
        cache().store(0, 0, keys(6), keys(6))


@pytest.mark.parametrize(
    ("held", "max_new", "workers", "capacity"),
    [([7, 3], 1, 1, 7), ([7, 3], 4, 1, 10), ([0], 1, 4, 1), ([5], 5, 4, 6), ([5], 6, 4, 7)],
)
def test_the_capacity_has_room_for_all_tokens_but_the_last(held, max_new, workers, capacity):
    assert capacity_for(held, max_new, workers) == capacity


def test_prompts_are_stored_then_computed_then_released():
    calls: list = []
    q, k, v = (torch.full((1,), value) for value in (1.0, 2.0, 3.0))

    def attend(*given):
        calls.append(("attend", *given))
        return q

    storing = StoringAttention(
        attend,
        lambda layer: calls.append(("release", layer)),
        lambda *given: calls.append(("store", *given)),
    )
    assert storing(q, k, v, 4) is q
    assert calls == [("store", 4, k, v), ("attend", q, k, v, 4), ("release", 4)]


def test_the_worker_with_most_tokens_gives_the_capacity_of_all():
    # Worker 0 holds 2,048 tokens of both prompts, worker 1 1,952 of the shorter one.
    layout = make_layout("striped", 2, 4096, 128)
    assert [int((layout.positions(rank) < 4000).sum()) for rank in range(2)] == [2048, 1952]
    assert most_held(layout, 4000) == most_held(layout, 4090) == 2048
