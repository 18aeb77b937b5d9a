"""Control characters are escaped in plain lines."""

from __future__ import annotations

from mtrain_cli.printable import printable


def test_plain_lines_escape_control_characters():
    assert printable("a\tb\nc\x1b[31m\x9b\u202e") == "a\tb\nc\\x1b[31m\\x9b\\u202e"
