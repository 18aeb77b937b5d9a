"""`mtrain profile`: mistakes are one line and cost nothing that was measured."""

from __future__ import annotations

import pytest
from commands.typed_line import split
from typer.testing import CliRunner

from mtrain_cli.commands.app import app


def run(*words: str):
    return CliRunner().invoke(app, ["profile", *split(*words)])


def _nothing_is_measured(*_):
    raise AssertionError("a mistake is found before anything is measured")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["sparsity --pattern mobb"],
            "--pattern mobb: no such pattern (did you mean moba?); allowed: ",
        ),
        (["sparsity --pattern dense"], "--pattern dense: no such pattern; allowed: "),
        (["sparsity --pattern ,"], "names nothing"),
        (
            ["sparsity sparsity.chunk=512"],
            "sparsity.chunk=512: none of the patterns vertical_slash has this key",
        ),
        (
            ["sparsity sparsity.pattern=moba"],
            "sparsity.pattern=moba: give the patterns to measure as --pattern NAME,...",
        ),
        (["sparsity sparsity.p_v=2"], "sparsity.p_v=2: must be above 0 and at most 1"),
        (["kernels --seq 12q"], "--seq 12q: 12q is not a number"),
        (["kernels --density 0"], "--density 0: each must be above 0 and at most 1"),
        (["kernels --heads 16/3"], "--heads 16/3: expected QUERY/KV heads, where KV divides QUERY"),
        (["kernels --block 100"], "--block 100: must be 16, 32, 64 or 128"),
        (["kernels --kernel flash5"], "--kernel flash5: no such kernel"),
        (["kernels --seq 0"], "--seq 0: each must be at least 2 tokens"),
        (["kernels --seq -5"], "--seq -5: each must be at least 2 tokens"),
        (
            ["kernels --density 101%"],
            "--density 101%: each must be above 0 and at most 1, which is 100%",
        ),
        (
            ["kernels --density 5%%"],
            "--density 5%%: 5%% is not a number; give items such as 0.05 or 5%",
        ),
        (["kernels --out folder"], "--out folder: is a folder; give a file"),
        (
            ["kernels --out file/x.json"],
            "--out file/x.json: cannot be written: ",
        ),
        (
            ["kernels --out file"],
            "--out file: exists and is not a calibration of mtrain; give another name, or remove "
            "it",
        ),
        (["kernels --out /proc/x/y.json"], "--out /proc/x/y.json: cannot be written: "),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, words, line):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mtrain_extras.bench.kernels.profile_kernels", _nothing_is_measured)
    monkeypatch.setattr(
        "mtrain_cli.profiling.pattern_quality.profile_sparsity", _nothing_is_measured
    )
    for folder in ("folder", "folder.parquet"):
        (tmp_path / folder).mkdir()
    for file in ("file", "other.parquet"):
        (tmp_path / file).write_text("a letter")
    result = run(*words)
    assert result.exit_code == 2
    assert line in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert (tmp_path / "file").read_text() == "a letter"
