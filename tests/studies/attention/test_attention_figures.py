"""Figures of attention draw the numbers of their rows, and each says what it shows."""

from __future__ import annotations

import pytest
from studies.attention.test_attention_findings import files

from mtrain_cli.reporting.elements import figure
from mtrain_cli.reporting.plots import Figure
from mtrain_extras.studies.attention import findings as attention_findings
from mtrain_extras.studies.attention.figures import attention_figures
from mtrain_extras.studies.attention.files import AttentionFiles


def drawn(*named) -> dict[str, Figure]:
    return {each.name: each for each in attention_figures(named)}


def test_each_figure_says_what_it_shows():
    found = drawn(("run", files()))
    assert list(found) == [
        *("top-keys", "top-heads", "top-samples", "overlap", "overlap-layers", "maps", "rope"),
        "rope-heads",
    ]
    assert all(each.views and each.finding for each in found.values())
    assert found["top-keys"].finding == attention_findings.largest_keys(files())
    assert found["maps"].finding == attention_findings.maps(files())
    assert not drawn(("run", AttentionFiles()))["maps"].finding


def test_a_finding_names_its_run_if_there_are_several():
    text = attention_findings.overlaps(files())
    assert drawn(("<a>", files()), ("b", files()))["overlap"].finding == f"<a>: {text} b: {text}"
    page = figure(drawn(("<a>", files()), ("b", files()))["overlap"])
    assert f"<p>&lt;a&gt;: {text}" in page


def test_lines_and_heat_maps_have_the_means():
    found = drawn(("run", files()))
    by_step, by_layer = found["top-keys"].views
    assert by_step.data[0]["y"] == pytest.approx([0.265, 0.465])
    assert by_layer.data[0]["y"] == pytest.approx([0.415, 0.515])
    assert found["top-heads"].views[0].data[0]["z"] == [
        pytest.approx([0.405, 0.425]), pytest.approx([0.505, 0.525]),
    ]  # fmt: skip
    assert found["top-samples"].views[0].data[0]["z"] == [
        pytest.approx([0.26, 0.46]), pytest.approx([0.27, 0.47]),
    ]  # fmt: skip
    matrix = next(v for v in found["overlap"].views if v.labels[1] == "top 4 keys").data[0]
    assert matrix["z"] == [[1.0, 0.6, 0.5], [0.6, 1.0, 0.9], [0.5, 0.9, 1.0]]
    (curve, _) = found["rope"].views[0].data
    assert (curve["x"], curve["y"]) == ([1, 2], [1.0, 2.0])
