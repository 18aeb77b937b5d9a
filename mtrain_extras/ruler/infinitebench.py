"""The tasks of InfiniteBench (arXiv:2402.13718): the user's files, prompts and scores.

The prompts below are copied from OpenBMB/InfiniteBench, commit 88b3daa, src/prompt.py, those for
models without a chat format (yarn_mistral_templates). Scores are comparable with published results
only if every character stays. Copyright (c) 2023 OpenBMB, MIT License:

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
associated documentation files (the "Software"), to deal in the Software without restriction,
including without limitation the rights to use, copy, modify, merge, publish, distribute,
sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions: The above copyright notice and this
permission notice shall be included in all copies or substantial portions of the Software. THE
SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT
LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT.
IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN
CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""

# ruff: noqa: E501
from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain_cli.commands.options import parse_names
from mtrain_cli.config import documents
from mtrain_cli.config.documents import UnreadableError
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.suggest import no_such
from mtrain_cli.data.checked_files import explain_read_errors, require_folder
from mtrain_extras.ruler import infinitebench_scores as scores

_LETTERS = "ABCD"


@dataclass(frozen=True)
class Task:
    """One task. The file in the user's folder is its key in `TASKS` with .jsonl."""

    name: str  # in the paper
    tokens: int  # most tokens of an answer
    score: Callable[[str, Sequence[str]], float]
    prompt: str


