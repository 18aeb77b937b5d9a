"""Essays, words and question files of the user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.evaluation.sources import (
    Question,
    read_haystack,
    read_hotpotqa,
    read_squad,
    read_words,
    split_sentences,
)


def _file(folder: Path, content: Any) -> Path:
    path = folder / "file.json"
    path.write_text(json.dumps(content))
    return path


def test_a_haystack_is_a_list_of_words(tmp_path: Path) -> None:
    expected = ["One", "two", "é.", ""]
    assert read_haystack(_file(tmp_path, {"text": "One  two\n\té. "})) == expected
    (tmp_path / "a.txt").write_text("One  two\n\té. ", encoding="utf-8")
    assert read_haystack(tmp_path / "a.txt") == expected


def test_sentences_end_before_white_space() -> None:
    text = "It is 3.5 m. Is it?  Yes!\nNo"
    assert split_sentences(text) == ["It is 3.5 m.", "Is it?", "Yes!", "No"]


def test_squad_questions_know_their_article(tmp_path: Path) -> None:
    def paragraph(text: str, question: str, is_impossible: bool = False) -> dict[str, Any]:
        answers = [{"text": "yes"}, {"text": "no"}]
        asked = {"question": question, "is_impossible": is_impossible, "answers": answers}
        return {"context": text, "qas": [asked]}

    articles = [[paragraph("c", "C?"), paragraph("a", "A?", True)], [paragraph("b", "B?")]]
    content = read_squad(_file(tmp_path, {"data": [{"paragraphs": parts} for parts in articles]}))
    assert content.documents == ["a", "b", "c"]
    assert content.questions == [
        Question("C?", ("yes", "no"), (2,), (0,)),
        Question("B?", ("yes", "no"), (1,)),
    ]


def test_hotpotqa_questions_have_several_documents(tmp_path: Path) -> None:
    asked = [
        {"question": "Q?", "answer": "A", "context": [["T2", ["x ", "y"]], ["T1", ["z"]]]},
        {"question": "R?", "answer": "B", "context": [["T2", ["x ", "y"]]]},
    ]
    content = read_hotpotqa(_file(tmp_path, asked))
    assert content.documents == ["T1\nz", "T2\nx y"]
    assert content.questions == [Question("Q?", ("A",), (1, 0)), Question("R?", ("B",), (1,))]


def test_words_are_the_values_of_an_object(tmp_path: Path) -> None:
    assert read_words(_file(tmp_path, {"0": "b", "1": "a"})) == ["b", "a"]
    with pytest.raises(ConfigError, match="must be a JSON object whose values are words"):
        read_words(_file(tmp_path, {"0": 1}))


@pytest.mark.parametrize("read", [read_haystack, read_squad, read_hotpotqa, read_words])
@pytest.mark.parametrize("content", ["{", "[1]", '{"data": 1}', '"text"', '{"text": 1}', "\udcff"])
def test_a_wrong_file_ends_with_one_line(tmp_path: Path, read, content: str) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("read", [read_haystack, read_squad, read_hotpotqa, read_words])
def test_a_missing_file_is_named(tmp_path: Path, read) -> None:
    with pytest.raises(ConfigError, match=r"none\.json: no such file"):
        read(tmp_path / "none.json")


def test_a_haystack_without_words_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(ConfigError, match=r"a\.txt: holds no text"):
        read_haystack(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"a\.txt: cannot be read \(it is not text: byte 1"):
        read_haystack(tmp_path / "a.txt")
