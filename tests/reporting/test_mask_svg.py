"""The picture of a mask has a cell for each share of allowed pairs."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.config.mask_settings import MASKS
from mtrain_cli.reporting.mask_svg import inline, svg
from mtrain_cli.reporting.mask_view import density

RUN = re.compile(r"M(\d+) (\d+)h(\d+)v1h-(\d+)z")
CHUNKED = MaskRule(False, MASKS["block_window"](block=20, back=1)).undivided(320, 320)


def painted(text: str, kind: str) -> np.ndarray:
    """Return which cells of the picture a path covers."""
    cells = np.zeros((64, 64), bool)
    (path,) = re.findall(rf'<path class="{kind}" d="([^"]*)"', text)
    assert RUN.sub("", path) == ""
    for left, top, wide, back in ((int(n) for n in run) for run in RUN.findall(path)):
        assert wide == back
        assert not cells[top, left : left + wide].any()
        cells[top, left : left + wide] = True
    return cells


@pytest.mark.parametrize("draw", [lambda mask: svg(mask, "t"), lambda mask: inline(mask, 192)])
def test_cells_are_full_partial_or_empty(draw):
    table = density(CHUNKED, 64)
    text = draw(CHUNKED)
    assert (painted(text, "full") == (table == 1)).all()
    assert 'class="partial"' not in text, "chunks of 20 tokens are 4 cells of 5"
    causal = SequenceMask.causal(320, 320)
    text = draw(causal)
    assert (painted(text, "partial") == np.eye(64, dtype=bool)).all()
    assert (painted(text, "full") == np.tri(64, k=-1, dtype=bool)).all()


def test_a_short_sequence_has_a_cell_per_token():
    text = svg(SequenceMask.causal(3, 3), "t")
    assert (painted(text, "full")[:3, :3] == np.tri(3, dtype=bool)).all()
    assert "scale(64)" in text


def test_the_file_is_xml_with_the_title_literally_and_both_modes():
    title = "<script>&\x1b " + "word " * 12
    text = svg(CHUNKED, title)
    tree = ET.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    assert tree.find(f"{space}title").text == title.replace("\x1b", "\ufffd")
    lines = [line.text for line in tree.findall(f"{space}text")]
    assert len(lines) == 3
    assert lines[0].startswith("<script>&")
    assert float(tree.get("height")) == 8 + 3 * 15 + 192 + 8
    assert "prefers-color-scheme: dark" in text
