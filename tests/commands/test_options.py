"""Shared options and parsers: lists, shares, numbers, and dataclasses of options."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import Annotated, get_args

import pytest
import typer
from typer.testing import CliRunner

from mtrain_cli.commands.options import (
    MOST_DIGITS,
    described_parameters,
    flag,
    option,
    parse_items,
    parse_names,
    parse_whole_number,
    warn,
    with_options,
    writing,
)
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch.failures import RunError


@dataclass(frozen=True)
class Shared:
    """Options of a test.

    size: A size.
    name: A name that takes
        two lines.
    """

    size: Annotated[int, option("N", least=1, most=9)] = 3
    name: Annotated[str, option("NAME", help="Not shown: the docstring has an entry.")] = "usual"
    loud: Annotated[bool, flag("--loud", "Be loud.")] = False


def call(*words: str, left_out: tuple[str, ...] = ()):
    app, seen = typer.Typer(), []

    @app.command()
    @with_options(Shared, *left_out)
    def command(shared: Shared, own: Annotated[int, option("N", help="Its own.")] = 7) -> None:
        """Say what was typed."""
        seen.append((shared, own))

    return CliRunner().invoke(app, list(words)), seen


def test_a_command_gets_the_fields_of_a_dataclass_and_its_own_options():
    result, seen = call("--size", "5", "--loud", "--own", "1")
    assert result.exit_code == 0, result.output
    assert seen == [(Shared(size=5, loud=True), 1)]
    result, seen = call()
    assert seen == [(Shared(), 7)]


def test_the_help_of_an_option_is_its_entry_in_the_docstring():
    help = {p.name: get_args(p.annotation)[1].help for p in described_parameters(Shared)}
    assert help == {"size": "A size.", "name": "A name that takes two lines.", "loud": "Be loud."}


def test_an_entry_of_a_docstring_needs_an_option():
    def command(size: Annotated[int, option("N")] = 1) -> None:
        """Do nothing.

        Args:
            sise: A size.
        """

    with pytest.raises(KeyError, match="sise"):
        described_parameters(command)


def test_limits_of_a_dataclass_field_hold():
    result, seen = call("--size", "10")
    assert (result.exit_code, seen) == (2, [])


def test_a_field_that_is_left_out_is_no_option_and_keeps_its_default():
    result, seen = call("--name", "other", left_out=("name",))
    assert (result.exit_code, seen) == (2, [])
    result, seen = call("--size", "4", left_out=("name",))
    assert seen == [(Shared(size=4, name="usual"), 7)]


def test_names_are_split_without_repeats_and_checked():
    assert parse_names("--layout", "a, b,a,", ["a", "b"]) == ["a", "b"]
    assert parse_names("--seq", "") == []
    with pytest.raises(ConfigError, match=r"--layout c: no such layout; allowed: a, b"):
        parse_names("--layout", "a,c", ["a", "b"])
    with pytest.raises(ConfigError, match="--layout ',': names nothing"):
        parse_names("--layout", ",")


def test_items_are_parsed_one_by_one():
    assert parse_items("--workers", "8, 32", int, "8,32") == [8, 32]
    with pytest.raises(ConfigError, match="--workers 8,x: x is not a number; give items such as"):
        parse_items("--workers", "8,x", int, "8,32")
    with pytest.raises(ConfigError, match="an empty item is not a number"):
        parse_items("--workers", "8,", int, "8,32")


@pytest.mark.parametrize("text", ["-1", "+1", " 1", "1.0", "٣", "", "1" * (MOST_DIGITS + 1)])
def test_whole_numbers_have_plain_digits_only(text):
    assert parse_whole_number("0017") == 17
    with pytest.raises(ValueError):  # noqa: PT011 - the caller reports it
        parse_whole_number(text)


def test_errors_and_warnings_about_a_name_with_a_line_break_are_one_line(capsys):
    warn(["a\nb: unused"])
    assert capsys.readouterr().err == "mtrain: warning: a\\nb: unused\n"
    for number in (errno.ENOSPC, errno.EACCES):
        with pytest.raises((RunError, ConfigError), match=r"a\\nb"), writing("--out a\nb"):
            raise OSError(number, os.strerror(number))


def test_an_error_of_the_disk_names_the_file_or_else_the_place(tmp_path):
    """A wrong path is the user's mistake; a full disk is a failure."""
    file = tmp_path / "file"
    file.touch()
    for wrong in (tmp_path / "missing/file", file / "below"):
        named = f"^--out here: {wrong} could not be written \\(No"
        with pytest.raises(ConfigError, match=named), writing("--out here"):
            wrong.write_text("x")
    with pytest.raises(RunError, match=r"here: could not be written \(No space"), writing("here"):
        raise OSError(errno.ENOSPC, "No space left on device")
