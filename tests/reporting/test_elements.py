"""Elements of a page: texts appear literally, and empty elements do not appear."""

from __future__ import annotations

from mtrain_cli.reporting import elements

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
