"""Control characters are escaped in plain lines."""

from __future__ import annotations

import json

from mtrain_cli.printable import one_line, printable, printable_json


def test_plain_lines_escape_control_characters():
    assert printable("a\tb\nc\x1b[31m\x9b\u202e") == "a\tb\nc\\x1b[31m\\x9b\\u202e"


def test_one_line_escapes_line_breaks_too():
    assert one_line("a\nb\r\u2028\x85\tc") == "a\\nb\\r\\u2028\\x85\tc"
    assert one_line("d\x0be\x1cf").splitlines() == ["d\\x0be\\x1cf"]


def test_json_keeps_its_meaning_without_control_characters():
    text = "a\x1b[31m\x9b\u202e\u00e9\\"
    line = printable_json(json.dumps(text, ensure_ascii=False))
    assert not set(line) & set("\x1b\x9b\u202e")
    assert "\u00e9" in line
    assert json.loads(line) == text
