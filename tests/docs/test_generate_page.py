"""The Python examples of docs/generate.md run one after another, like the cells of a notebook."""

from __future__ import annotations

import pytest
from docs.blocks import blocks_of

CELLS = [block for block in blocks_of("python") if block.page.name == "generate.md"]


@pytest.mark.usefixtures("_in_a_folder")
def test_the_cells_run_in_order(capsys):
    assert len(CELLS) >= 4
    names: dict = {"__name__": "notebook"}
    for cell in CELLS:
        exec(compile(cell.text, str(cell), "exec", dont_inherit=True), names)
    shown = capsys.readouterr().out
    assert "dense: " in shown
    assert "vertical_slash: " in shown


@pytest.fixture
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Otherwise `auto` takes Triton's interpreter for a kernel.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
