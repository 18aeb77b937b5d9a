"""An export has the tokenizer of its data, and refuses weights of another model."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from commands.test_checkpoint import MODEL, decoder_of, ids_in, mtrain, trained_run
from commands.typed_line import split

from mtrain_cli.composition import compose
from mtrain_cli.config import resolved_file
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.tokenizers import NO_BEGIN, ByteTokenizer
from mtrain_cli.inference.model_source import load_decoder, open_source
from mtrain_cli.model.experts import expert_layers
from mtrain_cli.model.tokenizer_files import of_bytes
from mtrain_cli.training import checkpointer, conversion
from mtrain_cli.training.checkpointer import load_model_state, write_model_state
from mtrain_cli.training.conversion import export_checkpoint, import_folder


def test_a_checkpoint_of_another_model_is_not_exported(tmp_path):
    config = compose.compose(MODEL)
    (tmp_path / "run").mkdir()
    resolved_file.save(config, tmp_path / "run" / "resolved.yaml")
    state = {name: value.detach() for name, value in decoder_of(config.model).named_parameters()}
    state["norm.weight"] = torch.ones(31)
    state["norm.bias"] = torch.ones(32)
    del state["layers.1.mlp.up_proj.weight"]
    write_model_state(tmp_path / "run" / "checkpoints", 1, state)
    with pytest.raises(ConfigError) as caught:
        export_checkpoint(tmp_path / "run", tmp_path / "out", dtype=torch.float32)
    text = "\n".join(caught.value.problems)
    assert "tensor layers.1.mlp.up_proj.weight is missing" in text
    assert "(3 tensors are wrong)" in text


EXPERTS = split(
    "model=tiny_moe model.hidden_size=32 model.num_layers=2 model.head_dim=8 "
    "model.intermediate_size=48 model.moe.expert_size=24"
)


def run_with_bias(path, bias):
    """Write a run whose routers have a bias; return its folder and its weights."""
    config = compose.compose(EXPERTS)
    path.mkdir()
    resolved_file.save(config, path / "resolved.yaml")
    state = {name: value.detach() for name, value in decoder_of(config.model).state_dict().items()}
    state["layers.1.mlp.selection_bias"] += torch.tensor(bias)
    write_model_state(path / "checkpoints", 1, state)
    return path, state


def test_a_model_with_experts_survives_export_and_import(tmp_path):
    run, state = run_with_bias(tmp_path / "run", 0.0)
    export_checkpoint(run, tmp_path / "out", dtype=torch.float32)
    import_folder(tmp_path / "out", tmp_path / "again")
    _, again = load_model_state(tmp_path / "again")
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], value) for name, value in state.items())


def test_an_import_inside_a_job_ends_at_a_signal_and_leaves_no_run(tmp_path, monkeypatch):
    run, _ = run_with_bias(tmp_path / "run", 0.0)
    export_checkpoint(run, tmp_path / "out", dtype=torch.float32)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.setenv(name, "0")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    monkeypatch.setattr(
        checkpointer, "write_model_state", lambda *_: os.kill(os.getpid(), signal.SIGTERM)
    )
    try:
        with pytest.raises(KeyboardInterrupt):
            import_folder(tmp_path / "out", tmp_path / "again")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not (tmp_path / "again").exists()


def test_routers_with_a_bias_are_loaded_but_not_exported(tmp_path):
    run, _ = run_with_bias(tmp_path / "run", [0.125] * 8)
    with pytest.raises(ConfigError, match=r"train.balance_bias: .* qwen3_moe model lacks"):
        export_checkpoint(run, tmp_path / "out", dtype=torch.float32)
    assert not (tmp_path / "out").exists()
    decoder, _ = load_decoder(open_source(run, []), torch.bfloat16, torch.device("cpu"))
    biases = [mlp.selection_bias for mlp in expert_layers(decoder.layers)]
    assert [bias.tolist() for bias in biases] == [[0.0] * 8, [0.125] * 8]
    assert biases[0].dtype == torch.float32


def test_export_of_a_byte_run_has_the_byte_tokenizer(tmp_path):
    message = mtrain("checkpoint", "export", trained_run(tmp_path / "run"), tmp_path / "out")
    assert message.endswith("MiB of weights tokenizer: bytes")
    assert ids_in(tmp_path / "out") == (256, 257, 258)
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= {
        file.name for file in (tmp_path / "out").iterdir()
    }


def test_export_of_a_token_run_has_the_tokenizer_of_the_store(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "text.md").write_text("the quick brown fox\n" * 40)
    mtrain(
        "data",
        "prepare",
        tmp_path / "text.md",
        tmp_path / "store",
        *split("--tokenizer bpe --vocab-size 260"),
    )
    run = trained_run(
        tmp_path / "run", "data=tokens", f"data.path={tmp_path / 'store'}", "model.vocab_size=auto"
    )
    message = mtrain("checkpoint", "export", run, tmp_path / "out")
    assert message.endswith(f"tokenizer: {tmp_path / 'store' / 'tokenizer.json'}")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        tmp_path / "store" / "tokenizer.json"
    ).read_bytes()
    assert ids_in(tmp_path / "out") == (None, 0, None)
    assert (
        json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["eos_token"]
        == "<|endoftext|>"
    )


def test_a_run_with_its_own_tokenizer_records_what_its_documents_start_with(tmp_path):
    run = tmp_path / "run"
    (run / conversion.TOKENIZER).mkdir(parents=True)
    files = of_bytes()
    files.write(run / conversion.TOKENIZER)
    config = compose.compose(split("data=stdlib data.bos=true"))
    conversion.record_begin(config, run)
    # On another machine, the data and their tokenizer are missing.
    moved = config.changed(data={"tokenizer": str(tmp_path / "gone.json")})
    found, _ = conversion.tokenizer_of_run(moved, run)
    assert found is not None
    assert found.begin == ByteTokenizer.named
    conversion.record_begin(compose.compose(split("data=stdlib data.bos=false")), run)
    found, _ = conversion.tokenizer_of_run(moved, run)
    assert found is not None
    assert found.begin == NO_BEGIN
    (tmp_path / "ids.npy").touch()
    conversion.record_begin(
        compose.compose(["data=tokens", f"data.path={tmp_path / 'ids.npy'}"]), run
    )
    found, _ = conversion.tokenizer_of_run(config, run)
    assert found is not None
    assert found.begin is None, "what the tokenizer prescribes"
    (run / conversion.TOKENIZER / conversion.BEGIN).unlink()
    found, _ = conversion.tokenizer_of_run(config, run)
    assert found is not None
    assert found.begin == ByteTokenizer.named, "a run of an earlier version"


def test_export_of_a_run_with_an_unknown_tokenizer_warns(tmp_path):
    (tmp_path / "ids.npy").touch()
    run = trained_run(tmp_path / "run", "data=tokens", f"data.path={tmp_path / 'ids.npy'}")
    message = mtrain("checkpoint", "export", run, tmp_path / "out")
    assert message.endswith(
        f"no tokenizer: data.path={tmp_path / 'ids.npy'} does not name a tokenizer; "
        "copy one with --tokenizer FOLDER"
    )
    assert ids_in(tmp_path / "out") == (None, None, None), (
        "transformers would take 1 and 2 for some families"
    )
    assert not (tmp_path / "out" / "tokenizer.json").exists()
