"""A line about a mistake keeps its settings as data, and callers render it with their own names."""

from __future__ import annotations

import copy
import pickle

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.problem import (
    Allowed,
    ConfigError,
    IfHas,
    Names,
    Problem,
    Setting,
    cli_option,
)

LINE = Problem(
    cli_option("max_new", 8),
    ": must be ",
    Allowed("at most 4"),
    IfHas("seq", ", or a longer seq"),
    "; see ",
    cli_option("beyond", True),
    Problem(" and ", Setting("pairs")),
)


def test_a_line_is_in_the_words_of_the_command_line_and_has_its_data():
    assert LINE == "--max-new 8: must be at most 4, or a longer seq; see --beyond and pairs"
    assert (LINE.key, LINE.value, LINE.allowed) == ("max_new", 8, "at most 4")
    plain = Problem("no data")
    assert (plain, plain.key, plain.value, plain.allowed) == ("no data", None, None, None)


def test_a_line_break_in_a_name_makes_no_second_line():
    error = ConfigError(Problem(Setting("run.name", "a\nb"), ": no"), "c\u2028d: no", "e: no")
    lines = ["run.name=a\\nb: no", "c\\u2028d: no", "e: no"]
    assert (list(error.problems), str(error).splitlines()) == (lines, lines)
    assert error.problems[0].value == "a\nb"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1.0, "1"), (1.0000001, "1.0000001"), (2e-05, "2e-05"), (float("nan"), "nan"), (8, "8")],
)
def test_a_value_is_shown_with_all_its_digits(value, shown):
    assert str(cli_option("top_p", value)) == f"--top-p {shown}"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (Names(), str(LINE)),
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
def test_a_caller_names_settings_without_reading_the_words(names, expected):
    cause = OSError()
    with pytest.raises(ConfigError) as raised, names.in_errors():
        raise ConfigError("--max-new is a word here", LINE) from cause
    assert raised.value.problems == ("--max-new is a word here", expected)
    assert raised.value.__cause__ is cause


def test_data_survive_copies_and_other_processes():
    for made in (copy.deepcopy(LINE), pickle.loads(pickle.dumps(LINE))):
        assert (made, made.parts) == (LINE, LINE.parts)


def test_wrong_overrides_have_their_key_value_and_what_is_allowed():
    with pytest.raises(ConfigError) as raised:
        compose(["optim.lr=-1", "sparsity=none", "topology.layout=zigzak"])
    found = {one.key: (one.value, one.allowed) for one in raised.value.problems}
    assert found["optim.lr"][0] == "-1"
    assert "above 0" in found["optim.lr"][1]
    assert found["sparsity"][0] == "none"
    assert found["sparsity"][1].startswith("dense, fixed, moba")
    assert "zigzag" in found["topology.layout"][1]
