"""Samples as lines of JSON; essays, words and question files of the user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtrain_cli.config.schema import ConfigError
from mtrain_extras.ruler.ruler_files import (
    Question,
    Sample,
    read_haystack,
    read_hotpotqa,
    read_samples,
    read_squad,
    read_words,
    write_samples,
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


def test_a_haystack_without_words_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(ConfigError, match=r"a\.txt: holds no text"):
        read_haystack(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"a\.txt: cannot be read \(it is not text: byte 1"):
        read_haystack(tmp_path / "a.txt")


_SAMPLES = [
    Sample(17, "text é\n", ("1234567",), 40, " The answer is", 3),
    Sample(1, "more", ("a", "b"), 41, " Answer:"),
]


def test_samples_survive_a_file(tmp_path: Path) -> None:
    write_samples(tmp_path / "a.jsonl", iter(_SAMPLES))
    assert list(read_samples(tmp_path / "a.jsonl")) == _SAMPLES
    assert [sample.prompt for sample in _SAMPLES] == ["text é\n The answer is", "more Answer:"]


def test_a_line_has_the_bytes_of_the_original() -> None:
    assert _SAMPLES[0].line() == (
        '{"index": 17, "input": "text \\u00e9\\n", "outputs": ["1234567"], "length": 40, '
        '"length_w_model_temp": 40, "answer_prefix": " The answer is", '
        '"token_position_answer": 3}\n'
    )
    assert "token_position_answer" not in _SAMPLES[1].line()


def test_a_failed_writer_leaves_no_file(tmp_path: Path) -> None:
    def failing():
        yield _SAMPLES[0]
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_samples(tmp_path / "a.jsonl", failing())
    assert list(tmp_path.iterdir()) == []


def test_other_files_need_only_input_and_outputs(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"input": "q", "outputs": ["a"], "more": 1}\n')
    assert list(read_samples(path)) == [Sample(1, "q", ("a",), 0)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"input": "q", "output": "a"}', "outputs is missing; give lines with the keys input and"),
        ('{"outputs": ["a"]}', "input is missing"),
        ("{", "line 1, column 2"),
        ("\udcff", "it is not text: byte 1 is not UTF-8"),
        ("[" * 100_000, "it is nested too deeply"),
        ("[1]", "a value has the wrong type"),
        ('{"input": "q", "outputs": []}', "outputs has no text"),
        ('{"input": "q", "outputs": [1]}', "outputs=1 has the wrong type"),
        ('{"input": "q", "outputs": "a"}', 'outputs="a" has the wrong type'),
        ('{"input": "q", "outputs": ["a"], "length": "7"}', 'length="7" has the wrong type'),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"input": "q", "outputs": ["a"]}\n' + line.encode("utf-8", "surrogateescape")
    )
    with pytest.raises(ConfigError) as error:
        list(read_samples(path))
    assert str(error.value).startswith(f"--file {path}: line 2")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_of_samples_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--file .*none.jsonl: no such file\. Give a .jsonl file"
    ):
        list(read_samples(tmp_path / "none.jsonl"))


def test_a_file_without_samples_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n \n")
    with pytest.raises(ConfigError, match="has no samples; give lines with the keys input"):
        list(read_samples(path))
