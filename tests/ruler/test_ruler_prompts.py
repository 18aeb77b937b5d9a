"""The prompts of RULER's tasks, filled up to a length as the original's loop fills them."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from evaluation.small_tokenizer import write_small_tokenizer

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.tokenizers import open_tokenizer
from mtrain_extras.ruler import ruler_templates
from mtrain_extras.ruler.ruler_files import Question, Questions
from mtrain_extras.ruler.ruler_prompts import (
    ChainPrompts,
    CommonWordPrompts,
    Draft,
    NeedleKinds,
    NeedlePrompts,
    Prompts,
    QuestionPrompts,
    Stream,
    TooShortError,
    find_size,
    fitting,
    frequent_words,
)
from mtrain_extras.ruler.ruler_templates import Template


@pytest.fixture(scope="module")
def count(tmp_path_factory) -> Callable[[str], int]:
    tokenizer = open_tokenizer(str(write_small_tokenizer(tmp_path_factory.mktemp("small"))))
    return lambda text: len(tokenizer.encode([text])[0])


class _Regular(Prompts):
    """A prompt of ``size`` has 10 + 2 * size letters; some cannot be drawn."""

    step, first, reserved, reserved_in_search = 3, 5, 4, 4

    def probe(self, stream: Stream, size: int) -> str:  # noqa: ARG002
        return "x" * (10 + 2 * size)

    def draw(self, stream: Stream, size: int, index: int) -> Draft:
        if stream.python.random() < 0.3:
            raise ValueError("cannot be drawn")
        return Draft(self.probe(stream, size) + "x" * (index % 2), (str(index),))


def test_the_search_finds_the_largest_size_that_fits() -> None:
    for limit in (30, 31, 32, 33, 200):
        size = find_size(_Regular(), Stream(1), limit, len)
        assert 10 + 2 * size + 4 <= limit < 10 + 2 * (size + 1) + 4
    assert find_size(_Regular(), Stream(1), 5, len) == _Regular.step


def test_a_sample_that_is_too_long_loses_a_step() -> None:
    lengths = [draft.length for draft in fitting(_Regular(), Stream(1), 54, len, 40)]
    assert max(lengths) == 54
    assert {(54 - length) % 6 for length in lengths[::2]} == {0}
    assert all(length < 50 for length in lengths[1::2])
    with pytest.raises(TooShortError) as caught:
        next(fitting(_Regular(), Stream(1), 15, len, 5))
    assert caught.value.shortest == 20


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


def test_all_documents_repeat_if_there_are_too_few() -> None:
    shown = _shown(25, 1)
    assert sorted(shown.count(f"Text {number}") for number in range(12)) == [2] * 11 + [3]


def test_fewer_documents_than_the_question_needs_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        QuestionPrompts(_CONTENT, 42).draw(Stream(1), 2, 1)


_NEEDLE = re.compile(r"One of the special magic (\w+) for (\S+) is: (\S+)\.")
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def test_essays_repeat_until_there_are_enough_words() -> None:
    prompts = NeedlePrompts(NeedleKinds("essay"), 4096, 42, ["One", "two."])
    context = prompts.draw(Stream(1), 7, 0).prompt.splitlines()[1]
    assert _NEEDLE.sub("", context).split() == ["One", "two."] * 3 + ["One"]


_ASSIGNED = re.compile(r"VAR ([A-Z]+) = (?:VAR )?(\w+)")


def _chain(text: str) -> list[str]:
    """Return the variables with the value that the question asks for, by following the text."""
    (asked,) = set(re.findall(r"assigned the value (\w+)", text))
    values: dict[str, str] = {}
    for name, value in _ASSIGNED.findall(text):
        values[name] = values.get(value, value)
    return [name for name, value in values.items() if value == asked]


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


_LISTED = re.compile(r"\d+\. (.+?)(?= \d+\. |\n|$)")


def test_long_lists_need_more_words() -> None:
    with pytest.raises(ConfigError, match=r"lists of 8,167 words .* there are only 8,166"):
        CommonWordPrompts(4096, 42).draw(Stream(1), 8167, 0)
    more = [f"more{number}" for number in range(9000)]
    prompts = CommonWordPrompts(4096, 42, more)
    assert all(word.startswith("more") for word in prompts.draw(Stream(1), 8167, 0).outputs)
    assert not any(word.startswith("more") for word in prompts.draw(Stream(1), 8166, 0).outputs)
    with pytest.raises(ConfigError, match="there are only 9,000"):
        prompts.draw(Stream(1), 9001, 0)
    with pytest.raises(ValueError, match="cannot hold 10 common ones"):
        prompts.draw(Stream(1), 9, 0)


def test_a_text_without_clear_ranks_is_refused(count) -> None:
    for limit in (0, 100, 249, 250):
        with pytest.raises(TooShortError):
            list(frequent_words(limit, 42, Stream(1), count, 2))


_TEMPLATES = {
    name: value for name, value in vars(ruler_templates).items() if isinstance(value, Template)
}


@pytest.mark.parametrize("name", _TEMPLATES)
def test_a_prompt_splits_before_its_last_answer(name: str) -> None:
    template = _TEMPLATES[name]
    question = f"Answer this.{template.answer} no.\nWhat is it?"
    assert template.split(question + template.answer) == (question, template.answer)
