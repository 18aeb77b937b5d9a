"""The Python of docs/library.md runs as written, in order."""

from __future__ import annotations

from pathlib import Path

import pytest
from docs.blocks import blocks_of

EXAMPLES = [
    block
    for block in blocks_of("python")
    if block.page.name == "library.md" and block.rule != "skip"
]


@pytest.mark.slow
def test_the_blocks_run_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    # Otherwise `auto` takes Triton's interpreter for a kernel.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.chdir(tmp_path)  # a block writes a profile
    assert len(EXAMPLES) >= 5
    assert len([line for line in EXAMPLES[0].text.splitlines() if line]) == 10
    names = {"__name__": "example"}
    for block in EXAMPLES:
        exec(compile(block.text, str(block), "exec", dont_inherit=True), names)
