"""RULER by generation: an engine that copies scores 100, random weights 0."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
from evaluation.evaluated_runs import small_run
from evaluation.small_tokenizer import write_small_tokenizer
from inference.small_models import engine, source

from mtrain_cli.data.tokenizers import ByteTokenizer, choose_begin
from mtrain_cli.evaluation.measurement import Cell
from mtrain_cli.evaluation.results import Result
from mtrain_cli.inference.engine import Completion
from mtrain_cli.inference.text import TextCodec, open_codec
from mtrain_extras.ruler.generated import Generated
from mtrain_extras.ruler.ruler import RULER6

LENGTH = 1536
RESULT = Result("k", "ruler:niah_single_1", LENGTH, "dense", "", 3, 2, None, None, "")


def needle(text: str) -> list[str]:
    """Return the value of the key in the question."""
    key = re.findall(r"special magic \w+ for (\S+) mentioned", text)[-1]
    return re.findall(rf"for {re.escape(key)} is: (\S+)\.", text)


def tracked(text: str) -> list[str]:
    """Return the variables that have the value of the last question."""
    value = re.findall(r"assigned the value (\d+) in the text", text)[-1]
    names = re.findall(rf"VAR (\w+) = {value}", text)
    for name, other in re.findall(r"VAR (\w+) = VAR (\w+)", text):
        if other in names:
            names.append(name)
    return names


def common(text: str) -> list[str]:
    """Return the ten most common words of the last list."""
    words = re.findall(r"\d+\. (\S+)", text.split("\n")[-2])
    return [word for word, _ in Counter(words).most_common(10)]


def frequent(text: str) -> list[str]:
    """Return the three most frequent coded words."""
    coded = text.partition("appeared coded words. ")[2].partition("\nQuestion")[0]
    words = [word for word in coded.split() if word != "..."]
    return [word for word, _ in Counter(words).most_common(3)]


SOLVERS = {
    "niah_single_1": needle, "niah_multikey_2": needle, "niah_multikey_3": needle, "vt": tracked,
    "cwe": common, "fwe": frequent,
}  # fmt: skip


class CopyingEngine:
    """Stands in for `Engine`: answers with what ``solve`` finds in the prompt."""

    def __init__(self, codec, solve):
        self._codec, self._solve = codec, solve

    def generate(self, prompts, max_new, sampling, stop):
        del sampling, stop
        for ids in prompts:
            text = self._codec.decode(ids)
            answer = self._codec.encode(f" {' '.join(self._solve(text))}")
            yield Completion(len(ids), answer[:max_new], "end")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return small_run(tmp_path_factory.mktemp("generated"))


@pytest.fixture(scope="module")
def codec(run):
    return open_codec(source(run))


def scored(own: Generated, model) -> Result:
    (cell,) = own.cells()
    return own.result(own.measure(model, cell, list(own.items(cell))), RESULT)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Return a random model of as many ids as a BPE has, and that BPE."""
    folder = tmp_path_factory.mktemp("small")
    write_small_tokenizer(folder / "tokenizer")
    found = small_run(folder, "model.vocab_size=768")
    return found, open_codec(source(found), folder / "tokenizer")


@pytest.mark.parametrize("task", RULER6)
def test_an_engine_that_copies_scores_100_and_random_weights_0(small, task):
    run, codec = small
    own = Generated(codec, [task], [2048], 2)
    solved = scored(own, CopyingEngine(codec, SOLVERS[task]))
    assert (solved.score, solved.error, solved.unit) == (100.0, 0.0, "%")
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
    assert (
        scored(own, CopyingEngine(codec, lambda text: re.findall(r"is: (\d+)", text))).score == 75.0
    )


def test_what_a_task_reads_belongs_to_its_settings(tmp_path, codec):
    book = tmp_path / "book.txt"
    book.write_text("One. Two.")
    own, again = (Generated(codec, [f"niah_single_2@{book}"], [LENGTH], 2) for _ in range(2))
    (cell,) = own.cells()
    before = own.settings(cell)
    book.write_text("One. Three.")
    assert again.settings(cell) != before
    assert own.settings(cell) == before  # read once, so that all samples have one key
    assert own.answer_tokens(cell) == 128


def test_the_begin_token_of_prompts_belongs_to_the_settings(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"input": "a", "outputs": ["b"]}\n')
    tokenizers = ByteTokenizer(), ByteTokenizer()
    choose_begin(tokenizers[1], True)
    without, own = (
        Generated(TextCodec(one, frozenset()), ["vt"], [LENGTH], 2, files=[tmp_path / "mine.jsonl"])
        for one in tokenizers
    )
    for cell in own.cells():
        assert own.settings(cell) != without.settings(cell)


def test_a_begin_token_needs_no_position_beyond_the_length(codec):
    class Beginning:
        required = codec.tokenizer

        def encode(self, text: str) -> list[int]:
            return [0, *codec.encode(text)]

    own = Generated(Beginning(), ["niah_single_1"], [LENGTH], 2)  # type: ignore[arg-type]
    (cell,) = own.cells()
    # The last token of an answer takes no position, since nothing follows it.
    used = [len(item["ids"]) + own.answer_tokens(cell) - 1 for item in own.items(cell)]
    assert max(used) <= LENGTH
