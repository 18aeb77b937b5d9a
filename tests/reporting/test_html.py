"""The page is one file without network access; its figures have the numbers of the tables."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from synthetic_records import Play, facts_of, recorded_once, ring, rows_of, write

from mtrain_cli.reporting.figures import figures
from mtrain_cli.reporting.html import _markdown, write_page
from mtrain_cli.reporting.report_source import open_source


def uneven(direction: str, rank: int, step: int) -> float:
    return (1 + 0.5 * rank + 0.1 * step) * (2 if direction == "backward" else 1)


PLAY = Play(ring(4), uneven, link={"context": 0.3}, index=0.2, merge=0.05)


def page_of(folder: Path, **more) -> tuple[str, dict]:
    text = write_page(
        folder / "report.html",
        [open_source(recorded_once(folder, PLAY, layers=(0, 3), iterations=3, **more))],
    ).read_text()
    return text, {figure["name"]: figure["views"] for figure in figures_in(text)}


def unpack(text: str, name: str) -> str:
    """Return a script element of the page, unpacked as in the browser."""
    element = re.search(rf'<script type="text/plain" id="{name}">([A-Za-z0-9+/=]*)</script>', text)
    assert element is not None, name
    return gzip.decompress(base64.b64decode(element.group(1))).decode()


def figures_in(text: str) -> list[dict]:
    return json.loads(unpack(text, "figures"))


def test_the_page_needs_no_network_and_holds_plotly_once(tmp_path):
    text, drawn = page_of(tmp_path)
    own = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", own)
    assert '<link rel="icon" href="data:,">' in own
    assert "url(" not in own
    assert re.search(r"plotly\.js \(cartesian - minified\) v\d", unpack(text, "plotly"))
    assert "@import" not in own
    assert 0.6e6 < len(text.encode()) < 1e6
    assert set(drawn) == {"cases", "heat", "timeline", "ranks", "spread", "layers"}
    for name in drawn:
        assert f'id="figure-{name}"' in own


def test_heat_maps_hold_the_times_of_workers_and_steps(tmp_path):
    _, drawn = page_of(tmp_path)
    view = next(
        v
        for v in drawn["heat"]
        if v["labels"] == ["dense striped ring", "backward", "attention, ms"]
    )
    assert view["data"][0]["z"] == [
        [pytest.approx(uneven("backward", r, s), rel=1e-3) for s in range(4)] for r in range(4)
    ]


def test_the_timeline_fills_the_pass_of_a_rank_in_order(tmp_path):
    text, drawn = page_of(tmp_path)
    assert "3 of " not in text
    for view, rank in itertools.product(drawn["timeline"], range(4)):
        background, *others = view["data"]
        computing = [trace for trace in others if not trace["name"].startswith("message")]
        bars = [
            bar
            for trace in computing
            for bar in zip(trace["base"], trace["x"], trace["y"], strict=True)
        ]
        spans = sorted((start, length) for start, length, y in bars if y == rank)
        for (start, length), (following, _) in itertools.pairwise(spans):
            assert start + length == pytest.approx(following, abs=2e-3)
        assert spans[0][0] == pytest.approx(0, abs=1e-6)
        # Where no phase covers it, the bar of the whole pass shows as a gap.
        assert background["name"] == "gap"
        assert dict(zip(background["y"], background["x"], strict=True))[rank] == pytest.approx(
            sum(spans[-1]), rel=1e-3
        )
    assert [trace for trace in view["data"] if trace["name"] == "message, context"]
    assert any(trace["name"] == "exposed (context link)" for trace in computing)


def test_stacked_bars_of_a_rank_add_up_to_its_passes(tmp_path):
    _, drawn = page_of(tmp_path)
    (case,) = open_source(tmp_path).cases
    view = next(v for v in drawn["ranks"] if v["labels"][1] == "all passes")
    total = np.sum([trace["y"] for trace in view["data"]], 0)
    assert total == pytest.approx(case.passes_ms.sum(0), rel=1e-3)


def test_the_header_names_host_date_command_and_completeness(tmp_path):
    text, _ = page_of(tmp_path / "a")
    for word in (
        "complete",
        "CPU of here",
        "2026-11-21",
        "torch 2.13.0",
        "mtrain profile imbalance",
        "agree within 1 µs",
        "cost unknown: only one iteration",
    ):
        assert word in text, word
    assert "Definitions</summary>" in text
    assert "mean_t( max_r T[r,t] / mean_r T[r,t] )" in text
    killed, _ = page_of(tmp_path / "b", complete=False, wanted=10)
    assert "partial: 3 of 10 samples; the run did not finish" in killed


def test_names_cannot_break_the_page(tmp_path):
    facts = facts_of(ring(2), label="</script><b>a & b")
    folder = write(tmp_path, [rows_of(Play(ring(2)))], [facts])
    text = write_page(folder / "report.html", [open_source(folder)]).read_text()
    assert "</script><b>" not in text
    assert "&lt;/script&gt;&lt;b&gt;a &amp; b" in text


def test_large_recordings_are_thinned_with_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr("mtrain_cli.reporting.figures.TIMELINE_BARS", 400)
    monkeypatch.setattr("mtrain_cli.reporting.figures.HEAT_NUMBERS", 12 * 16**2)
    source = open_source(recorded_once(tmp_path, Play(ring(24), uneven, link={"context": 0.3})))
    drawn = {figure.name: figure for figure in figures([source])}
    timeline = drawn["timeline"]
    # Each of the two passes gets half of the bars; a wait may take two, late and exposed.
    assert all(
        100 < sum(len(trace["x"]) for trace in view.data) <= 2 * 200 for view in timeline.views
    )
    assert "16 of 24 ranks" in timeline.note
    assert re.search(r"without the [\d,]+ shortest phases", timeline.note)
    assert all(len(view.data[0]["z"]) <= 16 for view in drawn["heat"].views)
    assert "shrink to 16 x 16 cells, each the maximum of its group" in drawn["heat"].note
    assert drawn["heat"].views[0].data[0]["y"][0] == "0-1"


def test_markdown_of_the_definitions_becomes_html():
    text = "# A\n\nSome **bold** `x < y`\nmore.\n\n- one\n  two\n- three\n\n"
    text += "| a | b |\n|---|---|\n| 1 | `max_r` |\n\n```\ncode <\n```"
    html = _markdown(text)
    assert "<h3>A</h3>" in html
    assert "<p>Some <b>bold</b> <code>x &lt; y</code> more.</p>" in html
    assert "<li>one two</li><li>three</li>" in html
    assert "<td class=words>1</td><td class=words><code>max_r</code></td>" in html
    assert "<pre>code &lt;</pre>" in html
