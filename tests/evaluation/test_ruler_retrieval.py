"""Needles in noise, among other needles and in essays."""

from __future__ import annotations

import re

import pytest

from mtrain_cli.evaluation.fitting import Stream
from mtrain_cli.evaluation.ruler_retrieval import NeedleKinds, NeedlePrompts
from mtrain_cli.evaluation.ruler_templates import NOISE

_NEEDLE = re.compile(r"One of the special magic (\w+) for (\S+) is: (\S+)\.")
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


@pytest.mark.parametrize(
    ("kinds", "needles"),
    [
        (NeedleKinds("noise"), 1),
        (NeedleKinds("needle"), 41),
        (NeedleKinds("needle", key="uuids", value="uuids"), 41),
        (NeedleKinds("essay", keys=4), 4),
        (NeedleKinds("essay", values=4), 4),
        (NeedleKinds("essay", queries=4), 4),
    ],
)
def test_the_text_answers_the_question(kinds: NeedleKinds, needles: int) -> None:
    essay = ["Some", "words.", "More", "of", "them!", "Are", "they?"] * 3
    prompts = NeedlePrompts(kinds, 4096, 42, essay if kinds.haystack == "essay" else ())
    draft = prompts.draw(Stream(7), 40, 0)
    found = _NEEDLE.findall(draft.prompt)
    assert len(found) == needles
    question = draft.prompt.splitlines()[-1]
    asked = [(key, value) for _, key, value in found if key in question]
    assert sorted(value for _, value in asked) == sorted(draft.outputs)
    assert len({key for key, _ in asked}) == kinds.queries
    assert {kind for kind, _, _ in found} == {kinds.value}


def test_one_answer_is_asked_for_in_the_singular() -> None:
    one = NeedlePrompts(NeedleKinds("noise"), 4096, 42).draw(Stream(1), 3, 0).prompt
    assert one.startswith("A special magic number is hidden")
    assert re.search(r"What is the special magic number for \S+ mentioned", one)
    many = NeedlePrompts(NeedleKinds("noise", values=2), 4096, 42).draw(Stream(1), 3, 0).prompt
    assert many.startswith("Some special magic numbers are hidden")


def test_uuids_are_of_version_4() -> None:
    kinds = NeedleKinds("needle", key="uuids", value="uuids")
    prompt = NeedlePrompts(kinds, 4096, 42).draw(Stream(1), 20, 0).prompt
    assert len(_UUID.findall(prompt)) == 2 * 21 + 2


def test_essays_repeat_until_there_are_enough_words() -> None:
    prompts = NeedlePrompts(NeedleKinds("essay"), 4096, 42, ["One", "two."])
    context = prompts.draw(Stream(1), 7, 0).prompt.splitlines()[1]
    assert _NEEDLE.sub("", context).split() == ["One", "two."] * 3 + ["One"]


def test_steps_are_those_of_the_haystack_and_the_length() -> None:
    assert NeedlePrompts(NeedleKinds("noise"), 4096, 42).step == 25
    assert NeedlePrompts(NeedleKinds("noise"), 4095, 42).step == 5
    assert NeedlePrompts(NeedleKinds("essay"), 100, 42).step == 500
    assert NeedlePrompts(NeedleKinds("noise"), 100, 42).draw(Stream(1), 9, 0).prompt.count(
        NOISE
    ) == 9  # fmt: skip
