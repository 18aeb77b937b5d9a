"""Small files in the formats of the essays and question sets of RULER, made by arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_WORDS = """
river stone market paper idea people work money essay write think build learn school summer
winter language painter taste wealth city
"""
_LIST = _WORDS.split()


def _sentences(first: int, count: int) -> list[str]:
    """Return sentences of 4 to 18 words. first: number of the first sentence."""
    made = []
    for number in range(first, first + count):
        words = [_LIST[(number * number + 7 * i) % len(_LIST)] for i in range(4 + number % 15)]
        made.append(f"{' '.join(words).capitalize()} {number}{'..?.!'[number % 5]}")
    return made


def write_essays(folder: Path) -> Path:
    """Write a file like RULER's PaulGrahamEssays.json."""
    sentences = _sentences(0, 1200)
    text = "\n\n".join("  ".join(sentences[i : i + 6]) for i in range(0, len(sentences), 6))
    return _write(folder / "PaulGrahamEssays.json", {"text": text})


def write_squad(folder: Path) -> Path:
    """Write a file like SQuAD 2.0: 20 articles, of one to six paragraphs each."""
    articles = []
    for article in range(20):
        paragraphs = []
        for number in range(1 + article % 6):
            asked = [
                {
                    "question": f"What is {_LIST[(article + number) % 21]} {number} of {article}?",
                    "is_impossible": is_impossible,
                    "answers": [{"text": _LIST[i]} for i in range(article % 3 + 1)],
                }
                for is_impossible in (False, article % 4 == 0)
            ]
            context = " ".join(_sentences(60 * article + 10 * number, 3 + article % 5))
            paragraphs.append({"context": context, "qas": asked})
        articles.append({"paragraphs": paragraphs})
    return _write(folder / "squad.json", {"data": articles})


def write_hotpotqa(folder: Path) -> Path:
    """Write a file like HotpotQA: 30 questions about 10 documents each."""
    asked = []
    for number in range(30):
        titles = [(number * 7 + i * 11) % 61 for i in range(10)]
        context = [[f"Title {title}", _sentences(20 * title, 4)] for title in titles]
        asked.append(
            {
                "question": f"Who {number}?",
                "answer": f"né {_LIST[number % 21]}",
                "context": context,
            }
        )
    return _write(folder / "hotpotqa.json", asked)


def _write(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path
