"""Words of other trainers are answered with what they are called here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mtrain_cli.commands.app import app
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.foreign_words import _HERE, counterpart, hub_hint
from mtrain_cli.config.keys import all_keys, sections
from mtrain_cli.config.schema import ConfigError


def complaint(*words: str, config_dir: Path | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        compose(words, config_dir)
    (line,) = error.value.problems
    return line


@pytest.mark.parametrize("option", ["--epochs", "--num_train_epochs", "--num-train-epochs"])
def test_a_foreign_option_names_its_counterpart(option):
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["train", option, "3"])
    assert result.exit_code == 2
    assert "; mtrain counts steps; use train.steps=N." in " ".join(result.stderr.split())
    assert "optim.eps" not in result.stderr
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["train", "--out", "a"])
    assert "run.dir=DIR" in " ".join(result.stderr.split())


def test_a_foreign_key_in_a_file_names_its_counterpart(tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe/a.yaml").write_text("# @package _global_\ntrain: {epochs: 2}\n")
    line = complaint("recipe=a", config_dir=tmp_path)
    assert line.endswith("train.epochs=2: mtrain counts steps; use train.steps=N")


def test_answers_name_keys_that_exist_and_hide_none():
    known = {*all_keys(), *sections(), "data", "sparsity", "key", "recipe"}
    for answer in _HERE:
        named = re.findall(r"([a-z_]+(?:\.[a-z_]+)*)=", answer)
        named += re.findall(r"[a-z_]+\.[a-z_]+", answer)
        assert set(named) <= {*known, "metrics.jsonl", "mine.yaml"}, answer
    assert [key for key in all_keys() if counterpart(key)] == []


def test_a_name_of_the_hub_is_told_from_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    assert hub_hint("org/name")
    for path in ("models/qwen", "/org/name", "./name", "org/a/b", "name", "~/name"):
        assert hub_hint(path) == ""
    for command in (["generate", "org/name", "--prompt", "a"], ["eval", "niah", "org/name"]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2
        assert "`hf download org/name --local-dir name`" in result.stderr
