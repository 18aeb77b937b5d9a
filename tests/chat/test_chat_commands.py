"""`mtrain data` and `mtrain train --dry-run` on conversations."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.ipc
import pytest
from chat_tokenizers import template, write_tokenizer
from conversations import made_up, turns, write
from typer.testing import CliRunner

from mtrain_cli.commands.app import app
from mtrain_cli.commands.data_output import print_targets
from mtrain_cli.composition.compose import compose
from mtrain_cli.console import Console
from mtrain_cli.data.open_dataset import open_dataset
from mtrain_cli.data.store import TokenStore
from mtrain_cli.data.tokenizers import ByteTokenizer

SHOWN = """<|im_start|>user
One?<|im_end|>
<|im_start|>assistant
[Two.\\x1b[31m<|im_end|>]

(10 of 34 tokens count toward the loss)
"""


@pytest.fixture
def words(tmp_path: Path) -> dict[str, str]:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", template("qwen3_instruct_2507"))
    first = turns("One?", "Two.\x1b[31m")
    path = write(tmp_path / "chat.jsonl", [first, *made_up(30)])
    return {"path": str(path), "tokenizer": str(tokenizer)}


def run(*arguments: str | Path) -> str:
    result = CliRunner(env={"COLUMNS": "100"}).invoke(app, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_prepared_store_gives_the_sequences_of_the_conversations(
    words: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = ("--kind", "chat", "--tokenizer", words["tokenizer"], "--setting", "train_on=last")
    said = run("data", "prepare", words["path"], out, *options)
    assert "31 documents" in said
    assert "the loss counts" in said
    given = ("data=chat", *(f"data.{key}={value}" for key, value in words.items()))
    direct = open_dataset(compose([*given, "data.train_on=last", "seq=512"]))
    stored = open_dataset(compose(["data=tokens", f"data.path={out}", "seq=512"]))
    assert len(direct) == len(stored) > 2
    for number in range(len(direct)):
        one, other = direct[number], stored[number]
        assert np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.labels, other.labels)
        assert np.array_equal(one.documents, other.documents)
    store = TokenStore.open(out)
    assert store.meta.whole
    store.verify()
    long = CliRunner().invoke(
        app, ["train", "data=tokens", f"data.path={out}", "seq=64", "--dry-run"]
    )
    assert long.exit_code == 2
    assert f"data.path={out}: document" in long.stderr.replace("\n", "")
    assert "tokens, more than seq=64" in long.stderr


def test_show_and_dry_run_print_the_targets_of_the_first_conversation(
    words: dict[str, str], tmp_path: Path
) -> None:
    run("data", "prepare", words["path"], tmp_path / "out", "--kind", "chat", "--tokenizer",
        words["tokenizer"])  # fmt: skip
    assert run("data", "show", tmp_path / "out", "--targets").endswith(SHOWN)
    given = (f"data.{key}={value}" for key, value in words.items())
    assert run("train", "data=chat", *given, "seq=512", "--dry-run").endswith(SHOWN)


def test_the_middle_of_a_long_document_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    ids = np.frombuffer(b"first " + b"middle " * 100_000 + b"last", np.uint8)
    targets = np.arange(ids.size) % 6 >= 3
    targets[2000:5000] = True
    for on in (targets, None):
        print_targets(Console(soft_wrap=True), ids, on, ByteTokenizer())
        shown = capsys.readouterr().out
        assert len(shown.replace("[", "").replace("]", "")) < 2200
        first, last = shown.split("\n... 698,010 tokens are not shown ...\n")
        bare = first.replace("[", "").replace("]", "")
        assert bare == ids[:1000].tobytes().decode()
        end, count = last.replace("[", "").replace("]", "").split("\n", 1)
        assert end == ids[-1000:].tobytes().decode()
        assert count.startswith(f"({int((targets if on is not None else ids > 0)[1:].sum()):,} of")


def test_a_domain_is_a_column_of_arrow_files_too(words: dict[str, str], tmp_path: Path) -> None:
    table = pyarrow.table({"messages": made_up(3), "domain": ["a", "b", "a"]})
    with pyarrow.ipc.new_stream(str(tmp_path / "chat.arrow"), table.schema) as writer:
        writer.write_table(table)
    given = ("--kind", "chat", "--tokenizer", words["tokenizer"], "--domain", "a")
    assert "2 documents" in run(
        "data", "prepare", tmp_path / "chat.arrow", tmp_path / "out", *given
    )


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_prepare_names_its_own_argument(
    kind: str, words: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    given = ("--kind", kind, "--tokenizer", words["tokenizer"])
    for name, problem in (("none.jsonl", "no such file"), ("empty", "the folder holds no .")):
        result = CliRunner().invoke(app, ["data", "prepare", name, "out", *given])
        assert result.exit_code == 2
        assert re.search(rf"SOURCE=\S*{name}: {problem}", result.stderr)
        assert "data.path" not in result.stderr


def test_targets_have_a_color_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(force_terminal=True, color_system="standard", no_color=False)
    ids = np.frombuffer(b"[red]a?yes", np.uint8)
    targets = np.arange(10) >= 7
    print_targets(console, ids, targets, ByteTokenizer())
    shown = capsys.readouterr().out
    assert "\x1b[2m[red]a?\x1b[0m\x1b[1;32myes\x1b[0m" in shown


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--kind", "tokens"], "--kind tokens: consists of token ids, which need no preparation"),
        (["--kind", "chats"], "chats"),
        (["--kind", "chat", "--setting", "train_on=me"], "data.train_on=me: expected one of"),
        (["--kind", "chat", "--tokenizer", "bpe"], "data.tokenizer=bpe: no such file"),
    ],
)
def test_wrong_options_are_one_line(
    options: list[str], expected: str, words: dict[str, str], tmp_path: Path
) -> None:
    arguments = ["data", "prepare", words["path"], str(tmp_path / "out"), *options]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert expected in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_setting_without_a_kind_is_refused(words: dict[str, str], tmp_path: Path) -> None:
    arguments = ["data", "prepare", words["path"], str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*arguments, "--setting", "train_on=last"])
    assert result.exit_code == 2
    assert "--setting train_on=last: only with --kind" in result.stderr
    assert json.loads(Path(words["path"]).read_text().splitlines()[0])
