"""A line about a mistake keeps its keys as data, and names options as the caller gives them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.problem import (
    ConfigError,
    Names,
    Problem,
    cli_option,
    if_has,
    setting,
)

LINE = Problem("train.steps=0: must be 1", "train.steps", value=0, allowed="1 or more")


def line():
    wrong = f"{cli_option('max_new', 8)}: must be at most 4{if_has('seq', ', or a longer seq')}"
    return f"{wrong}; see {cli_option('beyond', True)} and {setting('pairs')}"


def test_a_line_has_the_key_that_is_wrong():
    assert (LINE.key, LINE.value, LINE.allowed) == ("train.steps", 0, "1 or more")
    plain = Problem("no data")
    assert (plain, plain.key, plain.value, plain.allowed) == ("no data", None, None, None)


@pytest.mark.parametrize(
    ("keys", "names", "expected"),
    [
        (("train.steps",), ["train.steps"], True),
        (("seq", "train.steps"), ["train."], True),
        (("train.",), ["train.steps"], True),
        (("train.steps",), ["train.step", "seq", "trai."], False),
        ((), ["train."], False),
    ],
)
def test_a_line_is_about_its_keys_and_their_sections(keys, names, expected):
    assert Problem("line", *keys).is_about(names) is expected


def test_a_line_break_in_a_name_makes_no_second_line():
    error = ConfigError(Problem("run.name=a\nb: no", "run.name"), "c\u2028d: no", "e: no")
    lines = ["run.name=a\\nb: no", "c\\u2028d: no", "e: no"]
    assert (list(error.problems), str(error).splitlines()) == (lines, lines)
    assert error.problems[0].key == "run.name"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1.0, "1"), (1.0000001, "1.0000001"), (2e-05, "2e-05"), (float("nan"), "nan"), (8, "8")],
)
def test_a_value_is_shown_with_all_its_digits(value, shown):
    assert cli_option("top_p", value) == f"--top-p {shown}"
    with Names(options=False).in_errors():
        assert cli_option("top_p", value) == f"top_p={shown}"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (Names(), "--max-new 8: must be at most 4, or a longer seq; see --beyond and pairs"),
        (
            Names(options=False, lacks=("seq",)),
            "max_new=8: must be at most 4; see beyond=True and pairs",
        ),
        (
            Names(other={"pairs": "needles", "max_new": "most"}),
            "--most 8: must be at most 4, or a longer seq; see --beyond and needles",
        ),
    ],
)
def test_a_caller_names_settings(names, expected):
    usual = line()
    with pytest.raises(ConfigError) as raised, names.in_errors():
        raise ConfigError(line())
    assert raised.value.problems == (expected,)
    assert line() == usual


def test_names_add_to_those_of_an_outer_block():
    with Names(options=False, lacks=("seq",)).in_errors(), Names(other={"pairs": "n"}).in_errors():
        assert line() == "max_new=8: must be at most 4; see beyond=True and n"


def test_an_option_may_be_a_path():
    assert cli_option("tokenizer", Path("no")) == "--tokenizer no"


def test_data_survive_copies_and_other_processes():
    for made in (copy.deepcopy(LINE), pickle.loads(pickle.dumps(LINE))):
        assert (made, made.keys, made.value, made.allowed) == (LINE, LINE.keys, 0, LINE.allowed)


def test_wrong_overrides_have_their_key_value_and_what_is_allowed():
    with pytest.raises(ConfigError) as raised:
        compose(["optim.lr=-1", "sparsity=none", "topology.layout=zigzak"])
    found = {one.key: (one.value, one.allowed) for one in raised.value.problems}
    assert found["optim.lr"][0] == "-1"
    assert "above 0" in found["optim.lr"][1]
    assert found["sparsity"][0] == "none"
    assert "allowed: block_topk, dense, fixed, moba" in found["sparsity"][1]
    assert "zigzag" in found["topology.layout"][1]
