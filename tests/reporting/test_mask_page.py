"""The page of a mask shows who holds which rows, and which rows travel."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from reporting.test_html import figures_in

from mtrain_cli.composition.compose import compose
from mtrain_cli.reporting import mask_page
from mtrain_cli.reporting.mask_page import layouts_table
from mtrain_cli.reporting.mask_view import MaskView, density, holders, views

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
    assert figure.linked
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
        ("2k", ["0", "256", "512", "768", "1,024", "1,280", "1,536", "1,792", "2,048"]),
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


def test_a_cell_with_several_ranks_shows_their_shares():
    (view,) = views(compose(["seq=128k"], plan=True), 4)
    (drawn,) = [one for one in mask_page.mask_figure([view]).views if one.labels[1] == "striped"]
    for row in drawn.data[1]["customdata"]:  # 1,024 tokens
        assert row == [rank for rank in range(4) for _ in range(4)]


def test_the_heat_map_has_the_rows_of_each_pair_of_ranks(masks):
    most = max(share.sent.max() for view in masks for share in view.shares)
    for drawn, (_, share) in chosen(mask_page.travel_figure(masks), masks):
        (heat,) = drawn.data
        for receiving, sending in itertools.product(range(10), repeat=2):
            rows = share.sent[sending, receiving]
            assert heat["z"][receiving][sending] == rows
            assert heat["text"][receiving][sending] == (str(rows) if rows else "")
        assert heat["zmax"] == most


def test_large_numbers_of_rows_are_short():
    shown = [mask_page._short(n) for n in (0, 9_999, 12_800, 1023 * 1024, 5 << 20)]
    assert shown == ["", "9999", "12.5k", "0.999m", "5m"]


def test_many_ranks_have_no_numbers_and_some_are_left_out():
    (view,) = views(compose(["seq=16k"], plan=True), 80)
    figure = mask_page.travel_figure([view])
    (heat,) = figure.views[0].data
    assert "text" not in heat
    assert len(heat["z"]) == len(heat["x"]) == 64
    assert (heat["x"][0], heat["x"][-1]) == ("0", "79")


def test_the_page_has_tables_of_layouts_and_ranks(masks, tmp_path):
    title = "<b>a</b> & \x1b"
    mask_page.write(tmp_path / "m.html", title, masks)
    text = (tmp_path / "m.html").read_text()
    assert "<h1>&lt;b&gt;a&lt;/b&gt; &amp; \ufffd</h1>" in text
    assert [figure["name"] for figure in figures_in(text)] == ["mask", "travels"]
    assert all(figure["linked"] for figure in figures_in(text))
    assert text.count('data-link="layout"') == 2
    for view in masks:
        assert f"<h2>Layouts: {view.title}</h2>" in text
        assert f"<h2>Ranks: {view.title}</h2>" in text
        cells = []
        for share in view.shares:
            traffic, outer = share.traffic, share.traffic.outer.received
            cells += [f"{traffic.pairs[3]:,}", f"{traffic.received[3]:,}"]
            cells += [f"{outer[3]:,}"] if outer.any() else []
            cells += [f"{share.costs[3]:.3f}"]
        assert "<tr><td class=words>3</td>" + "".join(f"<td>{c}</td>" for c in cells) in text
        for share, row in zip(view.shares, layouts_table(view, "").cells(), strict=True):
            assert row[0] == share.layout.name
            first, *rest = row
            assert f"<td class=words>{first}</td>" + "".join(f"<td>{c}</td>" for c in rest) in text
    inner, outer = masks[0].shares[0].prices
    assert f"costs as much as {inner:,} pairs, and {outer:,} if it comes from another node" in text
