"""A path names a Hugging Face folder, a run or a checkpoint, with the settings of its training."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from inference.small_models import source, write_hf, write_run
from model.tiny_models import LLAMA3, YARN, export, make_decoder, tiny_model
from training.allocations import LiveBytes

from mtrain_cli.config import resolved_file
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.inference.model_source import load_decoder, open_source
from mtrain_cli.model.huggingface import HuggingFaceFolder
from mtrain_cli.training.checkpointer import load_model_state

CPU = torch.device("cpu")


def loaded(found, dtype=torch.float32):
    return dict(load_decoder(found, dtype, CPU)[0].named_parameters())


def test_a_folder_is_dense_and_has_its_weights(tmp_path):
    found = source(write_hf(tmp_path / "hf"))
    assert (found.is_folder, found.config.sparsity.pattern) == (True, "dense")
    assert found.config.topology.workers == 1
    assert found.config.layout == "zigzag"  # the fastest for a prompt, which is one document
    folder = HuggingFaceFolder(tmp_path / "hf")
    for name, parameter in loaded(found).items():
        assert torch.equal(parameter, folder.read(name))
        assert not parameter.requires_grad
    assert {p.dtype for p in loaded(found, torch.bfloat16).values()} == {torch.bfloat16}


@pytest.mark.parametrize("write", [write_hf, write_run])
def test_weights_are_read_one_by_one_into_their_dtype(tmp_path, write):
    """No second copy of the model is in memory, not even in the dtype of the file."""
    write(tmp_path / "model")
    found = source(tmp_path / "model")
    with LiveBytes([]) as live:
        weights = loaded(found, torch.bfloat16)
    largest = max(weight.numel() for weight in weights.values())
    whole = sum(weight.numel() for weight in weights.values())
    assert largest < whole / 2
    assert live.peak < torch.bfloat16.itemsize * whole + torch.float32.itemsize * largest + 1024
    for name, weight in loaded(found).items():
        assert torch.equal(weights[name], weight.bfloat16())


def test_the_length_of_the_model_limits_the_workers_and_cannot_change(tmp_path):
    """A folder of 64k positions has more blocks than the default seq."""
    export(tmp_path / "hf", tiny_model(rope=dataclasses.replace(YARN, original_max_position=2**16)))
    assert source(tmp_path / "hf", "topology.workers=400").config.topology.workers == 400
    write_run(tmp_path / "run")
    with pytest.raises(ConfigError) as caught:
        source(tmp_path / "run", "topology.workers=100")
    (line,) = caught.value.problems
    assert "seq=512 has only 4 such blocks for 100 workers; give fewer workers" in line
    assert "longer seq" not in line


@pytest.mark.parametrize("rope", [YARN, LLAMA3])
def test_the_rotary_factor_is_the_folders(tmp_path, rope):
    export(tmp_path / "hf", tiny_model(rope=rope))
    found = source(tmp_path / "hf")
    assert found.rope_factor == rope.factor
    expected = make_decoder(tiny_model(rope=rope))
    decoder, _ = load_decoder(found, torch.float32, CPU)
    assert decoder.attention_factor == expected.attention_factor
    assert torch.equal(decoder.inverse_frequencies_F, expected.inverse_frequencies_F)


def test_a_run_keeps_its_pattern_and_not_its_topology(tmp_path):
    config = write_run(tmp_path / "run", "sparsity=vertical_slash", "topology.workers=4")
    for path in ("run", "run/checkpoints", "run/checkpoints/step-3"):
        found = source(tmp_path / path)
        assert found.config.sparsity == config.sparsity
        assert found.config.topology.workers == 1
        assert found.config.model == config.model
    _, state = load_model_state(tmp_path / "run")
    assert all(torch.equal(p, state[name]) for name, p in loaded(found).items())
    dense = source(tmp_path / "run", "sparsity=dense", "topology.workers=3")
    assert (dense.config.sparsity.pattern, dense.config.topology.workers) == ("dense", 3)
    assert source(tmp_path / "run", "sparsity.p_s=0.5").config.sparsity.p_s == 0.5


@pytest.mark.parametrize(
    "word",
    [
        "train.eval_every=2 data.eval_sequences=2",
        "train.deterministic=true train.dtype=float32",
        "train.global_batch=4 topology.workers=4 topology.context_parallel=1",
        "data=text data.path=corpus",
        "optim.offload=true topology.device=cuda",
        "profile.every=2",
    ],
)
def test_settings_of_training_alone_do_not_matter(tmp_path, monkeypatch, word):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    saved = write_run(tmp_path / "run", *word.split()).changed(train={"init_from": "gone"})
    resolved_file.save(saved, tmp_path / "run" / "resolved.yaml")
    (tmp_path / "corpus").rmdir()
    found = source(tmp_path / "run", "topology.workers=2").config
    assert (found.model, found.mask, found.data) == (saved.model, saved.mask, saved.data)
    assert found.train.eval_every == 0


def test_layers_are_compiled_only_on_request(tmp_path):
    write_run(tmp_path / "run", "train.compile=true")
    for words, compiled in (((), False), (("train.compile=true",), True)):
        decoder, _ = load_decoder(source(tmp_path / "run", *words), torch.float32, CPU)
        assert {layer.execution.compile for layer in decoder.layers} == {compiled}


def test_a_run_is_found_by_its_name(tmp_path, monkeypatch):
    write_run(tmp_path / "runs" / "mine")
    monkeypatch.chdir(tmp_path)
    assert open_source(Path("mine")).path == Path("runs/mine")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["seq=4k"], "seq=4k: the model gives this setting"),
        (["model.num_layers=1"], "model.num_layers=1: the model gives this setting"),
        (["train.steps=1"], "train.steps=1: the model gives this setting"),
        (["topology.context_parallel=1"], "topology.context_parallel=1: in `mtrain generate` and"),
        (["topology.expert_parallel=2"], "topology.expert_parallel=2: in `mtrain generate` and"),
        (["topology.expert_chunks=4"], "topology.expert_chunks=4: in `mtrain generate` and"),
        (
            ["topology.workers=3", "topology.pipeline_parallel=2"],
            "topology.pipeline_parallel=2: in `mtrain generate` and",
        ),
        (["topology.virtual_stages=2"], "topology.virtual_stages=2: in `mtrain generate` and"),
        (["sparsity=fixed"], "sparsity=fixed: chooses keys without regard to the prompt"),
        (["sparsity=vertical_slach"], "sparsity=vertical_slach: no such sparsity"),
        (["sparsity.p_s=2", "sparsity=vertical_slash"], "sparsity.p_s=2"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, words, problem):
    write_run(tmp_path / "run")
    for path in (tmp_path / "run", write_hf(tmp_path / "hf")):
        with pytest.raises(ConfigError) as raised:
            open_source(path, words)
        assert raised.value.problems[0].startswith(problem)


def test_a_run_of_a_synthetic_pattern_says_what_to_choose(tmp_path):
    write_run(tmp_path / "run", "sparsity=fixed")
    with pytest.raises(ConfigError, match="allowed: dense, vertical_slash, xattention, moba"):
        open_source(tmp_path / "run")
    assert source(tmp_path / "run", "sparsity=dense").config.sparsity.pattern == "dense"


@pytest.mark.parametrize(("name", "reason"), [("", "no model here"), ("nope", "no such folder")])
def test_a_path_without_a_model_is_refused(tmp_path, name, reason):
    with pytest.raises(ConfigError) as raised:
        open_source(tmp_path / name)
    (line,) = raised.value.problems
    assert line.startswith(f"{tmp_path / name}: {reason}. Give a Hugging Face folder")


def test_damaged_or_foreign_weights_are_refused(tmp_path):
    config = write_run(tmp_path / "run")
    found = source(tmp_path / "run")
    other = dataclasses.replace(config.model, num_layers=1)
    wrong = dataclasses.replace(found, config=dataclasses.replace(found.config, model=other))
    with pytest.raises(
        ConfigError, match=r"run: tensor layers\.1.* is in no model of .*resolved\.yaml"
    ):
        loaded(wrong)
    for file in (tmp_path / "run/checkpoints/step-3").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ConfigError, match="step-3"):
        loaded(found)
