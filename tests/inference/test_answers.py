"""Text appears as it comes, safely; JSON and banners say what was computed."""

from __future__ import annotations

import json

import pytest
from inference.small_models import engine, source, write_hf, write_run

from mtrain_cli.inference.answers import AnswerPrinter, describe, report
from mtrain_cli.inference.engine import END, Completion
from mtrain_cli.inference.text import TextCodec, open_codec


@pytest.fixture(scope="module")
def codec(tmp_path_factory) -> TextCodec:
    """The byte tokenizer."""
    folder = tmp_path_factory.mktemp("run") / "run"
    write_run(folder)
    return open_codec(source(folder))


def test_a_single_text_streams_with_control_characters_escaped(codec, capsys):
    printer = AnswerPrinter(codec, 1)
    for byte in b"a\x1b[2J\n\xc3":
        printer.token(0, byte)
        if byte == ord("a"):
            assert capsys.readouterr().out == "a"
    printer.completed(Completion(3, list(b"a\x1b[2J\n\xc3")))
    assert capsys.readouterr().out == "\\x1b[2J\n\ufffd\n"


def test_several_texts_have_titles(codec, capsys):
    printer = AnswerPrinter(codec, 2)
    printer.token(0, 65)
    assert capsys.readouterr().out == ""
    printer.completed(Completion(3, [65]))
    printer.completed(Completion(3, [66, 67]))
    assert capsys.readouterr().out == "--- prompt 1 ---\nA\n--- prompt 2 ---\nBC\n"


def test_json_has_a_line_per_prompt(codec, capsys):
    printer = AnswerPrinter(codec, 1, as_json=True)
    printer.token(0, 65)
    printer.completed(Completion(3, [65, 10], END, 0.5, 0.25))
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {
        "prompt": 0, "text": "A\n", "prompt_tokens": 3, "ids": [65, 10], "finish": "end",
        "prefill_seconds": 0.5, "decode_seconds": 0.25,
    }  # fmt: skip


def test_json_holds_no_control_characters(codec, capsys):
    text = "\x9b31m\u202e"
    AnswerPrinter(codec, 1, as_json=True).completed(Completion(3, list(text.encode())))
    (line,) = capsys.readouterr().out.split("\n")[:-1]
    assert line.isascii()
    assert json.loads(line)["text"] == text


def test_ids_are_shown_without_a_tokenizer(capsys):
    printer = AnswerPrinter(TextCodec(None, frozenset(), "none"), 2)
    printer.completed(Completion(3, [65, 10]))
    assert capsys.readouterr().out == "--- prompt 1 ---\n65 10\n"


def test_the_summary_counts_prompts_and_tokens(codec):
    printer = AnswerPrinter(codec, 2, as_json=True)
    printer.completed(Completion(1000, [1] * 11, "length", 0.5, 0.2))
    printer.completed(Completion(500, [1], END, 0.25, 0.2))
    assert printer.summary() == (
        "1,500 prompt tokens in 0.75 s (2,000 tokens/s); 20.0 ms per generated token; "
        "1 of 2 prompts ended at --max-new"
    )


def test_the_banner_names_both_kinds_of_attention(tmp_path, capsys):
    folder = write_hf(tmp_path / "hf")
    dense = describe(engine(folder))
    assert dense == [
        "hf: 3 layers, float32 on cpu",
        "prompts: dense, kernel sdpa; new tokens: dense over the whole cache, kernel sdpa",
    ]
    assert describe(engine(folder), generates=False)[1] == "attention: dense, kernel sdpa"
    sparse = describe(engine(folder, "sparsity=moba"))
    assert sparse[1].startswith("prompts: moba (")
    mixed = describe(engine(folder, "sparsity=moba", "sparsity.dense_layers=1"))[1]
    assert ", kernel sdpa, the last layer dense, kernel sdpa; new tokens: " in mixed
    assert "last layer" not in sparse[1]
    write_run(tmp_path / "run")
    assert describe(engine(tmp_path / "run"))[0] == "tiny, step 3: 2 layers, float32 on cpu"
    report(dense)
    assert capsys.readouterr().err.splitlines() == dense
