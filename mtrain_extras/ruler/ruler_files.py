"""RULER's samples on disk, and the user's files for them: essays, SQuAD, HotpotQA and words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain_cli.config import documents
from mtrain_cli.config.documents import replacing
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.checked_files import explain_read_errors

_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError)


@dataclass(frozen=True)
class Sample:
    """One question about a long text.

    index: number of the sample. RULER's needle tasks store here the character offset of the first
        answer instead.
    length: number of tokens of input and answer_prefix, plus the tokens reserved for the answer.
    answer_token: number of tokens of the input before the first answer; None if not recorded.
    """

    index: int
    input: str  # the text and the question
    outputs: tuple[str, ...]  # the expected answers
    length: int
    answer_prefix: str = ""  # beginning of the answer, which the model continues
    answer_token: int | None = None

    @property
    def prompt(self) -> str:
        """The text that the model reads: the input and the beginning of the answer."""
        return self.input + self.answer_prefix

    def line(self) -> str:
        """Return the sample as a line of JSON. The bytes are those that RULER writes."""
        record: dict[str, Any] = {
            "index": self.index, "input": self.input, "outputs": list(self.outputs),
            "length": self.length, "length_w_model_temp": self.length,
            "answer_prefix": self.answer_prefix,
        }  # fmt: skip
        if self.answer_token is not None:
            record["token_position_answer"] = self.answer_token
        return json.dumps(record) + "\n"


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Write samples to a .jsonl file, which appears when it is complete."""
    with replacing(path) as draft, draft.open("w", encoding="utf-8") as file:
        file.writelines(sample.line() for sample in samples)


def read_samples(path: Path) -> Iterator[Sample]:
    """Yield the samples of a .jsonl file with input and outputs; ConfigError if it has none."""
    missing = f"--file {path}: no such file. Give a .jsonl file of samples."
    keys = "give lines with the keys input and outputs"
    with explain_read_errors(f"--file {path}:", missing), path.open("rb") as file:
        empty = True
        for number, line in enumerate(file):
            if not line.strip():
                continue
            empty = False
            try:
                record = json.loads(line.decode("utf-8"))
                position = {"answer_token": record.get("token_position_answer")}
                known = {"index": number, "length": 0, **record, **position}
                sample = documents.checked(Sample, known)
            except (*_UNREADABLE, RecursionError) as error:
                why = documents.reason(error)
                raise ConfigError(f"--file {path}: line {number + 1}: {why}; {keys}") from None
            if not sample.outputs:
                raise ConfigError(f"--file {path}: line {number + 1}: outputs has no text; {keys}")
            yield sample
        if empty:
            raise ConfigError(f"--file {path}: has no samples; {keys}")


@dataclass(frozen=True)
class Sources:
    """Paths of files that the user gives."""

    essays: str | None = None  # text, or RULER's PaulGrahamEssays.json
    squad: str | None = None  # RULER's squad.json (SQuAD 2.0)
    hotpotqa: str | None = None  # RULER's hotpotqa.json (HotpotQA, distractor setting)
    words: str | None = None  # RULER's english_words.json, for more words than wonderwords has


NO_SOURCES = Sources()


@dataclass(frozen=True)
class Question:
    """One question. documents, related: numbers of those that answer it, and of its article."""

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
    """Return the words of a text file, or of the key ``text`` of a .json file; else ConfigError."""
    if path.suffix.lower() == ".json":
        text = _read(path, lambda content: content["text"])
    else:
        text = _read(path, str, lambda path: path.read_text(encoding="utf-8"))
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{path}: holds no text")
    return re.sub(r"\s+", " ", text).split(" ")


def read_words(path: Path) -> list[str]:
    """Return the words of RULER's english_words.json. Raises ConfigError if it has none."""
    words = _read(path, lambda content: list(content.values()))
    if not all(isinstance(word, str) for word in words):
        raise ConfigError(f"{path}: must be a JSON object whose values are words")
    return words


def read_squad(path: Path) -> Questions:
    """Read the questions of SQuAD 2.0 that have an answer. Raises ConfigError if it is none."""
    return _read(path, _parse_squad)


def read_hotpotqa(path: Path) -> Questions:
    """Read HotpotQA in its distractor setting. Raises ConfigError if it is none."""
    return _read(path, _parse_hotpotqa)


def _read(
    path: Path,
    parse: Callable[[Any], Any],
    read: Callable[[Path], Any] = documents.read_json,
) -> Any:
    """Return ``parse`` of what ``read`` gives."""
    with explain_read_errors(f"{path}:", f"{path}: no such file."):
        try:
            return parse(read(path))
        except _UNREADABLE as error:
            raise ConfigError(f"{path}: cannot be read ({documents.reason(error)})") from None


def _parse_squad(content: Any) -> Questions:
    articles = [article["paragraphs"] for article in content["data"]]
    texts, numbers = _numbered(part["context"] for parts in articles for part in parts)
    questions = []
    for parts in articles:
        of_article = [numbers[part["context"]] for part in parts]
        for own, part in zip(of_article, parts, strict=True):
            related = tuple(number for number in of_article if number != own)
            for asked in part["qas"]:
                if not asked["is_impossible"]:
                    outputs = tuple(answer["text"] for answer in asked["answers"])
                    questions.append(Question(asked["question"], outputs, (own,), related))
    return Questions(questions, texts)


def _parse_hotpotqa(content: Any) -> Questions:
    def titled(title: str, sentences: list[str]) -> str:
        return f"{title}\n{''.join(sentences)}"

    texts, numbers = _numbered(titled(*entry) for one in content for entry in one["context"])
    questions = []
    for one in content:
        own = tuple(numbers[titled(*entry)] for entry in one["context"])
        questions.append(Question(one["question"], (one["answer"],), own))
    return Questions(questions, texts)


def _numbered(texts: Iterable[str]) -> tuple[list[str], dict[str, int]]:
    """Return the sorted distinct texts, and the number of each."""
    distinct = sorted(set(texts))
    return distinct, {text: number for number, text in enumerate(distinct)}
