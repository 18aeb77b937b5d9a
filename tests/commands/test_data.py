"""`mtrain data`: prepare and show, with their mistakes."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mtrain_cli.commands.app import app
from mtrain_cli.composition.compose import compose
from mtrain_cli.data.open_dataset import open_dataset


def _run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["data", *map(str, arguments)])


def _mistake(*arguments: str | Path) -> str:
    """Return the only line on stderr of a command that must exit with code 2."""
    result = _run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text(
        "".join(json.dumps({"body": f"document {number} " * 30}) + "\n" for number in range(50))
    )
    return path


@pytest.mark.parametrize(
    "name", ["plain-1.0", "my data, all=of it", "it's", 'say "hi"', "$HOME", "back\\slash", "é"]
)
def test_prepare_prints_counts_and_a_next_command_that_works(
    corpus: Path, tmp_path: Path, name: str
) -> None:
    out = tmp_path / name
    result = _run(
        "prepare", corpus, out, "--text-key", "body", "--tokenizer", "bpe", "--vocab-size", "301"
    )
    assert result.exit_code == 0, result.output
    assert "50 documents" in result.stdout
    command = shlex.split(result.stdout.splitlines()[-1])
    assert command[:3] == ["mtrain", "train", "data=tokens"]
    config = compose([*command[2:], "seq=64"])
    assert config.data.path == str(out)
    assert "vocabulary 301 (304 for the model, a multiple of 8), each document" in result.stdout
    assert config.model.vocab_size % 8 == 0
    assert open_dataset(config).num_tokens > 64


def test_repeating_prepare_reports_that_it_is_complete(corpus: Path, tmp_path: Path) -> None:
    assert _run("prepare", corpus, tmp_path / "out", "--text-key", "body").stdout.startswith(
        "Wrote"
    )
    again = _run("prepare", corpus, tmp_path / "out", "--text-key", "body")
    assert (again.exit_code, again.stdout.splitlines()[0]) == (
        0,
        f"Already complete: {tmp_path / 'out'}",
    )


def test_prepare_reads_the_standard_library(tmp_path: Path) -> None:
    result = _run("prepare", "stdlib", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "tokenizer bytes, vocabulary 264, each document ends with id 257" in result.stdout


def test_show_prints_counts_lengths_and_text(corpus: Path, tmp_path: Path) -> None:
    _run("prepare", corpus, tmp_path / "out", "--text-key", "body")
    result = _run("show", tmp_path / "out", "--document", "7", "--check")
    assert result.exit_code == 0, result.output
    assert "50 documents, 17,750 tokens from" in result.stdout
    assert "(checked)" in result.stdout
    assert "256 to 1,023" in result.stdout
    assert "100.0%" in result.stdout
    assert "document 7 document 7" in result.stdout


def test_mistakes_are_one_line_and_exit_code_2(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert f"SOURCE={tmp_path / 'none'}: no such file. Give a .txt" in _mistake(
        "prepare", tmp_path / "none", out
    )
    assert "--text-key=text: " in _mistake("prepare", corpus, out)
    assert "Its keys: body" in _mistake("prepare", corpus, tmp_path / "out2")
    assert "--tokenizer=gpt5: no such file. Give bytes, bpe, or the path" in _mistake(
        "prepare", corpus, out, "--tokenizer", "gpt5"
    )
    assert "--vocab-size 5: only for --tokenizer bpe" in _mistake(
        "prepare", corpus, out, "--vocab-size", "5"
    )
    allowed = (
        "give a folder written by `mtrain data prepare`, a folder of MDS shards, or a .npy or .bin"
    )
    assert f"holds no tokens; {allowed}" in _mistake("show", tmp_path)
    (tmp_path / "words.txt").write_text("words")
    assert f"is not a token array; {allowed}" in _mistake("show", tmp_path / "words.txt")
    assert "no such folder" in _mistake("show", tmp_path / "none")
    _run("prepare", corpus, out, "--text-key", "body")
    assert "--document 50: the store has documents 0 to 49" in _mistake(
        "show", out, "--document", "50"
    )
    (out / "tokens.bin").write_bytes(b"")
    assert "tokens.bin has 0 bytes" in _mistake("show", out)
    assert not list(tmp_path.glob("gpt5*"))


def test_help_shows_examples() -> None:
    assert (
        "mtrain data prepare stdlib data/python --tokenizer bpe" in _run("prepare", "--help").stdout
    )
    assert "mtrain data show data/python --document 17 --check" in _run("show", "--help").stdout


def test_data_commands_do_not_import_torch(corpus: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    script = (
        "import sys\nfrom mtrain_cli.commands.data import prepare, show\nfrom pathlib import Path\n"
        f"prepare({str(corpus)!r}, Path({out!r}), 'bytes', None, 'body')\nshow(Path({out!r}), 0, "
        "True)\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
