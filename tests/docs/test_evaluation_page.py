"""The Python of docs/evaluation.md runs as written."""

from __future__ import annotations

from pathlib import Path

import pytest
from docs.blocks import Block, blocks_of
from evaluation.small_tokenizer import write_small_tokenizer

EXAMPLES = [
    block
    for block in blocks_of("python")
    if block.page.name == "evaluation.md" and block.rule != "skip"
]


@pytest.mark.parametrize("block", EXAMPLES, ids=str)
def test_python_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_small_tokenizer(tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(compile(block.text, str(block), "exec", dont_inherit=True), {"__name__": "example"})


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 2
