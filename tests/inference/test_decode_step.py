"""The cache keeps each token once; steps leave tensors in place and equal those without a batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from inference.small_models import engine, tokens, write_hf
from model.tiny_models import tiny_model

from mtrain_cli.inference.engine import DecodeStep, Engine, KvCache
from mtrain_cli.inference.sampling import Sampling

NEW = 4


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


def test_a_prompt_longer_than_the_capacity_is_an_error():
    with pytest.raises(AssertionError):
        cache().store(0, 0, keys(6), keys(6))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> Engine:
    return engine(write_hf(tmp_path_factory.mktemp("model") / "hf"))


def begun(loaded: Engine, prompts: list[list[int]], batch: int) -> tuple[DecodeStep, KvCache]:
    """Return a step after the first token of each prompt."""
    cache = KvCache(loaded.config.model, batch, 60, torch.float32, loaded.device)
    step = DecodeStep(loaded.decoder, cache, loaded.choices.kernel, loaded.group, Sampling(), NEW)
    begin(loaded, step, cache, prompts)
    return step, cache


def begin(loaded: Engine, step: DecodeStep, cache: KvCache, prompts: list[list[int]]) -> None:
    cache.used.zero_()
    logits = torch.cat([loaded.prefill(ids, cache, row) for row, ids in enumerate(prompts)])
    step.begin(logits, [len(ids) for ids in prompts], [np.zeros(NEW) for _ in prompts])


def run(step: DecodeStep) -> list[list[int]]:
    found = [step.tokens[:, 0].tolist()]
    for _ in range(NEW - 1):
        step.run()
        found.append(step.tokens[:, 0].tolist())
    return [list(row) for row in zip(*found, strict=True)]


def test_a_step_moves_each_sequence_by_one(loaded):
    prompts = [tokens(30), tokens(9)]
    step, cache = begun(loaded, prompts, batch=2)
    assert step.positions[:, 0].tolist() == [30, 9]
    assert cache.used.tolist() == [30, 9]
    first = step.tokens[:, 0].tolist()
    step.run()
    assert step.positions[:, 0].tolist() == [31, 10]
    assert cache.used.tolist() == [31, 10]
    assert step.tokens[:, 0].tolist() != first


def test_a_later_step_does_not_change_a_copy_of_the_tokens(loaded):
    step, _ = begun(loaded, [tokens(30), tokens(9)], batch=2)
    chosen = step.tokens[:, 0].tolist()
    copied = step.copy_tokens()
    step.run()
    assert copied() == chosen
    assert step.copy_tokens()() != chosen


def test_a_graph_could_replay_the_steps(loaded):
    """A graph reads and writes fixed memory, so no step may replace a tensor of its input."""
    step, cache = begun(loaded, [tokens(30)], batch=1)
    state = [step.tokens, step.positions, cache.used, *cache.keys, *cache.values]
    places = [tensor.data_ptr() for tensor in state]
    ids = run(step)
    again = [step.tokens, step.positions, cache.used, *cache.keys, *cache.values]
    assert [tensor.data_ptr() for tensor in again] == places
    assert ids == run(begun(loaded, [tokens(30)], batch=1)[0])


def test_a_step_serves_one_batch_after_another_and_rows_without_a_prompt(loaded):
    first, second = [tokens(30), tokens(9)], [tokens(12)]
    step, cache = begun(loaded, first, batch=2)
    run(step)
    begin(loaded, step, cache, second)
    assert cache.used.tolist() == [12, 0]
    assert run(step)[0] == run(begun(loaded, second, batch=1)[0])[0]


def test_samples_use_the_random_number_of_their_token(loaded):
    sampling = Sampling(temperature=1.0, seed=2)
    ids = tokens(20)
    completion = next(loaded.generate([ids], NEW, sampling))
    uniforms, whole = sampling.uniforms(0, NEW), list(ids)
    for number in range(NEW):
        x_1NC, _ = loaded.hidden(whole)
        logits = loaded.decoder.head(x_1NC[:, len(whole) - 1])
        whole.append(int(sampling.choose(logits, torch.tensor([uniforms[number]]))))
    assert completion.ids == whole[len(ids) :]
