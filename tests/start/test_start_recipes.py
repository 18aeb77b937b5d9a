"""What `mtrain init` writes can be trained as it is, and it replaces nothing unasked."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
import yaml
from command import python_path
from places.fake_hub import fake_hub
from typer.testing import CliRunner

from mtrain_cli.commands.app import app
from mtrain_cli.composition.compose import compose
from mtrain_cli.config import plugins
from mtrain_cli.config.groups import open_groups
from mtrain_cli.config.keys import all_keys
from mtrain_cli.model import tokenizer_files
from mtrain_cli.model.huggingface_config import config_json
from mtrain_extras.start.command import _kind, _seq

WITHOUT = {
    "chat": "chat" not in open_groups().options["data"],
    "lora": "train.lora.rank" not in all_keys(),
}
JOBS = [
    pytest.param(job, marks=pytest.mark.skipif(WITHOUT.get(job, False), reason="not there yet"))
    for job in ("text", "chat", "extend", "lora", "profile")
]


COOKBOOK = Path(__file__).parents[2] / "docs" / "cookbook.md"
(CHAT,) = re.findall(r"(?s)cat > talk.jinja <<'END'\n(.*?)\nEND\n", COOKBOOK.read_text())


def mtrain(*words: str):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, list(words), prog_name="mtrain")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A model of 512 tokens that reads bytes, with the chat template of the cookbook."""
    folder = tmp_path_factory.mktemp("base")
    shape = compose(["seq=512", "model.rope.original_max_position=512"]).model
    config = config_json(shape, rope_factor=1.0, seq=512, dtype="bfloat16")
    (folder / "config.json").write_text(json.dumps(config))
    read = transformers.AutoConfig.from_pretrained(folder)
    transformers.AutoModelForCausalLM.from_config(read).save_pretrained(folder)
    for name, content in tokenizer_files.of_bytes().files.items():
        (folder / name).write_bytes(content)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": CHAT}))
    return folder


@pytest.fixture
def here(base, tmp_path, monkeypatch) -> Path:
    """A folder with texts, conversations and a model that was trained on 512 tokens."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (tmp_path / "my books").mkdir()
    (tmp_path / "my books" / "one.txt").write_text("A text of some words. " * 6000)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    (tmp_path / "chat.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 500)
    shutil.copytree(base, tmp_path / "tiny-512")
    return tmp_path


def options(job: str) -> list[str]:
    data = [] if job == "profile" else ["--data", "chat.jsonl" if job == "chat" else "my books"]
    model = ["--model", "tiny-512"] if job in ("chat", "extend", "lora") else []
    return ["--job", job, *data, *model]


def printed(output: str, name: str) -> list[str]:
    """The words of the command that stands behind a name."""
    (line,) = (line for line in output.splitlines() if line.startswith(name))
    return shlex.split(line.removeprefix(name))


@pytest.mark.parametrize("gpus", [[], ["--gpus", "0"], ["--gpus", "2"]], ids=["all", "cpu", "2"])
@pytest.mark.parametrize("job", JOBS)
@pytest.mark.usefixtures("here")
def test_the_printed_plan_plans_the_recipe(job, gpus):
    result = mtrain("init", "my run", *options(job), *gpus)
    assert result.exit_code == 0, result.output
    plan = printed(result.stdout, "plan")
    planned = mtrain(*plan[1:])
    assert planned.exit_code == 0, planned.output
    assert ("2 GPUs" in planned.output) == (gpus == ["--gpus", "2"])
    assert ("fits" in planned.output) == (job != "lora")  # transformers' memory is not estimated


@pytest.mark.usefixtures("here")
def test_without_data_a_recipe_takes_pythons_own_sources():
    assert mtrain("init", "--job", "text").exit_code == 0
    config = compose(["recipe=text"], Path("text"))
    assert (config.data.kind, config.data.path) == ("stdlib", None)
    assert config.data.eval_sequences > 0


def test_an_extension_covers_four_times_the_models_length(here):
    assert mtrain("init", *options("extend")).exit_code == 0
    config = compose(["recipe=extend"], Path("extend"))
    assert (config.seq, config.model.rope.scaling) == (2048, "yarn")
    assert config.sparsity.pattern == "vertical_slash"
    assert config.train.init_from == str(here / "tiny-512")
    # A model whose positions are scaled already keeps its scaling.
    scaled = json.loads((here / "tiny-512" / "config.json").read_text())
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
    scaled |= {"rope_scaling": yarn, "rope_parameters": {"rope_theta": 10000.0, **yarn}}
    (here / "tiny-512" / "config.json").write_text(json.dumps(scaled))
    assert mtrain("init", *options("extend"), "--force").exit_code == 0
    assert "yarn" not in Path("extend/recipe/extend.yaml").read_text()


@pytest.mark.usefixtures("here")
def test_a_models_name_gives_the_length_of_its_config(base, tmp_path, monkeypatch):
    """The Hub is a server on loopback, which is asked for no weights."""
    pytest.importorskip("huggingface_hub")
    from mtrain_extras.places import entry, names

    monkeypatch.setattr(plugins, "places", lambda: [entry])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names.local.cache_clear()
    with fake_hub(monkeypatch, tmp_path) as hub:
        hub.models["org/tiny"] = {p.name: p.read_bytes() for p in base.iterdir() if p.is_file()}
        result = mtrain("init", "--job", "extend", "--model", "org/tiny", "--data", "my books")
        assert result.exit_code == 0, result.output
        recipe = yaml.safe_load(Path("extend/recipe/extend.yaml").read_text())
        assert (recipe["seq"], recipe["train"]["init_from"]) == (2048, "org/tiny")
        assert "config.json" in hub.downloads
        assert not [name for name in hub.downloads if "safetensors" in name]

        words = ["init", "x", "--job", "extend", "--data", "my books", "--model"]
        refused = mtrain(*words, "org/none")
        assert refused.exit_code == 2
        line = refused.stderr.splitlines()[-1]
        assert line.startswith("mtrain: --model org/none: no such folder here and no such repos")
        hub.models["org/empty"] = {"config.json": b"{}"}
        refused = mtrain(*words, "org/empty")
        assert refused.exit_code == 2
        lines = [line for line in refused.stderr.splitlines() if line.startswith("mtrain: ")]
        assert len(lines) == 1
        assert lines[0].startswith("mtrain: org/empty/config.json: model_type=null: must be")
        assert not Path("x").exists()
    names.local.cache_clear()


def test_a_recipe_finds_oddly_named_data_from_any_folder(here, monkeypatch):
    odd = here / """a: 'b' "c" #d"""
    (here / "my books").rename(odd)
    assert mtrain("init", "--job", "text", "--data", odd.name).exit_code == 0
    monkeypatch.chdir("/")
    assert compose(["recipe=text"], here / "text").data.path == str(odd)


