"""Shipped profiles at 80 and 120 columns: no name is broken, and times have their defined names."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from typer.testing import CliRunner

from mtrain_cli.commands import app as command_line

NAMES = {
    "hierarchical_ring",
    "hierarchical_all_gather",
    "vertical_slash",
    "context_parallel",
    "all_gather",
}
VALIDATE = (
    "simulate",
    "validate",
    "predicted-4xh200",
    "--prediction",
    "predicted-4xh200/predictions",
    "--no-files",
)
CASES = {
    "profile": ("report", "real-512k-4xh200"),
    "validation": VALIDATE,
}
WHOLE = ("recorded by ", "sha256 ", "figures ")  # to be copied


def shown(*words: str, columns: int) -> str:
    result = CliRunner(env={"COLUMNS": str(columns), "TERM": "dumb"}).invoke(
        command_line.app, list(words), prog_name="mtrain"
    )
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "name", [*(f"{name}-{columns}" for name in CASES for columns in (80, 120)), "predicted-100"]
)
def test_names_are_not_broken(name):
    what, _, columns = name.partition("-")
    columns = int(columns)
    words = CASES.get(what, ("report", "predicted-4xh200"))
    text = shown(*words, columns=columns)
    lines = [line for line in text.splitlines() if not line.startswith(WHOLE)]
    assert (
        max(map(len, lines)) <= columns or words[1] == "real-512k-4xh200"
    )  # whose first line says what it is
    assert "…" not in text
    names = set(
        re.findall(
            r"\b(?:hierarchical|vertical|context|all)_\w*|\w*_(?:gather|ring|slash|parallel)\b",
            text,
        )
    )
    assert names <= NAMES
    assert "hierarchical_ring" in names
    # No fragment of a name stands on a line of its own.
    assert not re.search(r"\bhierarchica(?!l_)|\bvertical_sl(?!ash)|\bcontext_par(?!allel)", text)


def test_validation_says_which_times_it_compares():
    page = " ".join(shown(*VALIDATE, columns=80).split())
    assert "ms: of a layer on the slowest worker, measured without recording (median)" in page
    assert "±: spread of the recorded iterations" in page


def _commands() -> list[tuple[str, ...]]:
    groups = [(group.name, group.typer_instance) for group in command_line.app.registered_groups]
    named = [(info.name,) for info in command_line.app.registered_commands]
    return [
        (),
        *named,
        *(
            (group, info.name)
            for group, of in groups
            for info in of.registered_commands
            if info.name
        ),
    ]


@pytest.mark.parametrize("columns", [80, 120])
def test_help_paragraphs_fill_the_lines(columns):
    for words in _commands():
        text = shown(*words, "--help", columns=columns).partition("╭")[0].partition(" Examples")[0]
        lines = [line.rstrip() for line in text.splitlines()]
        for line, following in itertools.pairwise(lines[3:]):
            first = following.split()[0] if following.strip() else ""
            if line.strip() and first:
                assert len(line) + 1 + len(first) > columns - 2, (words, line)


NAMED = "a-name-that-leaves-no-room-for-a-table-beside-it"


@pytest.mark.parametrize("columns", [80, 120])
def test_run_names_are_not_broken(columns, tmp_path):
    for i, name in enumerate((NAMED, NAMED.upper())):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "resolved.yaml").write_text("train: {steps: 3}\n")
        rows = [
            {
                "step": step,
                "loss": 3.0 - i,
                "seconds": 1.0,
                "tokens_per_second_per_gpu": 10.0,
                "density": 1.0,
            }
            for step in (1, 2, 3)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        buckets = [{"begin": 0, "end": 128, "tokens": 5, "loss": 2.5}]
        result = {
            "step": 3,
            "loss": 2.5,
            "tokens": 5,
            "sequences": 1,
            "seconds": 1.0,
            "attention": "dense",
            "buckets": buckets,
        }
        (folder / "evaluations.jsonl").write_text(json.dumps(result) + "\n")
    for words in (
        ("status", "--all"),
        ("report", NAMED, NAMED.upper(), "--no-html", "--no-csv"),
        ("report", NAMED, "--no-html", "--no-csv"),
    ):
        text = shown(*words, columns=columns)
        assert max(map(len, text.splitlines())) <= columns
        assert "…" not in text
        assert NAMED in text
        assert text.lower().count(NAMED[:12]) == text.lower().count(NAMED) > 0
