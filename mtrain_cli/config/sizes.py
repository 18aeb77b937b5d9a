"""Parse and format numbers of tokens such as ``512k``, ``1m`` and ``524288``."""

from __future__ import annotations

import re
from fractions import Fraction

K = 1024
_UNITS = {"": 1, "k": K, "m": K * K}
_SIZE = re.compile(
    r"(?P<number>[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*(?P<unit>[a-z]*)", re.IGNORECASE
)
# Limits of a number and its digits. Without them, the exact fraction of 1e999999999 would fill the
# memory. No key allows numbers that large.
_BEYOND, _DIGITS = 1e30, 40

EXPECTED = "a number of tokens such as 4096, 512k or 1m (k = 1024, m = 1024 k)"


def parse_size(text: str | int | float, expected: str = EXPECTED) -> int:
    """Parse a number of tokens: ``512k``, ``0.5M`` and ``524_288`` all give 524288.

    Raises:
        ValueError: the text is no whole number of tokens. The message begins with ``expected``.
    """
    match = _SIZE.fullmatch(str(text).strip())
    unit = _UNITS.get(match["unit"].lower()) if match else None
    if match is None or unit is None or isinstance(text, bool):
        raise ValueError(f"expected {expected}")
    if len(match["number"]) > _DIGITS or abs(float(match["number"].replace("_", ""))) >= _BEYOND:
        raise ValueError(f"expected {expected}; the value is too large or has too many digits")
    tokens = Fraction(match["number"].replace("_", "")) * unit
    if tokens.denominator != 1:
        raise ValueError(f"is {float(tokens):g} tokens; expected a whole number")
    return int(tokens)


def format_size(tokens: int) -> str:
    """Return the shortest exact text: ``512k`` for 524288, ``1000`` for 1000."""
    for unit, size in (("m", K * K), ("k", K)):
        if tokens and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def format_bytes(size: float) -> str:
    """Format a number of bytes: ``1.5 GiB``, ``12.0 MiB``, ``3.2 KiB`` or ``17 B``."""
    for unit, scale in (("GiB", K**3), ("MiB", K**2), ("KiB", K)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} B"


def with_count(count: int, noun: str) -> str:
    """Return ``1 document`` or ``2,000 documents``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def parse_share(text: str) -> float:
    """Parse ``0.05`` or ``5%`` to 0.05. Raises ValueError for another text."""
    text = text.strip()
    return float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)


def divisors(number: int, most: int | None = None) -> str:
    """List the divisors of a number, such as ``1, 2, 4``. most: the largest to list."""
    last = number if most is None else min(number, most)
    return ", ".join(str(n) for n in range(1, last + 1) if number % n == 0)


def count(number: int) -> str:
    """Format a count, for example as 3.09 B, 494 M or 874 K."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return str(number)
