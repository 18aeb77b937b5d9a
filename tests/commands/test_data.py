"""`mtrain data`: prepare and show, with their mistakes."""

import gzip
import json
import os
import shlex
import signal
import time
from pathlib import Path

import pytest
import warm
from command import python_path
from masked_documents import question_record, write_jsonl
from typer.testing import CliRunner, Result

from mtrain_cli.commands.app import app
from mtrain_cli.composition.compose import compose
from mtrain_cli.data.open_dataset import open_dataset
from mtrain_cli.launch.stop_request import NOTHING_TO_SAVE


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
    assert "  50 documents, 17,750 tokens, 0.0 MiB of uint16, from " in result.stdout
    assert "(checked)" in result.stdout
    assert "  lengths: 10 % up to " in result.stdout
    assert ", longest " in result.stdout
    assert "document 7 document 7" in result.stdout


def test_mistakes_are_one_line_and_exit_code_2(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert f"SOURCE={tmp_path / 'none'}: no such file. Give a .txt" in _mistake(
        "prepare", tmp_path / "none", out
    )
    assert "Its keys: body" in _mistake("prepare", corpus, out)
    allowed = "give a folder written by `mtrain data prepare`, or a folder of MDS shards"
    assert f"holds no tokens; {allowed}" in _mistake("show", tmp_path)
    (tmp_path / "words.txt").write_text("words")
    assert f"holds no tokens; {allowed}" in _mistake("show", tmp_path / "words.txt")
    assert "no such folder" in _mistake("show", tmp_path / "none")
    _run("prepare", corpus, out, "--text-key", "body")
    assert "--document 50: PATH has 50 documents, numbered from 0" in _mistake(
        "show", out, "--document", "50"
    )
    (out / "tokens.bin").write_bytes(b"")
    assert "tokens.bin has 0 bytes" in _mistake("show", out)


def test_tokens_without_keys_are_counted_in_the_summary(tmp_path: Path) -> None:
    records = [{"ids": [1] * 3, "mask": [[1, 2, 0, 1, 0], [2, 2, 0, 3, 0]], "at": None}]
    source, out = write_jsonl(tmp_path / "q.jsonl", records), tmp_path / "store"
    for words in (("prepare", source, out, *COLUMNS), ("show", out)):
        assert (
            "  tokens that see no key: 2; slices without queries or keys: 1\n"
            in _run(*words).stdout
        )


COLUMNS = ["--tokens-key", "ids", "--mask-key", "mask", "--positions-key", "at"]


def test_masks_and_positions_are_kept_and_shown(tmp_path: Path) -> None:
    records = [question_record(10, 4, 6)] * 20 + [{"ids": [1, 2], "mask": None, "at": None}]
    source, out = write_jsonl(tmp_path / "q.jsonl", records), tmp_path / "my store"
    result = _run("prepare", source, out, *COLUMNS)
    assert result.exit_code == 0, result.output
    lines = (
        "masks in the column mask: 20 of 21 documents, at most 2 intervals of keys per query",
        "rotary positions in the column at: 20 of 21 documents, up to 15",
    )
    assert all(line in result.stdout for line in lines)
    assert "see no key" not in result.stdout
    command = shlex.split(result.stdout.splitlines()[-1])
    config = compose([*command[2:], "seq=64"])
    assert (config.data.mask_key, config.data.positions_key) == ("mask", "at")
    assert open_dataset(config)[0].slices is not None
    shown = _run("show", out, "--check")
    assert shown.exit_code == 0, shown.output
    assert all(line in shown.stdout for line in lines)
    plain = _run("prepare", source, tmp_path / "plain", "--tokens-key", "ids")
    assert "column" not in plain.stdout
    assert "data.mask_key" not in plain.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mask-key", "mask"], "--mask-key mask: only for token ids; add --tokens-key"),
        (["--positions-key", "at"], "--positions-key at: only for token ids"),
        ([*COLUMNS, "--tokenizer", "bpe"], "--tokenizer bpe: give the tokenizer that made them"),
        (["--tokens-key", "id"], "q.jsonl line 1 has no such key. Its keys: ids, mask, at"),
        ([*COLUMNS, "--mask-key", "m"], "--mask-key m: "),
    ],
)
def test_wrong_settings_of_columns_are_one_line(
    tmp_path: Path, words: list[str], message: str
) -> None:
    source = write_jsonl(tmp_path / "q.jsonl", [question_record(10, 4, 6)] * 2)
    assert message in _mistake("prepare", source, tmp_path / "out", *words)
    assert not (tmp_path / "out").exists()


