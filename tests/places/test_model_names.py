"""A model's name stands for its commit on the Hub. Each mistake is one line.

The Hub is a server on loopback, and huggingface_hub is the real package.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import typer
import yaml
from places.fake_hub import COMMIT, fake_hub
from typer.testing import CliRunner

from mtrain_cli.commands.app import app
from mtrain_cli.composition.compose import compose, resume
from mtrain_cli.config import plugins, resolved_file
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.model import huggingface
from mtrain_extras.places import entry, fetched_run, kinds, names

MODEL = ["model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.num_kv_heads=1",
         "model.head_dim=16", "model.intermediate_size=48", "seq=64"]  # fmt: skip


@pytest.fixture(autouse=True)
def hub(monkeypatch, tmp_path):
    pytest.importorskip("huggingface_hub")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names.local.cache_clear()
    with fake_hub(monkeypatch, tmp_path) as served:
        served.models["org/small"] = small_model(tmp_path / "made")
        yield served
    names.local.cache_clear()


def small_model(folder):
    """Return the files of a model with random weights, and of a program that must never run."""
    from mtrain_cli.model.tokenizer_files import of_bytes

    config = compose(MODEL)
    shapes = huggingface.parameter_shapes(config.model)
    generator = torch.Generator().manual_seed(0)

    def read(wanted):
        return {name: 0.1 * torch.randn(shapes[name], generator=generator) for name in wanted}

    huggingface.write_folder(
        folder, config.model, read, rope_factor=1.0, seq=64, dtype=torch.float32,
        mask=config.mask, tokenizer=of_bytes(),
    )  # fmt: skip
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return {**files, "modeling.py": b"raise SystemExit", "pytorch_model.bin": b"pickle"}


def problem(*words, **options):
    with pytest.raises(ConfigError) as caught:
        compose(words, **options)
    (line,) = caught.value.problems
    return line


def test_a_name_becomes_the_folder_of_its_commit(capsys):
    config = compose(["train.init_from=org/small", "data=text", "data.path=.", "seq=64"])
    assert config.train.init_from.endswith(f"models--org--small/snapshots/{COMMIT}")
    assert config.model.hidden_size == 32
    assert f"train.init_from=org/small: commit {COMMIT} of the Hub" in capsys.readouterr().err
    assert set(os.listdir(config.train.init_from)) == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip


def test_only_the_weights_that_transformers_loads_are_fetched(hub):
    files = hub.models["org/small"]
    weights = files["model.safetensors"]
    others = ("fp16/model.safetensors", "consolidated.safetensors", "model.fp16.safetensors")
    hub.models["org/small"] = files | dict.fromkeys(others, weights)
    names.local("", "org/small", kinds.MODEL)
    assert [name for name in hub.downloads if "safetensors" in name] == ["model.safetensors"]

    hub.downloads.clear()
    parts = ("model-1-of-2.safetensors", "model-2-of-2.safetensors")
    index = json.dumps({"weight_map": {"a": parts[0], "b": parts[1]}}).encode()
    hub.models["org/parts"] = {
        "config.json": files["config.json"], "model.safetensors.index.json": index,
        "model.safetensors": weights, **dict.fromkeys(parts, weights),
    }  # fmt: skip
    folder = names.local("", "org/parts", kinds.MODEL)
    assert sorted(p.name for p in Path(folder).glob("*.safetensors")) == [*parts]
    hub.models["org/torn"] = {n: c for n, c in hub.models["org/parts"].items() if n != parts[1]}
    with pytest.raises(ConfigError, match=rf"{parts[1]}, which its index names, could not be"):
        names.local("", "org/torn", kinds.MODEL)


@pytest.mark.parametrize("lost", ["snapshot", "weights"])
def test_a_lora_run_gets_its_base_model_again(hub, tmp_path, lost):
    path = names.local("", "org/small", kinds.MODEL)
    if lost == "snapshot":
        shutil.rmtree(tmp_path / "hub")
    else:
        Path(path, "model.safetensors").unlink()
    names.local.cache_clear()
    hub.downloads.clear()
    values = {"train.init_from": path, "train.lora.rank": 0}
    assert not entry.localize(values)
    assert values["train.init_from"] == path
    assert not hub.downloads  # the checkpoint has the weights
    values["train.lora.rank"] = 8
    assert not entry.localize(values)
    assert values["train.init_from"] == path
    assert Path(path, "model.safetensors").is_file()


def test_a_lora_run_that_is_fetched_gets_its_base_model(tmp_path):
    from mtrain_cli.config import documents

    saved = compose(["train.init_from=org/small", "seq=64"])
    resolved_file.save(saved, file := tmp_path / "resolved.yaml")
    raw = documents.read_yaml(file)
    gone = Path(saved.train.init_from)
    raw["train"]["init_from"] = str(gone).replace(str(tmp_path), "/nowhere/else")
    for rank, has_weights in ((0, False), (8, True)):
        shutil.rmtree(tmp_path / "hub", ignore_errors=True)
        names.local.cache_clear()
        raw["train"]["lora"]["rank"] = rank
        file.write_text(yaml.safe_dump(raw))
        fetched_run._make_data_local(file)
        assert (gone / "model.safetensors").is_file() == has_weights
        now = documents.read_yaml(file)["train"]["init_from"]
        assert now == (str(gone) if has_weights else raw["train"]["init_from"])


def test_each_file_is_fetched_once(hub):
    for name in ("org/small", "org/small@v1", f"org/small@{COMMIT}", "hf://org/small"):
        names.local.cache_clear()
        compose([f"train.init_from={name}", "seq=64"])
    assert sorted(hub.downloads) == sorted(set(hub.downloads))


def test_a_plan_does_without_weights(hub):
    compose(["train.init_from=org/small", "seq=64"], plan=True)
    assert "config.json" in hub.downloads
    assert "model.safetensors" not in hub.downloads


def test_a_tokenizer_may_be_a_name(hub, tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    words = ["data=text", "data.path=a.txt", "data.tokenizer=org/small", "model.vocab_size=300"]
    tokenizer = compose(words).data.tokenizer
    assert tokenizer.endswith(f"snapshots/{COMMIT}/tokenizer.json")
    done = CliRunner().invoke(app, ["data", "prepare", "a.txt", "s", "--tokenizer=org/small"])
    assert done.exit_code == 0, done.output
    assert hub.downloads.count("tokenizer.json") == 1
    assert "model.safetensors" not in hub.downloads


@pytest.mark.parametrize(
    ("words", "model", "tokenizer", "prompt"),
    [
        (["--tokenizer", "org/a", "org/a", "--prompt", "org/a"], "/model", "/folder", "org/a"),
        (["--prompt", "org/a", "org/a", "--tokenizer=org/a"], "/model", "/folder", "org/a"),
        (["--prompt=org/a", "--tokenizer", "org/a", "--", "org/a"], "/model", "/folder", "org/a"),
        (["--prompt", "org/a", "--ignore-end", "org/b"], "/model", None, "org/a"),
    ],
)
def test_only_the_word_at_its_own_place_is_replaced(monkeypatch, words, model, tokenizer, prompt):
    monkeypatch.setattr(entry, "local", lambda _, value, kind: value and f"/{kind}")
    monkeypatch.setattr(plugins, "places", lambda: [entry])
    context = typer.main.get_command(app).get_command(None, "generate").make_context("", words)
    got = context.params
    assert str(got["model"]) == model
    assert (str(got["tokenizer"]) if got["tokenizer"] else None) == tokenizer
    assert got["prompt"] == [prompt]


def test_generate_takes_a_name():
    words = ["generate", "org/small", "--prompt", "a/b", "--max-new", "2"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output


def test_a_name_is_imported_as_a_run(tmp_path):
    done = CliRunner().invoke(app, ["checkpoint", "import", "org/small", "started"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "started/checkpoints/step-0/manifest.json").is_file()


def test_a_folder_of_that_name_wins_and_is_said(hub, tmp_path, capsys):
    small_model(tmp_path / "org" / "small")
    config = compose(["train.init_from=org/small", "seq=64"])
    assert config.train.init_from == str(tmp_path / "org" / "small")
    assert "org/small: is a folder here, so it is not looked for" in capsys.readouterr().err
    assert not hub.downloads


def test_the_token_is_sent(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    compose(["train.init_from=org/small", "seq=64"])
    assert set(hub.tokens) == {"Bearer hf_secret"}


def test_a_cached_model_needs_no_network(hub, monkeypatch):
    from huggingface_hub import constants

    compose(["train.init_from=org/small", "seq=64"])
    names.local.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.models.clear()
    assert compose(["train.init_from=org/small", "seq=64"]).model.hidden_size == 32


def test_a_run_that_resumes_keeps_its_commit_and_asks_nobody(hub):
    saved = compose(["train.init_from=org/small", "seq=64"])
    names.local.cache_clear()
    hub.tokens.clear()
    kept = resume(saved, ["train.init_from=org/small", "train.steps=90"])
    assert kept.train.init_from == saved.train.init_from
    assert not hub.tokens
    hub.models.clear()
    with pytest.raises(ConfigError, match=r"train\.init_from=org/small@0000000"):
        resume(saved, [f"train.init_from=org/small@{'0' * 40}"])


def test_a_repository_that_does_not_exist():
    assert problem("train.init_from=org/none") == (
        "train.init_from=org/none: no such folder here and no such repository on the Hub, or a "
        "private one; no token is set (HF_TOKEN, or `hf auth login`)"
    )


def test_a_gated_repository(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.gated.add("org/small")
    assert problem("train.init_from=org/small") == (
        "train.init_from=org/small: a gated repository; accept its terms at "
        f"{hub.url}/org/small with the account of your token"
    )


def test_a_gated_repository_without_a_token(hub):
    hub.gated.add("org/small")
    assert "; no token is set (HF_TOKEN, or" in problem("train.init_from=org/small")


def test_a_wrong_revision(hub):
    assert problem("train.init_from=org/small@v7") == (
        "train.init_from=org/small@v7: the repository has no revision 'v7'; see "
        f"{hub.url}/org/small/tree/main"
    )


def test_a_repository_without_safetensors(hub):
    del hub.models["org/small"]["model.safetensors"]
    assert problem("train.init_from=org/small") == (
        "train.init_from=org/small: has no safetensors; mtrain reads no other format of weights"
    )


def test_offline_without_a_cache(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert problem("train.init_from=org/small") == (
        "train.init_from=org/small: no such folder here, nor in the cache of the Hub (HF_HOME), "
        "and HF_HUB_OFFLINE forbids to fetch it"
    )


def test_offline_with_a_cache_without_weights(monkeypatch):
    from huggingface_hub import constants

    compose(["train.init_from=org/small", "seq=64"], plan=True)
    names.local.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in problem("train.init_from=org/small")


def test_a_hub_that_does_not_answer(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    line = problem("train.init_from=org/small")
    assert line.startswith(
        "train.init_from=org/small: no such folder here, and http://127.0.0.1:9 cannot be reached"
    )


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    line = problem("train.init_from=org/small")
    assert "no such folder here, and the Hub needs huggingface_hub; pip install" in line


def test_a_wrong_path_is_not_looked_for_on_the_hub(hub, tmp_path):
    (tmp_path / "models").mkdir()
    line = problem("train.init_from=models/none")
    assert line == "train.init_from=models/none: no such folder; give a Hugging Face folder"
    assert not hub.tokens


@pytest.mark.parametrize("words", [["generate", "org/none", "--prompt", "x"],
                                   ["checkpoint", "verify", "org/none"]])  # fmt: skip
def test_commands_print_one_line_and_exit_with_2(words):
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    (line,) = done.output.strip().splitlines()
    assert "org/none: no such folder here and no such repository on the Hub" in line
