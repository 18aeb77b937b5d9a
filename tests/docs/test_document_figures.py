"""The figures that are committed are those that their script draws, and read well on a phone."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
from docs.blocks import ROOT, script

from mtrain_cli.config.mask_settings import MASKS

FOLDER = ROOT / "docs/figures"


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    return script("docs/figures.py")


def test_the_script_draws_what_is_committed(drawing, tmp_path):
    assert drawing.MASKS.keys() == set(MASKS)
    drawing.write(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {path.name for path in FOLDER.glob("*.svg")}
    for name in names:
        assert (tmp_path / name).read_text() == (FOLDER / name).read_text(), (
            f"{name}: python docs/figures.py"
        )


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.svg")), ids=lambda path: path.stem)
def test_figures_are_legible_in_both_modes_and_on_a_phone(path: Path):
    text = path.read_text()
    width = float(re.search(r'viewBox="0 0 (\d+)', text)[1])
    sizes = [float(size) for size in re.findall(r"font-size: (\d+)px", text)]
    assert min(sizes) * 368 / width >= 9, "368 pixels are left of 400"
    assert "prefers-color-scheme: dark" in text
    assert 'class="card"' in text, "a background of its own"
    assert "<title>" in text
    ends = [float(x) for x in re.findall(r'<rect x="[\d.]+" y="[\d.]+" width="([\d.]+)"', text)]
    assert max(ends) <= width


def test_every_figure_is_shown_somewhere():
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    for path in FOLDER.glob("*.svg"):
        assert f"figures/{path.name}" in pages
