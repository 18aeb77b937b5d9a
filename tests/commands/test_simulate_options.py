"""`mtrain simulate`: options and settings are honoured together or refused, never ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from mtrain_cli.commands import app as command_line

DENSE = ("model=tiny", "seq=32k", "sparsity=dense")
STRIPED = ("--layout", "striped", "--exchange", "ring")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*words: str):
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(command_line.app, ["simulate", *words], prog_name="mtrain")


def document(*words: str) -> dict[str, Any]:
    found = run(*words, "--json", "--no-files")
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def test_a_slow_rank_needs_a_group_of_one_size():
    words = (*DENSE, "train.global_batch=8", "--recommend", "--slow", "3=2", "--no-files", *STRIPED)
    refused = run(*words)
    assert refused.exit_code == 2, refused.output
    assert "--slow 3=2: --recommend tries groups of any size; give topology.context_parallel=N" in refused.stderr
    fixed = run(*words, "topology.context_parallel=4")
    assert fixed.exit_code == 0, fixed.output
    # `auto` is no size.
    assert run(*words, "topology.context_parallel=auto").exit_code == 2
