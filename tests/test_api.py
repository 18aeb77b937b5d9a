"""The Python interface gives what the command line gives."""

from __future__ import annotations

import dataclasses
import sys
import warnings
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
        (lambda m: m.generate("a", temperature=-1), "temperature=-1: must be 0"),
        (lambda m: m.generate("a", max_new=9999), "max_new=9999"),
        (lambda m: m.generate("a", max_new="3"), "max_new='3': must be a whole number"),
        (lambda m: m.generate("a", temperature="hot"), "temperature='hot': must be a number"),
        (lambda m: m.generate(None), "prompts=None: must be a text, token ids"),
        (lambda m: m.generate("a", beyond="no"), "beyond='no': must be True or False"),
        (lambda m: m.token_losses(None), "tokens=None: must be a text or token ids"),
        (lambda m: m.token_losses("a" * 9999), "more than the 4,096 positions of the model. Give a "
         "shorter prompt, or add beyond=True to go on anyway"),
        (lambda m: m.encode(3), "text=3: must be a text"),
        (lambda _: api.compose(3), "override=3: must be a text"),
        (lambda _: api.train("x"), "config='x': must be a configuration"),
        (lambda _: api.load(None), "path=None: must be a path"),
        (lambda m: load(m.source.path, attention="foo"), "attention=foo: no such pattern; allowed: "
         "dense"),
        (lambda m: api.load(m.source.path, "sparsity=moba", attention="dense"),
         "attention=dense: sparsity=moba gives a pattern, too"),
        (lambda m: load(m.source.path, tokenizer="no"), "tokenizer=no: no such folder"),
        (lambda m: m.generate([[1, 5000]]), "the id 5000 at token 2"),
        (lambda m: m.token_losses("a"), "tokens: has 1 token; give at least 2"),
        (lambda m: m.token_scores([]), "tokens: has 0 tokens; give at least 2"),
    ],
)  # fmt: skip
def test_mistakes_raise_config_errors(folder, call, problem):
    with pytest.raises(api.ConfigError) as raised:
        call(load(folder / "run"))
    (line,) = raised.value.problems
    assert problem in line
    assert "--" not in line


def test_a_prefix_lm_generates_but_has_no_losses(tmp_path):
    write_run(tmp_path / "prefix", "mask=prefix_lm", "mask.prefix=48")
    model = load(tmp_path / "prefix")
    assert len(model.generate("a", max_new=3, ignore_end=True)[0].ids) == 3
    with pytest.raises(api.ConfigError, match=r"prefix 48: a score needs the loss of each"):
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


def test_an_older_checkpoint_is_used_with_a_warning(tmp_path):
    write_run(tmp_path / "run", steps=(3, 5))
    newest = tmp_path / "run/checkpoints/step-5"
    expected = load(newest.parent / "step-3").generate([1, 2], max_new=4)
    assert load(newest).generate([1, 2], max_new=4) != expected
    for file in newest.glob("*.distcp"):
        file.write_bytes(b"")
    with pytest.warns(UserWarning, match="step-5: .*; using the previous checkpoint instead"):
        damaged = load(tmp_path / "run")
    (newest / "manifest.json").unlink()
    with pytest.warns(UserWarning, match="step-5: is incomplete; using step-3 instead"):
        incomplete = load(tmp_path / "run")
    assert damaged.generate([1, 2], max_new=4) == expected
    assert incomplete.generate([1, 2], max_new=4) == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(newest.parent / "step-3")  # as asked


def test_lm_eval_needs_its_package(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "mtrain_extras.lm_eval.model", None)
    with pytest.raises(api.ConfigError, match=r"lm_eval: needs the package lm-eval: pip install"):
        load(folder / "run").lm_eval()


def test_a_request_of_lm_eval_is_refused_with_the_names_of_python(folder):
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    model = load(folder / "run").lm_eval()
    settings = {"temperature": -1, "do_sample": True}
    for arguments, problem in (
        (("a" * 5000, {}), "or add beyond=True to go on anyway"),
        (("a", settings), "temperature=-1: must be 0"),
    ):
        with pytest.raises(api.ConfigError, match=problem):
            model.generate_until([instance("generate_until", {}, arguments, 0)])


def settings_of_a_group(rank: int, world: int, folder: str) -> tuple:
    del rank, world
    half = "topology.tensor_parallel=2"
    shared = api.load(Path(folder), "train.kernel=sdpa", half, "topology.workers=4", device="cpu")
    refused = []
    for words in (("topology.workers=2",), ("topology.tensor_parallel=3",)):
        with pytest.raises(api.ConfigError) as error:
            api.load(Path(folder), *words, device="cpu")
        refused.append(str(error.value))
    dims = shared._engine.environment.dims
    return dims.tp, dims.cp, shared.generate(tokens(9), max_new=5)[0].ids, *refused


def test_processes_of_a_group_share_layers_if_asked(folder):
    expected = load(folder / "hf").generate(tokens(9), max_new=5)[0].ids
    for tp, cp, ids, workers, tensor in gloo.run(4, settings_of_a_group, str(folder / "hf")):
        assert (tp, cp, ids) == (2, 2, expected)
        assert workers.startswith("topology.workers=2: torchrun started 4 processes")
        assert "topology.tensor_parallel=3: must divide" in tensor


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
