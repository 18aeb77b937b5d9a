"""Text of others on a terminal: names of runs, files and domains may hold what moves the cursor or changes a terminal's state."""

from __future__ import annotations

import re

# Control characters but for tab and newline, and what turns the direction of text.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)


def printable(text: str) -> str:
    r"""``text`` with every control character spelled out, such as ``\x1b``."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def same_width(text: str) -> str:
    """``text`` with a replacement character in the place of every control character."""
    return _CONTROL.sub("\ufffd", text)
