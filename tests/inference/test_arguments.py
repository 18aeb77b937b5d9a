"""Arguments of a wrong type get a line, and messages name arguments instead of options."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mtrain_cli.config.problem import ConfigError, cli_option, if_has
from mtrain_cli.inference import arguments


@pytest.mark.parametrize(
    ("check", "value", "problem"),
    [
        (arguments.whole_number, "3", "x='3': must be a whole number"),
        (arguments.whole_number, 2.0, "x=2.0: must be a whole number"),
        (arguments.whole_number, True, "x=True: must be a whole number"),
        (arguments.number, None, "x=None: must be a number"),
        (arguments.truth, "no", "x='no': must be True or False"),
        (arguments.text, 3, "x=3: must be a text"),
        (arguments.path, None, "x=None: must be a path"),
        (arguments.token_ids, "ab", "x='ab': must be a text or token ids"),
        (arguments.token_ids, [1, 1.5], "x: token 2 is 1.5; ids are whole numbers"),
        (arguments.token_ids, [True], "x: token 1 is True; ids are whole numbers"),
        (arguments.prompts, None, "x=None: must be a text, token ids, or a list of these"),
        (arguments.prompts, {"a": 1}, "x={'a': 1}: must be a text, token ids, or a list of these"),
        (arguments.prompts, b"ab", "x=b'ab': must be a text, token ids, or a list of these"),
        (arguments.token_ids, {1, 2}, "x={1, 2}: must be a text or token ids"),
        (arguments.prompts, [1.5], "x: token 1 is 1.5; ids are whole numbers"),
        (arguments.prompts, [1, "a"], "x: token 2 is 'a'; ids are whole numbers"),
        (arguments.prompts, ["a", None], "x: prompt 2=None: must be a text or token ids"),
    ],
)
def test_wrong_types_get_a_line(check, value, problem):
    with pytest.raises(ConfigError) as raised:
        check("x", value)
    assert raised.value.problems == (problem,)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("ab", ["ab"]),
        ([], []),
        ([[]], [[]]),
        (("ab", [1, 2]), ["ab", [1, 2]]),
        (torch.tensor([1, 2]), [[1, 2]]),
        ([torch.tensor(1), torch.tensor(2)], [[1, 2]]),
        (np.array([[1, 2], [3, 4]], np.int32), [[1, 2], [3, 4]]),
        (iter(["a", range(2)]), ["a", [0, 1]]),
    ],
)
def test_prompts_are_texts_and_ids(value, expected):
    found = arguments.prompts("x", value)
    assert found == expected
    assert all(type(one) is int for ids in found if isinstance(ids, list) for one in ids)


def test_values_are_those_of_python():
    assert arguments.whole_number("x", np.int64(3)) == 3
    assert arguments.number("x", np.float32(0.5)) == 0.5
    assert arguments.path("x", "a/b") == arguments.path("x", Path("a/b")) == Path("a/b")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", -1.0, "temperature=-1"),
        ("top_p", 1e20, "top_p=1e+20"),
        ("temperature", float("inf"), "temperature=inf"),
        ("max_new", None, "max_new"),
        ("beyond", True, "beyond=True"),
        ("tokenizer", Path("no"), "tokenizer=no"),
    ],
)
def test_messages_name_arguments(name, value, expected):
    with arguments.ARGUMENTS.in_errors():
        assert cli_option(name, value) == expected
        assert if_has("prompt_file", ": --prompt-file FILE") == ""
