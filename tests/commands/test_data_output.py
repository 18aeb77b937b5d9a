"""What `mtrain data` prints: progress, tables and text without escape sequences."""

import json
from pathlib import Path

import numpy as np
import pytest
from reporting.test_tables import printed
from typer.testing import CliRunner, Result

from mtrain_cli.commands.app import app
from mtrain_cli.commands.data_output import _length_table


def _run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["data", *map(str, arguments)])


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text(
        "".join(json.dumps({"body": f"document {number} " * 30}) + "\n" for number in range(50))
    )
    return path


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


def test_the_histogram_fits_a_narrow_terminal() -> None:
    lines = printed(_length_table(np.full(3, 99_999_999)), width=80).splitlines()
    (row,) = [line for line in lines if "99,999,999 " in line and "█" in line]
    assert "100.0%" in row
    assert max(map(len, lines)) <= 80
