"""Run `mtrain` in this process, with its arguments as one typed line or in several parts."""

from __future__ import annotations

import json
import shlex
from typing import Any

from typer.testing import CliRunner

from mtrain_cli.commands import app as command_line

DENSE = "model=tiny seq=32k sparsity=dense"
STRIPED = "--layout striped --exchange ring"
SMALL = "model=tiny seq=16k --columns 64 --density 0.1"


def split(*parts: str) -> list[str]:
    """Split each part into arguments as a shell does."""
    return [word for part in parts for word in shlex.split(part) or [part]]


def run(*parts: str, columns: int = 80):
    """Run `mtrain`, with each part split into arguments."""
    environment = {"COLUMNS": str(columns), "TERM": "dumb"}
    return CliRunner(env=environment).invoke(command_line.app, split(*parts), prog_name="mtrain")


def simulate(*parts: str, columns: int = 200):
    return run("simulate", *parts, columns=columns)


def document(*parts: str) -> dict[str, Any]:
    result = simulate(*parts, "--json", "--no-files")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)
