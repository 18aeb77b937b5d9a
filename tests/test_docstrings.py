"""What docstrings say about parameters and fields."""

from __future__ import annotations

from dataclasses import dataclass

from mtrain_cli import docstrings


def command(size: int, name: str) -> None:
    """Do something.

    Two paragraphs.

    Args:
        size: A size: a number.
        name: A name that takes
            two lines.
    """
    del size, name


@dataclass
class Base:
    """Settings.

    size: a size
    """

    size: int


@dataclass
class Derived(Base):
    """More settings.

    name: a name that takes
        two lines
    size: another size
    """

    name: str


def test_the_entries_of_a_function_stand_under_args():
    entries = {"size": "A size: a number.", "name": "A name that takes two lines."}
    assert docstrings.split(command) == ("Do something.\n\nTwo paragraphs.", entries)


def test_a_dataclass_has_the_entries_of_its_bases():
    assert docstrings.split(Base) == ("Settings.", {"size": "a size"})
    assert docstrings.entries(Derived) == {
        "size": "another size",
        "name": "a name that takes two lines",
    }


def test_a_docstring_may_have_no_entries():
    assert docstrings.split(type("Bare", (), {"__doc__": "Bare."})) == ("Bare.", {})
    assert docstrings.entries(lambda: None) == {}