def test_data_are_read_as_what_they_are(here):
    (here / "store").mkdir()
    (here / "store" / "meta.json").write_text("{}")
    (here / "shards").mkdir()
    (here / "shards" / "index.json").write_text("{}")
    assert [_kind(name) for name in ("store", "shards", "ids.npy", "my books", None)] == [
        *("tokens", "mds", "tokens", "text", "stdlib")
    ]


def test_small_data_get_short_sequences(here):
    (here / "small.txt").write_text("x" * 100_000)
    assert _seq("small.txt", 65_536) == 1024  # 24 sequences of 4 bytes a token
    assert _seq(None, 65_536) == 65_536
    (here / "small.txt").write_text("x")
    assert _seq("small.txt", 65_536) == 256


@pytest.mark.usefixtures("here")
def test_nothing_is_replaced_unless_asked():
    assert mtrain("init", *options("text")).exit_code == 0
    recipe, script = Path("text/recipe/text.yaml"), Path("text/run.sh")
    recipe.write_text("mine")
    refused = mtrain("init", *options("text"))
    assert refused.exit_code == 2
    assert refused.stderr.startswith("mtrain: text/recipe/text.yaml: exists; give another FOLDER")
    assert recipe.read_text() == "mine"
    recipe.unlink()
    script.write_text("mine")
    assert mtrain("init", *options("text")).exit_code == 2
    assert not recipe.exists()  # all files or none
    assert mtrain("init", *options("text"), "--force").exit_code == 0
    assert "mine" not in script.read_text()


@pytest.mark.usefixtures("here")
def test_mistakes_are_one_line_and_write_nothing():
    Path("file").touch()
    Path("empty").mkdir()
    for words, expected in (
        ([], "--job NAME: required; one of text, chat, extend, lora, profile"),
        (["--job", "txt"], "--job txt: no such job (did you mean text?)"),
        (["--job", "text", "--data", "missing"], "--data missing: no such file or folder"),
        (["--job", "extend"], "--model FOLDER: --job extend needs a Hugging Face model"),
        (["--job", "text", "--model", "tiny-512"], "--model tiny-512: --job text takes no model"),
        (["--job", "chat", "--model", "tiny-512"], "--data PATH: --job chat needs"),
        (["--job", "extend", "--model", "empty"], "train.init_from="),
        (["--job", "text", "--gpus", "-1"], "--gpus -1: must be at least 0"),
        (["file", "--job", "text"], "file/recipe: could not be written (Not a directory)"),
    ):
        result = mtrain("init", *words)
        assert result.exit_code == 2, words
        assert expected in result.stderr
        assert "Traceback" not in result.output
        assert not list(Path().rglob("*.yaml")), words


@pytest.mark.slow  # trains on two processes
@pytest.mark.parametrize("job", ["text", "profile"])
def test_the_script_runs(job, here):
    assert mtrain("init", *options(job), "--gpus", "0").exit_code == 0
    program = here / "bin" / "mtrain"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m mtrain_cli "$@"\n')
    program.chmod(0o755)
    path = os.pathsep.join([str(program.parent), os.environ["PATH"]])
    result = subprocess.run(
        ["sh", f"{job}/run.sh", *(["train.steps=2", "seq=512"] if job == "text" else [])],
        env={**os.environ, "PATH": path, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert ("Load balance" in result.stdout) == (job == "profile")
    assert (here / "profile" / "cluster.yaml").exists() == (job == "profile")


def test_three_questions_on_a_terminal(here):
    control, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "mtrain_cli", "init"],
        env={**os.environ, "PYTHONPATH": python_path(), "COLUMNS": "100"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    shown = ""

    def answer(question: str, text: str) -> None:
        nonlocal shown
        while question not in shown:
            shown += os.read(control, 1 << 16).decode()
        shown = shown.partition(question)[2]
        os.write(control, f"{text}\n".encode())

    try:
        answer("What do you want to do?", "text")
        answer("Your data", "missing")
        answer("missing: no such file or folder", "my books")
        answer("Number of GPUs", "0")
        answer("watch", "")
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        os.close(control)
    config = compose(["recipe=text"], here / "text")
    assert (config.data.path, config.topology.device) == (str(here / "my books"), "cpu")
