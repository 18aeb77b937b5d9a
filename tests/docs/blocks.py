"""The blocks of code in the documents, with the comment that says how a test treats each."""

from __future__ import annotations

import importlib.util
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
RULES = ("run", "slow", "dry-run", "compose", "skip")
_FENCE = re.compile(r"^```(\w*)\s*$")
_RULE = re.compile(r"^<!-- test: ([\w-]+)\s*(.*?) -->$")


@dataclass(frozen=True)
class Block:
    """rule: one of `RULES`. more: what stands behind it. line: of the page, from 1."""

    page: Path
    line: int
    language: str
    rule: str
    more: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        """The words of each line that begins with `mtrain`, without `mtrain` and comments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        words = [shlex.split(line, comments=True) for line in lines]
        return [found[1:] for found in words if found[:1] == ["mtrain"]]

    @property
    def is_plain(self) -> bool:
        """Nothing but lines of `mtrain`, without anything that only a shell understands."""
        lines = [line for line in self.text.replace("\\\n", " ").splitlines() if line.strip()]
        return len(self.commands) == len(lines) and not re.search(r"[|&;$<>]", self.text)


def blocks(page: Path) -> list[Block]:
    """Every fenced block of a page. A comment with a rule stands directly before its block."""
    found: list[Block] = []
    rule, more, start, language = "run", "", 0, ""
    inside: list[str] | None = None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = _FENCE.match(line)
        if inside is not None:
            if fence:
                text = "\n".join(inside)
                found.append(Block(page, start, language, rule, more, text))
                inside, rule, more = None, "run", ""
            else:
                inside.append(line)
        elif fence:
            inside, start, language = [], number, fence[1]
        elif match := _RULE.match(line):
            rule, more = match.groups()
        elif line.strip():
            rule, more = "run", ""
    assert inside is None, f"{page}: a block has no end"
    return found


def blocks_of(language: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language == language]


def script(path: str) -> ModuleType:
    """Return a script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(path.replace("/", "_"), ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
