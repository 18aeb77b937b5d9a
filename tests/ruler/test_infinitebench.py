"""InfiniteBench: the user's files, prompts, their cut, and `mtrain eval infinitebench`."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from commands.test_evaluate import evaluate, refused
from evaluation.evaluated_runs import small_run
from inference.small_models import source
from ruler.infinitebench_files import LINES, RIGHT, write_files

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.evaluation.measurement import Cell
from mtrain_cli.evaluation.results import Result
from mtrain_cli.inference.engine import Completion
from mtrain_cli.inference.text import open_codec
from mtrain_cli.reporting.evaluations import evaluation_tables
from mtrain_extras.ruler.infinitebench import TASKS, read_samples
from mtrain_extras.ruler.infinitebench_evaluation import InfiniteBenchSamples

RESULT = Result("k", "infinitebench:code_debug", 1024, "dense", "", 3, 2, 50.0, None, "%")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_files(tmp_path_factory.mktemp("infinitebench"))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return small_run(tmp_path_factory.mktemp("run"), "topology.device=cpu")


@pytest.fixture(scope="module")
def codec(run):
    return open_codec(source(run))


class Answering:
    """Stands in for `Engine`: always writes one text, of any length."""

    def __init__(self, codec, text):
        self._ids = codec.encode_plain(text)

    def generate(self, prompts, max_new, sampling, stop):
        del max_new, sampling, stop
        return [Completion(len(ids), self._ids, "end") for ids in prompts]


def test_there_are_files_of_all_tasks():
    assert sorted(LINES) == sorted(RIGHT) == sorted(TASKS)


@pytest.mark.parametrize("task", TASKS)
def test_a_right_answer_scores_100_and_another_0(task, data, codec):
    samples = InfiniteBenchSamples(codec, data, [task], [2048], 5)
    (cell,) = samples.cells()
    assert samples.count(cell, 5) == 1
    items = list(samples.items(cell))
    for text, score in ((RIGHT[task], 100.0), ("nothing", 0.0)):
        (row,) = samples.measure(Answering(codec, text), cell, items)
        assert row["score"] == score


def test_prompts_have_the_texts_of_their_line(data):
    prompts = {task: next(read_samples(data / f"{task}.jsonl", task)).prompt for task in TASKS}
    for task, prompt in prompts.items():
        assert LINES[task]["context"] in prompt
        assert all(option in prompt for option in LINES[task].get("options", ()))
    assert "What is the largest number in the following list?" in prompts["math_find"]
    assert "a function called func_1 in" in prompts["code_run"]
    assert prompts["code_run"].endswith("The value of func_1(-7) is")
    assert "C. write\nD. close\n" in prompts["longbook_choice_eng"]
    (choice,) = read_samples(data / "longbook_choice_eng.jsonl", "longbook_choice_eng")
    assert choice.answers == ("close", "D")


def test_the_middle_of_a_long_prompt_is_cut(data, codec):
    whole, cut = (
        next(InfiniteBenchSamples(codec, data, ["passkey"], [n], 1).items(Cell("passkey", n)))
        for n in (2048, 207)
    )
    assert (whole["cut"], len(cut["ids"])) == (0, 200)  # 207 less 6 for the answer; even halves
    assert cut["ids"] == whole["ids"][:100] + whole["ids"][-100:]
    assert cut["cut"] == len(whole["ids"]) - 200
    exact = len(whole["ids"]) + 6
    samples = InfiniteBenchSamples(codec, data, ["passkey"], [exact, exact - 1], 1)
    assert [next(samples.items(cell))["cut"] > 0 for cell in samples.cells()] == [False, True]
    samples = InfiniteBenchSamples(codec, data, ["passkey"], [1, 2, 6], 1)
    assert [len(next(samples.items(cell))["ids"]) for cell in samples.cells()] == [2, 2, 2]


def test_the_result_says_what_was_cut(data, codec):
    samples = InfiniteBenchSamples(codec, data, ["math_calc"], [1024], 2)
    rows = [{"score": 10.0, "cut": 5}, {"score": 20.0, "cut": 0}]
    found = samples.result(rows, replace(RESULT, task="infinitebench:math_calc"))
    assert (found.score, found.unit) == (15.0, "%")
    assert found.note == "1 of 2 prompts, answers at 512 of 30,000 tokens"
    assert samples.answer_tokens(samples.cells()[0]) == 512
    assert samples.result(rows[1:], replace(RESULT, length=2048)).note == ""


def test_the_table_has_the_published_scores_and_their_mean():
    five = ("longbook_sum_eng", "longbook_qa_eng", "longbook_choice_eng", "longdialogue_qa_eng")
    results = [
        replace(RESULT, note="1 of 2 prompts"),
        replace(RESULT, task="infinitebench:passkey", length=4096, score=90.0),
        replace(RESULT, attention="vertical_slash", score=40.0, note="1 of 2 prompts"),
    ]
    assert cells(results) == [
        ["1k", "code_debug", "Code.Debug", "50.0", "40.0", "1 of 2 prompts",
         "26.3 / 17.0 / 34.1 / 15.5"],
        ["4k", "passkey", "Retrieve.PassKey", "90.0", "-", "", ""],
    ]  # fmt: skip
    rest = [replace(RESULT, task=f"infinitebench:{task}", score=10.0) for task in five]
    *_, mean, other_length = cells([*results, *rest])
    assert mean == ["1k", "mean of 5", "Avg.", "18.0", "-", "", "24.5 / 21.7 / 25.8 / 22.0"]
    assert other_length[0] == "4k"


def cells(results: list[Result]) -> list[list[str]]:
    (table,) = evaluation_tables(results)
    assert "not predicted" in table.note
    return [[column.cell(row) for column in table.columns] for row in table.rows]


def test_the_command_scores_all_tasks_of_a_folder(run, data, monkeypatch):
    monkeypatch.chdir(run.parent)
    done = evaluate(
        "infinitebench", "run", "--data", str(data), "--length", "256", "--samples", "3"
    )
    assert "InfiniteBench, % ± standard error" in done.stdout
    assert all(task in done.stdout for task in TASKS)
    assert re.search(r"passkey +Retrieve.PassKey +0.0 +1 of 1 prompts", done.stdout)
    rows = list(map(json.loads, Path("run/evaluation/samples.jsonl").read_text().splitlines()))
    assert {row["task"] for row in rows} == {f"infinitebench:{task}" for task in TASKS}
    assert max(row["prompt_tokens"] for row in rows) <= 256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": 3}, "context=3 has the wrong type"),
        ({"answer": None}, "answer: must be a text, a number or a list of them"),
        ({"options": ["read"]}, "options: must be 4, not 1"),
        ({"answer": ["open"]}, "answer: is none of the options"),
        ({"answer": ["open", ""]}, "answer: is none of the options"),
        ({"answer": ["open", "BC"]}, "answer: is none of the options"),
    ],
)
def test_a_damaged_line_is_named_by_file_and_number(change, message, tmp_path):
    path = tmp_path / "code_debug.jsonl"
    lines = [LINES["code_debug"], {**LINES["code_debug"], **change}]
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ConfigError) as caught:
        list(read_samples(path, "code_debug"))
    assert str(caught.value) == f"--data: {path}: line 2: {message}"


@pytest.mark.parametrize(
    ("task", "change", "message"),
    [
        ("code_run", {"input": "What?"}, "input: calls no function"),
        ("code_run", {"answer": "five"}, "answer: 'five' is not a finite number"),
        ("math_find", {"answer": "abc"}, "answer: 'abc' is not a finite number"),
        ("math_find", {"answer": "nan"}, "answer: 'nan' is not a finite number"),
        ("math_find", {"answer": ["1e999"]}, "answer: '1e999' is not a finite number"),
        ("math_find", {"input": "What?"}, "input: asks for no number"),
    ],
)
def test_a_line_without_what_its_prompt_asks_for_is_refused(task, change, message, tmp_path):
    path = tmp_path / f"{task}.jsonl"
    path.write_text(json.dumps({**LINES[task], **change}))
    with pytest.raises(ConfigError, match=f"line 1: {message}"):
        list(read_samples(path, task))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--data", "gone"),
            "gone: no such folder. Give a folder with files such as",
        ),
        (("--data", "."), "holds none of passkey.jsonl, number_string.jsonl, "),
        (("--data", ".", "--tasks", "paskey"), "no such task (did you mean passkey?)"),
        (("--data", ".", "--tasks", "passkey"), "passkey.jsonl: no such file"),
        (("--data", "bad"), "math_find.jsonl: line 2: column 2: "),
        (("--data", "empty"), "math_find.jsonl: has no samples"),
    ],
)
def test_mistakes_get_one_line(run, words, message, monkeypatch):
    monkeypatch.chdir(run.parent)
    for name, text in (("bad", "\n{'a'"), ("empty", "\n")):
        Path(name).mkdir(exist_ok=True)
        Path(name, "math_find.jsonl").write_text(text)
    assert message in refused("infinitebench", "run", *words)
