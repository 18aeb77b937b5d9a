"""Escape control characters in untrusted text, such as file names, before it reaches a terminal."""

from __future__ import annotations

import re

# Control characters except tab and newline, characters that change the text direction, and the
# bytes of a file name that is not UTF-8.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""Return `text` with control characters escaped, for example as `\x1b`."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    r"""Return `text` with line breaks escaped, too, for example as `\n`."""
    return printable(text).replace("\n", "\\n")


def printable_json(text: str) -> str:
    r"""Return JSON on one line with control characters escaped, for example as `\u009b`.

    They can only stand inside its strings, so the JSON means the same.
    """
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def same_width(text: str) -> str:
    """Return `text` with each control character replaced by one replacement character."""
    return _CONTROL.sub("\ufffd", text)
