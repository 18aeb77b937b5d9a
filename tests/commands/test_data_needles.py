"""`mtrain data needles`, with its mistakes."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mtrain_cli.commands.app import app
from mtrain_cli.composition.compose import compose
from mtrain_cli.data.open_dataset import open_dataset


def _run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["data", "needles", *map(str, arguments)])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {number} of the corpus\n" for number in range(2000)))
    return path


def test_the_next_command_reads_one_document_a_sequence(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "my needles"
    result = _run(
        out, "--length", "2k", "--pairs", "8", "--documents", "9", "--chains", "0.5",
        "--haystack", text, "--questions", "2",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "of bytes, 16 questions each\n" in result.stdout
    assert result.stdout.startswith(f"Wrote {out}/needles.jsonl: 9 documents of 2,048 tokens of")
    records = [json.loads(line) for line in (out / "needles.jsonl").read_text().splitlines()]
    assert [len(record["questions"]) for record in records] == [16] * 9
    assert sum(question["links"] for record in records for question in record["questions"]) == 72
    command = shlex.split(result.stdout.splitlines()[-1])
    assert command[:3] == ["mtrain", "train", "data=text"]
    dataset = open_dataset(compose(command[2:]))
    assert len(dataset) == 9
    texts = {bytes(dataset[i].tokens[:-1].astype("uint8")).decode() for i in range(9)}
    assert texts == {record["text"] for record in records}


def test_the_seed_determines_the_documents(text: Path, tmp_path: Path) -> None:
    def written(name: str, seed: int) -> bytes:
        options = ("--length", "1k", "--pairs", "2", "--documents", "2", "--haystack", text)
        assert _run(tmp_path / name, *options, "--seed", str(seed)).exit_code == 0
        return (tmp_path / name / "needles.jsonl").read_bytes()

    assert written("a", 1) == written("b", 1) != written("c", 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("out --length 8q", "--length 8q: '8q' is not a number of tokens such as 4096"),
        ("out --length 0", "--length 0: must be from 1 to"),
        ("out --length 1k --pairs 64", "--pairs 64: 1,024 tokens of bytes have no room for them"),
        ("out --chains 2", "--chains 2: must be a share from 0 to 1, such as 0.25 or 25%"),
        ("out --chains many", "--chains many: must be a share from 0 to 1"),
        ("out --haystack none.txt", "--haystack none.txt: no such file"),
        ("out --tokenizer none.json", "--tokenizer none.json: no such file"),
        ("full", "OUT=full: already holds needles.jsonl; delete it or give another folder"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "needles.jsonl").write_text("mine")
    result = _run(*arguments.split())
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"mtrain: {said}")
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "full" / "needles.jsonl").read_text() == "mine"
