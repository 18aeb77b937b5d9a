"""Every command of the documents runs as written, or as the comment before its block says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from command import mtrain, python_path
from docs.blocks import PAGES, RULES, Block, blocks_of
from typer.testing import CliRunner

from mtrain_cli.commands.app import app
from mtrain_cli.composition.compose import compose
from mtrain_cli.model.huggingface_config import config_json

BLOCKS = blocks_of("bash")
INLINE = re.compile(r"`mtrain ([^`]+)`")


def of(*rules: str) -> list:
    marks = {"slow": pytest.mark.slow}
    return [
        pytest.param(block, id=str(block), marks=marks.get(block.rule, ()))
        for block in BLOCKS
        if block.rule in rules
    ]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    # Otherwise `auto` takes Triton's interpreter for a kernel.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return tmp_path


def shell(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs lines as a user does, with this mtrain on the path."""
    programs = folder / "bin"
    programs.mkdir()
    program = programs / "mtrain"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m mtrain_cli "$@"\n')
    program.chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )


def run_here(words: list[str]) -> None:
    result = CliRunner(env={"COLUMNS": "100", "TERM": "dumb"}).invoke(
        app, words, prog_name="mtrain"
    )
    assert result.exit_code == 0, f"mtrain {' '.join(words)}\n{result.output[-2000:]}"


@pytest.mark.parametrize("block", of("run", "slow"))
def test_commands_run_as_written(block: Block, folder):
    if block.is_plain and block.rule == "run":
        for words in block.commands:
            run_here(words)
        return
    lines, _, rest = block.text.replace("$PWD", str(folder)).partition("\nmtrain ")
    last = replace(block, text=f"mtrain {rest}")
    if not (last.is_plain and block.rule == "run"):
        lines, last = block.text, replace(block, text="")
    result = shell(lines, folder)
    for words in last.commands if not result.returncode else ():
        result = mtrain(folder, *words)
        if result.returncode:
            break
    assert result.returncode == 0, f"{block.text}\n{(result.stdout + result.stderr)[-2000:]}"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("block", of("dry-run"))
def test_commands_that_need_gpus_or_time_plan_as_written(block: Block):
    assert block.commands
    for words in block.commands:
        assert words[0] == "train", f"{block}: a dry run is of `mtrain train`"
        run_here([*words, *block.more.split(), *["--dry-run"][: "--dry-run" not in words]])


@pytest.mark.parametrize("block", of("compose"))
def test_commands_that_need_files_or_gpus_compose_as_written(block: Block, folder):
    assert block.commands
    make_files(folder)
    for words in block.commands:
        given = parsed(words)
        # Patterns by option: each key of sparsity goes to those that have it.
        patterns = [f"sparsity={name}" for name in (given.get("pattern") or "").split(",") if name]
        compose([*patterns[-1:], *(given.get("overrides") or ())], plan=True)


def make_files(folder: Path) -> None:
    """What the reader of a page has: texts, shards, weights."""
    texts = ("books/one.txt", "all/books/one.txt", "all/needles/needles.jsonl")
    for name in (*texts, "all/code/index.json", "all/book/index.json"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
    weights = folder / "Qwen2.5-3B"
    weights.mkdir()
    model = compose(["model=qwen3b"]).model
    published = config_json(model, rope_factor=1.0, seq=32768, dtype="bfloat16")
    (weights / "config.json").write_text(json.dumps(published))
    (weights / "model.safetensors").touch()


@pytest.mark.parametrize("block", of("skip"))
def test_a_block_that_does_not_run_says_why_and_holds_no_line_of_mtrain(block: Block):
    assert block.more, f"{block}: say why"
    assert all(words[0].startswith("--install") for words in block.commands), str(block)


def test_rules_are_known():
    assert {block.rule for block in BLOCKS} <= set(RULES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_inside_sentences_exist(page):
    for found in INLINE.findall(page.read_text(encoding="utf-8")):
        words = " ".join(found.split()).split()
        command = typer.main.get_command(app)
        for word in words:
            if not getattr(command, "commands", None):
                break
            if word.startswith("-"):
                assert any(word in param.opts for param in command.params), found
                break
            assert word in command.commands, f"{page.name}: `mtrain {found}`"
            command = command.commands[word]


def parsed(words: list[str]) -> dict:
    """What a command would be called with. Its options are checked, and it is not called."""
    found: dict = {}
    root = typer.main.get_command(app)
    waiting = [root]
    while waiting:
        command = waiting.pop()
        below = getattr(command, "commands", None)
        if below:
            waiting.extend(below.values())
        else:
            command.callback = lambda **given: found.update(given)
    code = root.main(args=list(words), prog_name="mtrain", standalone_mode=False)
    assert not code, f"mtrain {' '.join(words)}"
    return found
