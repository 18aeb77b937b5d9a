"""`mtrain data ruler`, with its mistakes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from evaluation.small_tokenizer import write_small_tokenizer
from ruler.ruler_files import write_essays, write_hotpotqa, write_squad
from typer.testing import CliRunner, Result

from mtrain_cli.commands.app import app
from mtrain_cli.data.tokenizers import open_tokenizer
from mtrain_extras.ruler import word_lists
from mtrain_extras.ruler.ruler import RULER13, generate
from mtrain_extras.ruler.ruler_files import Sources, read_samples


def _run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["data", "ruler", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a tokenizer, essays and questions."""
    monkeypatch.chdir(tmp_path)
    write_small_tokenizer(tmp_path / "tok")
    write_essays(tmp_path)
    write_squad(tmp_path)
    write_hotpotqa(tmp_path)
    return tmp_path


def test_files_hold_the_samples_of_each_length_and_task(folder: Path) -> None:
    result = _run(
        "out", "--tokenizer", "tok", "--length", "6k,8192", "--tasks", "ruler13", "--samples", "2",
        "--essays", "PaulGrahamEssays.json", "--squad", "squad.json",
        "--hotpotqa", "hotpotqa.json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("Words of wonderwords, SHA-256 ")
    assert lines[1] == "Wrote out/6144/niah_single_1.jsonl: 2 samples"
    assert {path.name for path in (folder / "out" / "8192").iterdir()} == {
        f"{task}.jsonl" for task in RULER13
    }
    files = ("PaulGrahamEssays.json", "squad.json", "hotpotqa.json")
    tokenizer, sources = open_tokenizer("tok"), Sources(*(str(folder / name) for name in files))
    for task in ("vt", "qa_1", "niah_multikey_1"):
        expected = list(generate(task, 8192, 2, tokenizer, sources=sources))
        assert list(read_samples(folder / "out" / "8192" / f"{task}.jsonl")) == expected


def test_another_haystack_names_the_file(folder: Path) -> None:
    (folder / "book.txt").write_text("A short text. " * 50)
    task = "niah_single_2@book.txt"
    result = _run("out", "--tokenizer", "tok", "--tasks", task, "--samples", "1")
    assert result.exit_code == 0, result.output
    (sample,) = read_samples(folder / "out" / "4096" / "niah_single_2@book.jsonl")
    assert "A short text." in sample.input


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--tasks niah", "--tasks niah: no such task"),
        ("--tasks ,", "--tasks ',': names nothing"),
        ("--tasks ruler13", "--tasks niah_single_2: give --essays FILE"),
        ("--tasks qa_2", "--tasks qa_2: give --hotpotqa FILE"),
        ("--tasks niah_single_2 --essays none.txt", "--essays none.txt: no such file"),
        ("--tasks qa_1 --squad hotpotqa.json", "--squad hotpotqa.json: cannot be read"),
        ("--tasks niah_single_2@a/x.txt,niah_single_2@b/x.md", "--tasks niah_single_2@a/x.txt,n"),
        ("--length 4q", "--length 4q: '4q' is not a number of tokens"),
        ("--length 4k,", "--length 4k,: '' is not a number of tokens"),
        ("--length 1", "--length 1: must be from 2 to"),
        ("--length 200", "--length 200: too few tokens for a sample of niah_single_1"),
        ("--tokenizer none", "--tokenizer none: no such file"),
        ("--length 4k,200 --tasks fwe,vt", "--length 200: too few tokens for a sample of fwe"),
        ("--length 2k", "OUT=out: already holds out/2048/fwe.jsonl; delete it"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(folder: Path, arguments: str, said: str) -> None:
    kept = folder / "out" / "2048" / "fwe.jsonl"
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    tokenizer = "" if "--tokenizer" in arguments else "--tokenizer tok"
    result = _run("out", *tokenizer.split(), *arguments.split())
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"mtrain: {said}")
    assert sorted((folder / "out").rglob("*")) == [kept.parent, kept]
    assert kept.read_text() == "mine"


@pytest.mark.usefixtures("folder")
def test_only_tasks_of_words_need_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    word_lists._lists.cache_clear()
    word_lists.adjective_nouns.cache_clear()
    result = _run(
        "out", "--tokenizer", "tok", "--tasks", "vt,fwe,niah_multikey_3", "--samples", "2"
    )
    assert (result.exit_code, result.stdout.count("Wrote")) == (0, 3), result.output
    result = _run("two", "--tokenizer", "tok", "--tasks", "niah_single_1")
    assert result.exit_code == 2
    assert "needs the wonderwords package: pip install" in result.stderr
