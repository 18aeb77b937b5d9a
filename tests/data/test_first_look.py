"""A dry run opens the data, and fails where the run would fail, with the same line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from masked_documents import masked_store
from typer.testing import CliRunner

from mtrain_cli.commands.app import app
from mtrain_cli.commands.train import require_data
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data import open_dataset as opening
from mtrain_cli.data import tokenizers
from mtrain_cli.data.open_dataset import look_at_data, open_dataset

CPU = ("seq=256", "topology.device=cpu", "topology.workers=1")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def dry_run(*words: str):
    return CliRunner(env={"COLUMNS": "300"}).invoke(
        app, ["train", *CPU, *words, "--dry-run"], prog_name="mtrain"
    )


def jsonl(name: str, *records: object) -> str:
    Path(name).write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return f"data.path={name}"


LONG = {"text": "Once upon a time \x1b[31m" + "there was a token. " * 100}


def broken(name: str) -> list[str]:
    """Return the words of a run whose data are broken."""
    if name == "no key":
        return ["data=text", jsonl("a.jsonl", {"messages": []})]
    if name == "too short":
        return ["data=text", jsonl("a.jsonl", {"text": "short"})]
    if name == "held out":
        return ["data=text", jsonl("a.jsonl", LONG), "data.eval_sequences=9"]
    if name == "vocabulary":
        return ["data=text", jsonl("a.jsonl", LONG), "model.vocab_size=100"]
    if name == "tokens":
        np.save("a.npy", np.full(4096, 300, np.uint16))
        return ["data=tokens", "data.path=a.npy", "model.vocab_size=264"]
    Path("c").mkdir()
    return ["data=tokens", "data.path=c"]


def open_as_a_run(words: list[str]) -> None:
    config = compose([*CPU, *words])
    require_data(config)
    open_dataset(config)


@pytest.mark.parametrize(
    "name",
    ["no key", "too short", "held out", "vocabulary", "tokens", "c"],
)
def test_a_dry_run_fails_with_the_line_of_the_run(name):
    words = broken(name)
    result = dry_run(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    with pytest.raises(ConfigError) as of_run:
        open_as_a_run(words)
    assert result.stderr == f"mtrain: {of_run.value}\n"
    # A vocabulary that is too small is refused when the settings are composed.
    assert dry_run(*words, "--no-data").exit_code == (2 if name == "vocabulary" else 0)


def test_a_plan_counts_what_a_folder_leaves_out_and_the_documents_of_the_standard_library():
    Path("docs").mkdir()
    Path("docs/a.txt").write_text(LONG["text"])
    Path("docs/b.pdf").touch()
    (line,), _ = look_at_data(compose([*CPU, "data=text", "data.path=docs"]))
    left_out = "left out: 1 of other kinds"
    assert line.endswith(f"; {left_out}")
    assert left_out in open_dataset(compose([*CPU, "data=text", "data.path=docs"])).describe()
    (line,), _ = look_at_data(compose(list(CPU)))
    assert re.search(r": \d+ documents, ", line)


def test_only_as_many_tokens_are_made_as_the_run_needs(monkeypatch):
    made = []

    class Counts(tokenizers.ByteTokenizer):
        def encode(self, pieces):
            made.extend(pieces)
            return super().encode(pieces)

    monkeypatch.setattr(opening, "open_tokenizer", lambda _: Counts())
    words = ["data=text", jsonl("a.jsonl", *[LONG] * 50)]
    look_at_data(compose([*CPU, *words]))
    assert len(made) == 1
    assert not Path("cache").exists(), "a corpus that is long enough is not tokenized whole"


def test_a_plan_says_how_many_tokens_are_targets(tmp_path):
    words = ["data=tokens", f"data.path={masked_store(tmp_path)}", "data.mask_key=mask"]
    words.append("model.vocab_size=264")
    labels = open_dataset(compose([*CPU, *words]))[0].labels
    shown = " ".join(dry_run(*words).stdout.split())
    counted = int((labels != -100).sum())
    assert counted < 250
    assert f"targets {counted} of the 256 tokens of the first sequence count toward " in shown


def test_data_that_are_elsewhere_need_no_data():
    refused = dry_run("data=text", "data.path=/none")
    assert (refused.exit_code, refused.stdout) == (2, "")
    planned = dry_run("data=text", "data.path=/none", "--no-data")
    assert (planned.exit_code, planned.stderr) == (0, "")
    alone = CliRunner().invoke(app, ["train", "--no-data"], prog_name="mtrain")
    assert alone.stderr == "mtrain: --no-data: a run needs its data; give it with --dry-run\n"
