"""Arguments of a wrong type get a line, and messages name arguments instead of options."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mtrain_cli.api import ARGUMENTS, checked, parsed_prompts, token_ids
from mtrain_cli.config.problem import ConfigError, cli_option, if_has


@pytest.mark.parametrize(
    ("check", "value", "problem"),
    [
        (int, "3", "x='3': must be a whole number"),
        (int, 2.0, "x=2.0: must be a whole number"),
        (int, True, "x=True: must be a whole number"),
        (float, None, "x=None: must be a number"),
        (bool, "no", "x='no': must be True or False"),
        (str, 3, "x=3: must be a text"),
        (Path, None, "x=None: must be a path"),
        (token_ids, "ab", "x='ab': must be a text or token ids"),
        (token_ids, [1, 1.5], "x: token 2 is 1.5; ids are whole numbers"),
        (token_ids, [True], "x: token 1 is True; ids are whole numbers"),
        (parsed_prompts, None, "x=None: must be a text, token ids, or a list of these"),
        (parsed_prompts, {"a": 1}, "x={'a': 1}: must be a text, token ids, or a list of these"),
        (parsed_prompts, b"ab", "x=b'ab': must be a text, token ids, or a list of these"),
        (token_ids, {1, 2}, "x={1, 2}: must be a text or token ids"),
        (parsed_prompts, [1.5], "x: token 1 is 1.5; ids are whole numbers"),
        (parsed_prompts, [1, "a"], "x: token 2 is 'a'; ids are whole numbers"),
        (parsed_prompts, ["a", None], "x: prompt 2=None: must be a text or token ids"),
    ],
)
def test_wrong_types_get_a_line(check, value, problem):
    with pytest.raises(ConfigError) as raised:
        checked(check, x=value) if isinstance(check, type) else check("x", value)
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
    found = parsed_prompts("x", value)
    assert found == expected
    assert all(type(one) is int for ids in found if isinstance(ids, list) for one in ids)


def test_values_are_those_of_python():
    assert checked(int, x=np.int64(3)) == 3
    assert checked(float, x=np.float32(0.5), y=1) == [0.5, 1.0]
    assert checked(Path, x="a/b") == checked(Path, x=Path("a/b")) == Path("a/b")


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
    with ARGUMENTS.in_errors():
        assert cli_option(name, value) == expected
        assert if_has("prompt_file", ": --prompt-file FILE") == ""
