"""`mtrain eval ruler`: tasks and files of samples, and one line for each mistake."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from commands.test_evaluate import evaluate, refused
from data.framed_tokenizers import write_framed
from evaluation.evaluated_runs import request_of, small_run, text_file
from inference.small_models import source

from mtrain_cli.inference.text import open_codec
from mtrain_extras.ruler.evaluation import RulerOptions, open_generated


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return small_run(tmp_path_factory.mktemp("ruler"), "topology.device=cpu")


@pytest.fixture(autouse=True)
def folder(run, monkeypatch) -> None:
    monkeypatch.chdir(run.parent)


def test_ruler_scores_tasks_and_files():
    lines = [{"input": f"The number is {n}. Which?", "outputs": [str(n)]} for n in range(3)]
    Path("mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ("--tasks", "niah_single_1", "--samples", "1", "--file", "mine.jsonl", "--max-new", "4")
    done = evaluate("ruler", "run", "--length", "1536", *words)
    assert "RULER, % ± standard error" in done.stdout
    assert "file:mine" in done.stdout
    assert "FLOP to compute (dense attention) and the samples of --file" in done.stderr
    again = evaluate("ruler", "run", "--length", "1536", *words)
    assert "holds all samples; nothing to compute" in again.stderr
    words = ("--tasks", "", "--file", "mine.jsonl", "--max-new", "2")
    assert evaluate("ruler", "run", *words).stderr.startswith("the samples of --file\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tasks", "vtt"), "no such task (did you mean vt?); allowed: ruler6, "),
        (("--tasks", "qa_1"), "give --squad FILE"),
        (("--tasks", "niah_single_1", "--length", "64"), "--length 64: too few tokens"),
        (
            ("--tasks", "niah_single_2@gone.txt", "--length", "2k"),
            "--tasks niah_single_2@gone.txt: no such file",
        ),
        (("--tasks", "", "--file", "a/x.jsonl", "--file", "b/x.jsonl"), "another file has this"),
    ],
)
def test_mistakes_get_one_line(words, message):
    assert message in refused("ruler", "run", *words)


def test_samples_without_outputs_and_too_long_ones_are_refused():
    Path("bad.jsonl").write_text('{"input": "a"}\n')
    words = ("ruler", "run", "--tasks", "", "--file", "bad.jsonl")
    assert "/bad.jsonl: line 1: outputs is missing" in refused(*words)
    row = {"input": "a", "outputs": ["b"]}
    Path("bad.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({**row, "input": ""}))
    assert "bad.jsonl: sample 2 is empty" in refused(*words)
    Path("bad.jsonl").write_text(json.dumps({"input": "a" * 5000, "outputs": ["b"]}) + "\n")
    # Files have lengths of their own, so --length does not count.
    assert "exceeds the 4,096 positions" in refused(*words, "--length", "64k")


def test_every_prompt_starts_as_in_training(tmp_path):
    tokenizer, text = write_framed(tmp_path / "framed"), text_file(tmp_path)
    words = ["data=text", f"data.path={text}", f"data.tokenizer={tokenizer}"]
    run = small_run(tmp_path, *words, "model.vocab_size=auto", "data.bos=auto")
    file = tmp_path / "own.jsonl"
    file.write_text(json.dumps({"input": "Line 1 says 1.", "outputs": ["1"]}) + "\n")
    options = asdict(RulerOptions(tasks=("fwe",), files=(str(file),)))
    codec = open_codec(source(run))
    own = open_generated(request_of(run, "ruler", options=options), source(run), codec)
    ids = [item["ids"] for cell in own.cells() for item in own.items(cell)]
    assert len(ids) > 1
    assert [one[:1] for one in ids] == [codec.encode_plain("<begin>")] * len(ids)
