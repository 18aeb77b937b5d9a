"""The page of a mask shows who holds which rows."""

from __future__ import annotations

import numpy as np
import pytest
from reporting.test_html import figures_in

from mtrain_cli.composition.compose import compose
from mtrain_extras.masks import page as mask_page
from mtrain_extras.masks.page import MaskView, density, holders, layouts_table, views

SEQ = 8192
NAMES = ["contiguous", "zigzag", "striped", "balanced"]


@pytest.fixture(scope="module")
def masks() -> list[MaskView]:
    words = ["mask=sliding_window", "mask.window=300", "mask.full_every=6", f"seq={SEQ}"]
    return views(compose([*words, "model.num_layers=6"], plan=True), 10, 5)


def chosen(figure, masks):
    """Yield each view of a figure with the layout that it shows."""
    shares = [(view, share) for view in masks for share in view.shares]
    assert [v.labels for v in figure.views] == [(v.title, s.layout.name) for v, s in shares]
    assert figure.selectors == ("layers", "layout")
    yield from zip(figure.views, shares, strict=True)


def test_the_strip_has_the_ranks_of_each_cell(masks):
    for drawn, (view, share) in chosen(mask_page.mask_figure(masks), masks):
        cells, strip, *legend = drawn.data
        np.testing.assert_allclose(cells["z"], density(view.mask), atol=0.01)
        owner = holders(share.layout)[:SEQ]
        for row, start in zip(strip["customdata"], range(0, SEQ, 64), strict=True):
            share_of_cell = np.bincount(owner[start : start + 64], minlength=10) / 64
            found = np.bincount(row, minlength=10) / 16
            np.testing.assert_allclose(found, share_of_cell, atol=1 / 16)
            assert row == sorted(row)
        shown = [[rank % 8 for rank in row] for row in strip["customdata"]]
        assert strip["z"] == shown
        assert strip["xaxis"] == "x2"
        assert [entry["name"] for entry in legend[:3]] == [
            "rank 0, 8, ...",
            "rank 1, 9, ...",
            "rank 2",
        ]
        # The colors of the strip are those of the legend.
        colours = [colour for edge, colour in strip["colorscale"]][::2]
        assert colours == [entry["marker"]["color"] for entry in legend]


@pytest.mark.parametrize(
    ("seq", "labels"),
    [
        ("128k", ["0", "16k", "32k", "48k", "64k", "80k", "96k", "112k", "128k"]),
        ("4k", ["0", "1k", "2k", "3k", "4k"]),
        ("1000", ["0", "125", "250", "375", "500", "625", "750", "875", "1,000"]),
    ],
)
def test_all_ticks_of_an_axis_have_one_form(seq, labels):
    (view,) = views(compose([f"seq={seq}"], plan=True), 2)
    axis = mask_page.mask_figure([view]).views[0].layout["xaxis"]
    assert axis["ticktext"] == labels
    assert axis["tickvals"] == [
        view.mask.length * i // (len(labels) - 1) for i in range(len(labels))
    ]


def test_the_page_has_tables_of_layouts(masks, tmp_path):
    title = "<b>a</b> & \x1b"
    mask_page.write(tmp_path / "m.html", title, masks)
    text = (tmp_path / "m.html").read_text()
    assert "<h1>&lt;b&gt;a&lt;/b&gt; &amp; \ufffd</h1>" in text
    assert [figure["name"] for figure in figures_in(text)] == ["mask"]
    for view in masks:
        assert f"<h2>Layouts: {view.title}</h2>" in text
        for share, row in zip(view.shares, layouts_table(view, "").cells(), strict=True):
            assert row[0] == share.layout.name
            first, *rest = row
            assert f"<td class=words>{first}</td>" + "".join(f"<td>{c}</td>" for c in rest) in text
    inner, outer = masks[0].shares[0].prices
    assert f"costs as much as {inner:,} pairs, and {outer:,} if it comes from another node" in text
