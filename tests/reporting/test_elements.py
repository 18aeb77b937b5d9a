"""Elements of a page: texts appear literally, and empty elements do not appear."""

from __future__ import annotations

import re

from reporting.test_html import figures_in

from mtrain_cli.reporting import elements
from mtrain_cli.reporting.plots import Figure, FigureView

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


def test_linked_selectors_have_a_name_in_common(tmp_path):
    view = FigureView(("a",), [], {})
    one = Figure("one", "One", ("layout",), [view], linked=True)
    other = Figure("other", "Other", ("layout",), [view])
    assert 'data-link="layout"' in elements.figure(one)
    assert "data-link" not in elements.figure(other)
    elements.write(tmp_path / "page.html", BAD, [elements.figure(one)], [one, other])
    text = (tmp_path / "page.html").read_text()
    assert f"<title>{SAFE}</title>" in text
    assert [figure["linked"] for figure in figures_in(text)] == [True, False]
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)[1]
    assert "if (figure.linked) follow(select);" in script
