"""The user's files for RULER: essays as haystack, and the question files SQuAD and HotpotQA."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain_cli.config.documents import read_json, reason
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.checked_files import explain_read_errors

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


class DamagedFileError(ConfigError):
    """A file of the user can be read, but does not hold what it should."""


@dataclass(frozen=True)
class Sources:
    """Files that the user gives.

    essays: text, or RULER's PaulGrahamEssays.json.
    squad: RULER's squad.json (SQuAD 2.0).
    hotpotqa: RULER's hotpotqa.json (HotpotQA, distractor setting).
    words: RULER's english_words.json, for lists of more words than wonderwords has.
    """

    essays: Path | None = None
    squad: Path | None = None
    hotpotqa: Path | None = None
    words: Path | None = None


@dataclass(frozen=True)
class Question:
    """One question about documents.

    documents: numbers of the documents that answer it.
    related: numbers of further documents of the same article.
    """

    text: str
    outputs: tuple[str, ...]
    documents: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclass(frozen=True)
class Questions:
    """Questions, and the documents that they refer to."""

    questions: Sequence[Question]
    documents: Sequence[str]


def read_haystack(path: Path) -> list[str]:
    """Return the words of a text file, or of the key ``text`` of a .json file.

    Raises:
        ConfigError: the file cannot be read, or holds no words.
    """
    if path.suffix.lower() == ".json":
        text = _read(path, lambda content: content["text"])
    else:
        with explain_read_errors(f"{path}:", f"{path}: no such file. Give a file of text."):
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise DamagedFileError(f"{path}: cannot be read ({reason(error)})") from None
    if not isinstance(text, str) or not text.strip():
        raise DamagedFileError(f"{path}: holds no text")
    return re.sub(r"\s+", " ", text).split(" ")


def split_sentences(text: str) -> list[str]:
    """Split a text behind each ``.``, ``!`` or ``?`` that white space follows.

    RULER uses NLTK's trained Punkt model, so its sentences differ behind abbreviations.
    """
    return _SENTENCE_END.split(text)


def read_words(path: Path) -> list[str]:
    """Return the words of RULER's english_words.json.

    Raises:
        ConfigError: the file cannot be read, or is not an object of words.
    """
    words = _read(path, lambda content: list(content.values()))
    if not all(isinstance(word, str) for word in words):
        raise DamagedFileError(f"{path}: must be a JSON object whose values are words")
    return words


def read_squad(path: Path) -> Questions:
    """Read SQuAD 2.0. Questions without an answer are left out.

    Raises:
        ConfigError: the file cannot be read, or is not SQuAD.
    """
    return _read(path, _parse_squad)


def read_hotpotqa(path: Path) -> Questions:
    """Read HotpotQA in its distractor setting.

    Raises:
        ConfigError: the file cannot be read, or is not HotpotQA.
    """
    return _read(path, _parse_hotpotqa)


def _read(path: Path, parse: Callable[[Any], Any]) -> Any:
    """Return ``parse`` of a JSON file."""
    with explain_read_errors(f"{path}:", f"{path}: no such file. Give a .json file."):
        try:
            return parse(read_json(path))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedFileError(f"{path}: cannot be read ({reason(error)})") from None


def _parse_squad(content: Any) -> Questions:
    articles = [article["paragraphs"] for article in content["data"]]
    documents, numbers = _numbered(part["context"] for parts in articles for part in parts)
    questions = []
    for parts in articles:
        of_article = [numbers[part["context"]] for part in parts]
        for part in parts:
            own = numbers[part["context"]]
            related = tuple(number for number in of_article if number != own)
            for asked in part["qas"]:
                if not asked["is_impossible"]:
                    outputs = tuple(answer["text"] for answer in asked["answers"])
                    questions.append(Question(asked["question"], outputs, (own,), related))
    return Questions(questions, documents)


def _parse_hotpotqa(content: Any) -> Questions:
    def titled(title: str, sentences: list[str]) -> str:
        return f"{title}\n{''.join(sentences)}"

    documents, numbers = _numbered(titled(*entry) for one in content for entry in one["context"])
    questions = [
        Question(
            one["question"],
            (one["answer"],),
            tuple(numbers[titled(*entry)] for entry in one["context"]),
        )
        for one in content
    ]
    return Questions(questions, documents)


def _numbered(texts: Iterable[str]) -> tuple[list[str], dict[str, int]]:
    """Return the sorted distinct texts, and the number of each."""
    documents = sorted(set(texts))
    return documents, {text: number for number, text in enumerate(documents)}
