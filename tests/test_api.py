"""The Python interface gives what the command line gives."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gloo
import numpy as np
import pytest
import torch
from inference.small_models import engine, tokens, write_hf, write_run

from mtrain_cli import api
from mtrain_cli.composition.compose import compose
from mtrain_cli.inference.sampling import Sampling


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_run(folder / "run")
    write_hf(folder / "hf")
    return folder


def load(path: Path, **options) -> api.Model:
    return api.load(path, "train.kernel=sdpa", device="cpu", **options)


def test_compose_is_that_of_the_command_line():
    words = ["seq=512", "sparsity=moba"]
    assert api.compose(*words) == compose(words)
    with pytest.raises(api.ConfigError, match="modl=x"):
        api.compose("modl=x")


def test_generate_takes_texts_ids_and_lists_of_them(folder):
    model = load(folder / "run")
    (one,) = model.generate("abc", max_new=5)
    assert (one.prompt_tokens, len(one.ids), one.finish) == (3, 5, "length")
    assert isinstance(one.text, str)
    ids = model.encode("abc")
    for same in (ids, np.array(ids), ["abc"], [ids]):
        assert model.generate(same, max_new=5) == [one]
    assert model.generate(["abc", "abcd"], max_new=5)[0] == one
    assert model.generate([]) == []


def test_sampling_is_that_of_the_engine(folder):
    prompts = [tokens(40), tokens(3)]
    found = load(folder / "hf").generate(
        prompts, max_new=6, temperature=0.8, top_p=0.9, top_k=30, seed=2
    )
    sampling = Sampling(0.8, 0.9, 30, 2)
    expected = list(engine(folder / "hf").generate(prompts, 6, sampling))
    assert [g.ids for g in found] == [c.ids for c in expected]
    assert [g.text for g in found] == [None, None]


def test_an_end_token_ends_a_text(folder, monkeypatch):
    model = load(folder / "run")
    (free,) = model.generate("abcd", max_new=6)
    codec = dataclasses.replace(model._codec, stop=frozenset([free.ids[1]]))
    monkeypatch.setattr(model, "_codec", codec)
    (ended,) = model.generate("abcd", max_new=6)
    assert ended.finish == "end"
    assert ended.ids == free.ids[: free.ids.index(free.ids[1])]
    assert model.generate("abcd", max_new=6, ignore_end=True) == [free]


def test_attention_and_losses(folder):
    ids = tokens(300)
    dense = load(folder / "hf").token_losses(ids)
    assert (dense.shape, dense.dtype) == ((299,), torch.float32)
    sparse = load(folder / "hf", attention="xattention")
    assert sparse.source.config.sparsity.pattern == "xattention"
    assert sparse.token_losses(ids).shape == (299,)
    text = load(folder / "run")
    greedy = text.generate("abcd", max_new=6, ignore_end=True)[0].ids
    wrong = [*greedy[:3], (greedy[3] + 1) % 256, *greedy[4:]]
    scores = text.token_scores([*b"abcd", *wrong])
    assert scores.is_greedy.dtype == torch.bool
    assert scores.is_greedy[3:7].tolist() == [True, True, True, False]
    assert torch.equal(scores.losses, text.token_losses([*b"abcd", *wrong]))
    assert torch.equal(text.token_losses("abc"), text.token_losses([97, 98, 99]))


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda m: m.generate("", max_new=3), "the prompt is empty"),
        (lambda m: m.generate("a", max_new=0), "max_new=0: must be at least 1"),
        (lambda m: m.generate("a", temperature=-1), "--temperature -1"),
        (lambda m: m.generate("a", max_new=9999), "--max-new 9999"),
        (lambda m: m.generate([[1, 5000]]), "the id 5000 at token 2"),
        (lambda m: m.token_losses("a"), "token_losses: 1 token; give at least 2"),
    ],
)
def test_mistakes_raise_config_errors(folder, call, problem):
    with pytest.raises(api.ConfigError) as raised:
        call(load(folder / "run"))
    assert problem in str(raised.value)


def test_a_prefix_lm_generates_but_has_no_losses(tmp_path):
    write_run(tmp_path / "prefix", "mask=prefix_lm", "mask.prefix=48")
    model = load(tmp_path / "prefix")
    assert len(model.generate("a", max_new=3, ignore_end=True)[0].ids) == 3
    with pytest.raises(api.ConfigError, match=r"prefix 48: token_losses needs the loss of each"):
        model.token_losses("abc")


def test_a_model_with_windows_has_losses_but_generates_only_short_texts(tmp_path):
    write_run(tmp_path / "windows", "mask=sliding_window", "mask.window=16")
    model = load(tmp_path / "windows")
    losses = model.token_losses(tokens(64))
    # A token's loss depends on the two layers' windows alone.
    changed = [*tokens(64, seed=1)[:20], *tokens(64)[20:]]
    assert torch.equal(losses[60:], model.token_losses(changed)[60:])
    with pytest.raises(api.ConfigError, match="with the new tokens, have at most 16 tokens"):
        model.generate([1] * 14, max_new=3)


def test_several_workers_need_processes(folder):
    with pytest.raises(api.ConfigError, match=r"topology\.workers=2: this process computes alone"):
        api.load(folder / "run", "topology.workers=2", device="cpu")


def in_a_group(rank: int, world: int, folder: str) -> tuple[list[int], list[float], list[bool]]:
    del rank, world
    model = load(Path(folder))
    ids = model.generate(tokens(300), max_new=5)[0].ids
    scores = model.token_scores(tokens(300) + ids)
    return ids, scores.losses.tolist(), scores.is_greedy.tolist()


def test_processes_of_a_group_share_each_prompt(folder):
    expected_ids, expected_losses, expected_hits = in_a_group(0, 1, str(folder / "hf"))
    assert all(expected_hits[-5:])
    assert not all(expected_hits)
    for ids, losses, hits in gloo.run(2, in_a_group, str(folder / "hf")):
        assert (ids, hits) == (expected_ids, expected_hits)
        np.testing.assert_allclose(losses, expected_losses, atol=2e-5)


@pytest.mark.slow
def test_a_trained_run_loads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    config = api.compose(
        "seq=256", "train.steps=2", "topology.workers=1", "topology.device=cpu", "run.name=mine"
    )
    path = api.train(config)
    assert path == tmp_path / "runs/mine"
    assert len(load(path).generate("def ", max_new=4)[0].ids) == 4
    with pytest.raises(api.ConfigError, match=r"run.name=mine"):
        api.train(config)
