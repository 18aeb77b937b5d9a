"""Chains of assignments."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from evaluation.small_tokenizer import write_small_tokenizer

from mtrain_cli.data.tokenizers import open_tokenizer
from mtrain_cli.evaluation.fitting import Stream
from mtrain_cli.evaluation.ruler_templates import NOISE
from mtrain_cli.evaluation.ruler_tracking import ChainPrompts, tracking_prompts
from mtrain_cli.evaluation.token_counts import TokenCounter

_ASSIGNED = re.compile(r"VAR ([A-Z]+) = (?:VAR )?(\w+)")


def _chain(text: str) -> list[str]:
    """Return the variables with the value that the question asks for, by following the text."""
    (asked,) = set(re.findall(r"assigned the value (\w+)", text))
    values: dict[str, str] = {}
    for name, value in _ASSIGNED.findall(text):
        values[name] = values.get(value, value)
    return [name for name, value in values.items() if value == asked]


def test_the_text_answers_the_question_after_a_solved_example(tmp_path: Path) -> None:
    counter = TokenCounter(open_tokenizer(str(write_small_tokenizer(tmp_path))))
    stream = Stream(42)
    prompts = tracking_prompts(4096, stream, counter)
    seen = set()
    for index in range(5):
        draft = prompts.draw(stream, 30, index)
        example, question = draft.prompt.split("\n\nMemorize")
        assert _chain(question) == list(draft.outputs)
        assert question.count(NOISE) == 30
        assert example.split()[-5:] == _chain(example)
        seen |= {tuple(draft.outputs), tuple(example.split()[-5:])}
    assert len(seen) == 10


def test_two_variables_of_one_name_are_refused_and_searched_around() -> None:
    prompts = ChainPrompts(5, letters=1, value=lambda stream: str(stream.numpy.randint(9)))
    stream, failures = Stream(3), 0
    for _ in range(200):
        try:
            prompts.draw(stream, 9, 0)
        except ValueError:
            failures += 1
        assert len(set(_chain(prompts.probe(stream, 9)))) == 5
    assert 40 < failures < 120  # 1 - 25*24*23*22 / 26^4 = 34 %


def test_a_text_without_room_for_the_chain_is_refused() -> None:
    prompts = ChainPrompts(5, letters=5, value=lambda _: "1")
    with pytest.raises(ValueError, match=r"[Ss]ample larger"):
        prompts.draw(Stream(1), 4, 0)