TASKS = {
    "passkey": Task(
        "Retrieve.PassKey", 6, scores.first_integer,
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz you about the important information.\n\n{context}\n\n{input}\n\nThe pass key is",
    ),
    "number_string": Task(
        "Retrieve.Number", 12, scores.first_integer,
        "There is an important info hidden inside a lot of irrelevant text. Find it. I will quiz you about the important information there.\n\n{context}\n\n{input}\n\nThe sequence of digits is",
    ),
    "kv_retrieval": Task(
        "Retrieve.KV", 50, scores.whole_word,
        "Extract the value corresponding to the specified key in the JSON object below.\n\n{context}\n\n{input}",
    ),
    "longbook_sum_eng": Task(
        "En.Sum", 1200, scores.rouge_lsum,
        "Summarize the book below.\n\n{context}\n\nSummary:",
    ),
    "longbook_qa_eng": Task(
        "En.QA", 40, scores.english_f1,
        "Read the book and answer the question. Be very concise in your answer.\n\n{context}\n\nQuestion: {input}\nAnswer:",
    ),
    "longbook_choice_eng": Task(
        "En.MC", 40, scores.chosen_option,
        "Read the book and answer the question.\n\n{context}\n\nQuestion: {input}\nA. {A}\nB. {B}\nC. {C}\nD. {D}\n\nThe letter of the correct answer is",
    ),
    "longdialogue_qa_eng": Task(
        "En.Dia", 40, scores.whole_name,
        'Below is a dialogue script where one random occurrence of a character name is replaced with "$$MASK$$", and you should try to guess who that character is.\n\n{context}\n\nThe name that has been replaced with $$MASK$$ is likely',
    ),
    "longbook_qa_chn": Task(
        "Zh.QA", 40, scores.chinese_f1,
        "阅读以下书籍然后回答问题。\n\n{context}\n\n问题：{input}\n答案：",
    ),
    "code_debug": Task(
        "Code.Debug", 5, scores.chosen_function,
        "Following is a Python code where exactly one of the functions/methods has a deliberate error that makes it crash.\n\n{context}\n\nOptions:\nA. {A}\nB. {B}\nC. {C}\nD. {D}\n\nThe correct option is:",
    ),
    "code_run": Task(
        "Code.Run", 5, scores.last_integer,
        "There is a function called {function} in the following Python code.\n\n{context}\n\nPlease compute the exact value of {call}. The value of {call} is",
    ),
    "math_calc": Task(
        "Math.Calc", 30_000, scores.listed_numbers,
        "Let us calculate the intermediate values of an expression.\n\nExpression: 1 + 3 + 4\nValues: [1, 4, 8]\n\nExpression: 8 - 3 + 2 - 4\nValues: [8, 5, 7, 3]\n\nExpression: {context}\nValues:",
    ),
    "math_find": Task(
        "Math.Find", 3, scores.first_number,
        "What is {wanted} in the following list?\n\n{context}\n\n{input}",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Sample:
    prompt: str
    answers: tuple[str, ...]  # for a choice, the text and the letter of the right option


@dataclass(frozen=True)
class _Line:
    """A line of a released file. Other keys, such as ``id``, are not read."""

    context: str
    input: str
    answer: Any
    options: tuple[str, ...] = ()


def find_files(folder: Path, names: str | None) -> list[str]:
    """Return the tasks to score: those named, or those with a file. Raises ConfigError if none."""
    require_folder(folder, f"--data {folder}", "with files such as passkey.jsonl")
    if names is not None:
        for name in (tasks := parse_names("--tasks", names)):
            if name not in TASKS:
                raise ConfigError(f"--tasks {name}: {no_such('task', name, TASKS)}")
        return tasks
    tasks = [task for task in TASKS if (folder / f"{task}.jsonl").is_file()]
    if not tasks:
        files = ", ".join(f"{task}.jsonl" for task in TASKS)
        raise ConfigError(f"--data {folder}: holds none of {files}")
    return tasks


def read_samples(path: Path, task: str) -> Iterator[Sample]:
    """Yield the samples of a released file. Raises ConfigError, which names a damaged line."""
    missing = f"--data: {path}: no such file"
    with explain_read_errors(f"--data: {path}:", missing), path.open("rb") as file:
        empty = True
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            empty = False
            try:
                yield _sample(documents.checked(_Line, json.loads(line)), TASKS[task])
            except (ValueError, RecursionError) as error:
                why = documents.reason(error).removeprefix("line 1, ")  # of the JSON
                raise ConfigError(f"--data: {path}: line {number}: {why}") from None
        if empty:
            raise ConfigError(f"--data: {path}: has no samples")


def _sample(line: _Line, task: Task) -> Sample:
    """Return the prompt and the answers of a line. Raises UnreadableError if it lacks some."""
    fields = {
        "context": line.context,
        "input": line.input,
        "function": "",
        "call": "",
        "wanted": "",
    }
    answers = _answers(line.answer)
    if "{A}" in task.prompt:
        if len(line.options) != len(_LETTERS):
            raise UnreadableError(f"options: must be {len(_LETTERS)}, not {len(line.options)}")
        if len(answers) != 2 or answers[1] not in tuple(_LETTERS):
            if len(answers) != 1 or answers[0] not in line.options:
                raise UnreadableError("answer: is none of the options")
            answers += (_LETTERS[line.options.index(answers[0])],)
        fields |= dict(zip(_LETTERS, line.options, strict=True))
    if "{call}" in task.prompt:
        if (call := re.search(r"(func_[0-9]+)\(-?[0-9]+\)", line.input)) is None:
            raise UnreadableError("input: calls no function, such as func_1(2)")
        fields |= {"function": call[1], "call": call[0]}
    if "{wanted}" in task.prompt:
        if (wanted := re.search(r"(The .+) of", line.input)) is None:
            raise UnreadableError('input: asks for no number, such as "The largest number of"')
        fields["wanted"] = wanted[1].lower()
    if task.score in (scores.first_number, scores.last_integer, scores.listed_numbers):
        for answer in answers:
            number = math.nan
            with contextlib.suppress(ValueError):
                number = float(answer)
            if not math.isfinite(number):
                raise UnreadableError(f"answer: {answer[:40]!r} is not a finite number")
    return Sample(task.prompt.format(**fields), answers)


def _answers(answer: Any) -> tuple[str, ...]:
    """Return the answers of a line: a text, a number, or a list of them, which may be nested."""
    if isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], list):
        answer = answer[0]
    items = answer if isinstance(answer, list) else [answer]
    if not items or not all(isinstance(one, str) or documents.is_number(one) for one in items):
        raise UnreadableError("answer: must be a text, a number or a list of them")
    return tuple(map(str, items))
