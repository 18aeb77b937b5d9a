from __future__ import annotations

import json
import resource
import shutil
import sys
from pathlib import Path

import pytest
import torch
from commands.typed_line import split
from typer.testing import CliRunner

from mtrain_cli import install_command
from mtrain_cli.commands.app import app
from mtrain_cli.composition import compose
from mtrain_cli.config import resolved_file
from mtrain_cli.config.schema import ConfigError, ModelConfig
from mtrain_cli.model.decoder import Decoder
from mtrain_cli.model.huggingface import HuggingFaceFolder, load_into, write_folder
from mtrain_cli.model.parallelize import initialize
from mtrain_cli.training.checkpointer import Checkpointer, load_model_state, write_model_state

MODEL = split(
    "model.hidden_size=32 model.num_layers=2 model.head_dim=8", "model.intermediate_size=48"
)


def decoder_of(model: ModelConfig) -> Decoder:
    with torch.device("meta"):
        decoder = Decoder(model)
    decoder.to_empty(device="cpu")
    initialize(decoder, 0)
    return decoder


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    """Random bfloat16 weights."""
    model = compose.compose([*MODEL, "model.init_std=0.2"]).model
    weights = dict(decoder_of(model).named_parameters())
    write_folder(
        tmp_path / "hf",
        model,
        lambda names: {n: weights[n].detach() for n in names},
        rope_factor=1.0,
        seq=4096,
        dtype=torch.bfloat16,
    )
    return tmp_path / "hf"


