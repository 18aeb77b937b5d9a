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