def test_a_document_has_a_number_from_0(tmp_path: Path) -> None:
    result = _run("show", tmp_path, "--document", "-5")
    assert result.exit_code == 2
    assert "--document" in result.output


def test_wrong_documents_are_one_line_with_their_place(tmp_path: Path) -> None:
    good = question_record(10, 4, 6)
    wrong = {
        "q.jsonl:2: token 300 is not one of the 264 ids of bytes": {"ids": [*good["ids"][1:], 300]},
        "q.jsonl line 2 holds [0, 4, 0, 4, 'casual'].": {"mask": [[0, 4, 0, 4, "casual"]]},
        "q.jsonl line 2 holds 33 positions for 34 tokens": {"at": good["at"][1:]},
    }
    for message, change in wrong.items():
        source = write_jsonl(tmp_path / "q.jsonl", [good, {**good, **change}])
        assert message in _mistake("prepare", source, tmp_path / "out", *COLUMNS)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt.gz", gzip.compress(b"some text " * 99)[:-9], "cannot be unpacked (it ends early)"),
        ("a.jsonl.zst", b"plain", "cannot be unpacked ("),
        ("a.jsonl", b'{"text":' + b"[" * 10**6, "line 1: not JSON ("),
        ("\x1b[31m\n.json", b"\0", "line 1: not JSON ("),
    ],
    ids=range(4),
)
def test_a_hostile_file_is_one_line_and_leaves_nothing(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    line = _mistake("prepare", tmp_path / name, tmp_path / "out")
    assert message in line
    assert line.isprintable()
    assert {path.name for path in tmp_path.iterdir()} == {name}


def test_left_out_files_with_strange_names_are_shown_in_plain_characters(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("a.txt", "b.\x1b[31m", "c.\u202etxt", "d.[red]"):
        (tmp_path / "in" / name).write_text("x")
    result = _run("prepare", tmp_path / "in", tmp_path / "out")
    line = "  left out: 3 of other kinds\n"
    assert line in result.stdout
    assert line in _run("show", tmp_path / "out").stdout
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_prepare_says_that_work_is_kept_when_a_signal_stops_it(tmp_path, number):
    with (tmp_path / "long.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": f"line {n} " * 200}) + "\n" for n in range(60_000))
    words = ["data", "prepare", "long.jsonl", "out", "--tokenizer", "bytes"]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    command = warm.Command("mtrain_cli.__main__", words, tmp_path, environment)
    try:
        while command.poll() is None and not (tmp_path / "out.partial/journal.json").exists():
            time.sleep(0.01)
        command.send_signal(signal.SIGUSR1)
        time.sleep(0.1)
        command.send_signal(number)
        stdout, stderr = command.communicate(60)
    finally:
        command.kill()
    assert command.returncode == 143, stderr
    assert "Finished work is kept: run the same command to continue" in stdout
    assert f"mtrain: {NOTHING_TO_SAVE}\n" in stderr
    assert stderr.endswith(f"mtrain: stopped by {number.name}\n")
    assert (tmp_path / "out.partial").exists()


def test_prepare_prints_progress_lines_to_stderr_without_a_terminal(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = _run("prepare", corpus, tmp_path / "quiet", "--text-key", "body")
    assert quiet.stderr == ""
    monkeypatch.setattr("mtrain_cli.commands.data_output._SECONDS_PER_LINE", 0.0)
    told = _run("prepare", corpus, tmp_path / "told", "--text-key", "body")
    assert "tokenizing: 0 of 0 MiB  50 documents, 17,750 tokens" in told.stderr.splitlines()


def test_show_removes_escape_sequences_from_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("harm\x1b]0;title\x07ful [bold]text[/bold]")
    _run("prepare", tmp_path / "a.txt", tmp_path / "out")
    shown = _run("show", tmp_path / "out").stdout
    assert "\x1b" not in shown
    assert "ful [bold]text[/bold]" in shown
