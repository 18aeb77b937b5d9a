"""Questions among documents that distract."""

from __future__ import annotations

import re

import pytest

from mtrain_cli.evaluation.fitting import Stream
from mtrain_cli.evaluation.ruler_questions import QuestionPrompts
from mtrain_cli.evaluation.sources import Question, Questions

_CONTENT = Questions(
    [
        Question("Where?", ("here", "there"), (4,), (1, 2)),
        Question("Who?", ("he",), (0, 5, 6)),
    ],
    [f"Text {number}" for number in range(12)],
)


def _shown(size: int, index: int) -> list[str]:
    draft = QuestionPrompts(_CONTENT, 42).draw(Stream(1), size, index)
    assert draft.outputs == _CONTENT.questions[index].outputs
    assert draft.prompt.endswith(f"\n\nQuestion: {_CONTENT.questions[index].text} Answer:")
    numbers = re.findall(r"Document (\d+):\n", draft.prompt)
    assert numbers == [str(number) for number in range(1, size + 1)]
    return re.findall(r"Document \d+:\n(Text \d+)\n", draft.prompt)


def test_related_documents_come_before_others() -> None:
    assert set(_shown(2, 0)) < {"Text 4", "Text 1", "Text 2"}
    assert "Text 4" in _shown(2, 0)
    assert set(_shown(3, 0)) == {"Text 4", "Text 1", "Text 2"}
    assert {"Text 4", "Text 1", "Text 2"} < set(_shown(7, 0))
    assert len(set(_shown(7, 0))) == 7
    assert {"Text 0", "Text 5", "Text 6"} < set(_shown(11, 1))


def test_all_documents_repeat_if_there_are_too_few() -> None:
    shown = _shown(25, 1)
    assert sorted(shown.count(f"Text {number}") for number in range(12)) == [2] * 11 + [3]


def test_fewer_documents_than_the_question_needs_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        QuestionPrompts(_CONTENT, 42).draw(Stream(1), 2, 1)
