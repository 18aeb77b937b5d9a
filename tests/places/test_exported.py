"""An export goes to a URL whole, or to a repository of the Hub with a model card.

The Hub is a server on loopback, and huggingface_hub is the real package.
"""

from __future__ import annotations

import json
from dataclasses import asdict

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from places.fake_hub import COMMIT, fake_hub
from typer.testing import CliRunner

from mtrain_cli.commands.app import app
from mtrain_cli.composition.compose import compose
from mtrain_cli.config import resolved_file
from mtrain_cli.launch.manifest import Manifest
from mtrain_cli.model import huggingface
from mtrain_cli.training import checkpointer
from mtrain_cli.training.evaluation import Evaluation
from mtrain_extras.places import run_place

BASE = f"/home/me/.cache/huggingface/hub/models--org--base/snapshots/{COMMIT}"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a run with a checkpoint, whose base model came from the Hub."""
    folder = tmp_path_factory.mktemp("runs") / "night"
    config = compose(
        ["model.num_layers=1", "seq=64", "sparsity=vertical_slash", "sparsity.last_q=32"]
    )
    weights = huggingface.parameter_shapes(config.model)
    made = {name: torch.randn(shape) for name, shape in weights.items()}
    step = checkpointer.write_model_state(folder / "checkpoints", 6, made)
    manifest = Manifest.read(step)
    Manifest(6, 1, manifest.torch, manifest.files, {"step": 6, "tokens": 12_345}).write(step)
    config = config.changed(run={"dir": str(folder)}, train={"init_from": BASE})
    resolved_file.save(config, folder / "resolved.yaml")
    facts = {"command": ["mtrain", "train", "data.path=my <b>books</b>"], "gpus": ["H200", "H200"]}
    (folder / "environment.json").write_text(json.dumps(facts))
    for step, loss in ((6, 3.25), (8, 1.0)):  # the later one is not of this checkpoint
        evaluation = Evaluation(step, loss, 64, 1, 0.1, "dense", ())
        with (folder / "evaluations.jsonl").open("a") as file:
            file.write(json.dumps(asdict(evaluation)) + "\n")
    return folder


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_place, "PAUSE_S", 0.001)
    yield fsspec.filesystem("memory")
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def export(run, *words):
    return CliRunner().invoke(app, ["checkpoint", "export", str(run), *words])


def test_an_export_to_a_url_has_the_bytes_of_one_to_a_folder(run, place, tmp_path, monkeypatch):
    sent, put = [], MemoryFileSystem.put_file
    monkeypatch.setattr(
        MemoryFileSystem, "put_file", lambda self, *a, **k: sent.append(a[1]) or put(self, *a, **k)
    )
    done = export(run, "memory://models/mine")
    assert sent[-1] == "/models/mine/config.json"  # so half an export is no model
    assert done.exit_code == 0, done.output
    assert "Wrote memory://models/mine: step 6" in done.output
    assert export(run, "here").exit_code == 0
    there = {n.rpartition("/")[2]: place.cat_file(n) for n in place.find("/models/mine")}
    assert there == {path.name: path.read_bytes() for path in (tmp_path / "here").iterdir()}


def test_a_place_with_files_is_refused_before_the_export(run, place):
    place.pipe_file("/models/mine/config.json", b"{}")
    done = export(run, "memory://models/mine")
    assert done.exit_code == 2
    assert done.output == (
        "mtrain: HF_FOLDER=memory://models/mine: has files already, such as config.json; give a "
        "new folder\n"
    )


@pytest.mark.parametrize("method", ["pipe_file", "put_file"])
def test_a_place_that_fails_is_one_line(run, monkeypatch, method):
    def refuse(*_, **__):
        raise PermissionError("access denied")

    monkeypatch.setattr(MemoryFileSystem, method, refuse)
    done = export(run, "memory://models/mine")
    assert done.exit_code == 2
    assert done.output == (
        "mtrain: HF_FOLDER=memory://models/mine: cannot be written (access denied)\n"
    )


def test_a_push_has_the_files_and_a_card(run, monkeypatch, tmp_path):
    with fake_hub(monkeypatch, tmp_path) as hub:
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        done = export(run, "hf", "--push", "org/pushed", "--private")
        assert done.exit_code == 0, done.output
        assert hub.created[0].get("visibility", hub.created[0].get("private")) in ("private", True)
        pushed = hub.pushed["org/pushed"]
    here = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    assert pushed == here
    card = pushed["README.md"].decode()
    assert card.startswith("---\nlibrary_name: ")
    for line in (
        'base_model: "org/base"',
        f"| Base model | org/base at commit {COMMIT} |",
        "| Tokens trained | 12,345 |",
        "| Held-out loss | 3.2500 (step 6) |",
        "| Hardware | 2 x H200 on its first node |",
        "| sparsity.pattern | vertical\\_slash |",
        "    mtrain train 'data.path=my <b>books</b>'",
    ):
        assert line in card.splitlines(), card


@pytest.mark.parametrize(
    ("token", "words", "line"),
    [
        ("", ["--push", "org/pushed"], "the Hub refuses access (401); check your token and its"),
        ("hf_x", ["--push", "a/b/c"], "--push a/b/c: no name of a repository"),
        ("hf_x", ["--private"], "--private: belongs to --push ORG/NAME; give both"),
    ],
)
def test_a_push_that_cannot_work_is_refused_before_the_export(
    run, monkeypatch, tmp_path, token, words, line
):
    with fake_hub(monkeypatch, tmp_path):
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        done = export(run, "hf", *words)
    assert done.exit_code == 2
    (said,) = done.output.splitlines()
    assert line in said
    assert not (tmp_path / "hf").exists()
