"""`train.epochs` gives the steps of a run: how often it passes over its data."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtrain_cli.commands.train import with_epochs
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.open_dataset import open_dataset

SEQ = 128


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "text.txt").write_text("long context " * 100, encoding="utf-8")
    data = f"data.path={tmp_path / 'text.txt'}", "data=text", "data.tokenizer=bytes"
    return [*data, f"seq={SEQ}", "train.global_batch=2", "optim.warmup_steps=1"]


@pytest.mark.parametrize(("epochs", "steps"), [("1", 6), ("2", 11), ("0.5", 3), ("0.01", 1)])
def test_epochs_count_sequences(words, epochs, steps):
    config = compose([*words, f"train.epochs={epochs}"])
    assert len(open_dataset(config)) == 11, "1,301 tokens"
    assert with_epochs(config, [f"train.epochs={epochs}"]).train.steps == steps


def test_held_out_sequences_do_not_count(words):
    config = compose([*words, "train.epochs=1", "data.eval_sequences=5"])
    assert with_epochs(config).train.steps == 3


def test_what_is_typed_replaces_what_a_file_says(words):
    config = compose([*words, "train.epochs=1", "train.steps=9"])
    typed = with_epochs(config, ["train.steps=9"])
    assert (typed.train.steps, typed.train.epochs) == (9, None)
    with pytest.raises(ConfigError, match=r"train.epochs=1: replaces train.steps; leave one"):
        with_epochs(config, ["train.steps=9", "train.epochs=1"])


def test_a_resumed_run_keeps_its_steps_unless_asked(words):
    config = compose([*words, "train.epochs=1", "train.steps=9"])
    assert with_epochs(config, [], resumed=True) == config
    assert with_epochs(config, ["train.epochs=1"], resumed=True).train.steps == 6


def test_the_schedule_must_fit_into_the_epochs(words):
    config = compose([*words, "train.epochs=1", "optim.schedule=wsd", "optim.decay_steps=20"])
    with pytest.raises(ConfigError, match=r"optim.decay_steps=20: the schedule has 6 steps"):
        with_epochs(config)
    many = compose([*words, "train.epochs=20", "optim.schedule=wsd", "optim.decay_steps=70"])
    assert with_epochs(many).train.steps == 110, "train.steps has 60 by default"