def mtrain(*words: str | Path, code: int = 0) -> str:
    """Run a command and return its output on both streams."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, (result.output, result.exception)
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def test_import_then_export_preserves_the_weights(hf_folder, tmp_path):
    mtrain("checkpoint", "import", hf_folder, tmp_path / "run")
    _, state = load_model_state(tmp_path / "run")
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert torch.equal(
        state["norm.weight"], HuggingFaceFolder(hf_folder).read("norm.weight").float()
    )
    mtrain("checkpoint", "export", tmp_path / "run", tmp_path / "out")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (hf_folder / file).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out", "run"]


def test_a_given_checkpoint_is_exported(tmp_path):
    run = tmp_path / "run"
    config = compose.compose(MODEL)
    run.mkdir()
    resolved_file.save(config, run / "resolved.yaml")
    states = {}
    for step in (5, 10):
        states[step] = {
            name: value.detach() + step
            for name, value in decoder_of(config.model).named_parameters()
        }
        write_model_state(run / "checkpoints", step, states[step])
    for source, step in ((run / "checkpoints" / "step-5", 5), (run, 10), (run / "checkpoints", 10)):
        out = tmp_path / f"out-{source.name}"
        mtrain("checkpoint", "export", source, out, "--dtype", "float32")
        decoder = decoder_of(config.model)
        load_into(decoder, out)
        assert all(
            torch.equal(value, states[step][name]) for name, value in decoder.named_parameters()
        )


def test_verify_agrees_within_tolerance_and_fails_beyond_it(hf_folder, tmp_path):
    pytest.importorskip("transformers")
    output = mtrain("checkpoint", "verify", hf_folder, "--tokens", "1024")
    assert "agrees at tolerance 0.001" in output
    # Progress is printed first, since computing takes long for many tokens.
    assert output.startswith(
        "1 of 2: mtrain's logits of 1,024 tokens through 2 layers, in float32 on the CPU 2 of 2: "
        "transformers' logits"
    )
    mtrain("checkpoint", "import", hf_folder, tmp_path / "run")
    output = mtrain(
        "checkpoint", "verify", tmp_path / "run", *split("--tokens 32 --tolerance 1e-12"), code=1
    )
    assert "DISAGREES at tolerance 1e-12" in output
    assert "largest logit difference" in output
    assert "mean KL divergence" in output


def test_verify_fails_when_weights_are_not_numbers(hf_folder):
    pytest.importorskip("transformers")
    from safetensors.torch import load_file, save_file

    tensors = load_file(hf_folder / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, hf_folder / "model.safetensors", {"format": "pt"})
    (hf_folder / "SHA256SUMS").unlink()
    assert "DISAGREES" in mtrain("checkpoint", "verify", hf_folder, "--tokens", "8", code=1)


def test_verify_without_transformers_says_how_to_install_it(hf_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert install_command("hf") in mtrain("checkpoint", "verify", hf_folder, code=2)


def test_mistakes_are_one_line_and_leave_no_files(hf_folder, tmp_path):
    run = tmp_path / "run"
    assert "nowhere/config.json: no such file" in mtrain(
        "checkpoint", "import", tmp_path / "nowhere", run, code=2
    )
    weights = hf_folder / "model.safetensors"
    assert mtrain("checkpoint", "import", weights, run, code=2) == (
        f"mtrain: {weights}: is a file; give a Hugging Face folder"
    )
    weights.write_bytes(weights.read_bytes()[:-10])
    assert "truncated or corrupt safetensors" in mtrain(
        "checkpoint", "import", hf_folder, run, code=2
    )
    assert "not a run or a run's checkpoint" in mtrain(
        "checkpoint", "export", run, tmp_path / "out", code=2
    )
    assert "already exists" in mtrain("checkpoint", "export", run, hf_folder, code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("folder", ["run", "run/checkpoints"])
def test_a_run_without_a_checkpoint_is_refused(tmp_path, folder):
    (tmp_path / folder).mkdir(parents=True)
    resolved_file.save(compose.compose(MODEL), tmp_path / "run" / "resolved.yaml")
    holds_none = f"mtrain: {tmp_path / folder}: holds no checkpoint"
    assert mtrain("checkpoint", "export", tmp_path / "run", tmp_path / "out", code=2) == holds_none
    pytest.importorskip("transformers")
    assert mtrain("checkpoint", "verify", tmp_path / "run", code=2) == holds_none


def test_a_damaged_checkpoint_is_not_exported(hf_folder, tmp_path):
    mtrain("checkpoint", "import", hf_folder, tmp_path / "run")
    file = next((tmp_path / "run" / "checkpoints" / "step-0").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert f"{file.name} was altered" in mtrain(
        "checkpoint", "export", tmp_path / "run", tmp_path / "out", code=2
    )
    assert not (tmp_path / "out").exists()


def test_a_skipped_checkpoint_is_reported_with_the_step_used_instead(tmp_path):
    run = tmp_path / "run"
    config = compose.compose(MODEL)
    run.mkdir()
    resolved_file.save(config, run / "resolved.yaml")
    for step in (5, 10):
        write_model_state(
            run / "checkpoints",
            step,
            {name: value.detach() for name, value in decoder_of(config.model).named_parameters()},
        )
    next((run / "checkpoints/step-10").glob("*.distcp")).unlink()
    message = mtrain("checkpoint", "export", run, tmp_path / "out")
    assert (
        f"warning: {run / 'checkpoints/step-10'}: __0_0.distcp is missing; "
        "using the previous checkpoint instead" in message
    )
    assert f"Wrote {tmp_path / 'out'}: step 5, qwen2, bfloat16, " in message
    pytest.importorskip("transformers")
    message = mtrain("checkpoint", "verify", run, "--tokens", "8")
    assert f"warning: {run / 'checkpoints/step-10'}: __0_0.distcp is missing" in message
    assert f"{run}, step 5, in float32 on 8 random tokens" in message


def test_a_full_disk_is_one_error_line_and_leaves_no_files(hf_folder, tmp_path):
    mtrain("checkpoint", "import", hf_folder, tmp_path / "run")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        exported = mtrain("checkpoint", "export", tmp_path / "run", tmp_path / "out", code=1)
        imported = mtrain("checkpoint", "import", hf_folder, tmp_path / "again", code=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert exported.startswith(f"error: {tmp_path / 'out'}: could not be written (")
    assert (
        "the checkpoint of step 0 was not saved (File too large); there is no earlier checkpoint"
        in imported
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]


def test_export_keeps_the_tokenizer_of_an_imported_folder(hf_folder, tmp_path):
    mtrain("checkpoint", "import", hf_folder, tmp_path / "none")
    assert "no tokenizer: the imported folder has none" in mtrain(
        "checkpoint", "export", tmp_path / "none", tmp_path / "out-none"
    )
    (hf_folder / "tokenizer.json").write_text('{"added_tokens": [{"id": 7, "content": "<end>"}]}')
    (hf_folder / "tokenizer_config.json").write_text('{"eos_token": "<end>", "chat_template": "x"}')
    mtrain("checkpoint", "import", hf_folder, tmp_path / "run")
    mtrain("checkpoint", "export", tmp_path / "run", tmp_path / "out")
    for file in ("tokenizer.json",):
        assert (tmp_path / "out" / file).read_bytes() == (hf_folder / file).read_bytes()
    assert (
        json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["chat_template"] == "x"
    )
    assert ids_in(tmp_path / "out") == (None, 7, None)


def test_data_without_a_tokenizer_use_that_of_the_weights(hf_folder, tmp_path):
    (hf_folder / "tokenizer.json").write_text('{"added_tokens": [{"id": 7, "content": "<end>"}]}')
    (tmp_path / "ids.npy").touch()
    run = trained_run(
        tmp_path / "run",
        f"train.init_from={hf_folder}",
        "data=tokens",
        f"data.path={tmp_path / 'ids.npy'}",
    )
    assert mtrain("checkpoint", "export", run, tmp_path / "out").endswith(f"tokenizer: {hf_folder}")


def test_a_shape_unsupported_by_transformers_is_reported_first(tmp_path):
    shape = split(
        "model.family=llama model.qkv_bias=false model.num_heads=3", "model.num_kv_heads=1"
    )
    run = trained_run(tmp_path / "run", *shape)
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    (run / "checkpoints" / "step-1" / "manifest.json").write_text("{}")
    message = mtrain("checkpoint", "export", run, tmp_path / "out", code=2)
    assert "model.num_heads=3: must divide model.hidden_size=32 in a llama model" in message
    assert not (tmp_path / "out").exists()


def trained_run(run: Path, *words: str) -> Path:
    """A run trained to step 1, whose checkpoint also holds the trainer's state."""
    config = compose.compose([*MODEL, *words])
    run.mkdir()
    resolved_file.save(config, run / "resolved.yaml")
    weights = {name: value.detach() for name, value in decoder_of(config.model).named_parameters()}
    Checkpointer(run / "checkpoints", keep=1).save(
        1, {"model": weights, "trainer": {"step": 1}}, asynchronous=False
    )
    return run


def ids_in(folder: Path) -> tuple[object, ...]:
    config = json.loads((folder / "config.json").read_text())
    return tuple(config[f"{name}_token_id"] for name in ("bos", "eos", "pad"))


def test_a_flipped_bit_of_an_export_is_refused_by_import_verify_and_init_from(hf_folder, tmp_path):
    path = hf_folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    message = f"mtrain: {path}: has changed since the export, as its sha256 in SHA256SUMS shows."
    assert mtrain("checkpoint", "import", hf_folder, tmp_path / "run", code=2).startswith(message)
    assert not (tmp_path / "run").exists()
    assert mtrain("checkpoint", "verify", hf_folder, code=2).startswith(message)
    decoder = decoder_of(HuggingFaceFolder(hf_folder).model)
    before = decoder.norm.weight.detach().clone()
    with pytest.raises(ConfigError, match="SHA256SUMS"):
        load_into(decoder, hf_folder)
    assert torch.equal(decoder.norm.weight, before)
    (hf_folder / "SHA256SUMS").unlink()
    load_into(decoder, hf_folder)
