"""RULER by generation: an engine that copies scores 100, random weights 0."""

from __future__ import annotations

import json

import pytest
from evaluation.evaluated_runs import small_run
from inference.small_models import engine, source

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.evaluation.generated import Generated, require_distinct
from mtrain_cli.evaluation.measurement import Cell
from mtrain_cli.evaluation.results import Result
from mtrain_cli.inference.engine import Completion
from mtrain_cli.inference.text import open_codec

LENGTH = 1536
RESULT = Result("k", "ruler:niah_single_1", LENGTH, "dense", "", 3, 2, None, None, "")


class CopyingEngine:
    """Stands in for `Engine`: answers with the number after ``is:`` in the prompt."""

    def generate(self, prompts, max_new, sampling, stop):
        del max_new, sampling, stop
        for ids in prompts:
            text = bytes(ids).decode()
            answer = text.partition(" is: ")[2].partition(".")[0]
            yield Completion(len(ids), list(f" {answer}.".encode()), "end")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return small_run(tmp_path_factory.mktemp("generated"))


@pytest.fixture(scope="module")
def codec(run):
    return open_codec(source(run))


def scored(own: Generated, model) -> Result:
    (cell,) = own.cells()
    return own.result(own.measure(model, cell, list(own.items(cell))), RESULT)


def test_an_engine_that_copies_scores_100_and_random_weights_0(run, codec):
    own = Generated(codec, ["niah_single_1"], [LENGTH], 2)
    copied = scored(own, CopyingEngine())
    assert (copied.score, copied.error, copied.unit) == (100.0, 0.0, "%")
    assert scored(own, engine(run)).score == 0.0


def test_files_are_graded_by_their_outputs(tmp_path, codec):
    rows = [
        {"input": "The number is: 41. Which?", "outputs": ["41"]},
        {"input": "The number is: 42. Which?", "outputs": ["42", "43"]},
        {"input": "The number is: 44. Which?", "outputs": ["44"]},
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = Generated(codec, [], [LENGTH], 2, files=[path])
    assert own.cells() == [Cell("file:mine", 0)]
    assert own.count(own.cells()[0], 9) == 3
    assert scored(own, CopyingEngine()).score == 75.0


def test_two_files_of_one_name_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="another file has this name"):
        require_distinct([tmp_path / "a.jsonl", tmp_path / "b" / "a.jsonl"])


def test_what_a_task_reads_belongs_to_its_settings(tmp_path, codec):
    book = tmp_path / "book.txt"
    book.write_text("One. Two.")
    own = Generated(codec, [f"niah_single_2@{book}"], [LENGTH], 2)
    (cell,) = own.cells()
    before = own.settings(cell)
    book.write_text("One. Three.")
    assert own.settings(cell) != before
    assert own.answer_tokens(cell) == 128
