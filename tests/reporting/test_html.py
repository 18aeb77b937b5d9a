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
from reporting.training_runs import trained
from synthetic_records import Play, recorded_once, ring

from mtrain_cli.reporting import elements, html
from mtrain_cli.reporting.html import write_page
from mtrain_cli.reporting.plots import Figure, FigureView
from mtrain_cli.reporting.plots import numbers as rounded
from mtrain_cli.reporting.report_source import ReportSource, open_source
from mtrain_cli.reporting.sections import HEAT_NUMBERS, figures
from mtrain_cli.reporting.training import POINTS, POINTS_OF_ALL


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


def page(folder: Path, *sources: ReportSource) -> tuple[str, dict[str, dict]]:
    text = write_page(folder / "report.html", sources).read_text()
    return text, {figure["name"]: figure for figure in figures_in(text)}


def test_the_page_needs_no_network_and_holds_plotly_once(tmp_path):
    text, drawn = page_of(tmp_path)
    own = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", own)
    assert '<link rel="icon" href="data:,">' in own
    assert "url(" not in own
    assert re.search(r"plotly\.js \(cartesian - minified\) v\d", unpack(text, "plotly"))
    assert "@import" not in own
    assert 0.6e6 < len(text.encode()) < 1e6
    assert set(drawn) == {"heat", "ranks", "program"}
    for name in drawn:
        assert f'id="figure-{name}"' in own


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
        "<dt>host</dt><dd>here</dd>",
        "2026-11-21",
        "torch 2.13.0",
        "mtrain profile imbalance",
        "agree within 1 µs",
        "cost unknown: only one iteration",
    ):
        assert word in text, word
    killed, _ = page_of(tmp_path / "b", complete=False, wanted=10)
    assert (
        "3 of the 10 requested iterations recorded; all figures cover only these iterations"
        in killed
    )


def test_large_recordings_are_thinned_with_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr("mtrain_cli.reporting.sections.HEAT_NUMBERS", 12 * 16**2)
    source = open_source(recorded_once(tmp_path, Play(ring(24), uneven, link={"context": 0.3})))
    drawn = {figure.name: figure for figure in figures([source])}
    assert all(len(view.data[0]["z"]) <= 16 for view in drawn["heat"].views)
    assert "shrink to 16 x 16 cells, each the maximum of its group" in drawn["heat"].note
    assert drawn["heat"].views[0].data[0]["y"][0] == "0-1"


def test_a_sparsity_profile_has_a_page_and_one_without_rows_is_refused(tmp_path):
    import pandas

    from mtrain_cli.config.schema import ConfigError
    from mtrain_cli.records.record_files import HEAD_ROWS, SPARSITY, write_summary

    numbers = {"density": 0.2, "of_mask": 0.2, "worst": 0.5, "slashes": 3, "columns": 9}
    rows = [
        {"step": at, "pattern": "moba", "layer": layer, "head": head, **numbers}
        | {"recall": 0.8 + 0.1 * head}
        for at, layer, head in itertools.product((1, 5), (0, 1), (0, 1))
    ]
    folder = tmp_path / "measured"
    write_summary(folder, {"kind": SPARSITY, "complete": True})
    with pytest.raises(ConfigError, match=r"sparsity\.parquet: cannot be read"):
        open_source(folder)
    pandas.DataFrame(rows).to_parquet(folder / HEAD_ROWS)
    source = open_source(folder)
    assert (source.kind, source.complete, len(source.sparsity)) == ("sparsity profile", True, 8)
    text, _ = page(tmp_path, source)
    assert "<td>all</td><td>0.8500</td><td>0.500</td><td>20.00%</td>" in text


def test_a_full_page_is_under_one_and_a_half_megabytes(tmp_path, monkeypatch):
    random = np.random.default_rng(0)

    def numbers(count: int) -> list[float]:
        return rounded(random.random(count))

    bars, heat = 12_000, {"type": "heatmap", "z": numbers(HEAT_NUMBERS)}
    columns = {
        "x": numbers(bars),
        "base": rounded(random.random(bars) * 100, 6),
        "y": [3] * bars,
    }
    columns["customdata"] = random.integers(0, 64, (bars, 2)).tolist()
    runs = POINTS_OF_ALL // POINTS
    curves = [{"x": list(range(POINTS)), "y": numbers(POINTS)} for _ in range(runs * 2 * 8)]
    filled = [Figure("all", "All", ("what",), [FigureView(("a",), [heat, columns, *curves], {})])]
    monkeypatch.setattr(html, "figures", lambda _: filled)
    size = len(write_page(tmp_path / "report.html", [trained("one", tmp_path)]).read_bytes())
    assert 1e6 < size < 1.5e6


def test_settings_are_listed_and_differences_tabulated(tmp_path):
    one = trained("one", tmp_path)
    settings = {**one.settings, "optim.lr": 2e-3, "topology.workers": 4, "run.name": "two"}
    text, _ = page(tmp_path, one, trained("two", tmp_path, settings=settings))
    assert "<dt>sequence</dt><dd>seq 4k</dd>" in text
    assert "<td class=words>optim.lr</td><td>0.001</td><td>0.002</td>" in text
    assert "<td class=words>run.name</td>" not in text
    assert "<td class=words>topology.workers</td><td>2</td><td>4</td>" in text


BAD = "</script><b>a & b"
SAFE = "&lt;/script&gt;&lt;b&gt;a &amp; b"


def test_texts_are_escaped():
    assert elements.note(BAD) == f'<p class="note">{SAFE}</p>'
    assert elements.remarks([BAD]) == f'<p class="remark">{SAFE}</p>'
    assert elements.definition_list([(BAD, BAD)]) == f"<dl><dt>{SAFE}</dt><dd>{SAFE}</dd></dl>"
    assert elements.section(BAD, "<p>", BAD).count(SAFE) == 2
    table = elements.table([BAD, "n"], [[BAD, BAD]])
    assert table.count(f"class=words>{SAFE}<") == 2
    assert f"<td>{SAFE}</td>" in table


def test_elements_without_content_are_empty():
    assert elements.table(["a"], []) == elements.section("t", "", "n") == elements.note("") == ""
