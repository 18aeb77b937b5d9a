"""Every message that the troubleshooting page quotes is one that the program prints."""

from __future__ import annotations

import ast
import functools
import re

import pytest
from docs.blocks import ROOT

from mtrain_cli.launch.failures import find_silent_rank

PAGE = ROOT / "docs" / "troubleshooting.md"
_SPAN = re.compile(r"`([^`\n]+)`")
# What varies from message to message: `...`, N, KEY=VALUE, FOLDER, SIGKILL, numbers, punctuation.
_VARIABLE = re.compile(r"\.\.\.|\b[A-Z][A-Z_/=]*\b|\d+|[:;,()?]")


def quotes() -> list[str]:
    """The quoted texts of several words, without commands and settings."""
    spans = _SPAN.findall(PAGE.read_text(encoding="utf-8"))
    return [span for span in spans if " " in span and not span.startswith("mtrain ")]


def fragments(quote: str) -> list[str]:
    """The fixed parts of a quote: those of several words, and keys."""
    parts = [part.strip() for part in _VARIABLE.split(quote)]
    return [part for part in parts if " " in part or part.endswith("=")]


@functools.cache
def messages() -> str:
    """All text in the source except docstrings, a line for each string, and composed messages.

    Expressions of f-strings are left out, or become `...`.
    """
    found = []
    for folder in ("mtrain_cli", "mtrain_extras", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
            documentation = {node.value for node in nodes if isinstance(node, ast.Expr)}
            strings = (node for node in nodes if isinstance(node, ast.expr))
            own = [node for node in strings if node not in documentation]
            found += [_flat(node, blank) for node in own for blank in ("", "...")]
    for stopped, running in (([1], []), ([], [1])):
        silent = find_silent_rank([], stopped, running, "topology.timeout_s=60")
        assert silent is not None
        found.append(silent.message)
    return "\n".join(filter(None, found))


def _flat(node: ast.expr, blank: str) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_flat(part, blank) or blank for part in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return " ".join(node.value.split("\n"))
    return ""


@pytest.mark.parametrize("quote", quotes())
def test_the_program_prints_each_quoted_message(quote: str) -> None:
    missing = [part for part in fragments(quote) if part not in messages()]
    assert missing == [], f"{PAGE.name} quotes text that no string of the program has"


def test_most_quotes_have_a_fixed_part_and_other_text_is_not_found() -> None:
    assert len(quotes()) > 20
    assert sum(bool(fragments(quote)) for quote in quotes()) > 0.8 * len(quotes())
    assert fragments("rank N hopped over: ... the lazy dog") == ["hopped over", "the lazy dog"]
    assert "hopped over" not in messages()
