"""The elements of a page, and the file: a browser shows it without a network."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from mtrain_cli.config.documents import replace_text
from mtrain_cli.printable import same_width
from mtrain_cli.reporting.plots import Figure
from mtrain_cli.reporting.table import Section, Table

_HERE = Path(__file__).parent
# plotly.js-cartesian-dist-min 4.1.1 from npm, gzipped, with its MIT licence in the same folder.
# plotly.py ships only the full library of 4.8 MB.
_PLOTLY = _HERE / "plotly" / "plotly-cartesian.min.js.gz"


def write(path: Path, title: str, body: Sequence[str], drawn: Sequence[Figure]) -> None:
    """Write a page atomically. Arguments as in `page`."""
    replace_text(path, page(title, body, drawn))


def page(
    title: str, body: Sequence[str], drawn: Sequence[Figure], nonce: str = "", more: str = ""
) -> str:
    """Return a page.

    body: HTML elements, with the element of each figure.
    drawn: the figures of the page.
    nonce: of the scripts, for a server's Content-Security-Policy. more: a script after them.
    """
    data = json.dumps(views_of(drawn), separators=(",", ":"), allow_nan=False)
    style, script, whole = (
        (_HERE / "page" / name).read_text(encoding="utf-8")
        for name in ("style.css", "script.js", "page.html")
    )
    whole = whole.format(
        title=escape(title),
        style=style,
        body="\n".join(body),
        plotly=base64.b64encode(_PLOTLY.read_bytes()).decode(),
        # Base64 text cannot contain the end of a script element.
        data=base64.b64encode(gzip.compress(data.encode(), mtime=0)).decode(),
        nonce=nonce and f' nonce="{nonce}"',
        script=script + more,
    )
    # Replace control characters: a user may print the file to a terminal.
    return same_width(whole)


def views_of(drawn: Sequence[Figure]) -> list[dict[str, Any]]:
    """Return what the script of a page draws of each figure."""
    return [
        {name: getattr(f, name) for name in ("name", "together")}
        | {"views": [asdict(view) for view in f.views]}
        for f in drawn
    ]


def section(title: str, content: str, remark: str = "") -> str:
    """Return a section of the page, or "" without content."""
    whole = f"<section><h2>{escape(title)}</h2>{content}{note(remark)}</section>"
    return whole if content else ""


def note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>' if text else ""


def sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."


def definition_list(rows: Sequence[tuple[str, Any]]) -> str:
    """Return a definition list of (name, value)."""
    listed = (f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in rows)
    return f"<dl>{''.join(listed)}</dl>"


def remarks(lines: Sequence[str]) -> str:
    return "".join(f'<p class="remark">{escape(line)}</p>' for line in lines)


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    words: Collection[int] = (0,),
    states: Sequence[str] = (),
) -> str:
    """Return a table, or "" without rows.

    words: indices of the columns that hold text. The other columns hold numbers.
    states: CSS class of each row.
    """
    if not rows:
        return ""

    def cells(tag: str, texts: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=words' if i in words else ''}>{escape(text)}</{tag}>"
            for i, text in enumerate(texts)
        )

    begins = [f'<tr class="{state}">' if state else "<tr>" for state in states or [""] * len(rows)]
    body = "".join(
        f"{begin}{cells('td', row)}</tr>" for begin, row in zip(begins, rows, strict=True)
    )
    content = f"<thead><tr>{cells('th', heads)}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table>{content}</table></div>'  # a wide table scrolls


def report_section(described: Section) -> str:
    """Return a section with its tables and sentences."""
    content = ""
    for part in described.parts:
        if isinstance(part, Table):
            shown = shown_table(part)
        else:
            tag, lines = "ol" if part.numbered else "ul", part.lines
            listed = "".join(f"<li>{escape(line)}</li>" for line in lines)
            shown = listed and f"<{tag}>{listed}</{tag}>"
        title = part.title if part.title != described.title else ""
        content += f"<h3>{escape(title)}</h3>{shown}" if title and shown else shown
    return section(described.title, content)


def shown_table(shown: Table) -> str:
    """Return a table with its note, or "" without rows."""
    columns = shown.shown
    words = [i for i, column in enumerate(columns) if column.words]
    heads = [column.heading for column in columns]
    cells = [list(map(str, row)) for row in shown.cells()]
    element = table(heads, cells, words, list(map(shown.state, shown.rows)))
    return element and element + note(sentence(shown.note) if shown.note else "")


def figure(drawn: Figure) -> str:
    """Return the HTML elements of a figure: a panel per view, or a single panel with selectors."""
    if drawn.together:
        panels = "".join(
            f'<div class="panel"><h3>{escape(", ".join(view.labels))}</h3>'
            f'<div class="figure" data-panel="{i}"></div></div>'
            for i, view in enumerate(drawn.views)
        )
        place = f'<div class="panels" id="figure-{drawn.name}">{panels}</div>'
    else:
        selectors = "".join(
            f'<label>{escape(name)} <select data-figure="{drawn.name}"></select></label>'
            for name in drawn.selectors
        )
        place = (
            f'<div class="selectors">{selectors}</div>'
            f'<div class="figure" id="figure-{drawn.name}"></div>'
        )
    finding = f"<p>{escape(drawn.finding)}</p>" if drawn.finding else ""
    return section(drawn.title, f"{finding}{place}", drawn.note)
