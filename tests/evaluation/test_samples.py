"""Samples as lines of JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.evaluation.samples import Sample, read_samples, write_samples

_SAMPLES = [
    Sample(17, "text é\n", ("1234567",), 40, " The answer is", 3),
    Sample(1, "more", ("a", "b"), 41, " Answer:"),
]


def test_samples_survive_a_file(tmp_path: Path) -> None:
    assert write_samples(tmp_path / "a.jsonl", iter(_SAMPLES)) == 2
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
        ('{"input": "q", "output": "a"}', "has no key outputs. Its keys: input, output"),
        ('{"outputs": ["a"]}', "has no key input. Its keys: outputs"),
        ("{", "not JSON (line 1, column 2"),
        ("\udcff", "not JSON (it is not text: byte 1 is not UTF-8)"),
        ("[" * 100_000, "not JSON (it is nested too deeply)"),
        ("[1]", "not a JSON object with the keys input and outputs"),
        ('{"input": "q", "outputs": []}', "outputs must be a list of one or more texts"),
        ('{"input": "q", "outputs": [1]}', "outputs must be a list of one or more texts"),
        ('{"input": "q", "outputs": "a"}', "outputs must be a list of one or more texts"),
        ('{"input": 1, "outputs": ["a"]}', "input and answer_prefix must be texts"),
        ('{"input": "q", "outputs": ["a"], "length": "7"}', "must be integers"),
        ('{"input": "q", "outputs": ["a"], "index": null}', "must be integers"),
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


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--file .*none.jsonl: no such file\. Give a .jsonl file"
    ):
        list(read_samples(tmp_path / "none.jsonl"))


def test_a_file_without_samples_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n \n")
    with pytest.raises(ConfigError, match="has no samples; give lines with the keys input"):
        list(read_samples(path))
