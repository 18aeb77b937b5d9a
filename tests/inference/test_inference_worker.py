"""A request reaches the workers unchanged, a stop ends them, and answers appear as they come."""

from __future__ import annotations

import contextlib
import io
import json
import pkgutil
from dataclasses import replace
from pathlib import Path

import gloo
import pytest
from inference.small_models import engine, source, tokens, write_hf, write_run

from mtrain_cli.config import documents
from mtrain_cli.inference import worker
from mtrain_cli.inference.engine import END, Completion
from mtrain_cli.inference.sampling import Sampling
from mtrain_cli.inference.text import TextCodec, open_codec
from mtrain_cli.inference.worker import AnswerPrinter, GenerateRequest, describe, report
from mtrain_cli.launch.environment import resolve_environment
from mtrain_cli.launch.run_dir import RunDir

NEW = 9


def request(folder: Path) -> GenerateRequest:
    return GenerateRequest(
        str(folder), True, [tokens(30), tokens(5)], NEW, Sampling(0.7, seed=4), as_json=True
    )


def test_a_saved_request_is_read_unchanged(tmp_path):
    saved = request(tmp_path)
    saved.save(RunDir(tmp_path))
    read = json.loads((tmp_path / "plan.json").read_text())
    assert documents.checked(GenerateRequest, read) == saved


def run_worker(rank: int, world: int, folder: str) -> tuple[bool, list[str]]:
    """Run the worker of a launched command. Rank 0 alone can read the request.

    Return whether it was stopped, and the lines that it printed.
    """
    here = Path(folder) / ("run" if rank == 0 else f"elsewhere-{rank}")
    found = source(Path(folder) / "hf", f"topology.workers={world}")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        stopped = worker.run(found.config, RunDir(here), gloo.environment(rank, world), False)
    return stopped, printed.getvalue().splitlines()


@pytest.mark.parametrize("stopped", [False, True])
def test_workers_end_together(tmp_path, stopped):
    write_hf(tmp_path / "hf")
    (tmp_path / "run").mkdir()
    request(tmp_path / "hf").save(RunDir(tmp_path / "run"))
    if stopped:
        RunDir(tmp_path / "run").stop_request.touch()
    first, second = gloo.run(2, run_worker, str(tmp_path))
    assert (first[0], second) == (stopped, (stopped, []))
    assert len(first[1]) == (0 if stopped else 2)
    for line in first[1]:
        assert len(json.loads(line)["ids"]) == NEW


def test_the_launcher_finds_the_worker():
    assert pkgutil.resolve_name(worker.TARGET) is worker.run


@pytest.mark.parametrize("ignore_end", [False, True])
def test_end_tokens_count_unless_the_request_ignores_them(
    tmp_path, monkeypatch, capsys, ignore_end
):
    found = source(write_hf(tmp_path / "hf"))
    environment = resolve_environment(found.config)
    asked = replace(request(tmp_path / "hf"), ignore_end=ignore_end)
    worker.answer(asked, found.config, environment)
    free = json.loads(capsys.readouterr().out.splitlines()[0])["ids"]
    codec = TextCodec(None, frozenset([free[3]]), "none")
    monkeypatch.setattr(worker, "open_codec", lambda *_: codec)
    worker.answer(asked, found.config, environment)
    again = json.loads(capsys.readouterr().out.splitlines()[0])["ids"]
    assert again == (free if ignore_end else free[: free.index(free[3])])


@pytest.fixture(scope="module")
def codec(tmp_path_factory) -> TextCodec:
    """The byte tokenizer."""
    folder = tmp_path_factory.mktemp("run") / "run"
    write_run(folder)
    return open_codec(source(folder))


def test_a_single_text_streams_with_control_characters_escaped(codec, capsys):
    printer = AnswerPrinter(codec, 1)
    for byte in b"a\x1b[2J\n\xc3":
        printer.token(byte)
        if byte == ord("a"):
            assert capsys.readouterr().out == "a"
    printer.completed(Completion(3, list(b"a\x1b[2J\n\xc3")))
    assert capsys.readouterr().out == "\\x1b[2J\n\ufffd\n"


def test_several_texts_have_titles(codec, capsys):
    printer = AnswerPrinter(codec, 2)
    printer.token(65)
    assert capsys.readouterr().out == ""
    printer.completed(Completion(3, [65]))
    printer.completed(Completion(3, [66, 67]))
    assert capsys.readouterr().out == "--- prompt 1 ---\nA\n--- prompt 2 ---\nBC\n"


def test_json_has_a_line_per_prompt(codec, capsys):
    printer = AnswerPrinter(codec, 1, as_json=True)
    printer.token(65)
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
        "1 of 2 ended at --max-new"
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
